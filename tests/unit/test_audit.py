"""Each kind of violation, written by hand, is found by its code, at its record; what is sound is not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from pipeline.core.audit import RULES, Code, Promise
from pipeline.core.events import Reason
from pipeline.core.rebuild import REPLAY_HEADER
from pipeline.core.tasks import InstantMs, Offset, Status
from tests.memory_topics import HOUR_MS, MemoryTopics

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.unit


def a_sound_day(topics: MemoryTopics) -> None:
    """A bit of everything that may happen, all of it right."""
    due_ms = topics.now + 10
    topics.schedule("emitted", due_ms, payload=b"p", event_id="e1")
    topics.schedule("cancelled", due_ms)
    topics.cancel("cancelled")
    topics.schedule("moved", due_ms)
    topics.schedule("moved", due_ms + HOUR_MS)
    topics.schedule("versioned", due_ms, version=5)
    topics.cancel("versioned", version=4)
    topics.schedule("versioned", due_ms + 5, version=3)
    topics.schedule("pending", topics.now + HOUR_MS)
    topics.cancel("unknown")
    topics.cancel("remembered", version=3)
    topics.schedule("remembered", due_ms, version=2)
    topics.schedule("emitted", due_ms, payload=b"p", event_id="e1")
    topics.raw_event(b"nobody", b"rubbish")
    topics.dead(Reason.MALFORMED, topics.position - 1, b"nobody", task_id="nobody")
    topics.pass_time(100)
    topics.applied(topics.emit("emitted"), due_offset=0)
    topics.emit("versioned")
    topics.cancel("emitted")
    topics.schedule("emitted", topics.now + 20)
    topics.pass_time(100)
    topics.write_due(topics.emit("emitted"), {REPLAY_HEADER: b"r"})


def test_a_sound_day_is_clean_and_proved() -> None:
    """Cancelled, moved, stale, repeated, refused, replayed: none of it is a violation, and nothing is left open."""
    topics = MemoryTopics()
    a_sound_day(topics)
    topics.settle()

    report = topics.audit()

    assert report.findings == []
    assert report.is_clean
    assert all(not promise.unprovable for promise in report.promises)
    assert {promise.promise: promise.checked > 0 for promise in report.promises} == dict.fromkeys(Promise, True)
    counted = {promise.promise: promise.checked for promise in report.promises}
    assert counted[Promise.G3] == counted[Promise.G4] == counted[Promise.G5] == 3, "a replayed copy is no emission"
    assert report.outcomes == {
        "CANCELLED": 1,
        "DUPLICATE": 1,
        "EMITTED": 3,
        "PENDING": 2,
        "REFUSED": 1,
        "REPLACED": 1,
        "STALE": 2,
    }


# -- one violation each: a function writes it, and says where it stands -----------------------------------------------


def schedule_lost(topics: MemoryTopics) -> tuple[str, int]:
    """The owner went past a schedule without a trace."""
    offset = topics.schedule("lost", topics.now + HOUR_MS)
    topics.states["lost"] = None
    topics.settle()
    return "task-events", offset


def refusal_missing(topics: MemoryTopics) -> tuple[str, int]:
    """Rubbish was passed over in silence."""
    offset = topics.raw_event(b"rubbish", b"rubbish")
    topics.settle()
    return "task-events", offset


def null_passed_over(topics: MemoryTopics) -> tuple[str, int]:
    """A record without key or value, too."""
    offset = topics.raw_event(None, None)
    topics.settle()
    return "task-events", offset


def refused_and_emitted(topics: MemoryTopics) -> tuple[str, int]:
    """One schedule, two ends."""
    offset = topics.schedule("both", topics.now)
    topics.dead(Reason.INTERNAL_ERROR, offset, b"both", task_id="both")
    due = topics.write_due(topics.due("both"))
    topics.states["both"] = None
    topics.settle()
    return "due-tasks", due


def buried_and_emitted(topics: MemoryTopics) -> tuple[str, int]:
    """Undeliverable, and delivered."""
    offset = topics.schedule("both", topics.now)
    topics.dead(Reason.UNDELIVERABLE, offset, b"both", task_id="both", generation=offset + 1)
    topics.emit("both")
    topics.settle()
    return "due-tasks", topics.due_offsets["both"]


def emission_missing(topics: MemoryTopics) -> tuple[str, int]:
    """The row says emitted; nobody can have seen it."""
    topics.schedule("gone", topics.now)
    state = topics.states["gone"]
    assert state is not None
    topics.states["gone"] = None
    topics.settle()
    offset = topics.row("gone", msgspec.structs.replace(state, status=Status.EMITTED, fired_at_ms=InstantMs(5)))
    topics.settle()
    return "task-state", offset


def burial_missing(topics: MemoryTopics) -> tuple[str, int]:
    """The row says that it is on dead-tasks."""
    topics.schedule("gone", topics.now)
    state = topics.states["gone"]
    assert state is not None
    topics.states["gone"] = None
    offset = topics.row("gone", msgspec.structs.replace(state, status=Status.DEAD))
    topics.settle()
    return "task-state", offset


def undecodable_due(topics: MemoryTopics) -> tuple[str, int]:
    """Somebody writes to due-tasks."""
    offset, _ = topics.writer.send("due-tasks", b"x", b"rubbish")
    topics.settle()
    return "due-tasks", offset


def undecodable_dead(topics: MemoryTopics) -> tuple[str, int]:
    """And to dead-tasks."""
    offset, _ = topics.writer.send("dead-tasks", b"x", b"rubbish")
    topics.settle()
    return "dead-tasks", offset


def undecodable_ledger(topics: MemoryTopics) -> tuple[str, int]:
    """And to applied-tasks, with a key that no row has."""
    offset, _ = topics.writer.send("applied-tasks", b"x", b"rubbish")
    topics.settle()
    return "applied-tasks", offset


def undecodable_ledger_row(topics: MemoryTopics) -> tuple[str, int]:
    """The key is right, the row is not."""
    offset, _ = topics.writer.send("applied-tasks", b"group\x001\x000\x00x", b"rubbish")
    topics.settle()
    return "applied-tasks", offset


def overdue(topics: MemoryTopics) -> tuple[str, int]:
    """The row waits for an instant that is long past."""
    offset = topics.schedule("late", topics.now + 10)
    topics.pass_time(HOUR_MS)
    topics.settle()
    return "task-events", offset


def early(topics: MemoryTopics) -> tuple[str, int]:
    """A millisecond is enough."""
    due_ms = topics.now + 1_000
    topics.schedule("early", due_ms)
    topics.emit("early", fired_at_ms=InstantMs(due_ms - 1), fence_clock_ms=InstantMs(due_ms - 1))
    topics.settle()
    return "due-tasks", topics.due_offsets["early"]


def clock_of_another_fence(topics: MemoryTopics) -> tuple[str, int]:
    """Fired at an instant that the fence was not asked about."""
    topics.schedule("x", topics.now)
    topics.emit("x", fence_clock_ms=InstantMs(topics.now - 5))
    topics.settle()
    return "due-tasks", topics.due_offsets["x"]


def before_the_fence(topics: MemoryTopics) -> tuple[str, int]:
    """Fired before the input was applied up to the fence."""
    topics.schedule("x", topics.now)
    topics.emit("x", fence_offset=Offset(topics.position + 1))
    topics.settle()
    return "due-tasks", topics.due_offsets["x"]


def named_wrongly(topics: MemoryTopics) -> tuple[str, int]:
    """The name of the emission is that of another."""
    topics.schedule("x", topics.now)
    topics.emit("x", emission_id="0:99:0:0")
    topics.settle()
    return "due-tasks", topics.due_offsets["x"]


def applied_beyond_positions(topics: MemoryTopics) -> tuple[str, int]:
    """It had applied more than task-state ever reflected."""
    topics.schedule("x", topics.now)
    topics.settle()
    later = topics.position + 1
    offset = topics.write_due(topics.due("x", applied_offset=Offset(later), fence_offset=Offset(later)))
    return "due-tasks", offset


def due_time_differs(topics: MemoryTopics) -> tuple[str, int]:
    """Scheduled for one instant, emitted for another."""
    topics.schedule("x", topics.now)
    topics.emit("x", due_at_ms=InstantMs(topics.now - 77))
    topics.settle()
    return "due-tasks", topics.due_offsets["x"]


def content_differs(topics: MemoryTopics) -> tuple[str, int]:
    """Not what was asked for."""
    topics.schedule("x", topics.now, payload=b"this")
    topics.emit("x", payload=b"that")
    topics.settle()
    return "due-tasks", topics.due_offsets["x"]


def fired_after_a_cancel(topics: MemoryTopics) -> tuple[str, int]:
    """April 1st."""
    topics.schedule("x", topics.now)
    before = topics.states["x"]
    topics.cancel("x")
    topics.states["x"] = before
    topics.emit("x")
    topics.settle()
    return "due-tasks", topics.due_offsets["x"]


def fired_after_a_reschedule(topics: MemoryTopics) -> tuple[str, int]:
    """The old time counts no more."""
    topics.schedule("x", topics.now)
    old = topics.due("x")
    topics.schedule("x", topics.now + HOUR_MS)
    position = Offset(topics.position)
    offset = topics.write_due(msgspec.structs.replace(old, applied_offset=position, fence_offset=position))
    topics.settle()
    return "due-tasks", offset


def fired_though_stale(topics: MemoryTopics) -> tuple[str, int]:
    """A newer version had cancelled it before it came."""
    topics.cancel("x", version=5)
    kept = topics.states.pop("x")
    topics.schedule("x", topics.now, version=4)
    stale = topics.due("x")
    topics.states["x"] = kept
    topics.schedule("x", topics.now, version=3)
    position = Offset(topics.position)
    offset = topics.write_due(msgspec.structs.replace(stale, applied_offset=position, fence_offset=position))
    topics.settle()
    return "due-tasks", offset


def nobody_asked(topics: MemoryTopics) -> tuple[str, int]:
    """A due record out of nothing."""
    topics.schedule("other", topics.now + HOUR_MS)
    offset = topics.write_due(msgspec.structs.replace(topics.due("other"), task_id="invented"))
    topics.settle()
    return "due-tasks", offset


def emitted_twice(topics: MemoryTopics) -> tuple[str, int]:
    """The same again, without the mark of a replay."""
    topics.schedule("x", topics.now)
    offset = topics.write_due(topics.emit("x"))
    topics.settle()
    return "due-tasks", offset


def generation_reused(topics: MemoryTopics) -> tuple[str, int]:
    """Two tasks under one generation: consumers' ledgers tell them apart, nobody else does."""
    topics.schedule("x", topics.now)
    task = topics.emit("x")
    offset = topics.write_due(msgspec.structs.replace(task, task_id="y"))
    topics.settle()
    return "due-tasks", offset


