"""The lock between processes that start, stop or fetch."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from pipeline.embedded import BrokerBusyError
from pipeline.embedded.file_lock import exclusive_lock

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.unit


def test_a_second_holder_waits_and_then_gives_up_with_a_sentence(tmp_path: Path) -> None:
    """A start that hangs must not make every other command hang with it."""
    path, waits = tmp_path / "lock", []

    with (
        exclusive_lock(path, timeout_s=1),
        pytest.raises(BrokerBusyError, match="Another process has held"),
        exclusive_lock(path, timeout_s=0.2, on_wait=lambda: waits.append("told")),
    ):
        pytest.fail("two held the lock at once")

    assert waits == ["told"]


def test_the_lock_is_free_after_the_block_and_after_an_error(tmp_path: Path) -> None:
    """A failed start must not block the next one."""
    path = tmp_path / "deep" / "lock"

    with pytest.raises(ZeroDivisionError), exclusive_lock(path, timeout_s=1):
        _ = 1 / 0

    with exclusive_lock(path, timeout_s=0):
        assert path.exists()


def test_a_killed_holder_releases_the_lock(tmp_path: Path) -> None:
    """A lock file that outlives a crash would need a person to delete it."""
    path = tmp_path / "lock"
    script = (
        "import pathlib, sys; from pipeline.embedded.file_lock import exclusive_lock\n"
        "with exclusive_lock(pathlib.Path(sys.argv[1]), timeout_s=1): print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(BrokerBusyError), exclusive_lock(path, timeout_s=0):
            pytest.fail("two held the lock at once")
        holder.kill()
        holder.wait()

        with exclusive_lock(path, timeout_s=0):
            assert path.exists()
