"""The rules that an event must keep, each at its boundary; a broken one names its reason and what to do."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.events import DAY_MS, Cancel, Event, Limits, Reason, Schedule, check_event
from pipeline.core.tasks import DurationMs, InstantMs, TaskId

pytestmark = pytest.mark.unit

APPEND_MS = InstantMs(1_767_268_800_000)
LIMITS = Limits(target_topics=frozenset({"calls"}))
LARGE = (2**31, 2**32, 2**31 * 1_000, 2**53, 2**63 - 1)


def _schedule(**changes: object) -> Schedule:
    return msgspec.structs.replace(Schedule(task_id=TaskId("order-1"), due_at_ms=APPEND_MS), **changes)


def _reason(event: Event, limits: Limits = LIMITS) -> Reason | None:
    rejection = check_event(event, append_at_ms=APPEND_MS, limits=limits)
    return None if rejection is None else rejection.reason


def _at(due_at_ms: int) -> Schedule:
    return _schedule(due_at_ms=InstantMs(due_at_ms))


def _in(delay_ms: int) -> Schedule:
    return _schedule(due_at_ms=None, delay_ms=DurationMs(delay_ms))


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (_schedule(), None),
        (Cancel(task_id=TaskId("order-1")), None),
        # ids
        (_schedule(task_id=TaskId("")), Reason.TASK_ID_LENGTH),
        (Cancel(task_id=TaskId("")), Reason.TASK_ID_LENGTH),
        (_schedule(task_id=TaskId("x" * 1_024)), None),
        (_schedule(task_id=TaskId("x" * 1_025)), Reason.TASK_ID_LENGTH),
        (_schedule(task_id=TaskId("é" * 512)), None),
        (_schedule(task_id=TaskId("é" * 512 + "x")), Reason.TASK_ID_LENGTH),
        (_schedule(task_id=TaskId("🚀" * 256)), None),
        (_schedule(task_id=TaskId("🚀" * 257)), Reason.TASK_ID_LENGTH),
        (_schedule(task_id=TaskId("\x00positions")), Reason.RESERVED_KEY),
        (_schedule(task_id=TaskId("a\x00|:b")), None),
        (_schedule(event_id="e" * 256), None),
        (_schedule(event_id="e" * 257), Reason.EVENT_ID_LENGTH),
        # versions
        (_schedule(version=-1), Reason.INVALID_VERSION),
        (Cancel(task_id=TaskId("a"), version=-1), Reason.INVALID_VERSION),
        (_schedule(version=2**63 - 1), None),
        (_schedule(version=2**63), Reason.INVALID_VERSION),
        # times
        (_schedule(due_at_ms=None), Reason.MISSING_TIME),
        (_schedule(delay_ms=DurationMs(5)), Reason.TWO_TIMES),
        (_schedule(delay_ms=DurationMs(0)), Reason.TWO_TIMES),
        (_in(0), None),
        (_in(-1), Reason.IMPLAUSIBLE_TIME),
        (_in(LIMITS.horizon_ms), None),
        (_in(LIMITS.horizon_ms + 1), Reason.BEYOND_HORIZON),
        (_at(APPEND_MS - LIMITS.past_max_ms), None),
        (_at(APPEND_MS - LIMITS.past_max_ms - 1), Reason.IMPLAUSIBLE_TIME),
        (_at(APPEND_MS + LIMITS.horizon_ms), None),
        (_at(APPEND_MS + LIMITS.horizon_ms + 1), Reason.BEYOND_HORIZON),
        (_at(APPEND_MS // 1_000), Reason.IMPLAUSIBLE_TIME),
        (_at(APPEND_MS * 1_000), Reason.BEYOND_HORIZON),
        # content
        (_schedule(target_topic="due-tasks"), None),
        (_schedule(target_topic="calls"), None),
        (_schedule(target_topic="elsewhere"), Reason.UNKNOWN_TARGET),
        (_schedule(target_topic="task-events"), Reason.UNKNOWN_TARGET),
        (_schedule(headers={"duetask": b""}), None),
        (_schedule(headers={"duetasks-replay": b""}), Reason.RESERVED_HEADER),
        (_schedule(headers={"ok": b"", "DueTasks-x": b""}), Reason.RESERVED_HEADER),
    ],
)
def test_rule_at_its_boundary(event: Event, reason: Reason | None) -> None:
    """One step inside is taken, one step outside is refused, with the code that the reference lists."""
    assert _reason(event) is reason


def test_first_broken_rule_is_the_one_reported() -> None:
    """The same event gets the same answer everywhere, however many rules it breaks."""
    event = _schedule(task_id=TaskId(""), version=-1, due_at_ms=None, target_topic="elsewhere")

    assert _reason(event) is Reason.TASK_ID_LENGTH
    assert _reason(msgspec.structs.replace(event, task_id=TaskId("a"))) is Reason.INVALID_VERSION
    assert _reason(msgspec.structs.replace(event, task_id=TaskId("a"), version=1)) is Reason.MISSING_TIME


def test_rejection_keeps_what_is_legible_and_stays_bounded() -> None:
    """It travels on `dead-tasks` and into the row: an id that was refused for its length must not."""
    kept = check_event(_schedule(event_id="e1", version=7, target_topic="x"), append_at_ms=APPEND_MS, limits=LIMITS)
    cut = check_event(_schedule(event_id="e" * 10_000, version=-7), append_at_ms=APPEND_MS, limits=LIMITS)

    assert kept is not None
    assert (kept.task_id, kept.event_id, kept.version) == ("order-1", "e1", 7)
    assert cut is not None
    assert (cut.event_id, cut.version) == ("", 0)


@given(
    near=st.sampled_from(LARGE),
    by=st.integers(-2_000, 2_000),
    horizon_ms=st.sampled_from([1_000, LIMITS.horizon_ms, *LARGE]),
    append_at_ms=st.sampled_from([0, APPEND_MS, 2**53]),
)
def test_times_near_any_integer_width_are_plain_numbers(near: int, by: int, horizon_ms: int, append_at_ms: int) -> None:
    """Other queues overflowed at 2^31 ms, 2^32 ms, 2^31 s, 2^53 and 2^63: a time is refused for its size alone."""
    limits = Limits(horizon_ms=DurationMs(horizon_ms))
    at_ms = InstantMs(append_at_ms)
    for due_at_ms, event in ((near + by, _at(near + by)), (append_at_ms + near + by, _in(near + by))):
        rejection = check_event(event, append_at_ms=at_ms, limits=limits)
        expected = None
        if due_at_ms < append_at_ms - limits.past_max_ms:
            expected = Reason.IMPLAUSIBLE_TIME
        elif due_at_ms > append_at_ms + horizon_ms:
            expected = Reason.BEYOND_HORIZON
        assert (None if rejection is None else rejection.reason) is expected


@given(append_at_ms=st.integers(0, 2**53), shift=st.integers(0, 2**40), past_by=st.integers(0, 2 * 366 * DAY_MS))
def test_judgement_moves_with_the_append_time(append_at_ms: int, shift: int, past_by: int) -> None:
    """Only the distance to the append time counts: replay years later gives the answer that was given then."""

    def judged(at_ms: int) -> Reason | None:
        event = _at(at_ms - past_by)
        rejection = check_event(event, append_at_ms=InstantMs(at_ms), limits=LIMITS)
        return None if rejection is None else rejection.reason

    assert judged(append_at_ms) is judged(append_at_ms + shift)
