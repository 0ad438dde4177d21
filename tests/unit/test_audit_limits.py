"""What an audit says where it can't know, what it is asked for, and how much it holds at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from pipeline.core.audit import Code, Promise, Unprovable
from pipeline.core.events import Reason
from pipeline.core.lifecycle import mark_dead
from pipeline.core.rebuild import REPLAY_HEADER
from pipeline.core.tasks import InstantMs, Offset
from pipeline.errors import TopicMismatchError, UsageError
from pipeline.testing.memory_audit import MemoryFactStore
from pipeline.testing.memory_cluster import NewRecord
from tests.audit_topics import RETENTION_MS
from tests.memory_topics import HOUR_MS, MemoryTopics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pipeline.service.audit.auditor import AuditReport

pytestmark = pytest.mark.unit

DAY_MS = 24 * HOUR_MS


def doubts(report: AuditReport) -> dict[tuple[str, str], int]:
    """What can't be proved, by promise and reason."""
    return {(one.promise, why): count for one in report.promises for why, count in one.unprovable.items()}


# -- strays --------------------------------------------------------------------------------------------------------


def stray(topics: MemoryTopics, *, recorded: bool) -> int:
    """An event whose key belongs to another partition: it leaves no row."""
    offset = topics.schedule("stray", topics.now + HOUR_MS)  # murmur2 puts "stray" into partition 0 of 2
    at_ms = topics.now
    topics.states["stray"] = None
    if recorded:
        topics.dead(Reason.WRONG_PARTITION, offset, b"stray", append_at_ms=at_ms)
    topics.settle()
    return offset


def test_a_stray_must_be_on_dead_tasks() -> None:
    """A cancel that lands in another partition than its schedule is lost, and somebody has to be told."""
    topics = MemoryTopics(partition_count=2, partition=1)
    offset = stray(topics, recorded=False)

    report = topics.audit(partitions=(1,))

    assert [(one.code, one.topic, one.offset) for one in report.findings] == [
        (Code.STRAY_NOT_REFUSED, "task-events", offset)
    ]


def test_a_stray_that_was_refused_is_in_order() -> None:
    """That is what the refusal is for."""
    topics = MemoryTopics(partition_count=2, partition=1)
    stray(topics, recorded=True)

    report = topics.audit(partitions=(1,))

    assert (report.findings, report.outcomes) == ([], {"REFUSED": 1})


# -- ledgers -------------------------------------------------------------------------------------------------------


def applied_but_the_last(topics: MemoryTopics, count: int = 3) -> None:
    """Tasks that were emitted and applied, but for the last one."""
    for number in range(count):
        topics.schedule(f"t{number}", topics.now)
        task = topics.emit(f"t{number}")
        if number < count - 1:
            topics.applied(task, due_offset=number)
    topics.settle()


def test_a_task_that_the_group_has_passed_without_a_row_was_missed() -> None:
    """Its offset says that it was read; neither the ledger nor dead-tasks says what became of it."""
    topics = MemoryTopics()
    applied_but_the_last(topics)

    there = topics.audit(group_offsets={("billing", "due-tasks", 0): Offset(2)})
    passed = topics.audit(group_offsets={("billing", "due-tasks", 0): Offset(3)})

    assert there.findings == []
    assert [(one.code, one.topic, one.offset, one.task_id) for one in passed.findings] == [
        (Code.APPLY_MISSED, "due-tasks", 2, "t2")
    ]
    assert next(one for one in passed.promises if one.promise is Promise.G6).checked == 2 + 3


def test_a_task_that_a_consumer_set_aside_was_not_missed() -> None:
    """A record that it could not read is on dead-tasks, without a row."""
    topics = MemoryTopics()
    applied_but_the_last(topics)
    topics.dead(Reason.MALFORMED, 2, b"t2", topic="due-tasks")

    report = topics.audit(group_offsets={("billing", "due-tasks", 0): Offset(3)})

    assert report.findings == []


