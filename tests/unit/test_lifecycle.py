"""The table of moves in full, and the rules that decide between two events of one task."""

from itertools import product

import msgspec
import pytest

from pipeline.core.events import Cancel, Event, Origin, Reason, Rejection, Schedule
from pipeline.core.lifecycle import (
    EXTERNAL,
    MOVES,
    IllegalMoveError,
    Transition,
    Trigger,
    apply_event,
    apply_rejection,
    event_hash,
    mark_dead,
    mark_emitted,
    mark_purged,
)
from pipeline.core.tasks import (
    EVENT_HASH_BYTES,
    EVENT_HASHES_MAX,
    FINAL,
    VERDICTS_MAX,
    DurationMs,
    Generation,
    IndexEntry,
    IndexKind,
    InstantMs,
    Offset,
    Status,
    TaskId,
    TaskState,
    Tracking,
    Verdict,
    index_entry,
)

pytestmark = pytest.mark.unit

TASK = TaskId("order-1")
NOW_MS = InstantMs(1_000_000)
DUE_MS = InstantMs(1_500_000)
RETENTION_MS = DurationMs(600_000)

EXPECTED: dict[tuple[Status | None, Trigger], tuple[Status | None, Verdict]] = {
    (None, Trigger.SCHEDULE): (Status.SCHEDULED, Verdict.SCHEDULED),
    (None, Trigger.CANCEL): (None, Verdict.UNKNOWN_TASK),
    (Status.SCHEDULED, Trigger.SCHEDULE): (Status.SCHEDULED, Verdict.RESCHEDULED),
    (Status.SCHEDULED, Trigger.CANCEL): (Status.CANCELLED, Verdict.CANCELLED),
    (Status.EMITTED, Trigger.SCHEDULE): (Status.SCHEDULED, Verdict.SCHEDULED),
    (Status.EMITTED, Trigger.CANCEL): (Status.EMITTED, Verdict.TOO_LATE),
    (Status.CANCELLED, Trigger.SCHEDULE): (Status.SCHEDULED, Verdict.SCHEDULED),
    (Status.CANCELLED, Trigger.CANCEL): (Status.CANCELLED, Verdict.ALREADY_CANCELLED),
    (Status.RUNNING, Trigger.SCHEDULE): (Status.SCHEDULED, Verdict.RESCHEDULED),
    (Status.RUNNING, Trigger.CANCEL): (Status.RUNNING, Verdict.TOO_LATE),
    (Status.RETRY_WAIT, Trigger.SCHEDULE): (Status.SCHEDULED, Verdict.RESCHEDULED),
    (Status.RETRY_WAIT, Trigger.CANCEL): (Status.CANCELLED, Verdict.CANCELLED),
    (Status.COMPLETED, Trigger.SCHEDULE): (Status.SCHEDULED, Verdict.SCHEDULED),
    (Status.COMPLETED, Trigger.CANCEL): (Status.COMPLETED, Verdict.TOO_LATE),
    (Status.DEAD, Trigger.SCHEDULE): (Status.SCHEDULED, Verdict.SCHEDULED),
    (Status.DEAD, Trigger.CANCEL): (Status.DEAD, Verdict.TOO_LATE),
}


def _state(status: Status, **changes: object) -> TaskState:
    state = TaskState(
        task_id=TASK,
        status=status,
        generation=Generation(7),
        due_at_ms=DUE_MS,
        wake_at_ms=DUE_MS,
        payload=b"content",
        content_type="text/plain",
        headers={"trace": b"1"},
        source="shop",
    )
    return msgspec.structs.replace(state, **changes)


def _origin(offset: int, append_at_ms: int = NOW_MS) -> Origin:
    return Origin(topic="task-events", partition=0, offset=Offset(offset), append_at_ms=InstantMs(append_at_ms))


def _schedule(**changes: object) -> Schedule:
    return msgspec.structs.replace(Schedule(task_id=TASK, due_at_ms=DUE_MS), **changes)


def _cancel(**changes: object) -> Cancel:
    return msgspec.structs.replace(Cancel(task_id=TASK), **changes)


def _apply(state: TaskState | None, event: Event, offset: int = 10) -> Transition:
    return apply_event(state, event, _origin(offset), generation=Generation(offset + 1), retention_ms=RETENTION_MS)


