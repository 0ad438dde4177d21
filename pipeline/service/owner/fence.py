"""The fence: proof that everything acknowledged before an instant has been applied.

Read the clock, *then* learn an offset that lies above all that was acknowledged before that reading, and fire only once
the applied position has reached it. A cancel acknowledged before the due instant is below it, so it has been applied.
"""

from collections.abc import Awaitable, Callable

import msgspec

from pipeline.core.tasks import InstantMs, Offset
from pipeline.errors import CorruptStateError
from pipeline.ports import Clock

__all__ = ["FENCE_KEY", "Fence", "FenceReading"]

FENCE_KEY = b"\x00fence"
"""Key of the records that `fence = "write"` adds to `task-events`; the owner reads over them."""


class FenceReading(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A clock reading, and the position from which on everything acknowledged before it is applied."""

    clock_ms: InstantMs
    target: Offset


class Fence:
    """Holds at most one reading until it was passed; the target is a fixed number, so a busy input can't starve it."""

    def __init__(self, clock: Clock, ask: Callable[[], Awaitable[Offset]]) -> None:
        self._clock = clock
        self._ask = ask
        self._reading: FenceReading | None = None

    @property
    def pending(self) -> FenceReading | None:
        """The reading that waits for its target."""
        return self._reading

    async def passed(self, position: Offset) -> FenceReading | None:
        """The reading behind which `position` may fire, or None if the input must be applied further first.

        Raises `CorruptStateError` if the position lies beyond the end: this is not the log that was read.
        """
        if self._reading is None:
            clock_ms = self._clock.now_ms()
            target = await self._ask()
            if position > target:
                raise CorruptStateError(f"applied up to {position}, but the input ends at {target}")
            self._reading = FenceReading(clock_ms=clock_ms, target=target)
        return self._reading if position >= self._reading.target else None

    def drop(self) -> None:
        """Everything due at the reading has fired; the next firing needs a new one."""
        self._reading = None
