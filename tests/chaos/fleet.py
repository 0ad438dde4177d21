"""The processes of a chaos run: brokers, agents, upstreams and consumers, and what can be done to each of them."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Final

from confluent_kafka.admin import AdminClient, NewTopic

from pipeline.embedded import EmbeddedBroker, EmbeddedCluster
from pipeline.errors import EXIT_UNAVAILABLE
from tests.acceptance.harness import Agent, Deployment

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

PARTITIONS: Final = 4
UPSTREAMS: Final = 3
"""The last one sends by transactions."""
SESSION_TIMEOUT_MS: Final = 4_000
TRANSACTION_TIMEOUT_MS: Final = 5_000
STOP_S: Final = 30.0
ROOT_MODULES: Final = "tests.chaos"


class Brokers:
    """One broker, or a cluster of several; one of them is disturbed at a time."""

    def __init__(self, folder: Path, *, cache_dir: Path, node_count: int, on_progress: Callable[[str], None]) -> None:
        self.node_count = node_count
        self.turn = threading.Lock()
        self._cluster: EmbeddedCluster | None = None
        if node_count == 1:
            self._single = EmbeddedBroker(folder, cache_dir=cache_dir, on_progress=on_progress)
            self.bootstrap_servers = self._single.start().bootstrap_servers
        else:
            # Leaders go back to their first node soon: leader changes beside those that kills bring.
            settings = {"leader.imbalance.check.interval.seconds": "15"}
            self._cluster = EmbeddedCluster(
                folder, cache_dir=cache_dir, node_count=node_count, settings=settings, on_progress=on_progress
            )
            self.bootstrap_servers = self._cluster.start().bootstrap_servers

    def node(self, number: int) -> EmbeddedBroker:
        """The broker of this number, counted round."""
        return self._single if self._cluster is None else self._cluster.node(1 + number % self.node_count)

    def settle(self) -> None:
        """Wait until another node may be taken away; nothing to wait for where there is only one."""
        if self._cluster is not None:
            self._cluster.await_in_sync()

    def end(self) -> None:
        """Nobody needs their data again."""
        if self._cluster is not None:
            self._cluster.kill()
        elif self._single.status() is not None:
            self._single.kill()


class Child:
    """A process that is started again and again under one name; its folder stays."""

    def __init__(
        self, name: str, folder: Path, environment: dict[str, str], arguments: Callable[[int], list[str]]
    ) -> None:
        self.name = name
        self.folder = folder
        self.turn = threading.Lock()
        self.wanted = False
        """Whether it should run: one that ended by itself meanwhile is started again."""
        self.ended_by_itself: list[str] = []
        self._environment = environment
        self._arguments = arguments
        self._lives = 0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Begin the next life."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "output.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *self._arguments(self._lives)],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._lives += 1
        self.wanted = True

    def kill(self) -> None:
        """SIGKILL."""
        self.wanted = False
        assert self._process is not None, f"{self.name} was never started"
        self._process.kill()
        self._process.wait(STOP_S)

    def freeze(self) -> None:
        """SIGSTOP."""
        self._send(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self._send(signal.SIGCONT)

    def stop(self) -> None:
        """SIGTERM, and wait; raises `AssertionError` if it does not end, or not cleanly."""
        self.wanted = False
        assert self._process is not None, f"{self.name} was never started"
        self._process.terminate()
        self.thaw()
        try:
            code = self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"{self.name} did not stop within {STOP_S:g} s\n{self.log_tail()}") from None
        # Minus SIGTERM: it was still on its way to where it listens for signals.
        assert code in {0, -signal.SIGTERM}, f"{self.name} ended with {code}\n{self.log_tail()}"

    def look_after(self) -> None:
        """Start it again if it ended by itself, as a supervisor does."""
        if self.wanted and self._process is not None and self._process.poll() is not None:
            self.ended_by_itself.append(f"{self.name} ended with {self._process.returncode}\n{self.log_tail(3)}")
            self.start()

    def log_tail(self, lines: int = 15) -> str:
        """The end of what it printed."""
        text = (self.folder / "output.log").read_text("utf-8", "replace")
        return "\n".join(text.splitlines()[-lines:])

    def _send(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)


class AgentPlace:
    """Where one agent runs, dies and comes back with its folder and its name in the group."""

    def __init__(self, deployment: Deployment, name: str, *, folder: str, fence: str, is_static: bool) -> None:
        self.name = name
        self.turn = threading.Lock()
        self.gave_up: list[str] = []
        self._deployment = deployment
        self._folder = folder
        self._settings: dict[str, object] = {"fence": fence}
        if is_static:
            self._settings["group_instance_id"] = name
        self._wanted = False
        self._agent: Agent | None = None

    @property
    def agent(self) -> Agent:
        """The present life."""
        assert self._agent is not None, f"{self.name} was never started"
        return self._agent

    def start(self) -> None:
        """Begin the next life; does not wait until it is ready."""
        self._agent = self._deployment.start_agent(self._folder, ready=False, **self._settings)
        self._wanted = True

    def kill(self) -> None:
        """SIGKILL."""
        self._wanted = False
        self.agent.kill()

    def stop(self) -> None:
        """SIGTERM; raises `AssertionError` if it does not end cleanly.

        One that no broker answered while it started was on its way out by itself.
        """
        self._wanted = False
        code = self.agent.stop()
        assert code in {0, -signal.SIGTERM} or self._found_no_broker(code), self.agent.log_tail()

    def _found_no_broker(self, code: int) -> bool:
        if self.agent.logged("partition_active"):
            return False
        return code == EXIT_UNAVAILABLE or "KafkaConnectionError" in self.agent.log_tail()

    def lose_tables(self) -> None:
        """Remove the local tables of a dead agent that shares its folder with nobody."""
        for tables in self.agent.data_dir.glob("agents/*/tables"):
            shutil.rmtree(tables)

    def look_after(self) -> None:
        """Start it again if it ended by itself; one that had partitions should have waited instead."""
        if self._wanted and not self.agent.is_running:
            if self.agent.logged("partition_active"):
                self.gave_up.append(self.agent.log_tail())
            self.start()


class Fleet:
    """Everything that runs. `deployment` has the topics; histories are in `folder / "history"`."""

    def __init__(self, brokers: Brokers, folder: Path, *, seed: int, rate: float) -> None:
        self.brokers = brokers
        self.folder = folder
        self.history = folder / "history"
        self.deployment = Deployment(
            brokers.bootstrap_servers,
            folder,
            partitions=PARTITIONS,
            session_timeout_ms=SESSION_TIMEOUT_MS,
            transaction_timeout_ms=TRANSACTION_TIMEOUT_MS,
        )
        self.outputs = f"{self.deployment.settings.topic_prefix}outputs"
        _create_like(self.deployment, self.outputs)
        self.agents = [
            AgentPlace(self.deployment, "agent-0", folder="agent-0", fence="offset", is_static=True),
            AgentPlace(self.deployment, "agent-1", folder="agent-1", fence="write", is_static=False),
        ]
        # It shares a folder with the second, so that it finds another's tables.
        self.guest = AgentPlace(self.deployment, "guest", folder="agent-1", fence="offset", is_static=False)
        self.upstreams = [
            self._upstream(f"u{number}", seed, rate / UPSTREAMS, transactional=number == UPSTREAMS - 1)
            for number in range(UPSTREAMS)
        ]
        self.consumers = [self._consumer(f"c{number}") for number in range(2)]
        self._watching = threading.Event()
        self._watcher = threading.Thread(target=self._look_after, name="supervisor")

    @property
    def children(self) -> list[Child]:
        """Upstreams and consumers."""
        return [*self.upstreams, *self.consumers]

    def start(self) -> None:
        """Start everything, and return when every partition is active."""
        for agent in self.agents:
            agent.start()
        self.deployment.await_ready()
        for child in self.children:
            child.start()
        self._watcher.start()

    def stop_upstreams(self) -> None:
        """Let each finish what it has begun."""
        for upstream in self.upstreams:
            upstream.stop()

    def end(self) -> None:
        """End every process, whatever state it is in."""
        self._watching.set()
        if self._watcher.is_alive():
            self._watcher.join(STOP_S)
        for child in self.children:
            if child.wanted:
                child.kill()
        self.deployment.close()
        self.brokers.end()

    def _look_after(self) -> None:
        while not self._watching.wait(0.3):
            for process in [*self.children, *self.agents]:
                if process.turn.acquire(blocking=False):  # else something is being done to it: next time
                    try:
                        process.look_after()
                    finally:
                        process.turn.release()

    def _upstream(self, name: str, seed: int, rate: float, *, transactional: bool) -> Child:
        def arguments(life: int) -> list[str]:
            options = ["--life", str(life), "--seed", str(seed), "--rate", str(rate)]
            flag = ["--transactional"] if transactional else []
            return [f"{ROOT_MODULES}.upstream", name, str(self.history), *options, *flag]

        return Child(name, self.folder / name, self.deployment.environment(name), arguments)

    def _consumer(self, name: str) -> Child:
        def arguments(life: int) -> list[str]:
            del life
            return [f"{ROOT_MODULES}.applier", str(self.history / f"{name}.jsonl"), "--outputs", self.outputs]

        return Child(name, self.folder / name, self.deployment.environment(name), arguments)


def _create_like(deployment: Deployment, topic: str) -> None:
    """One more topic, with as many partitions, and as many replicas as the cluster gives."""
    admin = AdminClient(deployment.settings.client_config())
    admin.create_topics([NewTopic(topic, PARTITIONS)])[topic].result(20)
    until_s = time.monotonic() + 20
    while topic not in admin.list_topics(timeout=5).topics:
        assert time.monotonic() < until_s, f"{topic} did not show"


def lose_data(children: Sequence[Child]) -> None:
    """Remove what these keep in their data folders, but for what they printed."""
    for child in children:
        for path in child.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