# -- the table ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("status", "trigger"), list(product([None, *Status], EXTERNAL)))
def test_every_external_event_has_a_verdict_in_every_status(status: Status | None, trigger: Trigger) -> None:
    """Upstream can't know where a task is: whatever it asks, whenever, is answered and never raises."""
    event = _schedule() if trigger is Trigger.SCHEDULE else _cancel()
    before = None if status is None else _state(status)

    after = _apply(before, event)

    to, verdict = EXPECTED[status, trigger]
    assert (after.state.status if after.state is not None else None, after.verdict) == (to, verdict)
    move = MOVES[status, trigger]
    assert (move.to, move.verdict) == (to, verdict)


def test_table_of_moves_lists_nothing_else() -> None:
    """The diagram is drawn from the table: a move that is not meant must not be in it."""
    internal = {pair: move.to for pair, move in MOVES.items() if pair[1] not in EXTERNAL}

    assert internal == {
        (Status.SCHEDULED, Trigger.DUE): Status.EMITTED,
        (Status.SCHEDULED, Trigger.UNDELIVERABLE): Status.DEAD,
        **dict.fromkeys([(status, Trigger.PURGE) for status in FINAL]),
    }
    assert set(EXPECTED) == {pair for pair in MOVES if pair[1] in EXTERNAL}
    assert all(move.verdict is None for pair, move in MOVES.items() if pair[1] not in EXTERNAL)


@pytest.mark.parametrize("status", [status for status in Status if status is not Status.SCHEDULED])
def test_only_a_scheduled_task_fires(status: Status) -> None:
    """An illegal internal move is a bug: it raises, and the state, being a value, is as it was."""
    state = _state(status)

    with pytest.raises(IllegalMoveError, match=r"DUE .*order-1"):
        mark_emitted(state, fired_at_ms=DUE_MS, emitted_offset=Offset(1), retention_ms=RETENTION_MS)
    with pytest.raises(IllegalMoveError, match=r"UNDELIVERABLE .*order-1"):
        mark_dead(state, now_ms=DUE_MS, retention_ms=RETENTION_MS)

    assert state == _state(status)


@pytest.mark.parametrize("status", [status for status in Status if status not in FINAL])
def test_unfinished_task_is_never_forgotten(status: Status) -> None:
    """Purging a live timer would lose it without a trace."""
    with pytest.raises(IllegalMoveError, match=r"PURGE .*order-1"):
        mark_purged(_state(status), now_ms=InstantMs(2**60))


@pytest.mark.parametrize("status", sorted(FINAL))
def test_finished_task_is_forgotten_at_its_instant_and_not_before(status: Status) -> None:
    """Until the retention is over, late copies of its events must still meet it."""
    state = _state(status, wake_at_ms=InstantMs(5_000))

    mark_purged(state, now_ms=InstantMs(5_000))
    with pytest.raises(AssertionError, match="purged early"):
        mark_purged(state, now_ms=InstantMs(4_999))


# -- schedule ----------------------------------------------------------------------------------------------------


def test_schedule_carries_everything_into_the_state() -> None:
    """What upstream gave comes out at the due instant: nothing may be lost on the way."""
    tracking = Tracking(lease_ms=DurationMs(1), attempts_max=2, backoff_ms=DurationMs(3))
    event = _schedule(
        event_id="e1",
        version=5,
        payload=b"\x00\xff",
        content_type="application/x",
        headers={"a": b"b"},
        target_topic="calls",
        tracking=tracking,
        source="shop",
        created_at_ms=InstantMs(99),
    )

    state = _apply(None, event, offset=41).state

    assert state == TaskState(
        task_id=TASK,
        status=Status.SCHEDULED,
        generation=Generation(42),
        version=5,
        due_at_ms=DUE_MS,
        wake_at_ms=DUE_MS,
        changed_at_ms=NOW_MS,
        payload=b"\x00\xff",
        content_type="application/x",
        headers={"a": b"b"},
        target_topic="calls",
        source="shop",
        created_at_ms=InstantMs(99),
        tracking=tracking,
        event_hashes=event_hash("e1"),
        verdicts=state.verdicts if state is not None else (),
    )
    (entry,) = state.verdicts
    assert (entry.event_id, entry.offset, entry.verdict) == ("e1", 41, Verdict.SCHEDULED)


def test_delay_counts_from_the_append_time_and_is_stored_as_an_instant() -> None:
    """Resolved once: replay at any later time gives the same due time, whatever anybody's clock says."""
    state = _apply(None, _schedule(due_at_ms=None, delay_ms=DurationMs(1_234))).state

    assert state is not None
    assert state.due_at_ms == NOW_MS + 1_234
    assert state.wake_at_ms == NOW_MS + 1_234


