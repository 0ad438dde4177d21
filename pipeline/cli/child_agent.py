"""Agents in processes of their own on one data folder, for the benchmark and the demonstration."""

import json
import shutil
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any, Final

import httpx
import psutil

from pipeline.config import child_environment
from pipeline.errors import UnavailableError

if TYPE_CHECKING:
    from pathlib import Path

    from pipeline.config import Settings

__all__ = ["ChildAgents"]

READY_TIMEOUT_S: Final = 90.0
_PAUSE_S: Final = 0.05
_HTTP_TIMEOUT_S: Final = 10.0
_STOP_TIMEOUT_S: Final = 20.0
_LOG_TAIL_BYTES: Final = 1_500


class ChildAgents:
    """`count` times `duetasks agent`, with the brokers and the data folder of `settings`; may be killed and restarted.

    Each takes a slot of the data folder, and with it its name in the group: restarted ones get their partitions back.
    """

    def __init__(self, settings: "Settings", count: int = 1) -> None:
        self._data_dir = settings.data_dir
        self._count = count
        self._partition_count = settings.partitions
        self._environment = child_environment(
            bootstrap_servers=settings.bootstrap_servers,
            data_dir=settings.data_dir,
            topic_prefix=settings.topic_prefix or None,
            partitions=settings.partitions,
            group_id=settings.group_id,
            http_host="127.0.0.1",
            http_port=0,
            advertised_url=None,
        )
        self.log_file: Path = settings.data_dir / "agent.log"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._http = httpx.Client(timeout=_HTTP_TIMEOUT_S)

    def start(self) -> None:
        """Start the processes; `await_ready` waits until they own all partitions."""
        with self.log_file.open("ab") as log:
            self._processes = [
                subprocess.Popen(
                    [sys.executable, "-m", "pipeline.cli", "agent"],
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # Ctrl-C reaches it through us, once
                )
                for _ in range(self._count)
            ]

    def await_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Return once every partition is restored and fenced; raises `UnavailableError` with its last words."""
        until_s = time.monotonic() + timeout_s
        while time.monotonic() < until_s:
            if self.is_ready():
                return
            time.sleep(_PAUSE_S)
        raise UnavailableError(f"Not every partition was ready within {timeout_s:g} s:\n{self._log_tail()}")

    def is_ready(self) -> bool:
        """Whether every partition is restored and fenced; raises `UnavailableError` if a process has ended."""
        for process in self._processes:
            if process.poll() is not None:
                raise UnavailableError(f"An agent ended with code {process.returncode}:\n{self._log_tail()}")
        answers = self._ask()
        owned = sum(len(answer["partitions"]) for answer in answers)
        return len(answers) == self._count and owned == self._partition_count and all(a["ready"] for a in answers)

    def positions(self) -> dict[int, tuple[int, float]]:
        """How far the table of each partition is in `task-events`, and since when (wall clock, seconds).

        Without those of agents that do not answer.
        """
        return {
            each["partition"]: (each["position"], each["moved_at_ms"] / 1000)
            for answer in self._ask()
            for each in answer["partitions"]
        }

    def rss_bytes(self) -> int:
        """The memory that the processes hold now."""
        return sum(int(psutil.Process(process.pid).memory_info().rss) for process in self._processes)

    def kill(self) -> float:
        """End them with SIGKILL, as a crash would; returns the wall clock's seconds just before."""
        at_s = time.time()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        return at_s

    def remove_tables(self) -> None:
        """Delete the local tables of agents that do not run; they restore them from `task-state`."""
        for tables in self._data_dir.glob("agents/*/tables"):
            shutil.rmtree(tables)

    def stop(self) -> None:
        """End cleanly those that run; one that does not end in time is killed."""
        running = [process for process in self._processes if process.poll() is None]
        for process in running:
            process.send_signal(signal.SIGTERM)
        for process in running:
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _ask(self) -> list[Any]:
        """The agents' accounts of themselves, of those that can give one now."""
        pids = {process.pid for process in self._processes}
        answers = []
        for announced in self._data_dir.glob("agents/*/agent.json"):
            try:
                address = json.loads(announced.read_text("utf-8"))
                if address["pid"] in pids:
                    answers.append(self._http.get(f"{address['url']}/readyz").json())
            except (OSError, ValueError, httpx.HTTPError):
                continue  # it is just starting, or ending
        return answers

    def _log_tail(self) -> str:
        return self.log_file.read_bytes()[-_LOG_TAIL_BYTES:].decode("utf-8", "replace")
