"""An agent in a process of its own on a data folder of its own, for the benchmark and the demonstration."""

import json
import shutil
import signal
import socket
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

__all__ = ["ChildAgent"]

READY_TIMEOUT_S: Final = 90.0
_PAUSE_S: Final = 0.05
_HTTP_TIMEOUT_S: Final = 10.0
_STOP_TIMEOUT_S: Final = 20.0
_LOG_TAIL_BYTES: Final = 1_500


class ChildAgent:
    """One `duetasks agent` with the brokers and the data folder of `settings`; may be killed and started again.

    It is a static member of its group, so a restart within the session time-out gets its partitions back at once.
    """

    def __init__(self, settings: "Settings") -> None:
        self._data_dir = settings.data_dir
        self._environment = child_environment(
            bootstrap_servers=settings.bootstrap_servers,
            data_dir=settings.data_dir,
            topic_prefix=settings.topic_prefix or None,
            partitions=settings.partitions,
            group_id=settings.group_id,
            group_instance_id=settings.group_instance_id or f"{settings.group_id}-0",
            http_host="127.0.0.1",
            http_port=_free_port(),  # the same at each start: the group remembers a static member's address
            advertised_url=None,
        )
        self.log_file: Path = settings.data_dir / "agent.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._http = httpx.Client(timeout=_HTTP_TIMEOUT_S)

    def start(self) -> None:
        """Start the process; `await_ready` waits until it owns its partitions."""
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pipeline.cli", "agent"],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C reaches it through us, once
            )

    def await_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Return once every partition is restored and fenced; raises `UnavailableError` with its last words."""
        until_s = time.monotonic() + timeout_s
        while time.monotonic() < until_s:
            if self.is_ready():
                return
            time.sleep(_PAUSE_S)
        raise UnavailableError(f"The agent was not ready within {timeout_s:g} s:\n{self._log_tail()}")

    def is_ready(self) -> bool:
        """Whether every partition is restored and fenced; raises `UnavailableError` if the process has ended."""
        if self._child.poll() is not None:
            raise UnavailableError(f"The agent ended with code {self._child.returncode}:\n{self._log_tail()}")
        answer = self._ask()
        return answer is not None and bool(answer["ready"] and answer["partitions"])

    def positions(self) -> dict[int, int]:
        """How far the table of each partition is in `task-events`; empty while the agent does not answer."""
        answer = self._ask()
        return {} if answer is None else {each["partition"]: each["position"] for each in answer["partitions"]}

    def rss_bytes(self) -> int:
        """The memory that the process holds now."""
        return int(psutil.Process(self._child.pid).memory_info().rss)

    def kill(self) -> float:
        """End it with SIGKILL, as a crash would; returns the wall clock's seconds just before."""
        at_s = time.time()
        self._child.kill()
        self._child.wait()
        return at_s

    def remove_tables(self) -> None:
        """Delete the local tables of an agent that does not run; it restores them from `task-state`."""
        for tables in self._data_dir.glob("agents/*/tables"):
            shutil.rmtree(tables)

    def stop(self) -> None:
        """End it cleanly, if it runs; one that does not end in time is killed."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()

    @property
    def _child(self) -> "subprocess.Popen[bytes]":
        if self._process is None:
            raise UnavailableError("The agent was not started.")
        return self._process

    def _ask(self) -> Any:  # noqa: ANN401  # JSON of /readyz
        """The agent's account of itself, or None while it can't give one."""
        for announced in self._data_dir.glob("agents/*/agent.json"):
            try:
                address = json.loads(announced.read_text("utf-8"))
                if address["pid"] == self._child.pid:
                    return self._http.get(f"{address['url']}/readyz").json()
            except (OSError, ValueError, httpx.HTTPError):
                return None  # it is just starting, or ending
        return None

    def _log_tail(self) -> str:
        return self.log_file.read_bytes()[-_LOG_TAIL_BYTES:].decode("utf-8", "replace")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