def applied_twice(topics: MemoryTopics) -> tuple[str, int]:
    """Two rows of one group for one occurrence."""
    topics.schedule("x", topics.now)
    task = topics.emit("x")
    topics.settle()
    topics.applied(task)
    return "applied-tasks", topics.applied(task)


def applied_unknown(topics: MemoryTopics) -> tuple[str, int]:
    """A row for what was never emitted."""
    topics.schedule("x", topics.now + HOUR_MS)
    topics.settle()
    return "applied-tasks", topics.applied(topics.due("x"))


def state_differs(topics: MemoryTopics) -> tuple[str, int]:
    """A row that waits for another instant than the event says."""
    topics.schedule("x", topics.now + HOUR_MS)
    state = topics.states["x"]
    assert state is not None
    topics.states["x"] = None
    offset = topics.row("x", msgspec.structs.replace(state, due_at_ms=InstantMs(state.due_at_ms + 1)))
    topics.settle()
    return "task-state", offset


def state_missing(topics: MemoryTopics) -> tuple[str, int]:
    """A cancelled task is forgotten too early: a late copy of its schedule would come to life."""
    topics.schedule("x", topics.now + HOUR_MS)
    topics.cancel("x")
    topics.states["x"] = None
    offset = topics.row("x", None)
    topics.settle()
    return "task-state", offset