@pytest.mark.parametrize("status", list(Status))
def test_new_schedule_starts_a_new_generation_and_forgets_the_old_emission(status: Status) -> None:
    """The old attempt becomes stale, and `TOO_LATE` must never point at an emission of another generation."""
    before = _state(status, fired_at_ms=InstantMs(5), emitted_offset=Offset(6), occurrence=3, attempt=2)

    state = _apply(before, _schedule(payload=b"new"), offset=100).state

    assert state is not None
    assert (state.generation, state.occurrence, state.attempt) == (101, 0, 0)
    assert (state.fired_at_ms, state.emitted_offset) == (0, -1)
    assert (state.payload, state.headers) == (b"new", {})


# -- cancel, emission, purge -------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [Status.SCHEDULED, Status.RETRY_WAIT])
@pytest.mark.parametrize("due_in_ms", [-5_000, 0, 5_000_000])
def test_cancel_outlives_the_due_time_that_it_stopped(status: Status, due_in_ms: int) -> None:
    """A late copy of the schedule may arrive around the due time: it must still meet the cancel."""
    before = _state(status, due_at_ms=InstantMs(NOW_MS + due_in_ms))

    state = _apply(before, _cancel(event_id="c")).state

    assert state is not None
    assert state.wake_at_ms == max(NOW_MS, NOW_MS + due_in_ms) + RETENTION_MS
    assert (state.payload, state.headers) == (b"", {})
    assert index_entry(state) == IndexEntry(state.wake_at_ms, IndexKind.PURGE, TASK)


def test_second_cancel_does_not_prolong_the_memory() -> None:
    """Else a repeating upstream would keep a row for ever."""
    first = _apply(_state(Status.SCHEDULED), _cancel(event_id="1"), offset=10).state
    assert first is not None

    later = _origin(11, append_at_ms=DUE_MS + 5)
    second = apply_event(first, _cancel(event_id="2"), later, generation=Generation(12), retention_ms=RETENTION_MS)

    assert second.verdict is Verdict.ALREADY_CANCELLED
    assert second.state is not None
    assert second.state.wake_at_ms == first.wake_at_ms


def test_late_cancel_is_told_where_the_emission_is() -> None:
    """`TOO_LATE` is only useful together with the emission that it came too late for."""
    emitted = mark_emitted(
        _state(Status.SCHEDULED),
        fired_at_ms=InstantMs(DUE_MS + 5),
        emitted_offset=Offset(88),
        retention_ms=RETENTION_MS,
    )

    after = _apply(emitted, _cancel(event_id="late"), offset=500)

    assert after.verdict is Verdict.TOO_LATE
    assert after.state is not None
    assert (after.state.fired_at_ms, after.state.emitted_offset) == (DUE_MS + 5, 88)
    assert after.state.wake_at_ms == emitted.wake_at_ms


def test_emission_keeps_what_identifies_it_and_drops_the_content() -> None:
    """The payload stands on `due-tasks` now; the row stays for a week and should be small."""
    before = _state(Status.SCHEDULED, version=3, event_hashes=event_hash("e"), target_topic="calls")

    state = mark_emitted(before, fired_at_ms=DUE_MS, emitted_offset=Offset(9), retention_ms=RETENTION_MS)

    assert state.status is Status.EMITTED
    assert (state.generation, state.version, state.event_hashes) == (7, 3, event_hash("e"))
    assert (state.due_at_ms, state.fired_at_ms, state.emitted_offset) == (DUE_MS, DUE_MS, 9)
    assert (state.payload, state.headers) == (b"", {})
    assert state.wake_at_ms == DUE_MS + RETENTION_MS


def test_early_fire_is_a_bug_that_raises() -> None:
    """G3 is asserted where it happens, a millisecond is enough."""
    with pytest.raises(AssertionError, match="early fire"):
        mark_emitted(
            _state(Status.SCHEDULED),
            fired_at_ms=InstantMs(DUE_MS - 1),
            emitted_offset=Offset(0),
            retention_ms=RETENTION_MS,
        )


def test_undeliverable_task_is_dead_and_was_not_emitted() -> None:
    """It must not claim an emission that nobody can find."""
    state = mark_dead(_state(Status.SCHEDULED), now_ms=DUE_MS, retention_ms=RETENTION_MS)

    assert (state.status, state.fired_at_ms, state.emitted_offset) == (Status.DEAD, 0, -1)
    assert state.wake_at_ms == DUE_MS + RETENTION_MS