def test_a_row_that_a_replay_made_the_ledger_forget_is_no_violation() -> None:
    """The copy is to be applied once more, whether the group has done so or not."""
    topics = MemoryTopics()
    topics.schedule("x", topics.now)
    task = topics.emit("x")
    topics.applied(task)
    topics.forget(task)
    topics.write_due(task, {REPLAY_HEADER: b"r"})
    topics.settle()

    waiting = topics.audit(group_offsets={("billing", "due-tasks", 0): Offset(1)})
    missed = topics.audit(group_offsets={("billing", "due-tasks", 0): Offset(2)})
    topics.applied(task, due_offset=1)
    again = topics.audit(group_offsets={("billing", "due-tasks", 0): Offset(2)})

    assert (waiting.findings, again.findings) == ([], [])
    assert [one.code for one in missed.findings] == [Code.APPLY_MISSED]


def test_only_the_groups_asked_for_are_judged() -> None:
    """`--group billing` says nothing of shipping."""
    topics = MemoryTopics()
    topics.schedule("x", topics.now)
    task = topics.emit("x")
    for group in ("billing", "shipping", "shipping"):
        topics.applied(task, group)
    topics.settle()

    assert topics.audit(groups=("billing",)).findings == []
    assert [one.code for one in topics.audit(groups=("shipping",)).findings] == [Code.APPLIED_TWICE]


# -- what retention and compaction took ----------------------------------------------------------------------------


def test_expired_events_make_rows_unprovable_not_right() -> None:
    """A row whose events are gone may be anything: it is counted, and never called proved."""
    topics = MemoryTopics()
    topics.schedule("old", topics.now + DAY_MS)
    topics.schedule("new", topics.now + DAY_MS)
    topics.settle()
    topics.cluster.log("task-events", 0).delete_before(Offset(1))

    report = topics.audit()

    assert report.findings == []
    assert doubts(report) == {("G7", Unprovable.EVENTS_GONE): 1}
    assert any("starts at 1" in note for note in report.notes)


def test_a_row_that_contradicts_the_schedule_it_names_is_wrong_whatever_is_gone() -> None:
    """No missing event can explain it."""
    topics = MemoryTopics()
    topics.schedule("old", topics.now + DAY_MS)
    topics.schedule("new", topics.now + DAY_MS)
    state = topics.states["new"]
    assert state is not None
    topics.states["new"] = msgspec.structs.replace(state, due_at_ms=InstantMs(state.due_at_ms + 1))
    topics.settle()
    topics.cluster.log("task-events", 0).delete_before(Offset(1))

    assert topics.audit().violations == {"STATE_DIFFERS": 1}


def test_expired_emissions_are_no_misses() -> None:
    """The rows are purged, the emissions expired: all that is left is the event, and it proves nothing."""
    topics = MemoryTopics()
    for name in ("a", "b"):
        topics.schedule(name, topics.now)
        topics.emit(name)
    topics.states["a"] = None
    topics.pass_time(8 * DAY_MS)
    topics.settle()
    topics.cluster.log("due-tasks", 0).delete_before(Offset(1))

    report = topics.audit()

    assert report.findings == []
    assert doubts(report) == {("G1", Unprovable.EMISSIONS_GONE): 1, ("G7", Unprovable.EMISSIONS_GONE): 1}


def test_a_missing_emission_of_what_was_scheduled_later_is_a_miss() -> None:
    """The first retained emission fired before this one was scheduled: its own must be retained as well."""
    topics = MemoryTopics()
    for name in ("a", "b"):
        topics.schedule(name, topics.now)
        topics.emit(name)
    topics.cluster.log("due-tasks", 0).delete_before(Offset(1))
    topics.schedule("lost", topics.now + 10)
    topics.states["lost"] = None
    topics.pass_time(DAY_MS)
    topics.settle()

    assert topics.audit().violations["SCHEDULE_LOST"] == 1


def test_compacted_events_are_unprovable_only_if_they_may_be_old_enough() -> None:
    """Nothing younger than `min.compaction.lag.ms` is compacted: there a hole is only a marker."""
    topics = MemoryTopics()
    topics.schedule("x", topics.now + DAY_MS)
    topics.cancel("x")
    topics.schedule("y", topics.now + DAY_MS)
    topics.states["x"] = None
    topics.settle()
    topics.cluster.log("task-events", 0).compact()

    young = topics.audit(compaction_lag_ms=DAY_MS)
    old = topics.audit(compaction_lag_ms=0)

    assert young.findings == []  # a cancel for a task that nobody knows leaves no row
    assert all(one.unprovable == {} for one in young.promises)
    assert any("may be compacted below" in note for note in old.notes)


