"""Time that passes only when everybody waits: an event loop that jumps, and clocks on it that tests may set.

Code under test sleeps, times out and reads its clock as always; a simulated day takes as long as the work in it.
"""

import asyncio
import math
import selectors
from collections.abc import Callable, Coroutine, Mapping
from selectors import SelectorKey
from typing import Any, Final, TypeVar

import msgspec

from pipeline.core.tasks import InstantMs

__all__ = ["START_MS", "StuckError", "VirtualClock", "VirtualLoop", "run_virtual"]

START_MS: Final = InstantMs(1_767_268_800_000)
"""Where virtual wall clocks start: 2026-01-01T12:00:00Z."""
_MICROSECONDS: Final = 1_000_000
_BUSY_MAX: Final = 100_000
"""Rounds of the loop at one instant; a simulation that needs more is caught in a loop."""

_T = TypeVar("_T")


class StuckError(Exception):
    """Nobody will ever wake up again, or the simulation went on past its bound: a bug in the code under test."""


class _JumpingSelector(selectors.BaseSelector):
    """Instead of sleeping, moves the loop's time on; real descriptors (the loop's own pipe) are only polled."""

    def __init__(self, advance: Callable[[float | None], None]) -> None:
        self._real = selectors.DefaultSelector()
        self._advance = advance
        self._busy = 0

    def register(self, fileobj: Any, events: int, data: Any = None) -> SelectorKey:  # noqa: ANN401  # as the base has it
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> SelectorKey:  # noqa: ANN401  # as the base has it
        return self._real.unregister(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
        found = self._real.select(0)
        if not found and timeout != 0:
            self._busy = 0
            self._advance(timeout)
        self._busy += 1
        if self._busy > _BUSY_MAX:
            self._busy = 0  # whoever cleans up now gets as many rounds again
            raise StuckError("somebody is busy for ever: no time passes any more")
        return found

    def close(self) -> None:
        self._real.close()

    def get_map(self) -> Mapping[Any, SelectorKey]:
        return self._real.get_map()


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop on virtual time; raises `StuckError` when nothing is left to wait for, or after `until_s`.

    Threads are not for it: it would jump on while they work.
    """

    def __init__(self, *, until_s: float = 400 * 86_400) -> None:
        self._now_us = 0
        self._until_us = int(until_s * _MICROSECONDS)
        super().__init__(_JumpingSelector(self._advance))
        self._clock_resolution = 1 / _MICROSECONDS

    def time(self) -> float:
        """Seconds since the loop was made, in whole microseconds."""
        return self._now_us / _MICROSECONDS

    @property
    def now_ms(self) -> int:
        """Whole milliseconds since the loop was made."""
        return self._now_us // 1_000

    def _advance(self, timeout: float | None) -> None:
        if timeout is None:
            raise StuckError("every task waits for something that no timer and no other task will bring")
        # Rounded up: who waits 1 ms must find that 1 ms has passed.
        self._now_us += math.ceil(timeout * _MICROSECONDS)
        if self._now_us > self._until_us:
            until_us, self._until_us = self._until_us, 2 * self._now_us  # whoever cleans up now gets as long again
            raise StuckError(f"the simulation passed its bound of {until_us // _MICROSECONDS} virtual seconds")


class _Stretch(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A time in which a wall clock ran evenly: from `from_ms` of the loop on, when it showed `wall_ms`."""

    from_ms: int
    wall_ms: int
    drift_ppm: int

    def at(self, loop_ms: int) -> int:
        passed_ms = loop_ms - self.from_ms
        return self.wall_ms + passed_ms + passed_ms * self.drift_ppm // _MICROSECONDS

    def first_ms(self, reading: int) -> int:
        """The first moment of the loop at which the clock showed at least `reading`."""
        passed_ms = (reading - self.wall_ms) * _MICROSECONDS // (_MICROSECONDS + self.drift_ppm)
        while self.at(self.from_ms + passed_ms) < reading:
            passed_ms += 1
        while passed_ms and self.at(self.from_ms + passed_ms - 1) >= reading:
            passed_ms -= 1
        return self.from_ms + passed_ms


class VirtualClock:
    """A clock port on a `VirtualLoop`; each simulated machine has one, which may be wrong in its own way."""

    def __init__(self, loop: VirtualLoop | None = None, *, start_ms: InstantMs = START_MS) -> None:
        found = loop if loop is not None else asyncio.get_running_loop()
        assert isinstance(found, VirtualLoop), "a virtual clock needs the loop of `run_virtual`"
        self._loop = found
        self._stretches = [_Stretch(from_ms=found.now_ms, wall_ms=start_ms, drift_ppm=0)]

    def now_ms(self) -> InstantMs:
        """Wall clock, milliseconds since 1970 UTC."""
        return InstantMs(self._stretches[-1].at(self._loop.now_ms))

    def monotonic_ms(self) -> int:
        """Milliseconds since the loop began; `step` does not touch it."""
        return self._loop.now_ms

    def step(self, by_ms: int) -> None:
        """Set the wall clock forward (or back) at once, as an operator or NTP would."""
        self._begin(self.now_ms() + by_ms, self._stretches[-1].drift_ppm)

    def drift(self, ppm: int) -> None:
        """From now on the wall clock gains `ppm` microseconds a second (or loses, below 0)."""
        self._begin(self.now_ms(), ppm)

    def first_read_ms(self, reading: int) -> int | None:
        """The earliest moment (milliseconds of the loop) at which the wall clock showed `reading`; None if never."""
        # A stretch ends within the millisecond in which the next one begins: that one belongs to both.
        ends = [*(stretch.from_ms for stretch in self._stretches[1:]), self._loop.now_ms]
        for stretch, end_ms in zip(self._stretches, ends, strict=True):
            if stretch.wall_ms <= reading <= stretch.at(end_ms):
                return stretch.first_ms(reading)
        return None

    def _begin(self, wall_ms: int, drift_ppm: int) -> None:
        self._stretches.append(_Stretch(from_ms=self._loop.now_ms, wall_ms=wall_ms, drift_ppm=drift_ppm))

    async def advance(self, by_ms: int) -> None:
        """Let so much time pass; whoever waits for less wakes up on the way."""
        await asyncio.sleep(by_ms / 1_000)


def run_virtual(main: Callable[[], Coroutine[Any, Any, _T]], *, until_s: float = 400 * 86_400) -> _T:
    """What `main()` returns, run on a virtual loop of its own."""
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(until_s=until_s)) as runner:
        return runner.run(main())
