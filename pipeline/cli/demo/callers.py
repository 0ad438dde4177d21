"""Consumers in processes of their own: each line that `duetasks consume` prints is a boarding call that was made."""

import json
import subprocess
import sys
import threading
import time
from typing import IO, TYPE_CHECKING, Final

from pipeline.cli.demo.checking import Applied
from pipeline.config import child_environment
from pipeline.errors import UnavailableError

if TYPE_CHECKING:
    from pipeline.config import Settings

__all__ = ["Callers"]

_GROUP: Final = "gates"
_STOP_TIMEOUT_S: Final = 20.0


class Callers:
    """Members of one consumer group, with a ledger; `made` grows while they run."""

    def __init__(self, settings: "Settings", count: int) -> None:
        self._settings = settings
        self._count = count
        self._processes: list[subprocess.Popen[bytes]] = []
        self._threads: list[threading.Thread] = []
        self.made: list[Applied] = []
        self.log_file = settings.data_dir / "consumers.log"

    def start(self) -> None:
        """Start all of them."""
        environment = child_environment(
            bootstrap_servers=self._settings.bootstrap_servers,
            data_dir=self._settings.data_dir,
            topic_prefix=self._settings.topic_prefix or None,
        )
        for _ in range(self._count):
            with self.log_file.open("ab") as log:
                process = subprocess.Popen(  # noqa: S603  # our own program
                    [sys.executable, "-m", "pipeline.cli", "consume", "--group", _GROUP],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    start_new_session=True,  # Ctrl-C reaches it through us, once
                )
            assert process.stdout is not None, "asked for above"  # noqa: S101  # for the type checker
            thread = threading.Thread(target=self._listen, args=(process.stdout,), daemon=True)
            thread.start()
            self._processes.append(process)
            self._threads.append(thread)

    def check(self) -> None:
        """Raise `UnavailableError` if one of them has ended."""
        for process in self._processes:
            if process.poll() is not None:
                raise UnavailableError(f"A consumer ended with code {process.returncode}: {self.log_file} says why.")

    def stop(self) -> None:
        """Let each finish what it has in hand, and hear its last lines."""
        for process in self._processes:
            process.terminate()
        for process, thread in zip(self._processes, self._threads, strict=True):
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            thread.join(_STOP_TIMEOUT_S)

    def _listen(self, lines: IO[bytes]) -> None:
        for line in lines:
            seen_at_ms = time.time() * 1000
            task = json.loads(line)
            self.made.append(
                Applied(
                    task_id=task["task_id"],
                    due_at_ms=task["due_at_ms"],
                    fired_at_ms=task["fired_at_ms"],
                    seen_at_ms=seen_at_ms,
                )
            )
