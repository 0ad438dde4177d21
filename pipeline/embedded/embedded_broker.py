"""A real Apache Kafka for one machine: started, found again, and stopped."""

from __future__ import annotations

import signal
import time
from pathlib import Path  # noqa: TC003 - msgspec reads the annotations of a struct at run time
from typing import TYPE_CHECKING

import msgspec

from pipeline.embedded.broker_errors import EmbeddedBrokerError
from pipeline.embedded.broker_folder import BrokerFolder, BrokerState
from pipeline.embedded.file_lock import exclusive_lock
from pipeline.embedded.java_command import broker_command, find_java, format_command
from pipeline.embedded.kafka_jars import ensure_jars, locked_jars
from pipeline.embedded.kafka_process import (
    await_ready,
    format_storage,
    is_stopped,
    new_cluster_id,
    spawn_detached,
    terminate,
)
from pipeline.embedded.loopback_ports import choose_ports
from pipeline.embedded.server_properties import (
    BrokerPorts,
    NodePlan,
    broker_settings,
    render_log4j,
    render_properties,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    import psutil

__all__ = ["BrokerInfo", "ClusterPlace", "EmbeddedBroker"]

HEAP_MB_DEFAULT = 768
START_TIMEOUT_S_DEFAULT = 90.0
STOP_TIMEOUT_S_DEFAULT = 30.0

_KILL_WAIT_S = 10.0
_PAUSE_WAIT_S = 5.0
_PAUSE_POLL_S = 0.005


class BrokerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A broker that runs, and where to look when something is wrong with it."""

    bootstrap_servers: str
    pid: int
    log_file: Path
    data_dir: Path
    cluster_id: str


class ClusterPlace(msgspec.Struct, frozen=True, kw_only=True):
    """What makes a broker one of several: its number, the ports of every node, and the id of the cluster."""

    node_id: int
    ports: dict[int, BrokerPorts]
    cluster_id: str


class EmbeddedBroker:
    """The one broker of a data folder; any number of processes may hold such an object for the same folder.

    The broker itself is a process of its own, which goes on when those that hold the object end.

    Args:
        data_dir: its files are in the subfolder `broker`; two data folders are two clusters.
        cache_dir: Kafka's jars, shared by all brokers of this machine.
        heap_mb: bound of Java's heap; the process takes about 300 MB beside it.
        settings: Kafka settings that override those of `server_properties`.
        place: its place in a cluster of several; without one it is a cluster by itself.
        on_progress: gets a sentence whenever a wait begins or moves on.

    """

    def __init__(
        self,
        data_dir: Path,
        *,
        cache_dir: Path,
        heap_mb: int = HEAP_MB_DEFAULT,
        settings: Mapping[str, str] | None = None,
        place: ClusterPlace | None = None,
        on_progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._folder = BrokerFolder(data_dir)
        self._place = place
        self._cache_dir = cache_dir.absolute()
        self._heap_mb = heap_mb
        self._settings = dict(settings or {})
        self._on_progress = on_progress

    def start(self, timeout_s: float = START_TIMEOUT_S_DEFAULT) -> BrokerInfo:
        """Give the broker that runs, started if none does, once it answers an API call.

        Safe to call from several processes at once: one starts it, all get the same. `timeout_s` does not count the
        one download of the jars.

        Raises:
            EmbeddedExtraMissingError: the extra `embedded` is not installed; the message names the command.
            JarsUnavailableError: offline at the first start ever; the message names the way to another cluster.
            JarChecksumError: the jars on the way here are not those that were tested.
            BrokerStartError: Kafka ended or did not answer in time; the message quotes its log.
            BrokerBusyError: another process has been starting or stopping it for longer than `timeout_s`.

        """
        return self._start(timeout_s, wait=True)

    def launch(self, timeout_s: float = START_TIMEOUT_S_DEFAULT) -> BrokerInfo:
        """As `start`, without the wait for an answer: the first node of a cluster has none before the second runs."""
        return self._start(timeout_s, wait=False)

    def status(self) -> BrokerInfo | None:
        """The broker that runs, or None. It may still be starting, or be paused: this looks at the process only."""
        state = self._folder.read_state()
        return self._info(state) if state is not None and self._folder.live_process(state) is not None else None

    def stop(self, timeout_s: float = STOP_TIMEOUT_S_DEFAULT) -> bool:
        """End the broker cleanly; False if none was running.

        One that has not ended after `timeout_s` is killed, and `on_progress` is told. Its data survives that too; the
        next start takes longer.

        Raises:
            BrokerBusyError: another process has been starting or stopping it for longer than `timeout_s`.

        """
        with self._lock(timeout_s):
            process = self._folder.live_process(self._folder.read_state())
            if process is not None:
                self._on_progress("Stopping Kafka")
                if not terminate(process, timeout_s=timeout_s):
                    self._on_progress(f"Kafka did not stop within {timeout_s:g} s and was killed: its data is safe")
            self._folder.forget_state()
            return process is not None

    def kill(self) -> None:
        """End the broker with SIGKILL, as a crash would, and wait until it is gone (for tests)."""
        process = self._running()
        process.kill()
        process.wait(_KILL_WAIT_S)

    def pause(self) -> None:
        """Freeze the broker with SIGSTOP (for tests): connections stay open, nothing answers once this has returned."""
        process = self._running()
        process.send_signal(signal.SIGSTOP)
        # The signal is only asked for: each thread stops when it is next looked at.
        give_up_s = time.monotonic() + _PAUSE_WAIT_S
        while not is_stopped(process.pid):
            if time.monotonic() > give_up_s:
                raise EmbeddedBrokerError(
                    f"The broker (process {process.pid}) did not stop within {_PAUSE_WAIT_S:g} s."
                )
            time.sleep(_PAUSE_POLL_S)

    def resume(self) -> None:
        """Let a paused broker go on."""
        self._running().send_signal(signal.SIGCONT)

    def command(self) -> list[str]:
        """The command line that runs this broker in the foreground, once it was started here before."""
        return self._command(self._jars())

    def _start(self, timeout_s: float, *, wait: bool) -> BrokerInfo:
        # Before the lock, so that whoever waits for the lock never waits for a download.
        jars = () if self.status() else self._jars()
        deadline_s = time.monotonic() + timeout_s
        with self._lock(timeout_s):
            state = self._folder.read_state()
            if state is None or self._folder.live_process(state) is None:
                state = self._launch(jars or self._jars(), deadline_s)
            if wait:
                await_ready(self._folder, state, deadline_s=deadline_s)
            return self._info(state)

    def _command(self, jars: tuple[Path, ...]) -> list[str]:
        return broker_command(
            find_java(),
            jars,
            heap_mb=self._heap_mb,
            log4j_file=self._folder.log4j_file,
            properties_file=self._folder.properties_file,
        )

    def _jars(self) -> tuple[Path, ...]:
        find_java()  # without the extra: say so before anything is fetched
        return ensure_jars(self._cache_dir, jars=locked_jars(), on_progress=self._on_progress)

    def _lock(self, timeout_s: float) -> AbstractContextManager[None]:
        return exclusive_lock(
            self._folder.lock_file,
            timeout_s=timeout_s,
            on_wait=lambda: self._on_progress("Waiting for another process that starts or stops this broker"),
        )

    def _running(self) -> psutil.Process:
        process = self._folder.live_process(self._folder.read_state())
        if process is None:
            raise EmbeddedBrokerError(f"No broker runs in {self._folder.path}; start it: duetasks broker start.")
        return process

    def _info(self, state: BrokerState) -> BrokerInfo:
        return BrokerInfo(
            bootstrap_servers=state.bootstrap_servers,
            pid=state.pid,
            log_file=self._folder.log_file,
            data_dir=self._folder.data_dir,
            cluster_id=state.cluster_id,
        )

    def _launch(self, jars: tuple[Path, ...], deadline_s: float) -> BrokerState:
        bootstrap_servers = self._write_settings()
        cluster_id = self._folder.cluster_id() or self._format(jars, deadline_s)
        self._on_progress("Starting Kafka")
        process = spawn_detached(self._command(jars), console_file=self._folder.console_file)
        state = BrokerState(
            pid=process.pid,
            process_started_at_s=process.create_time(),
            bootstrap_servers=bootstrap_servers,
            cluster_id=cluster_id,
        )
        # Before it is ready: if this process is killed while it waits, the next one must find the broker.
        self._folder.write_state(state)
        return state

    def _write_settings(self) -> str:
        """Write what Kafka reads at its start, and give the address for clients."""
        plan = self._plan()
        self._folder.write_ports(plan.ports)
        settings = broker_settings(plan, overrides=self._settings)
        self._folder.properties_file.write_text(render_properties(settings), "ascii")
        self._folder.log4j_file.write_text(render_log4j(self._folder.log_file), "ascii")
        return plan.ports.bootstrap_servers

    def _plan(self) -> NodePlan:
        log_dir = str(self._folder.kafka_dir)
        if self._place is not None:
            # Not chosen again: the other nodes know these.
            voters = {node_id: ports.controller for node_id, ports in self._place.ports.items()}
            ports = self._place.ports[self._place.node_id]
            return NodePlan(ports=ports, log_dir=log_dir, node_id=self._place.node_id, voters=voters)
        known = self._folder.read_ports()
        ports = choose_ports(known)
        if known is not None and known.client != ports.client:
            self._on_progress(f"Port {known.client} is taken by another process: the broker moves to {ports.client}")
        return NodePlan(ports=ports, log_dir=log_dir)

    def _format(self, jars: tuple[Path, ...], deadline_s: float) -> str:
        self._on_progress("Preparing the data folder")
        cluster_id = self._place.cluster_id if self._place is not None else new_cluster_id()
        command = format_command(
            find_java(),
            jars,
            cluster_id=cluster_id,
            log4j_file=self._folder.log4j_file,
            properties_file=self._folder.properties_file,
        )
        format_storage(command, timeout_s=max(1.0, deadline_s - time.monotonic()))
        return cluster_id
