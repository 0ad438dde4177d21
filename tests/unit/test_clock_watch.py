import pytest

from pipeline.service.owner.clock_watch import ClockWatch

pytestmark = pytest.mark.unit


class SettableClock:
    """Two clocks that the test moves apart."""

    def __init__(self) -> None:
        self.wall_ms = 1_000_000
        self.steady_ms = 500

    def now_ms(self) -> int:
        return self.wall_ms

    def monotonic_ms(self) -> int:
        return self.steady_ms


def test_a_jump_over_the_bound_is_told_until_the_clock_is_set_back() -> None:
    """A clock that jumps an hour ahead must not fire an hour's timers at once."""
    clock = SettableClock()
    watch = ClockWatch(clock, 60_000)

    clock.wall_ms += 3_600_000
    jumped = watch.jumped_ms()
    clock.steady_ms += 5_000
    clock.wall_ms += 5_000 - 3_600_000
    after = watch.jumped_ms()

    assert jumped == 3_600_000
    assert after == 0


def test_time_that_passes_is_no_jump() -> None:
    """An idle hour looks like a jump to who compares wall clock readings alone."""
    clock = SettableClock()
    watch = ClockWatch(clock, 60_000)

    clock.wall_ms += 3_600_000
    clock.steady_ms += 3_600_000

    assert watch.jumped_ms() == 0


def test_small_steps_are_followed_and_do_not_add_up() -> None:
    """A clock that is disciplined by many small steps is a good clock."""
    clock = SettableClock()
    watch = ClockWatch(clock, 60_000)

    steps = []
    for _ in range(10):
        clock.wall_ms += 30_000
        steps.append(watch.jumped_ms())

    assert steps == [0] * 10


def test_without_a_bound_nothing_is_watched() -> None:
    """The default must never turn a good step into a miss."""
    clock = SettableClock()
    watch = ClockWatch(clock, 0)

    clock.wall_ms += 10**9

    assert watch.jumped_ms() == 0
