"""The life of a task: the table of moves, and the functions that make them.

Rules, in prose:

1. An event that was seen before (one of the last 16 event ids) is DUPLICATE and changes nothing.
2. `version` orders events that travel on different roads. A SCHEDULE needs version > known, a CANCEL >= known, else it
   is STALE; every event with a version raises the known one, whatever its verdict. Unversioned ones follow the log.
3. A SCHEDULE is accepted in every status. It starts a new generation, numbered by its offset: none is used twice.
4. A CANCEL stops a timer that has not fired. After the emission it is TOO_LATE, and told where the emission is.
5. A cancel for a task that nobody knows is remembered only if it has a version: else it can't overrule anything.
6. Internal moves (DUE, PURGE, ...) that the table does not list are bugs: they raise and change nothing.

The table `MOVES` is the whole truth; the diagram in the docs is drawn from it.
"""

from collections.abc import Mapping
from enum import StrEnum
from hashlib import blake2b
from typing import Final

import msgspec

from pipeline.core.events import Cancel, Event, Origin, Rejection, Schedule
from pipeline.core.tasks import (
    EVENT_HASH_BYTES,
    EVENT_HASHES_MAX,
    NO_HEADERS,
    VERDICTS_MAX,
    DurationMs,
    Generation,
    InstantMs,
    Offset,
    Status,
    TaskState,
    Verdict,
    VerdictEntry,
)

__all__ = [
    "EXTERNAL",
    "MOVES",
    "IllegalMoveError",
    "Move",
    "Transition",
    "Trigger",
    "apply_event",
    "apply_rejection",
    "event_hash",
    "has_seen",
    "mark_dead",
    "mark_emitted",
    "mark_purged",
]


class Trigger(StrEnum):
    """What moves a task: two requests from outside, the rest from the owner itself."""

    SCHEDULE = "SCHEDULE"
    CANCEL = "CANCEL"
    DUE = "DUE"
    UNDELIVERABLE = "UNDELIVERABLE"
    PURGE = "PURGE"


EXTERNAL: Final = (Trigger.SCHEDULE, Trigger.CANCEL)


