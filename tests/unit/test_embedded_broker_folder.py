"""What the embedded broker leaves on disk is believed only as far as the operating system agrees."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import psutil
import pytest

from pipeline.embedded.broker_folder import BrokerFolder, BrokerState, write_atomically
from pipeline.embedded.server_properties import BrokerPorts
from pipeline.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.unit


@pytest.fixture
def folder(tmp_path: Path) -> BrokerFolder:
    """A folder in which a broker could be started."""
    folder = BrokerFolder(tmp_path)
    folder.path.mkdir()
    return folder


@pytest.fixture
def stand_in(folder: BrokerFolder) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has the broker's settings file on its command line, as the broker has; ends with its input."""
    command = [sys.executable, "-c", "import sys; sys.stdin.read()", str(folder.properties_file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        yield process


def _state(pid: int, started_at_s: float = 0.0) -> BrokerState:
    return BrokerState(
        pid=pid, process_started_at_s=started_at_s, bootstrap_servers="127.0.0.1:20001", cluster_id="cluster"
    )


def test_state_and_ports_are_read_as_they_were_written(folder: BrokerFolder) -> None:
    """Another process finds the broker by these two files alone."""
    state, ports = _state(123), BrokerPorts(client=20001, controller=20002)

    folder.write_state(state)
    folder.write_ports(ports)

    assert folder.read_state() == state
    assert folder.read_ports() == ports


@pytest.mark.parametrize("content", [b"", b"{", b'{"pid": "many"}', b"\xff"])
def test_a_damaged_state_file_counts_as_none(folder: BrokerFolder, content: bytes) -> None:
    """It is only a hint about a process: a disk that was full must not stop the broker for ever."""
    (folder.path / "broker.json").write_bytes(content)

    assert folder.read_state() is None


def test_no_state_is_no_process(folder: BrokerFolder) -> None:
    """Before the first start, and after a stop."""
    assert folder.live_process(folder.read_state()) is None


def test_the_recorded_process_is_found(folder: BrokerFolder, stand_in: subprocess.Popen[bytes]) -> None:
    """Even when the clock was set meanwhile, which moves the start time that the operating system reports."""
    found = folder.live_process(_state(stand_in.pid, started_at_s=12.0))

    assert found is not None
    assert found.pid == stand_in.pid


def test_a_process_that_ended_is_not_found(folder: BrokerFolder, stand_in: subprocess.Popen[bytes]) -> None:
    """After a crash the state file is still there."""
    stand_in.communicate()

    assert folder.live_process(_state(stand_in.pid)) is None


def test_a_zombie_is_not_found(folder: BrokerFolder, stand_in: subprocess.Popen[bytes]) -> None:
    """A broker killed under the process that started it keeps its pid until that process looks."""
    assert stand_in.stdin is not None
    stand_in.stdin.close()
    # WNOWAIT: wait for the end, but leave the zombie where it is.
    os.waitid(os.P_PID, stand_in.pid, os.WEXITED | os.WNOWAIT)

    assert psutil.Process(stand_in.pid).status() == psutil.STATUS_ZOMBIE
    assert folder.live_process(_state(stand_in.pid)) is None


def test_a_reused_pid_is_not_the_broker(folder: BrokerFolder) -> None:
    """Or `duetasks broker stop` would end somebody else's process."""
    assert folder.live_process(_state(os.getpid(), psutil.Process().create_time())) is None


def test_a_broker_of_another_data_folder_is_not_this_one(
    tmp_path: Path, folder: BrokerFolder, stand_in: subprocess.Popen[bytes]
) -> None:
    """A copied data folder brings a copied state file, which names the original's process."""
    copy = BrokerFolder(tmp_path / "copy")

    assert folder.live_process(_state(stand_in.pid)) is not None
    assert copy.live_process(_state(stand_in.pid)) is None


@pytest.mark.parametrize(("shift_s", "is_found"), [(0.0, True), (60.0, False)])
def test_where_the_command_line_is_unreadable_the_start_time_decides(
    folder: BrokerFolder,
    stand_in: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
    shift_s: float,
    is_found: bool,  # noqa: FBT001 - a parameter of the case
) -> None:
    """Some systems hide the command lines of other users' processes."""

    def deny(process: psutil.Process) -> list[str]:
        raise psutil.AccessDenied(process.pid)

    started_at_s = psutil.Process(stand_in.pid).create_time()
    monkeypatch.setattr(psutil.Process, "cmdline", deny)

    found = folder.live_process(_state(stand_in.pid, started_at_s + shift_s))

    assert (found is not None) is is_found


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk while the state is written must not lose the broker that runs."""
    path = tmp_path / "broker.json"
    path.write_bytes(b"old")

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)

    with pytest.raises(OSError, match="No space"):
        write_atomically(path, b"new")

    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_cluster_id_is_that_of_the_formatted_data(folder: BrokerFolder) -> None:
    """It tells whether Kafka's data exists, so that a restart never formats it again."""
    assert folder.cluster_id() is None

    folder.kafka_dir.mkdir()
    (folder.kafka_dir / "meta.properties").write_text("#comment\nversion=1\ncluster.id=abc-_123\nnode.id=1\n")

    assert folder.cluster_id() == "abc-_123"


def test_the_log_tail_is_short_and_without_stack_traces(folder: BrokerFolder) -> None:
    """It goes into an error message that a person reads."""
    lines = [f"line {n}\n\tat some.Class" for n in range(100)]
    folder.log_file.write_text("\n".join(lines), "utf-8")
    folder.console_file.write_text("last words", "utf-8")

    tail = folder.log_tail().splitlines()

    assert tail[-2:] == ["line 99", "last words"]
    assert len(tail) == 16


def test_a_comma_in_the_path_is_refused(tmp_path: Path) -> None:
    """Kafka would take the path for a list of two folders and write beside the data folder."""
    with pytest.raises(UsageError, match="comma"):
        BrokerFolder(tmp_path / "a,b")
