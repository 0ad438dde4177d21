"""What an embedded broker leaves on disk about itself: its ports for ever, its process while it runs."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TypeVar

import msgspec
import psutil

from pipeline.embedded.server_properties import BrokerPorts

STATE_FILE_NAME = "broker.json"
PORTS_FILE_NAME = "ports.json"

_Kept = TypeVar("_Kept", bound=msgspec.Struct)


class BrokerState(msgspec.Struct, frozen=True, kw_only=True):
    """The broker process that was started last in a data folder, written before it is ready."""

    pid: int
    # Seconds since the epoch, as the operating system tells it: with the pid it names one process for ever.
    process_started_at_s: float
    bootstrap_servers: str
    cluster_id: str


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file so that a reader, or a crash, sees all of the old or all of the new."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def read_state(folder: Path) -> BrokerState | None:
    """State of the broker started last in `folder`, or None where there is none (a damaged file counts as none)."""
    return _read(folder / STATE_FILE_NAME, BrokerState)


def read_ports(folder: Path) -> BrokerPorts | None:
    """Ports that the broker of `folder` had, or None before its first start."""
    return _read(folder / PORTS_FILE_NAME, BrokerPorts)


def write_state(folder: Path, state: BrokerState) -> None:
    """Record the process that runs in `folder`."""
    write_atomically(folder / STATE_FILE_NAME, msgspec.json.encode(state))


def write_ports(folder: Path, ports: BrokerPorts) -> None:
    """Record the ports of `folder`."""
    write_atomically(folder / PORTS_FILE_NAME, msgspec.json.encode(ports))


def live_process(state: BrokerState | None, *, properties_file: Path) -> psutil.Process | None:
    """The process that `state` names if it is still that broker; None if it ended, or if its pid is somebody else's.

    What tells a reused pid is the command line, which names this folder's own settings file. The start time that the
    operating system reports moves when the clock is set, so it only decides where the command line can't be read.
    """
    if state is None:
        return None
    try:
        process = psutil.Process(state.pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        return process if _is_broker(process, state, properties_file) else None
    except psutil.NoSuchProcess:
        return None


def _is_broker(process: psutil.Process, state: BrokerState, properties_file: Path) -> bool:
    try:
        return str(properties_file) in process.cmdline()
    except psutil.AccessDenied:
        return abs(process.create_time() - state.process_started_at_s) < 1.0


def _read(path: Path, kind: type[_Kept]) -> _Kept | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
