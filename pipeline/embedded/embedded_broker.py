"""A real Apache Kafka for one machine: started, found again, and stopped.

The broker outlives the process that starts it. What ties them together is the folder `<data_dir>/broker`:

    broker.json       the process that runs, written before it is ready
    ports.json        its ports, kept for ever so that clients find it again
    server.properties, log4j2.properties   written at each start
    kafka/            Kafka's data
    kafka.log         Kafka's log;  console.log: what the Java process printed
    start.lock        held while somebody starts or stops it
"""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import time
import uuid
from typing import TYPE_CHECKING

import msgspec
import psutil
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from pipeline.embedded import broker_state, kafka_jars
from pipeline.embedded.broker_errors import BrokerStartError, EmbeddedBrokerError
from pipeline.embedded.file_lock import exclusive_lock
from pipeline.embedded.java_command import broker_command, find_java, format_command
from pipeline.embedded.loopback_ports import choose_ports
from pipeline.embedded.server_properties import NodePlan, broker_settings, render_log4j, render_properties

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path

HEAP_MB_DEFAULT = 768
START_TIMEOUT_S_DEFAULT = 90.0
STOP_TIMEOUT_S_DEFAULT = 30.0

_POLL_S = 0.1
_API_TIMEOUT_S = 2.0
_KILL_WAIT_S = 10.0
_LOG_TAIL_LINES = 15
_LOG_TAIL_BYTES = 20_000


class BrokerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A broker that runs, and where to look when something is wrong with it."""

    bootstrap_servers: str
    pid: int
    log_file: Path
    data_dir: Path
    cluster_id: str


class EmbeddedBroker:
    """The one broker of a data folder; any number of processes may hold such an object for the same folder."""

    def __init__(
        self,
        data_dir: Path,
        *,
        cache_dir: Path,
        heap_mb: int = HEAP_MB_DEFAULT,
        settings: Mapping[str, str] | None = None,
        on_progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Name the broker of `data_dir`; nothing is touched yet.

        `cache_dir` holds Kafka's jars and may be shared by many brokers. `settings` override those of
        `server_properties`. `on_progress` gets a sentence whenever a wait begins or moves on.
        """
        self._folder = data_dir.absolute() / "broker"
        self._cache_dir = cache_dir.absolute()
        self._heap_mb = heap_mb
        self._settings = dict(settings or {})
        self._on_progress = on_progress

    @property
    def log_file(self) -> Path:
        """Kafka's own log."""
        return self._folder / "kafka.log"

    @property
    def _console_file(self) -> Path:
        return self._folder / "console.log"

    @property
    def _properties_file(self) -> Path:
        return self._folder / "server.properties"

    @property
    def _log4j_file(self) -> Path:
        return self._folder / "log4j2.properties"

    @property
    def _kafka_dir(self) -> Path:
        return self._folder / "kafka"

    def start(self, timeout_s: float = START_TIMEOUT_S_DEFAULT) -> BrokerInfo:
        """Give the broker that runs, started if none does, once it answers an API call.

        Safe to call from several processes at once: one starts it, the others get the same one. It goes on running
        when the caller ends. `timeout_s` does not count the one download of the jars.

        Raises:
            EmbeddedExtraMissingError: the extra `embedded` is not installed.
            JarsUnavailableError: offline at the first start ever; the message names the way to another cluster.
            JarChecksumError: the jars on the way here are not those that were tested.
            BrokerStartError: Kafka ended or did not answer in time; the message quotes its log.
            BrokerBusyError: another process has been starting or stopping it for longer than `timeout_s`.

        """
        java = find_java()
        jars = kafka_jars.ensure_jars(self._cache_dir, jars=kafka_jars.locked_jars(), on_progress=self._on_progress)
        deadline = time.monotonic() + timeout_s
        with self._lock(timeout_s):
            state = broker_state.read_state(self._folder)
            process = self._live(state)
            if state is None or process is None:
                state, process = self._launch(java, jars, deadline)
            self._await_ready(state, process, deadline)
            return self._info(state)

    def status(self) -> BrokerInfo | None:
        """The broker that runs, or None. It may still be starting, or be paused: this looks at the process only."""
        state = broker_state.read_state(self._folder)
        return self._info(state) if state is not None and self._live(state) is not None else None

    def stop(self, timeout_s: float = STOP_TIMEOUT_S_DEFAULT) -> bool:
        """End the broker cleanly; False if none was running.

        One that has not ended after `timeout_s` is killed, and `on_progress` is told. Its data survives that too;
        the next start takes longer.

        Raises:
            BrokerBusyError: another process has been starting or stopping it for longer than `timeout_s`.

        """
        with self._lock(timeout_s):
            process = self._live(broker_state.read_state(self._folder))
            if process is not None:
                self._terminate(process, timeout_s)
            (self._folder / broker_state.STATE_FILE_NAME).unlink(missing_ok=True)
            return process is not None

    def kill(self) -> None:
        """End the broker with SIGKILL, as a crash would, and wait until it is gone (for tests)."""
        process = self._running()
        process.kill()
        process.wait(_KILL_WAIT_S)

    def pause(self) -> None:
        """Freeze the broker with SIGSTOP (for tests): connections stay open, nothing answers."""
        self._running().send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused broker go on."""
        self._running().send_signal(signal.SIGCONT)

    def _lock(self, timeout_s: float) -> AbstractContextManager[None]:
        return exclusive_lock(
            self._folder / "start.lock",
            timeout_s=timeout_s,
            on_wait=lambda: self._on_progress("Waiting for another process that starts or stops this broker"),
        )

    def _live(self, state: broker_state.BrokerState | None) -> psutil.Process | None:
        return broker_state.live_process(state, properties_file=self._properties_file)

    def _running(self) -> psutil.Process:
        process = self._live(broker_state.read_state(self._folder))
        if process is None:
            message = f"No embedded broker runs in {self._folder}; start it first: `duetasks broker start`."
            raise EmbeddedBrokerError(message)
        return process

    def _info(self, state: broker_state.BrokerState) -> BrokerInfo:
        return BrokerInfo(
            bootstrap_servers=state.bootstrap_servers,
            pid=state.pid,
            log_file=self.log_file,
            data_dir=self._folder.parent,
            cluster_id=state.cluster_id,
        )

    def _launch(
        self, java: Path, jars: tuple[Path, ...], deadline: float
    ) -> tuple[broker_state.BrokerState, psutil.Process]:
        known = broker_state.read_ports(self._folder)
        ports = choose_ports(known)
        if known is not None and ports.client != known.client:
            self._on_progress(f"Port {known.client} is taken by another process: the broker moves to {ports.client}")
        broker_state.write_ports(self._folder, ports)
        plan = NodePlan(ports=ports, log_dir=str(self._kafka_dir))
        self._properties_file.write_text(render_properties(broker_settings(plan, self._settings)), "utf-8")
        self._log4j_file.write_text(render_log4j(self.log_file), "utf-8")
        cluster_id = self._cluster_id() or self._format(java, jars, deadline)
        self._on_progress("Starting Kafka")
        process = self._spawn(
            broker_command(
                java, jars, heap_mb=self._heap_mb, log4j_file=self._log4j_file, properties_file=self._properties_file
            )
        )
        state = broker_state.BrokerState(
            pid=process.pid,
            process_started_at_s=process.create_time(),
            bootstrap_servers=ports.bootstrap_servers,
            cluster_id=cluster_id,
        )
        # Before it is ready: whoever starts this process may be killed while it waits, and the next one must find it.
        broker_state.write_state(self._folder, state)
        return state, process

    def _cluster_id(self) -> str | None:
        """Id in the formatted data, or None where there is no formatted data yet."""
        try:
            lines = (self._kafka_dir / "meta.properties").read_text("utf-8").splitlines()
        except FileNotFoundError:
            return None
        return next((line.removeprefix("cluster.id=") for line in lines if line.startswith("cluster.id=")), None)

    def _format(self, java: Path, jars: tuple[Path, ...], deadline: float) -> str:
        self._on_progress("Preparing the data folder")
        # As Kafka makes them: 16 random bytes in URL-safe base64 without padding, not starting with a dash.
        cluster_id = "d" + base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")[1:]
        command = format_command(
            java, jars, cluster_id=cluster_id, log4j_file=self._log4j_file, properties_file=self._properties_file
        )
        try:
            done = subprocess.run(  # noqa: S603 - our own Java with our own arguments, no shell
                command, capture_output=True, text=True, check=False, timeout=max(1.0, deadline - time.monotonic())
            )
        except subprocess.TimeoutExpired as error:
            message = "Preparing Kafka's data folder took too long; is the machine overloaded? Try again."
            raise BrokerStartError(message) from error
        if done.returncode != 0:
            message = f"Kafka could not prepare {self._kafka_dir}: {(done.stderr or done.stdout).strip()}"
            raise BrokerStartError(message)
        return cluster_id

    def _spawn(self, command: list[str]) -> psutil.Process:
        """Start a process that has a session of its own, so that Ctrl-C or the end of ours does not reach it."""
        console = os.open(self._console_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            # Not subprocess.Popen: its object complains when it is dropped while the process runs, which is the point.
            pid = os.posix_spawn(
                command[0],
                command,
                os.environ,
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, console, 1),
                    (os.POSIX_SPAWN_DUP2, console, 2),
                ],
                setsid=True,
            )
        finally:
            os.close(console)
        return psutil.Process(pid)

    def _await_ready(self, state: broker_state.BrokerState, process: psutil.Process, deadline: float) -> None:
        while True:
            if self._live(state) is None:
                message = f"Kafka ended while it was starting. The end of its log:\n{self._log_tail()}"
                raise BrokerStartError(message)
            if _answers(state):
                return
            if time.monotonic() >= deadline:
                message = (
                    f"Kafka (pid {process.pid}) does not answer at {state.bootstrap_servers} in time. "
                    f"Its log is {self.log_file}, and ends with:\n{self._log_tail()}"
                )
                raise BrokerStartError(message)
            time.sleep(_POLL_S)

    def _terminate(self, process: psutil.Process, timeout_s: float) -> None:
        self._on_progress("Stopping Kafka")
        process.send_signal(signal.SIGCONT)  # a paused process would keep the next signal for later
        process.terminate()
        try:
            process.wait(timeout_s)
        except psutil.TimeoutExpired:
            self._on_progress(f"Kafka did not stop within {timeout_s:g} s: killing it; its next start takes longer")
            process.kill()
            process.wait(_KILL_WAIT_S)

    def _log_tail(self) -> str:
        lines: list[str] = []
        for path in (self.log_file, self._console_file):
            if path.exists():
                lines += path.read_bytes()[-_LOG_TAIL_BYTES:].decode("utf-8", "replace").splitlines()[-_LOG_TAIL_LINES:]
        return "\n".join(lines)


def _answers(state: broker_state.BrokerState) -> bool:
    """Whether the broker answers an API call, as the cluster that it should be."""
    admin = AdminClient(
        {
            "bootstrap.servers": state.bootstrap_servers,
            # Only for this probe: try again at once, and keep the expected refusals off the terminal.
            "reconnect.backoff.max.ms": 200,
            "log_level": 0,
        }
    )
    try:
        return bool(admin.list_topics(timeout=_API_TIMEOUT_S).cluster_id == state.cluster_id)
    except KafkaException:
        return False
