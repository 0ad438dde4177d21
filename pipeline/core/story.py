"""The story of one task: what was asked, what became of each request, what was sent out and who applied it.

Verdicts come from the row of `task-state`, which keeps the last four; those that it no longer has are derived
once more, by the owner's fold over the events that are left. Where earlier events are gone, a derived verdict may
differ from the one that was given then, and the story says which are derived.
"""

from enum import StrEnum
from typing import Final

import msgspec

from pipeline.core.durations import format_instant
from pipeline.core.events import Event, Origin, Rejection, Schedule
from pipeline.core.lifecycle import apply_event, apply_rejection
from pipeline.core.rebuild import Burial, Emission, forgotten_by, with_burial, with_emission
from pipeline.core.tasks import DurationMs, Generation, InstantMs, Offset, TaskState, Verdict

__all__ = ["Chapter", "Narrator", "What"]

_PLAIN_WORDS: Final = {
    Verdict.CANCELLED: "its timer was stopped before it fired",
    Verdict.ALREADY_CANCELLED: "no timer was waiting",
    Verdict.UNKNOWN_TASK: "there was no such task",
    Verdict.REJECTED: "it was refused",
}


class What(StrEnum):
    """Kinds of chapters."""

    SCHEDULE = "SCHEDULE"
    CANCEL = "CANCEL"
    UNREADABLE = "UNREADABLE"
    EMITTED = "EMITTED"
    REPLAYED = "REPLAYED"
    APPLIED = "APPLIED"
    FAILED = "FAILED"
    LEDGER_FORGETS = "LEDGER_FORGETS"
    SET_ASIDE = "SET_ASIDE"
    FORGOTTEN = "FORGOTTEN"


class Chapter(msgspec.Struct, frozen=True, kw_only=True):
    """One record of the story. `verdict` is that of a request; `is_derived`: task-state does not hold it any more."""

    at_ms: InstantMs
    what: What
    topic: str
    partition: int
    offset: int
    verdict: str = ""
    is_derived: bool = False
    why: str = ""


class Narrator:
    """Tells verdicts and reasons; feed it events and emissions in the order in which the owner met them.

    `row` is what `task-state` says now; `applied` how far the owner has come.
    """

    def __init__(
        self, row: TaskState | None, *, applied: Offset, generation_base: int, retention_ms: DurationMs
    ) -> None:
        self._known: dict[int, Verdict] = {entry.offset: entry.verdict for entry in (row.verdicts if row else ())}
        self._applied = applied
        self._base = generation_base
        self._retention_ms = retention_ms
        self._state: TaskState | None = None

    def event(self, event: Event, origin: Origin) -> Chapter:
        """A SCHEDULE or CANCEL."""
        before = self._remembered(origin.append_at_ms)
        what = What.SCHEDULE if isinstance(event, Schedule) else What.CANCEL
        if origin.offset >= self._applied:
            return self._chapter(what, origin, "", "not applied yet")
        generation = Generation(self._base + origin.offset + 1)
        result = apply_event(before, event, origin, generation=generation, retention_ms=self._retention_ms)
        self._state = result.state
        verdict = self._known.get(origin.offset, result.verdict)
        told = _words(verdict, event, before, result.state)
        return self._chapter(what, origin, verdict, told, is_derived=origin.offset not in self._known)

    def refusal(self, rejection: Rejection, origin: Origin, what: What) -> Chapter:
        """An event that was refused."""
        if origin.offset >= self._applied:
            return self._chapter(what, origin, "", "not applied yet")
        before = self._remembered(origin.append_at_ms)
        if rejection.task_id is not None:
            self._state = apply_rejection(before, rejection, origin, retention_ms=self._retention_ms)
        return self._chapter(what, origin, Verdict.REJECTED, f"{rejection.reason}: {rejection.message}")

    def emission(self, emission: Emission) -> str:
        """What is to be said of an emission."""
        task = emission.task
        self._state = with_emission(self._state, emission, retention_ms=self._retention_ms)
        late_ms = task.fired_at_ms - task.due_at_ms
        return (
            f"due at {format_instant(task.due_at_ms)}, fired {late_ms} ms later, scheduled at offset "
            f"{task.scheduled_offset}, all below {task.applied_offset} had been applied"
        )

    def burial(self, burial: Burial) -> None:
        """The task was set aside as undeliverable."""
        self._state = with_burial(self._state, burial, retention_ms=self._retention_ms)

    def _remembered(self, at_ms: InstantMs) -> TaskState | None:
        state = self._state
        return None if state is not None and forgotten_by(state, at_ms) else state

    def _chapter(
        self, what: What, origin: Origin, verdict: Verdict | str, why: str, *, is_derived: bool = False
    ) -> Chapter:
        return Chapter(
            at_ms=origin.append_at_ms,
            what=what,
            topic=origin.topic,
            partition=origin.partition,
            offset=origin.offset,
            verdict=str(verdict),
            is_derived=is_derived,
            why=why,
        )


def _words(verdict: Verdict, event: Event, before: TaskState | None, after: TaskState | None) -> str:
    """Why an event got its verdict."""
    match verdict:
        case Verdict.SCHEDULED | Verdict.RESCHEDULED:
            told = "" if after is None else f"due at {format_instant(after.due_at_ms)}"
            if verdict is Verdict.RESCHEDULED and before is not None:
                told += f", instead of {format_instant(before.due_at_ms)}"
        case Verdict.DUPLICATE:
            told = f"event id {event.event_id!r} was seen before: it changes nothing"
        case Verdict.STALE:
            known = "a newer one" if before is None else f"{before.version}"
            told = f"its version is {event.version}, and {known} was known: it changes nothing"
        case Verdict.TOO_LATE:
            told = "it had left the table before"
            if before is not None and before.emitted_offset >= 0:
                fired = format_instant(before.fired_at_ms)
                told = f"it had fired at {fired}, emission at offset {before.emitted_offset}"
        case _:
            told = _PLAIN_WORDS[verdict]
    return told
