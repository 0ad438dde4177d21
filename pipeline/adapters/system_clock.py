"""The clocks of this machine."""

import time

from pipeline.core.tasks import InstantMs

__all__ = ["SystemClock"]


class SystemClock:
    """Implements `Clock`; the monotonic one counts time asleep too, so that a suspended machine is noticed."""

    def now_ms(self) -> InstantMs:
        """Wall clock, milliseconds since 1970 UTC."""
        return InstantMs(time.time_ns() // 1_000_000)

    def monotonic_ms(self) -> int:
        """Milliseconds since boot."""
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000