def state_unfounded(topics: MemoryTopics) -> tuple[str, int]:
    """A row that nobody asked for."""
    topics.schedule("x", topics.now + HOUR_MS)
    state = topics.states["x"]
    assert state is not None
    offset = topics.row("y", msgspec.structs.replace(state, task_id="y"))
    topics.settle()
    return "task-state", offset


def state_unreadable(topics: MemoryTopics) -> tuple[str, int]:
    """Bytes that are no row."""
    offset, _ = topics.writer.send("task-state", b"x", b"rubbish")
    topics.settle()
    return "task-state", offset


def state_of_another(topics: MemoryTopics) -> tuple[str, int]:
    """A row under another's key."""
    topics.schedule("x", topics.now + HOUR_MS)
    offset = topics.row("y", topics.states["x"])
    topics.settle()
    return "task-state", offset


def positions_missing(topics: MemoryTopics) -> tuple[str, int]:
    """Rows, and nothing says what they reflect."""
    topics.schedule("x", topics.now + HOUR_MS)
    return "task-state", topics.row("x", topics.states["x"])


def second_emission_missing(topics: MemoryTopics) -> tuple[str, int]:
    """That an earlier generation was emitted says nothing of the one that the row speaks of."""
    topics.schedule("x", topics.now)
    topics.emit("x")
    topics.schedule("x", topics.now)
    state = topics.states["x"]
    assert state is not None
    topics.states["x"] = None
    emitted = msgspec.structs.replace(state, status=Status.EMITTED, fired_at_ms=state.due_at_ms)
    offset = topics.row("x", emitted)
    topics.settle()
    return "task-state", offset


def positions_go_back(topics: MemoryTopics) -> tuple[str, int]:
    """What was applied can't be unapplied."""
    topics.schedule("x", topics.now + HOUR_MS)
    topics.settle()
    topics.position, kept = 0, topics.position
    topics.settle()
    back = topics.cluster.log("task-state", 0).end_offset - 1
    topics.position = kept
    topics.settle()
    return "task-state", back


