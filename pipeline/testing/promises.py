"""Checks of the promises G1 to G5 and G7 against what a simulated world went through.

The rule for "this event overrules that schedule" is written down here once more, on its own: the code under test
decides it by folding states, this decides it by comparing pairs of events.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from pipeline.core.effects import DueTask
from pipeline.core.events import Cancel, Event, Schedule
from pipeline.core.positions import POSITIONS_KEY
from pipeline.core.tasks import InstantMs, Offset, TaskId, index_entry
from pipeline.ports import Codec
from pipeline.testing.memory_log import MemoryLog
from pipeline.testing.memory_timer_table import DiskTable

__all__ = [
    "Acknowledged",
    "check_cancels_count",
    "check_emitted_once",
    "check_never_early",
    "check_nothing_missed",
    "check_table_is_fold",
]


class Acknowledged(msgspec.Struct, frozen=True, kw_only=True):
    """An event that upstream was told is in: where it stands, and when the answer came, by the owner's clock.

    `generation_base` is that of its topic: 0, unless `task-events` was created anew.
    """

    event: Event
    offset: Offset
    acknowledged_at_ms: InstantMs
    append_at_ms: InstantMs
    generation_base: int = 0

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
    by_generation = {(ack.event.task_id, ack.generation): ack for ack in acknowledged}
    for task in emissions:
        schedule = by_generation.get((TaskId(task.task_id), task.generation))
        assert schedule is not None, f"emitted without an acknowledged schedule: {task}"
        for other in _overruling(schedule, acknowledged):
            assert other.acknowledged_at_ms >= schedule.due_at_ms, (
                f"G4: {task.task_id!r} of offset {schedule.offset}, due at {schedule.due_at_ms}, was emitted although "
                f"{other.event} was acknowledged at {other.acknowledged_at_ms}"
            )


def check_nothing_missed(emissions: Iterable[DueTask], acknowledged: Sequence[Acknowledged], now_ms: InstantMs) -> None:
    """G1, G2: once all is healed and time has passed, what is due and was not overruled has been emitted."""
    emitted = {(task.task_id, task.generation) for task in emissions}
    for ack in acknowledged:
        if not isinstance(ack.event, Schedule) or ack.due_at_ms > now_ms:
            continue
        if _is_repeated(ack, acknowledged):
            continue
        if not any(_overruling(ack, acknowledged)) and not any(_forgotten_cancels(ack, acknowledged)):
            assert (ack.event.task_id, ack.generation) in emitted, (
                f"G1, G2: {ack.event.task_id!r} of offset {ack.offset} was due at {ack.due_at_ms}, it is {now_ms}, "
                "and it was never emitted"
            )


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


def _overruling(schedule: Acknowledged, acknowledged: Iterable[Acknowledged]) -> Iterable[Acknowledged]:
    """The events that, by the rules, stop `schedule` from firing."""
    mine = schedule.event
    for other in acknowledged:
        event = other.event
        if other is schedule or event.task_id != mine.task_id or _is_same(schedule, other):
            continue
        if _is_repeated(other, acknowledged):
            continue
        later = other.generation > schedule.generation
        if mine.version and event.version:
            newer = event.version > mine.version
            tie = event.version == mine.version and (isinstance(event, Cancel) or not later)
            if newer or tie:
                yield other
        elif later:
            yield other


def _forgotten_cancels(schedule: Acknowledged, acknowledged: Iterable[Acknowledged]) -> Iterable[Acknowledged]:
    """Cancels sent again after `schedule` that may count as new: nothing is remembered of one that met no task.

    Without a version it left no row, not even its id. Whether it met one depends on when it was applied.
    """
    for other in acknowledged:
        event = other.event
        if event.task_id == schedule.event.task_id and isinstance(event, Cancel) and not event.version:
            later = other.generation > schedule.generation
            if later and _is_repeated(other, acknowledged):
                yield other


def _is_repeated(ack: Acknowledged, acknowledged: Iterable[Acknowledged]) -> bool:
    """Whether it is the second sending of an event: it changes nothing."""
    return any(_is_same(ack, other) and other.generation < ack.generation for other in acknowledged)


def _is_same(one: Acknowledged, other: Acknowledged) -> bool:
    return bool(one.event.event_id) and one.event.event_id == other.event.event_id