def test_a_newer_row_excuses_a_missing_one() -> None:
    """Compaction under a running audit removes the row that it looks for, because there is a newer one."""
    topics = MemoryTopics()
    topics.schedule("x", topics.now + DAY_MS)
    topics.settle(without=frozenset({"x"}))

    missing = topics.audit()
    topics.row("x", topics.states["x"])  # of a transaction whose positions have not come yet
    excused = topics.audit()

    assert set(missing.violations) == {"SCHEDULE_LOST", "STATE_MISSING"}
    assert excused.findings == []
    assert doubts(excused)["G7", Unprovable.CHANGED_MEANWHILE] == 1


class _Interrupted:
    """A clock that lets something happen when the audit reads it: once it began, before the end of `task-state`."""

    def __init__(self, topics: MemoryTopics, happen: Callable[[], None]) -> None:
        self._topics = topics
        self._happen: Callable[[], None] | None = happen
        self._calls = 0

    def now_ms(self) -> InstantMs:
        self._calls += 1
        if self._calls == 2 and self._happen is not None:
            self._happen()
        return InstantMs(self._topics.now)

    def monotonic_ms(self) -> int:
        return self._topics.now


def test_what_came_after_the_positions_is_not_held_against_the_rows() -> None:
    """An audit beside a running owner sees emissions, events and rows of transactions that it does not judge yet."""
    topics = MemoryTopics()
    for name in ("again", "fired", "cancelled"):
        topics.schedule(name, topics.now)
    topics.emit("again")
    topics.settle()

    def go_on() -> None:
        topics.emit("fired")
        topics.cancel("cancelled")
        topics.schedule("again", topics.now)
        topics.schedule("new", topics.now)
        topics.emit("again")
        topics.emit("new")
        topics.raw_event(b"rubbish", b"rubbish")
        topics.row("again", topics.states["again"])

    report = topics.audit(clock=_Interrupted(topics, go_on))

    assert report.findings == []
    assert any("not applied yet: 4" in note for note in report.notes)
    assert report.outcomes["WAITING"] == 2
    assert topics.audit().findings != [], "once settled, all of that must have its positions"


def test_how_long_finished_tasks_are_kept_may_have_been_set_otherwise() -> None:
    """Rows say until when they are kept, by the setting of their time."""
    topics = MemoryTopics()
    topics.schedule("x", topics.now)
    topics.emit("x")
    topics.settle()

    assert topics.audit(retention_ms=30 * DAY_MS).findings == []


def test_an_aborted_first_transaction_needs_no_positions() -> None:
    """An owner that was killed in its first transaction leaves a marker, and no row that counts."""
    topics = MemoryTopics()
    owner = topics.cluster.producer("owner")
    owner.init()
    owner.send(NewRecord(topic="task-state", partition=0, key=b"x", value=b"row"))
    owner.abort()

    assert topics.audit().findings == []


# -- what is asked for ---------------------------------------------------------------------------------------------


def test_only_the_time_asked_for_is_judged() -> None:
    """What happened before and after is read, but not accused."""
    topics = MemoryTopics()
    first = topics.raw_event(b"a", b"rubbish")
    between_ms = topics.now + 1
    topics.pass_time(10)
    second = topics.raw_event(b"b", b"rubbish")
    topics.settle()

    assert [one.offset for one in topics.audit().findings] == [first, second]
    assert [one.offset for one in topics.audit(from_ms=between_ms).findings] == [second]
    assert [one.offset for one in topics.audit(to_ms=between_ms).findings] == [first]


def test_a_partition_that_is_not_there_is_a_wrong_call() -> None:
    """Not an audit without findings."""
    with pytest.raises(UsageError, match="no partition 7"):
        MemoryTopics().audit(partitions=(7,))