def positions_beyond_the_end(topics: MemoryTopics) -> tuple[str, int]:
    """Applied what is not there: events were lost."""
    topics.schedule("x", topics.now + HOUR_MS)
    topics.position += 5
    topics.settle()
    return "task-state", -1


def positions_of_another_count(topics: MemoryTopics) -> tuple[str, int]:
    """Placed with another number of partitions."""
    topics.settle(partition_count=7)
    return "task-state", 0


ONE_EACH: list[tuple[Code, Callable[[MemoryTopics], tuple[str, int]], set[Code]]] = [
    (Code.SCHEDULE_LOST, schedule_lost, {Code.STATE_MISSING}),
    (Code.REFUSAL_MISSING, refusal_missing, set()),
    (Code.REFUSAL_MISSING, null_passed_over, set()),
    (Code.TWO_OUTCOMES, refused_and_emitted, {Code.STATE_MISSING}),
    (Code.TWO_OUTCOMES, buried_and_emitted, set()),
    (Code.EMISSION_MISSING, emission_missing, {Code.STATE_DIFFERS}),
    (Code.EMISSION_MISSING, second_emission_missing, {Code.STATE_DIFFERS}),
    (Code.BURIAL_MISSING, burial_missing, {Code.STATE_DIFFERS}),
    (Code.UNDECODABLE, undecodable_due, set()),
    (Code.UNDECODABLE, undecodable_dead, set()),
    (Code.UNDECODABLE, undecodable_ledger, set()),
    (Code.UNDECODABLE, undecodable_ledger_row, set()),
    (Code.OVERDUE, overdue, set()),
    (Code.EARLY, early, {Code.STATE_DIFFERS}),
    (Code.EVIDENCE_WRONG, clock_of_another_fence, set()),
    (Code.EVIDENCE_WRONG, before_the_fence, set()),
    (Code.EVIDENCE_WRONG, named_wrongly, set()),
    (Code.EVIDENCE_WRONG, applied_beyond_positions, set()),
    (Code.DUE_TIME_DIFFERS, due_time_differs, {Code.STATE_DIFFERS}),
    (Code.CONTENT_DIFFERS, content_differs, set()),
    (Code.OVERRULED, fired_after_a_cancel, {Code.STATE_DIFFERS}),
    (Code.OVERRULED, fired_after_a_reschedule, {Code.STATE_DIFFERS}),
    (Code.OVERRULED, fired_though_stale, {Code.STATE_DIFFERS}),
    (Code.EMITTED_WITHOUT_SCHEDULE, nobody_asked, set()),
    (Code.EMITTED_TWICE, emitted_twice, set()),
    (Code.GENERATION_REUSED, generation_reused, {Code.EMITTED_WITHOUT_SCHEDULE}),
    (Code.APPLIED_TWICE, applied_twice, set()),
    (Code.APPLIED_UNKNOWN, applied_unknown, set()),
    (Code.STATE_DIFFERS, state_differs, set()),
    (Code.STATE_MISSING, state_missing, set()),
    (Code.STATE_UNFOUNDED, state_unfounded, set()),
    (Code.STATE_UNREADABLE, state_unreadable, set()),
    (Code.STATE_UNREADABLE, state_of_another, set()),
    (Code.POSITIONS_WRONG, positions_missing, set()),
    (Code.POSITIONS_WRONG, positions_go_back, set()),
    (Code.POSITIONS_WRONG, positions_beyond_the_end, set()),
    (Code.POSITIONS_WRONG, positions_of_another_count, set()),
]


@pytest.mark.parametrize(("code", "falsify", "consequences"), ONE_EACH, ids=[one[1].__name__ for one in ONE_EACH])
def test_each_violation_is_found(
    code: Code, falsify: Callable[[MemoryTopics], tuple[str, int]], consequences: set[Code]
) -> None:
    """By its code and at its record, among much that is sound; with nothing else but what follows from it."""
    alone, among_others = MemoryTopics(), MemoryTopics()
    a_sound_day(among_others)

    topic, offset = falsify(alone)
    report = alone.audit(overdue_ms=60_000)
    falsify(among_others)

    found = [(finding.topic, finding.offset) for finding in report.findings if finding.code is code]
    assert found == [(topic, offset)], report.findings
    assert set(report.violations) - {code} <= consequences, report.findings
    assert all(finding.detail for finding in report.findings)
    assert among_others.audit(overdue_ms=60_000).violations.get(code)


def test_every_code_has_a_violation_that_shows_it() -> None:
    """A rule without a test may never have worked."""
    elsewhere = {Code.STRAY_NOT_REFUSED, Code.APPLY_MISSED}

    assert {one[0] for one in ONE_EACH} | elsewhere == set(Code) == set(RULES)
