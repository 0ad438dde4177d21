"""A bound for calls into a client library that has been seen not to keep its own."""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final, TypeVar

from pipeline.errors import UnknownOutcomeError

__all__ = ["GRACE_S", "bounded"]

GRACE_S: Final = 5.0
"""How much longer than its own time-out a call may take."""

Result = TypeVar("Result")


def bounded(call: Callable[[], Result], timeout_s: float, what: str) -> Result:
    """What `call` returns or raises, in a thread of its own that is left behind after `timeout_s` and a grace.

    Raises `UnknownOutcomeError` then: whatever the call worked on must not be used again. `what` completes "could not".
    """
    results: SimpleQueue[Result] = SimpleQueue()
    errors: SimpleQueue[BaseException] = SimpleQueue()
    done = threading.Event()

    def run() -> None:
        try:
            results.put(call())
        except BaseException as error:  # noqa: BLE001  # handed over, whatever it is
            errors.put(error)
        done.set()

    # A daemon: a thread that never comes back must not keep the process from ending.
    threading.Thread(target=run, name=f"bounded {what}", daemon=True).start()
    if not done.wait(timeout_s + GRACE_S):
        raise UnknownOutcomeError(f"Could not {what}: the client did not come back within its time-out.")
    if not errors.empty():
        raise errors.get()
    return results.get()
