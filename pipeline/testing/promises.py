"""Checks of the promises G1 to G7 against what a world, simulated or real, went through.

The rule for "this event overrules that schedule" is written down here once more, on its own: the code under test
decides it by folding states, this decides it by comparing pairs of events of a task.

A `check_...` raises `AssertionError` with the first violation; the function named for the violation yields a sentence
for each, so that they can be counted. Both take histories of hundreds of thousands of events.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import msgspec

from pipeline.core.applied import AppliedTask
from pipeline.core.effects import DueTask
from pipeline.core.events import Cancel, Event, Schedule
from pipeline.core.positions import POSITIONS_KEY
from pipeline.core.tasks import InstantMs, Offset, TaskId, index_entry
from pipeline.ports import Codec
from pipeline.testing.memory_log import MemoryLog
from pipeline.testing.memory_timer_table import DiskTable

__all__ = [
    "EVENT_IDS_REMEMBERED",
    "Acknowledged",
    "TaskHistory",
    "applied_wrongly",
    "check_applied_once",
    "check_cancels_count",
    "check_emitted_once",
    "check_never_early",
    "check_nothing_missed",
    "check_table_is_fold",
    "fired_wrongly",
    "missed",
]

EVENT_IDS_REMEMBERED: Final = 16
"""How many events of a task the design promises to know again, whatever the code says."""


class Acknowledged(msgspec.Struct, frozen=True, kw_only=True):
    """An event that upstream was told is in: where it stands, and when the answer came, by the owner's clock.

    `generation_base` is that of its topic: 0, unless `task-events` was created anew. `is_refused`: it breaks a rule of
    admission, so only its version counts.
    """

    event: Event
    offset: Offset
    acknowledged_at_ms: InstantMs
    append_at_ms: InstantMs
    generation_base: int = 0
    is_refused: bool = False

    @property
    def generation(self) -> int:
        """The generation that it starts, if it is a SCHEDULE that is accepted."""
        return self.generation_base + self.offset + 1

    @property
    def due_at_ms(self) -> int:
        """When a SCHEDULE is due."""
        assert isinstance(self.event, Schedule), "a cancel is never due"
        if self.event.due_at_ms is not None:
            return self.event.due_at_ms
        return self.append_at_ms + (self.event.delay_ms or 0)


def check_emitted_once(emissions: Iterable[DueTask]) -> None:
    """G5: one emission per task, generation, occurrence and attempt."""
    counted = Counter((task.task_id, task.generation, task.occurrence, task.attempt) for task in emissions)
    doubled = [emission for emission, count in counted.items() if count > 1]
    assert not doubled, f"G5: emitted more than once: {doubled}"


def check_never_early(emissions: Iterable[DueTask]) -> None:
    """G3: nothing fires before its instant."""
    early = [task for task in emissions if task.fired_at_ms < task.due_at_ms]
    assert not early, f"G3: fired early: {early}"


def check_cancels_count(emissions: Iterable[DueTask], acknowledged: Sequence[Acknowledged]) -> None:
    """G4: nothing fires that was overruled by an event acknowledged before its due instant."""
    _check(fired_wrongly(emissions, acknowledged))


def fired_wrongly(emissions: Iterable[DueTask], acknowledged: Iterable[Acknowledged]) -> Iterator[str]:
    """G4: a sentence for each emission of what was overruled in time, or never asked for."""
    histories = _by_task(acknowledged)
    for task in emissions:
        history = histories.get(TaskId(task.task_id))
        schedule = history.by_generation.get(task.generation) if history else None
        if history is None or schedule is None:
            yield f"emitted without an acknowledged schedule: {task}"
            continue
        for other in history.overruling(schedule):
            if other.acknowledged_at_ms < schedule.due_at_ms:
                yield (
                    f"G4: {task.task_id!r} of offset {schedule.offset}, due at {schedule.due_at_ms}, was emitted "
                    f"although {other.event} was acknowledged at {other.acknowledged_at_ms}"
                )
                break


def check_nothing_missed(emissions: Iterable[DueTask], acknowledged: Sequence[Acknowledged], now_ms: InstantMs) -> None:
    """G1, G2: once all is healed and time has passed, what is due and was not overruled has been emitted."""
    _check(missed(emissions, acknowledged, now_ms))


def missed(
    emissions: Iterable[DueTask],
    acknowledged: Iterable[Acknowledged],
    now_ms: InstantMs,
    *,
    remembered: int = EVENT_IDS_REMEMBERED,
) -> Iterator[str]:
    """G1, G2: a sentence for each schedule that was due by `now_ms`, was not overruled, and never emitted.

    `remembered`: how many events of a task must be known when they come again; 0 where rows are soon forgotten.
    """
    emitted = {(task.task_id, task.generation) for task in emissions}
    for history in _by_task(acknowledged).values():
        for ack in history.events:
            if not isinstance(ack.event, Schedule) or ack.is_refused or ack.due_at_ms > now_ms:
                continue
            if history.is_repeated(ack):
                continue
            if (ack.event.task_id, ack.generation) in emitted:
                continue
            if not any(history.overruling(ack)) and not any(history.forgotten(ack, remembered)):
                yield (
                    f"G1, G2: {ack.event.task_id!r} of offset {ack.offset} was due at {ack.due_at_ms}, it is {now_ms}, "
                    "and it was never emitted"
                )


def check_applied_once(applied: Iterable[AppliedTask], emissions: Iterable[DueTask]) -> None:
    """G6: each group applies an occurrence at most once, and only what was emitted."""
    _check(applied_wrongly(applied, emissions))


def applied_wrongly(applied: Iterable[AppliedTask], emissions: Iterable[DueTask]) -> Iterator[str]:
    """G6: a sentence for each occurrence that a group applied more than once, or without an emission."""
    emitted = {(task.task_id, task.generation, task.occurrence) for task in emissions}
    counted = Counter((row.group, row.task_id, row.generation, row.occurrence) for row in applied)
    for (group, *occurrence), count in counted.items():
        if count > 1:
            yield f"G6: group {group!r} applied {occurrence} {count} times"
        if tuple(occurrence) not in emitted:
            yield f"G6: group {group!r} applied {occurrence}, which was never emitted"


def check_table_is_fold(table: DiskTable, state_log: MemoryLog, codec: Codec) -> None:
    """G7: the local table is what its changelog folds to, and its index is what its rows say."""
    folded: dict[bytes, bytes] = {}
    for entry in state_log.committed():
        assert entry.key is not None, "a task-state record without a key"
        if entry.value is None:
            folded.pop(entry.key, None)
        else:
            folded[entry.key] = entry.value
    folded.pop(POSITIONS_KEY, None)
    assert {key.encode(): value for key, value in table.rows.items()} == folded, "G7: the table is not the fold"
    entries = sorted(index_entry(codec.decode_state(value)) for value in table.rows.values())
    assert table.index == entries, "G7: the index does not agree with the rows"


def _check(violations: Iterator[str]) -> None:
    first = next(violations, None)
    assert first is None, first


class TaskHistory:
    """What was acknowledged of one task, in the order given, and the rule for what overrules what."""

    def __init__(self, events: Sequence[Acknowledged]) -> None:
        self.events = events
        self.by_generation = {ack.generation: ack for ack in events if not ack.is_refused}
        self._refused = [ack for ack in events if ack.is_refused and ack.event.version]
        self._first_generation: dict[str, int] = {}
        for ack in events:
            known = self._first_generation.get(ack.event.event_id, ack.generation)
            self._first_generation[ack.event.event_id] = min(known, ack.generation)

    def is_repeated(self, ack: Acknowledged) -> bool:
        """Whether it is the second sending of an event: it changes nothing."""
        return bool(ack.event.event_id) and self._first_generation[ack.event.event_id] < ack.generation

    def overruling(self, schedule: Acknowledged) -> Iterator[Acknowledged]:
        """The events that, by the rules, stop `schedule` from firing."""
        mine = schedule.event
        for other in self.events:
            event = other.event
            if other is schedule or _is_same(schedule, other) or self.is_repeated(other):
                continue
            if other.is_refused:
                # It does nothing itself, but who comes after it with a version that is not above its own is stale.
                if mine.version and event.version >= mine.version and other.generation < schedule.generation:
                    yield other
                continue
            if self._is_outdated(other):
                continue
            later = other.generation > schedule.generation
            if mine.version and event.version:
                newer = event.version > mine.version
                tie = event.version == mine.version and (isinstance(event, Cancel) or not later)
                if newer or tie:
                    yield other
            elif later:
                yield other

    def _is_outdated(self, ack: Acknowledged) -> bool:
        """Whether what was refused before it makes it stale, so that it overrules nothing."""
        version, is_schedule = ack.event.version, isinstance(ack.event, Schedule)
        return bool(version) and any(
            refused.generation < ack.generation and refused.event.version >= version + (not is_schedule)
            for refused in self._refused
        )

    def forgotten(self, schedule: Acknowledged, remembered: int) -> Iterator[Acknowledged]:
        """Events sent again after `schedule` that may count as new, and overrule it."""
        repeated = (
            other for other in self.events if other.generation > schedule.generation and self.is_repeated(other)
        )
        yield from (other for other in repeated if self.may_be_forgotten(other, remembered))

    def may_be_forgotten(self, repeated: Acknowledged, remembered: int) -> bool:
        """Whether as many others as are `remembered` came between it and its first sending.

        A cancel without a version may be forgotten at once: if it met no task, it left no row, not even its id. Whether
        it met one depends on when it was applied.
        """
        event = repeated.event
        if isinstance(event, Cancel) and not event.version:
            return True
        between = range(self._first_generation[event.event_id] + 1, repeated.generation)
        others = sum(1 for other in self.events if other.generation in between and not _is_same(other, repeated))
        return others >= remembered


def _by_task(acknowledged: Iterable[Acknowledged]) -> dict[TaskId, TaskHistory]:
    """The events of each task: whatever decides the fate of a task is among its own."""
    events: defaultdict[TaskId, list[Acknowledged]] = defaultdict(list)
    for ack in acknowledged:
        events[ack.event.task_id].append(ack)
    return {task_id: TaskHistory(own) for task_id, own in events.items()}


def _is_same(one: Acknowledged, other: Acknowledged) -> bool:
    return bool(one.event.event_id) and one.event.event_id == other.event.event_id
