"""Rules for rebuilding the timer table from what the topics still hold.

The events are folded by the same lifecycle as ever; what it can't know from them is what the timers did. That stands on
`due-tasks` and `dead-tasks`, and each of those records says how far the events had been applied when it was written.

1. **What was emitted stays emitted.** An emission of a generation overrules whatever else the fold says of the task at
   that position: its schedule may have been compacted away, a cancel may have been refused then as stale.
2. **A timer that was overtaken is not live.** Timers of a partition fire in the order of their instants. If one that
   was due later has fired, at a position where this one's schedule was applied already, then this one was no timer any
   more: it fired, and its emission has expired; or its schedule was refused. It must not fire again.
3. **What the topics can't tell, `task-state` may.** A row whose schedule is no longer among the events is kept. Where
   both tell, and differ, the topics win; but a version once seen stays seen, what is over stays over, and a row that
   notes that the event was refused is believed.
"""

from bisect import bisect_left
from enum import StrEnum
from typing import Final

import msgspec

from pipeline.core.effects import DueTask
from pipeline.core.lifecycle import mark_emitted
from pipeline.core.tasks import (
    FINAL,
    NO_HEADERS,
    DurationMs,
    Generation,
    InstantMs,
    Offset,
    Status,
    TaskId,
    TaskState,
    Verdict,
)

__all__ = [
    "REPLAY_HEADER",
    "Burial",
    "Emission",
    "Overtaking",
    "Source",
    "forgotten_by",
    "generation_base_of",
    "presume_emitted",
    "reconcile",
    "with_burial",
    "with_emission",
]

REPLAY_HEADER: Final = "duetasks-replay"
"""Marks a record that `duetasks replay` wrote: it says nothing about what the timers did."""

_ACCEPTED: Final = frozenset({Verdict.SCHEDULED, Verdict.RESCHEDULED})
_FIRED: Final = frozenset({Status.EMITTED, Status.DEAD})


class Source(StrEnum):
    """What became of a row of `task-state`."""

    CONFIRMED = "CONFIRMED"  # events and `task-state` agree
    CORRECTED = "CORRECTED"  # they differed, the topics won
    KEPT = "KEPT"  # only `task-state` knows