def test_topics_that_do_not_fit_together_are_refused() -> None:
    """With another partition count the records of one task lie apart, and every verdict would be wrong."""
    topics = MemoryTopics()
    topics.cluster.add_partitions("due-tasks", 2)

    with pytest.raises(TopicMismatchError, match="differ"):
        topics.audit()


# -- bounds --------------------------------------------------------------------------------------------------------


def test_the_findings_kept_are_bounded_and_all_are_counted() -> None:
    """A million violations must not fill the memory, nor look like a thousand."""
    topics = MemoryTopics()
    for number in range(50):
        topics.raw_event(b"k%d" % number, b"rubbish")
    topics.settle()

    report = topics.audit(findings_max=7)

    assert (len(report.findings), report.findings_left_out, report.violations) == (7, 43, {"REFUSAL_MISSING": 50})


class _Held:
    """How many of the things that were handed out somebody still has."""

    def __init__(self) -> None:
        self.now = 0
        self.most = 0

    def gave_out(self) -> None:
        self.now += 1
        self.most = max(self.most, self.now)


class _Counted(bytes):
    """Bytes that are counted until nobody holds them any more."""

    held: _Held

    def __del__(self) -> None:
        self.held.now -= 1


class _CountingStore(MemoryFactStore):
    """A disk whose facts are counted from when they are handed out."""

    def __init__(self) -> None:
        super().__init__()
        self.held = _Held()
        self.batch_max = 0

    def put(self, facts: Sequence[tuple[bytes, bytes]]) -> None:
        self.batch_max = max(self.batch_max, len(facts))
        super().put(facts)

    def scan(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        for key, value in super().scan(prefix):
            counted = _Counted(value)
            counted.held = self.held
            self.held.gave_out()
            yield key, counted
            del counted


@pytest.mark.parametrize("shape", ["many tasks", "one task"])
def test_what_is_held_does_not_grow_with_the_topics(shape: str) -> None:
    """Thirty times the records, the same number of facts in hand: one is judged at a time, whoever's they are."""
    held = []
    for count in (100, 3_000):
        topics = MemoryTopics()
        for number in range(count):
            topics.schedule("one" if shape == "one task" else f"t{number}", topics.now + DAY_MS)
            if number % 10 == 0:
                topics.cancel("one" if shape == "one task" else f"t{number}", event_id=f"e{number}")
        topics.settle()
        store = _CountingStore()

        report = topics.audit(facts=store)

        assert report.findings == []
        assert store.batch_max <= 100, "a chunk of the log is the most that is read at once"
        held.append(store.held.most)

    assert held[0] == held[1] <= 3


def test_the_memory_of_one_task_is_bounded() -> None:
    """A task that is moved a hundred thousand times is judged by the last few of its events, and by nothing lost."""
    topics = MemoryTopics()
    for number in range(2_000):
        topics.schedule("x", topics.now + DAY_MS, event_id=f"e{number}")
    first = msgspec.structs.replace(topics.due("x"), generation=1, emission_id="0:1:0:0", scheduled_offset=Offset(0))
    topics.settle()
    offset = topics.write_due(first)

    report = topics.audit()

    assert report.outcomes == {"REPLACED": 1_999, "PENDING": 1}
    assert [(one.topic, one.offset) for one in report.findings if one.code.promise is Promise.G4] == [
        ("due-tasks", offset)
    ]


def test_a_task_that_is_set_aside_again_and_again_is_no_violation() -> None:
    """Only the last burials are kept; what the row says of them is counted as unprovable then."""
    topics = MemoryTopics()
    for _ in range(100):
        offset = topics.schedule("x", topics.now)
        dead_at_ms = InstantMs(topics.now)
        topics.dead(Reason.UNDELIVERABLE, offset, b"x", task_id="x", generation=offset + 1, dead_at_ms=dead_at_ms)
        state = topics.states["x"]
        assert state is not None
        topics.states["x"] = mark_dead(state, now_ms=dead_at_ms, retention_ms=RETENTION_MS)
    topics.settle()

    report = topics.audit()

    assert report.findings == []
    assert doubts(report) == {("G7", Unprovable.TOO_TANGLED): 1}
