"""How the agent's process ends."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.unit

PROGRAM = """
import threading
from concurrent.futures import ThreadPoolExecutor
from pipeline.cli.agent_command import _end_threads

ThreadPoolExecutor(1).submit(threading.Event().wait, 600)
_end_threads(3)
"""


def test_thread_that_waits_for_a_broker_does_not_keep_the_process() -> None:
    """Found by chaos: an agent that was told to stop while the broker was away hung after it had said that it ended."""
    ended = subprocess.run([sys.executable, "-c", PROGRAM], timeout=60, check=False, capture_output=True, text=True)

    assert ended.returncode == 3
    assert "threads_left_behind" in ended.stdout + ended.stderr
