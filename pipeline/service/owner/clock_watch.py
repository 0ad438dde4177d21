"""Notices when the wall clock jumps ahead: everything scheduled until then would fire at once.

Off unless a bound is set. A virtual machine that was paused may step its clock for a good reason, and then a pause that
only an operator ends would be a miss; who knows their clocks sets the bound.
"""

from pipeline.ports import Clock

__all__ = ["ClockWatch"]


class ClockWatch:
    """Compares the wall clock with the one that nobody can set, since the process started."""

    def __init__(self, clock: Clock, jump_max_ms: int) -> None:
        self._clock = clock
        self._jump_max_ms = jump_max_ms
        self._distance_ms = self._distance()

    def jumped_ms(self) -> int:
        """How far the wall clock stands ahead of where it should, if that is over the bound; else 0.

        Small steps and drift are followed. A jump stays until the clock is set back, or the agent is started again:
        that is how an operator says that the clock is right.
        """
        if not self._jump_max_ms:
            return 0
        ahead_ms = self._distance() - self._distance_ms
        if ahead_ms > self._jump_max_ms:
            return ahead_ms
        self._distance_ms += ahead_ms
        return 0

    def _distance(self) -> int:
        return self._clock.now_ms() - self._clock.monotonic_ms()