# -- versions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", list(Status))
@pytest.mark.parametrize(
    ("known", "version", "schedule_counts", "cancel_counts"),
    [
        (0, 0, True, True),
        (0, 1, True, True),
        (5, 0, True, True),
        (5, 4, False, False),
        (5, 5, False, True),
        (5, 6, True, True),
        (2**63 - 1, 2**63 - 1, False, True),
    ],
)
def test_version_decides_across_roads(
    status: Status,
    known: int,
    version: int,
    *,
    schedule_counts: bool,
    cancel_counts: bool,
) -> None:
    """SCHEDULE needs version > known, CANCEL >= known: at a tie the cancel wins, whichever came first."""
    before = _state(status, version=known)

    scheduled = _apply(before, _schedule(version=version, event_id="s"))
    cancelled = _apply(before, _cancel(version=version, event_id="c"))

    assert (scheduled.verdict is not Verdict.STALE) is schedule_counts
    assert (cancelled.verdict is not Verdict.STALE) is cancel_counts
    for after in (scheduled, cancelled):
        assert after.state is not None
        assert after.state.version == max(known, version)
    if not schedule_counts:
        assert scheduled.state is not None
        assert (scheduled.state.status, scheduled.state.generation) == (status, 7)
        assert index_entry(scheduled.state) == index_entry(before)


@pytest.mark.parametrize("status", [Status.EMITTED, Status.CANCELLED])
def test_version_of_a_cancel_without_effect_still_counts(status: Status) -> None:
    """TOO_LATE or ALREADY_CANCELLED, it was the newest word: no older schedule on a slower road may overrule it."""
    after = _apply(_state(status, version=1), _cancel(version=3, event_id="c"))

    assert _apply(after.state, _schedule(version=2, event_id="s")).verdict is Verdict.STALE


def test_cancel_of_an_unknown_task_is_remembered_if_it_has_a_version() -> None:
    """It may have overtaken its schedule; without a version it can't be told from an old one, and leaves no row."""
    versioned = _apply(None, _cancel(version=2, event_id="c"))
    assert versioned.verdict is Verdict.UNKNOWN_TASK
    assert versioned.state is not None
    assert (versioned.state.status, versioned.state.generation, versioned.state.version) == (Status.CANCELLED, 0, 2)
    assert versioned.state.wake_at_ms == NOW_MS + RETENTION_MS

    assert _apply(versioned.state, _schedule(version=2, event_id="s")).verdict is Verdict.STALE
    assert _apply(versioned.state, _schedule(version=3, event_id="s")).verdict is Verdict.SCHEDULED

    unversioned = _apply(None, _cancel())
    assert unversioned == Transition(None, Verdict.UNKNOWN_TASK)


def test_unversioned_cancel_of_an_unknown_task_counts_as_new_when_sent_again() -> None:
    """The limit of that rule, kept in view: nothing was remembered, so its second copy stops a schedule in between."""
    unknown = _apply(None, _cancel(event_id="c"), offset=1)
    scheduled = _apply(unknown.state, _schedule(event_id="s"), offset=2)

    assert _apply(scheduled.state, _cancel(event_id="c"), offset=3).verdict is Verdict.CANCELLED

    versioned = _apply(None, _cancel(event_id="c", version=1), offset=1)
    scheduled = _apply(versioned.state, _schedule(event_id="s", version=2), offset=2)

    assert _apply(scheduled.state, _cancel(event_id="c", version=1), offset=3).verdict is Verdict.DUPLICATE


# -- duplicates --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", list(Status))
@pytest.mark.parametrize("event", [_schedule(event_id="again", version=9), _cancel(event_id="again", version=9)])
def test_event_seen_before_changes_nothing(status: Status, event: Event) -> None:
    """An upstream that missed its acknowledgement sends again: not one bit of the row may change."""
    before = _state(status, event_hashes=event_hash("other") + event_hash("again"))

    after = _apply(before, event)

    assert after.verdict is Verdict.DUPLICATE
    assert after.state is before


def test_last_sixteen_event_ids_are_remembered_and_no_more() -> None:
    """The memory of a row is bounded: the seventeenth pushes the first out."""
    state: TaskState | None = None
    for number in range(EVENT_HASHES_MAX + 1):
        state = _apply(state, _schedule(event_id=f"event {number}"), offset=number).state
    assert state is not None
    assert len(state.event_hashes) == EVENT_HASHES_MAX * EVENT_HASH_BYTES

    assert _apply(state, _schedule(event_id="event 1")).verdict is Verdict.DUPLICATE
    assert _apply(state, _schedule(event_id=f"event {EVENT_HASHES_MAX}")).verdict is Verdict.DUPLICATE
    assert _apply(state, _schedule(event_id="event 0")).verdict is Verdict.RESCHEDULED


