"""One process at a time, by a lock that the kernel releases when its holder dies."""

from __future__ import annotations

import fcntl
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pipeline.embedded.broker_errors import BrokerBusyError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_POLL_S = 0.1


@contextmanager
def exclusive_lock(path: Path, *, timeout_s: float, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold the lock at `path` for the block; a second holder waits at most `timeout_s`.

    The file stays behind on purpose: deleting it would let a third process lock a new file of the same name.
    `on_wait` is called once, if somebody else holds the lock.

    Raises:
        BrokerBusyError: somebody held it for longer than `timeout_s`; try again later.

    """
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + timeout_s
    with path.open("a+b") as handle:
        if not _try_lock(handle.fileno()):
            on_wait()
            while not _try_lock(handle.fileno()):
                if time.monotonic() >= deadline:
                    message = (
                        f"Another process has held {path} for more than {timeout_s:g} s; try again when it is done."
                    )
                    raise BrokerBusyError(message)
                time.sleep(_POLL_S)
        yield  # closing the file releases the lock


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