class Emission(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One record of `due-tasks` or of another target topic, and where it stands."""

    task: DueTask
    target_topic: str
    offset: Offset

    @property
    def position(self) -> int:
        """How far the events had been applied, counted over all creations of their topic, as generations are."""
        return generation_base_of(self.task) + self.task.applied_offset


class Burial(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A due task that was set aside as undeliverable; `append_at_ms` is when `dead-tasks` got it."""

    task_id: TaskId
    generation: Generation
    dead_at_ms: InstantMs
    append_at_ms: InstantMs


class Overtaking:
    """Remembers which emissions overtake which timers, in a few numbers however many there were."""

    def __init__(self) -> None:
        # Positions rise, and (instant, id) falls: an emission that a later one exceeds in both can't tell any more.
        self._positions: list[int] = []
        self._marks: list[tuple[int, str]] = []

    def add(self, emission: Emission) -> None:
        """One more, in the order in which they were emitted; one from before a loss of positions proves nothing."""
        position, mark = emission.position, (emission.task.due_at_ms, emission.task.task_id)
        if self._positions and position < self._positions[-1]:
            return
        while self._marks and self._marks[-1] <= mark:
            self._positions.pop()
            self._marks.pop()
        self._positions.append(position)
        self._marks.append(mark)

    def has_overtaken(self, state: TaskState) -> bool:
        """Whether something due later has fired when this schedule was applied already."""
        at = bisect_left(self._positions, state.generation)
        return at < len(self._marks) and self._marks[at] > (state.due_at_ms, state.task_id)


def generation_base_of(task: DueTask) -> int:
    """What was added to offsets to make generations when this was emitted."""
    return task.generation - 1 - task.scheduled_offset


def with_emission(state: TaskState | None, emission: Emission, *, retention_ms: DurationMs) -> TaskState:
    """The task's state once this was emitted (rule 1); `state` is what the fold says of it."""
    task = emission.task
    if (
        state is not None
        and state.status is Status.SCHEDULED
        and state.generation == task.generation
        and state.due_at_ms <= task.fired_at_ms
    ):
        return mark_emitted(
            state, fired_at_ms=task.fired_at_ms, emitted_offset=emission.offset, retention_ms=retention_ms
        )
    return TaskState(
        task_id=TaskId(task.task_id),
        status=Status.EMITTED,
        generation=Generation(task.generation),
        occurrence=task.occurrence,
        attempt=task.attempt,
        version=max(task.version, state.version if state is not None else 0),
        due_at_ms=task.due_at_ms,
        wake_at_ms=InstantMs(task.fired_at_ms + retention_ms),
        changed_at_ms=task.fired_at_ms,
        source=task.source,
        target_topic=emission.target_topic,
        event_hashes=state.event_hashes if state is not None else b"",
        verdicts=state.verdicts if state is not None else (),
        fired_at_ms=task.fired_at_ms,
        emitted_offset=emission.offset,
    )


def with_burial(state: TaskState | None, burial: Burial, *, retention_ms: DurationMs) -> TaskState | None:
    """The task's state once it was set aside as undeliverable; a newer generation is not touched."""
    if state is None or state.generation != burial.generation:
        return state
    return msgspec.structs.replace(
        state,
        status=Status.DEAD,
        wake_at_ms=InstantMs(burial.dead_at_ms + retention_ms),
        changed_at_ms=burial.dead_at_ms,
        payload=b"",
        content_type="",
        headers=NO_HEADERS,
        tracking=None,
        fired_at_ms=InstantMs(0),
        emitted_offset=Offset(-1),
    )


def presume_emitted(state: TaskState, *, retention_ms: DurationMs) -> TaskState:
    """The state of a timer that must not fire any more although its emission is gone: where it stood is not known."""
    return mark_emitted(state, fired_at_ms=state.due_at_ms, emitted_offset=Offset(-1), retention_ms=retention_ms)


def forgotten_by(state: TaskState, at_ms: InstantMs) -> bool:
    """Whether a finished task was forgotten by then, by an owner that was up: its PURGE timer had fired."""
    return state.status in FINAL and state.wake_at_ms <= at_ms


def reconcile(
    folded: TaskState | None, known: TaskState, *, accepted: bool, generation_base: int
) -> tuple[TaskState, Source]:
    """The row to go on with where `task-state` has one (rule 3), and where it comes from.

    `accepted`: the events still hold the schedule of `known`, and the fold accepted it.
    """
    if folded is None:
        return known, Source.KEPT
    if folded.generation == known.generation:
        if folded.status is known.status and folded.due_at_ms == known.due_at_ms:
            return _with_place_of(known, folded), Source.CONFIRMED
        # An emission may have expired, a cancel may have been lost: what is over for one of them is over.
        if _finality(folded) < _finality(known):
            return known, Source.KEPT
        return _with_version_of(folded, known), Source.CORRECTED
    has_fired = folded.status in _FIRED and folded.generation > known.generation
    if not has_fired and (not accepted or _was_refused(folded, known, generation_base)):
        return known, Source.KEPT
    return _with_version_of(folded, known), Source.CORRECTED


def _finality(state: TaskState) -> int:
    """How much is over: a timer, a task that was stopped, one that has fired."""
    return 2 if state.status in _FIRED else int(state.status in FINAL)


def _was_refused(folded: TaskState, known: TaskState, generation_base: int) -> bool:
    """Whether the row notes that the event that the fold accepted was refused when it came."""
    offset = folded.generation - 1 - generation_base
    return any(entry.offset == offset and entry.verdict not in _ACCEPTED for entry in known.verdicts)


def _with_version_of(folded: TaskState, known: TaskState) -> TaskState:
    return msgspec.structs.replace(folded, version=max(folded.version, known.version))


def _with_place_of(known: TaskState, folded: TaskState) -> TaskState:
    """The row as it is; where it did not know the place of its emission, with that."""
    if known.emitted_offset >= 0 or folded.emitted_offset < 0:
        return known
    return msgspec.structs.replace(known, emitted_offset=folded.emitted_offset)