def test_events_of_every_verdict_are_remembered() -> None:
    """A stale or late event sent twice is a duplicate the second time too."""
    state = _apply(_state(Status.SCHEDULED, version=5), _schedule(version=4, event_id="stale")).state
    state = _apply(state, _cancel(version=5, event_id="cancel")).state
    state = _apply(state, _cancel(version=5, event_id="second")).state

    for event_id in ("stale", "cancel", "second"):
        assert _apply(state, _schedule(version=99, event_id=event_id)).verdict is Verdict.DUPLICATE


def test_hash_across_two_remembered_ones_is_no_duplicate() -> None:
    """Hashes stand side by side: eight bytes that straddle two of them are nobody's."""
    wanted = event_hash("wanted")
    straddling = b"0000" + wanted + b"1111"
    assert len(straddling) == 2 * EVENT_HASH_BYTES

    assert (
        _apply(_state(Status.SCHEDULED, event_hashes=straddling), _cancel(event_id="wanted")).verdict
        is Verdict.CANCELLED
    )
    aligned = straddling + wanted
    assert (
        _apply(_state(Status.SCHEDULED, event_hashes=aligned), _cancel(event_id="wanted")).verdict is Verdict.DUPLICATE
    )


def test_events_without_an_id_are_never_duplicates() -> None:
    """Nothing tells two of them apart but their offsets."""
    state = _apply(None, _schedule(), offset=1).state

    assert _apply(state, _schedule(), offset=2).verdict is Verdict.RESCHEDULED
    assert state is not None
    assert state.event_hashes == b""


def test_last_four_verdicts_are_kept() -> None:
    """Each request can be looked up by its offset for a while; the row stays bounded."""
    state: TaskState | None = None
    for offset in range(6):
        state = _apply(state, _schedule(event_id=str(offset)), offset=offset).state

    assert state is not None
    assert [entry.offset for entry in state.verdicts] == [2, 3, 4, 5]
    assert len(state.verdicts) == VERDICTS_MAX


# -- rejections --------------------------------------------------------------------------------------------------


def _rejection(version: int = 0) -> Rejection:
    return Rejection(reason=Reason.BEYOND_HORIZON, message="too far", task_id=TASK, event_id="r", version=version)


@pytest.mark.parametrize("status", list(Status))
def test_rejection_is_noted_and_raises_the_version_but_moves_nothing(status: Status) -> None:
    """The author can ask what became of it; a refused newest word still makes older ones stale."""
    before = _state(status, version=3)

    after = apply_rejection(before, _rejection(version=8), _origin(55), retention_ms=RETENTION_MS)

    assert after is not None
    assert (after.status, after.generation, after.version) == (status, 7, 8)
    assert index_entry(after) == index_entry(before)
    (entry,) = after.verdicts
    assert (entry.offset, entry.verdict, entry.reason) == (55, Verdict.REJECTED, Reason.BEYOND_HORIZON)


def test_rejection_never_lowers_the_version() -> None:
    """An old refused event must not open the door for other old ones."""
    after = apply_rejection(
        _state(Status.SCHEDULED, version=9), _rejection(version=2), _origin(1), retention_ms=RETENTION_MS
    )

    assert after is not None
    assert after.version == 9


def test_rejection_of_an_unknown_task_leaves_a_row_only_for_its_version() -> None:
    """Else anybody could fill the table with refused events."""
    assert apply_rejection(None, _rejection(), _origin(1), retention_ms=RETENTION_MS) is None

    after = apply_rejection(None, _rejection(version=4), _origin(1), retention_ms=RETENTION_MS)

    assert after is not None
    assert (after.status, after.generation, after.version) == (Status.CANCELLED, 0, 4)
    assert after.wake_at_ms == NOW_MS + RETENTION_MS


@pytest.mark.parametrize("status", list(Status))
def test_every_row_has_an_index_entry(status: Status) -> None:
    """No status is without a reason to be looked at again: nothing can be stuck for ever."""
    kinds = {
        Status.SCHEDULED: IndexKind.DUE,
        Status.RUNNING: IndexKind.LEASE,
        Status.RETRY_WAIT: IndexKind.RETRY,
    }

    assert index_entry(_state(status)) == IndexEntry(DUE_MS, kinds.get(status, IndexKind.PURGE), TASK)
