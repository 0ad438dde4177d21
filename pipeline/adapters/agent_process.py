"""The agent that `duetasks up` runs as a process of its own: started, found again, and stopped.

Kept in the data folder: `up-agent.json` (which process it is) and `agent.log` (what a detached one says).
"""

import subprocess
import sys
from pathlib import Path
from typing import IO, Final

import msgspec
import psutil

__all__ = ["AgentProcess", "AgentRecord"]

# The owner finishes or aborts its transactions within two seconds; the rest is Faust leaving its group.
STOP_TIMEOUT_S_DEFAULT: Final = 20.0
_ARGUMENTS: Final = ("-m", "pipeline.cli", "agent")
_CLOCK_TOLERANCE_S: Final = 2.0
_KILL_WAIT_S: Final = 5.0
_LOG_TAIL_BYTES: Final = 4_000
_LOG_TAIL_LINES: Final = 5


class AgentRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One agent process; with its start time the pid names one process for ever."""

    pid: int
    process_started_at_s: float
    log_file: str | None


class AgentProcess:
    """The one agent of a data folder that `duetasks up` looks after; agents started in other ways are not its business.

    Args:
        data_dir: the data folder, which must exist before `start`.

    """

    def __init__(self, data_dir: Path) -> None:
        self._record_file = data_dir / "up-agent.json"
        self.log_file = data_dir / "agent.log"

    def running(self) -> AgentRecord | None:
        """The agent that `up` started and that still runs, or None."""
        record = self._record()
        return record if record is not None and _process(record) is not None else None

    def start(self, *, detached: bool) -> "subprocess.Popen[bytes]":
        """Start an agent with this process's settings; a detached one logs to `log_file`, others to our stderr.

        It gets a session of its own: Ctrl-C reaches it once, through us, and not from the terminal as well.
        """
        log: IO[bytes] | None = self.log_file.open("ab") if detached else None
        try:
            process = subprocess.Popen(  # noqa: S603  # our own program
                [sys.executable, *_ARGUMENTS],
                stdin=subprocess.DEVNULL,
                stdout=log or sys.stderr.fileno(),  # stdout is for the result of `up`
                stderr=log or sys.stderr.fileno(),
                start_new_session=True,
            )
        finally:
            if log is not None:
                log.close()  # the child has its own
        record = AgentRecord(
            pid=process.pid,
            process_started_at_s=psutil.Process(process.pid).create_time(),
            log_file=str(self.log_file) if detached else None,
        )
        self._record_file.write_bytes(msgspec.json.encode(record))
        return process

    def stop(self, timeout_s: float = STOP_TIMEOUT_S_DEFAULT) -> bool:
        """Ask the agent to end and wait until it has; after `timeout_s` it is killed. False if none runs.

        Killing it is safe too: whatever it had not committed did not happen.
        """
        record = self.running()
        process = _process(record) if record is not None else None
        if process is None:
            return False
        process.terminate()
        try:
            process.wait(timeout_s)
        except psutil.TimeoutExpired:
            process.kill()
            process.wait(_KILL_WAIT_S)
        self._record_file.unlink(missing_ok=True)
        return True

    def last_words(self) -> str:
        """How a message about the agent ends: what it logged last, or where to look."""
        record = self._record()
        if record is None or record.log_file is None or not self.log_file.exists():
            return ": what it logged above says why."
        text = self.log_file.read_bytes()[-_LOG_TAIL_BYTES:].decode("utf-8", "replace")
        return f"; {self.log_file} ends so:\n" + "\n".join(text.splitlines()[-_LOG_TAIL_LINES:])

    def _record(self) -> AgentRecord | None:
        try:
            return msgspec.json.decode(self._record_file.read_bytes(), type=AgentRecord)
        except (FileNotFoundError, msgspec.DecodeError):
            return None


def _process(record: AgentRecord) -> psutil.Process | None:
    """The live process that `record` names; None if it ended or its pid is another process's by now."""
    try:
        process = psutil.Process(record.pid)
        same = (
            process.status() != psutil.STATUS_ZOMBIE
            and abs(process.create_time() - record.process_started_at_s) < _CLOCK_TOLERANCE_S
            and tuple(process.cmdline()[-len(_ARGUMENTS) :]) == _ARGUMENTS
        )
    except psutil.NoSuchProcess:
        return None
    return process if same else None