class Move(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Where a trigger leads; `verdict` is told to the author of an external event. `to` None: nothing is remembered."""

    to: Status | None
    verdict: Verdict | None = None


_SCHEDULED: Final = Move(to=Status.SCHEDULED, verdict=Verdict.SCHEDULED)
_RESCHEDULED: Final = Move(to=Status.SCHEDULED, verdict=Verdict.RESCHEDULED)
_PURGED: Final = Move(to=None)


def _too_late(status: Status) -> Move:
    return Move(to=status, verdict=Verdict.TOO_LATE)


MOVES: Final[Mapping[tuple[Status | None, Trigger], Move]] = {
    (None, Trigger.SCHEDULE): _SCHEDULED,
    (None, Trigger.CANCEL): Move(to=None, verdict=Verdict.UNKNOWN_TASK),
    (Status.SCHEDULED, Trigger.SCHEDULE): _RESCHEDULED,
    (Status.SCHEDULED, Trigger.CANCEL): Move(to=Status.CANCELLED, verdict=Verdict.CANCELLED),
    (Status.SCHEDULED, Trigger.DUE): Move(to=Status.EMITTED),
    (Status.SCHEDULED, Trigger.UNDELIVERABLE): Move(to=Status.DEAD),
    (Status.EMITTED, Trigger.SCHEDULE): _SCHEDULED,
    (Status.EMITTED, Trigger.CANCEL): _too_late(Status.EMITTED),
    (Status.EMITTED, Trigger.PURGE): _PURGED,
    (Status.CANCELLED, Trigger.SCHEDULE): _SCHEDULED,
    (Status.CANCELLED, Trigger.CANCEL): Move(to=Status.CANCELLED, verdict=Verdict.ALREADY_CANCELLED),
    (Status.CANCELLED, Trigger.PURGE): _PURGED,
    (Status.RUNNING, Trigger.SCHEDULE): _RESCHEDULED,
    (Status.RUNNING, Trigger.CANCEL): _too_late(Status.RUNNING),
    (Status.RETRY_WAIT, Trigger.SCHEDULE): _RESCHEDULED,
    (Status.RETRY_WAIT, Trigger.CANCEL): Move(to=Status.CANCELLED, verdict=Verdict.CANCELLED),
    (Status.COMPLETED, Trigger.SCHEDULE): _SCHEDULED,
    (Status.COMPLETED, Trigger.CANCEL): _too_late(Status.COMPLETED),
    (Status.COMPLETED, Trigger.PURGE): _PURGED,
    (Status.DEAD, Trigger.SCHEDULE): _SCHEDULED,
    (Status.DEAD, Trigger.CANCEL): _too_late(Status.DEAD),
    (Status.DEAD, Trigger.PURGE): _PURGED,
}


class IllegalMoveError(Exception):
    """An internal trigger met a status that the table does not list: a bug, raised before anything changed."""


class Transition(msgspec.Struct, frozen=True, gc=False):
    """The state after an event (None: nothing is remembered) and the verdict on it."""

    state: TaskState | None
    verdict: Verdict


def event_hash(event_id: str) -> bytes:
    """Eight bytes that stand for an event id in a task's memory of what it has seen."""
    return blake2b(event_id.encode("utf-8", "surrogatepass"), digest_size=EVENT_HASH_BYTES).digest()


def apply_event(
    state: TaskState | None, event: Event, origin: Origin, *, generation: Generation, retention_ms: DurationMs
) -> Transition:
    """The state after `event`, and the verdict. `generation` is what a SCHEDULE at this offset starts, if accepted.

    Deterministic: the only instant used is the record's append time, so replay gives the same answer.
    """
    digest = event_hash(event.event_id) if event.event_id else b""
    if state is not None and digest and has_seen(state.event_hashes, digest):
        return Transition(state, Verdict.DUPLICATE)
    known = state.version if state is not None else 0
    version = max(known, event.version)
    if isinstance(event, Schedule):
        if event.version and event.version <= known:
            assert state is not None, "a known version without a state"
            return _noted(state, event, origin, digest, version, Verdict.STALE)
        return _schedule(state, event, origin, digest, version, generation)
    if event.version and event.version < known:
        assert state is not None, "a known version without a state"
        return _noted(state, event, origin, digest, version, Verdict.STALE)
    return _cancel(state, event, origin, digest, version, retention_ms)


def apply_rejection(
    state: TaskState | None, rejection: Rejection, origin: Origin, *, retention_ms: DurationMs
) -> TaskState | None:
    """The state after an event that was refused: its verdict is noted and its version counts, nothing else changes."""
    assert rejection.task_id is not None, "a rejection without a task leaves no state"
    entry = VerdictEntry(
        event_id=rejection.event_id, offset=origin.offset, verdict=Verdict.REJECTED, reason=rejection.reason
    )
    if state is None:
        if not rejection.version:
            return None
        state = _memory(rejection.task_id, origin, retention_ms)
    return msgspec.structs.replace(
        state,
        version=max(state.version, rejection.version),
        verdicts=(*state.verdicts, entry)[-VERDICTS_MAX:],
    )


def mark_emitted(
    state: TaskState, *, fired_at_ms: InstantMs, emitted_offset: Offset, retention_ms: DurationMs
) -> TaskState:
    """The state after its timer fired; the payload leaves the table, it stands on the execution topic now."""
    _move(state, Trigger.DUE)
    assert state.due_at_ms <= fired_at_ms, f"early fire: {state.task_id!r} due at {state.due_at_ms}, now {fired_at_ms}"
    return _finished(state, Status.EMITTED, fired_at_ms, retention_ms, emitted_offset)


def mark_dead(state: TaskState, *, now_ms: InstantMs, retention_ms: DurationMs) -> TaskState:
    """The state of a due task that can't be emitted at all; the bytes stand on `dead-tasks`."""
    _move(state, Trigger.UNDELIVERABLE)
    return _finished(state, Status.DEAD, now_ms, retention_ms, Offset(-1))


def mark_purged(state: TaskState, *, now_ms: InstantMs) -> None:
    """Check that a finished task may be forgotten now; the caller writes the tombstone."""
    _move(state, Trigger.PURGE)
    assert state.wake_at_ms <= now_ms, f"purged early: {state.task_id!r} at {now_ms}, kept until {state.wake_at_ms}"


def _move(state: TaskState, trigger: Trigger) -> Move:
    move = MOVES.get((state.status, trigger))
    if move is None:
        raise IllegalMoveError(f"{trigger} of task {state.task_id!r} in status {state.status}")
    return move


def _finished(
    state: TaskState,
    status: Status,
    at_ms: InstantMs,
    retention_ms: DurationMs,
    emitted_offset: Offset,
) -> TaskState:
    return TaskState(
        state.task_id,
        status,
        generation=state.generation,
        occurrence=state.occurrence,
        attempt=state.attempt,
        version=state.version,
        due_at_ms=state.due_at_ms,
        wake_at_ms=InstantMs(at_ms + retention_ms),
        changed_at_ms=at_ms,
        source=state.source,
        created_at_ms=state.created_at_ms,
        target_topic=state.target_topic,
        event_hashes=state.event_hashes,
        verdicts=state.verdicts,
        fired_at_ms=at_ms if status is Status.EMITTED else InstantMs(0),
        emitted_offset=emitted_offset,
    )


def _schedule(
    state: TaskState | None, event: Schedule, origin: Origin, digest: bytes, version: int, generation: Generation
) -> Transition:
    verdict = MOVES[state.status if state is not None else None, Trigger.SCHEDULE].verdict
    assert verdict is not None, "every external event has a verdict"
    due_at_ms = event.due_at_ms
    if due_at_ms is None:
        assert event.delay_ms is not None, "admission lets no event without a time pass"
        due_at_ms = InstantMs(origin.append_at_ms + event.delay_ms)
    entry = VerdictEntry(event_id=event.event_id, offset=origin.offset, verdict=verdict)
    after = TaskState(
        event.task_id,
        Status.SCHEDULED,
        generation=generation,
        version=version,
        due_at_ms=due_at_ms,
        wake_at_ms=due_at_ms,
        changed_at_ms=origin.append_at_ms,
        payload=event.payload,
        content_type=event.content_type,
        headers=event.headers,
        target_topic=event.target_topic,
        source=event.source,
        created_at_ms=event.created_at_ms,
        tracking=event.tracking,
        event_hashes=digest if state is None else _remember(state.event_hashes, digest),
        verdicts=(entry,) if state is None else (*state.verdicts, entry)[-VERDICTS_MAX:],
    )
    return Transition(after, verdict)


def _cancel(
    state: TaskState | None, event: Cancel, origin: Origin, digest: bytes, version: int, retention_ms: DurationMs
) -> Transition:
    move = MOVES[state.status if state is not None else None, Trigger.CANCEL]
    assert move.verdict is not None, "every external event has a verdict"
    if state is None:
        if not event.version:
            return Transition(None, move.verdict)
        return _noted(_memory(event.task_id, origin, retention_ms), event, origin, digest, version, move.verdict)
    if move.to is Status.CANCELLED and state.status is not Status.CANCELLED:
        state = msgspec.structs.replace(
            state,
            status=Status.CANCELLED,
            # A cancel outlives the due time that it stopped: a late copy of the schedule must still meet it.
            wake_at_ms=InstantMs(max(origin.append_at_ms, state.due_at_ms) + retention_ms),
            changed_at_ms=origin.append_at_ms,
            payload=b"",
            headers=NO_HEADERS,
        )
    return _noted(state, event, origin, digest, version, move.verdict)


def _memory(task_id: str, origin: Origin, retention_ms: DurationMs) -> TaskState:
    """A row for a task that was never scheduled: it only remembers a version, and is purged like a cancelled one."""
    return TaskState(
        task_id=task_id,  # type: ignore[arg-type]  # admission made it a TaskId
        status=Status.CANCELLED,
        wake_at_ms=InstantMs(origin.append_at_ms + retention_ms),
        changed_at_ms=origin.append_at_ms,
    )


def _noted(state: TaskState, event: Event, origin: Origin, digest: bytes, version: int, verdict: Verdict) -> Transition:
    entry = VerdictEntry(event_id=event.event_id, offset=origin.offset, verdict=verdict)
    after = msgspec.structs.replace(
        state,
        version=version,
        event_hashes=_remember(state.event_hashes, digest),
        verdicts=(*state.verdicts, entry)[-VERDICTS_MAX:],
    )
    return Transition(after, verdict)


def has_seen(hashes: bytes, digest: bytes) -> bool:
    """Whether a task's memory (`TaskState.event_hashes`) holds the event of that hash."""
    at = hashes.find(digest)
    while at >= 0 and at % EVENT_HASH_BYTES:
        at = hashes.find(digest, at + 1)
    return at >= 0


def _remember(hashes: bytes, digest: bytes) -> bytes:
    return (hashes + digest)[-EVENT_HASHES_MAX * EVENT_HASH_BYTES :]
