"""What an embedded broker keeps on disk, in `<data_dir>/broker`:

broker.json         the process that was started last, written before it is ready
ports.json          its ports, kept for ever so that clients find it again
server.properties   written at each start, as is log4j2.properties
kafka/              Kafka's data
kafka.log           Kafka's log; console.log: what the Java process printed
start.lock          held while somebody starts or stops it
"""  # noqa: D415 - a list, not a sentence

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TypeVar

import msgspec
import psutil

from pipeline.embedded.server_properties import BrokerPorts
from pipeline.errors import UsageError

__all__ = ["BrokerFolder", "BrokerState"]

_LOG_TAIL_LINES = 15
_LOG_TAIL_BYTES = 20_000
_CLOCK_TOLERANCE_S = 1.0

_Kept = TypeVar("_Kept", bound=msgspec.Struct)


class BrokerState(msgspec.Struct, frozen=True, kw_only=True):
    """One broker process; with its start time the pid names one process for ever."""

    pid: int
    # Since the epoch, as the operating system tells it.
    process_started_at_s: float
    bootstrap_servers: str
    cluster_id: str


class BrokerFolder:
    """Paths and small files of one embedded broker.

    Raises:
        UsageError: Kafka can't keep its data under such a path; choose another.

    """

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir.absolute()
        if "," in str(self.data_dir):
            raise UsageError(
                f"The data folder {self.data_dir} has a comma in its path, which Kafka takes for two folders."
            )
        self.path = self.data_dir / "broker"
        self.kafka_dir = self.path / "kafka"
        self.log_file = self.path / "kafka.log"
        self.console_file = self.path / "console.log"
        self.properties_file = self.path / "server.properties"
        self.log4j_file = self.path / "log4j2.properties"
        self.lock_file = self.path / "start.lock"
        self._state_file = self.path / "broker.json"
        self._ports_file = self.path / "ports.json"

    def read_state(self) -> BrokerState | None:
        """The process started last, or None where there is none; a damaged file counts as none."""
        return _read(self._state_file, BrokerState)

    def write_state(self, state: BrokerState) -> None:
        """Record the process that was just started."""
        write_atomically(self._state_file, msgspec.json.encode(state))

    def forget_state(self) -> None:
        """Record that no process runs."""
        self._state_file.unlink(missing_ok=True)

    def read_ports(self) -> BrokerPorts | None:
        """Ports of the last start, or None before the first."""
        return _read(self._ports_file, BrokerPorts)

    def write_ports(self, ports: BrokerPorts) -> None:
        """Record the ports for all later starts."""
        write_atomically(self._ports_file, msgspec.json.encode(ports))

    def cluster_id(self) -> str | None:
        """Id in Kafka's data, or None where Kafka has no data here yet."""
        try:
            lines = (self.kafka_dir / "meta.properties").read_text("utf-8").splitlines()
        except FileNotFoundError:
            return None
        return next((line.removeprefix("cluster.id=") for line in lines if line.startswith("cluster.id=")), None)

    def live_process(self, state: BrokerState | None) -> psutil.Process | None:
        """The process that `state` names if it is this broker; None if it ended or its pid is another process's."""
        if state is None:
            return None
        try:
            process = psutil.Process(state.pid)
            return process if self._is_this_broker(process, state) else None
        except psutil.NoSuchProcess:
            # A zombie raises a kind of it: ended, and only waiting for its parent, which may be this very process.
            return None

    def _is_this_broker(self, process: psutil.Process, state: BrokerState) -> bool:
        """Tell a reused pid: by the settings file on its command line, which no other process has.

        Not by the start time alone: what the operating system reports moves when the clock is set, and a running
        broker taken for a dead one would be started twice. It decides where the command line can't be read.
        """
        try:
            return str(self.properties_file) in process.cmdline()
        except psutil.AccessDenied:
            return abs(process.create_time() - state.process_started_at_s) < _CLOCK_TOLERANCE_S

    def log_tail(self) -> str:
        """Last lines of Kafka's log and of what Java printed, for a message."""
        return "\n".join(line for path in (self.log_file, self.console_file) for line in _tail(path))


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file so that a reader, or a crash, sees all of the old or all of the new."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)  # gone already when it was moved into place


def without_stack_traces(text: str) -> list[str]:
    """Lines of what Java printed, without those that only mean something beside Kafka's source."""
    return [line for line in text.splitlines() if not line.startswith("\tat ")]


def _read(path: Path, kind: type[_Kept]) -> _Kept | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def _tail(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _LOG_TAIL_BYTES))
            return without_stack_traces(file.read().decode("utf-8", "replace"))[-_LOG_TAIL_LINES:]
    except FileNotFoundError:
        return []
