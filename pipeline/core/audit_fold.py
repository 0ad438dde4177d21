"""The production fold of one task's events and emissions, where more than one history may be true.

G7 asks whether a row is what its inputs amount to. Some things leave no mark on the topics: whether a finished task was
forgotten before the next event came, where between two events a due task was set aside, whether the last emissions
belong to the transactions that the audit looks at. So this folds *every* history that is possible, a few at a time;
the row must be one of their ends. The fold itself is the one that owners run.
"""

from typing import Final

import msgspec

from pipeline.core.audit_requests import SKEW_MS
from pipeline.core.events import Event, Origin, Rejection
from pipeline.core.lifecycle import apply_event, apply_rejection
from pipeline.core.rebuild import Burial, Emission, with_burial, with_emission
from pipeline.core.tasks import (
    FINAL,
    NO_HEADERS,
    DurationMs,
    Generation,
    InstantMs,
    Offset,
    Status,
    TaskState,
)

__all__ = ["BURIALS_MAX", "Histories", "is_same_row"]

HISTORIES_MAX: Final = 24
BURIALS_MAX: Final = 64
"""Of one task: it was scheduled again as often, and could never be emitted."""
_UNSET: Final = InstantMs(0)


class Histories:
    """All states that a task may be in. `is_lost`: there are more than are kept, nothing can be said any more."""

    def __init__(self, *, retention_ms: DurationMs) -> None:
        self._retention_ms = retention_ms
        self._states: list[TaskState | None] = [None]
        self._burials: list[Burial] = []
        self.is_lost = False

    @property
    def is_empty(self) -> bool:
        """Whether in every history nothing is known of the task."""
        return all(state is None for state in self._states)

    def expect_burial(self, burial: Burial) -> None:
        """The task was set aside in this generation, at some time after it was scheduled."""
        self._burials.append(burial)
        if len(self._burials) > BURIALS_MAX:
            del self._burials[0]
            self.is_lost = True

    def apply(self, event: Event, origin: Origin, generation: Generation) -> None:
        """One more event that was accepted for judgement."""
        self._branch_before(origin.append_at_ms)
        self._replace(
            [
                apply_event(state, event, origin, generation=generation, retention_ms=self._retention_ms).state
                for state in self._states
            ]
        )

    def refuse(self, rejection: Rejection, origin: Origin) -> None:
        """One more event that was refused; only one that names its task touches the row."""
        self._branch_before(origin.append_at_ms)
        if rejection.task_id is not None:
            self._replace(
                [apply_rejection(state, rejection, origin, retention_ms=self._retention_ms) for state in self._states]
            )

    def emit(self, emission: Emission, *, perhaps: bool) -> None:
        """The task was emitted; `perhaps` only after the transactions that are looked at."""
        after = [self._emitted(state, emission) for state in self._states]
        self._replace([*self._states, *after] if perhaps else after)

    def _emitted(self, state: TaskState | None, emission: Emission) -> TaskState | None:
        if state is not None and state.status is Status.EMITTED and state.generation == emission.task.generation:
            return state  # a second one is a violation of its own, and the row is that of the first
        return with_emission(state, emission, retention_ms=self._retention_ms)

    def end(self, stamp_ms: InstantMs, *, burials_settled: bool) -> None:
        """All events came; what the timers may have done until `stamp_ms` is still open."""
        buried = self._buried(self._states)
        self._replace(buried if burials_settled else [*self._states, *buried])
        self._replace([*self._states, *(None for state in self._states if _may_be_forgotten(state, stamp_ms))])

    def allows(self, row: TaskState | None) -> bool:
        """Whether some history ends with this row."""
        return any(is_same_row(state, row) for state in self._states)

    def awaits_emission(self, until_ms: InstantMs) -> bool:
        """Whether some history ends with a timer that is due by then: its emission may have expired."""
        return any(
            state is not None and state.status is Status.SCHEDULED and state.due_at_ms <= until_ms
            for state in self._states
        )

    def example(self) -> TaskState | None:
        """One of the possible ends, for a person to compare with."""
        return next((state for state in self._states if state is not None), None)

    def _branch_before(self, at_ms: InstantMs) -> None:
        """What may have happened before an event of that instant."""
        states = self._states
        if self._burials:
            states = [*states, *self._buried(states)]
        states = [*states, *(None for state in states if _may_be_forgotten(state, at_ms))]
        self._replace(states)

    def _buried(self, states: list[TaskState | None]) -> list[TaskState | None]:
        found: list[TaskState | None] = []
        for before in states:
            state = before
            for burial in self._burials:
                if state is not None and state.status is Status.SCHEDULED:
                    state = with_burial(state, burial, retention_ms=self._retention_ms)
            found.append(state)
        return found

    def _replace(self, states: list[TaskState | None]) -> None:
        kept: list[TaskState | None] = []
        for state in states:
            if state not in kept:
                kept.append(state)
        self.is_lost = self.is_lost or len(kept) > HISTORIES_MAX
        self._states = kept[:HISTORIES_MAX]


def is_same_row(folded: TaskState | None, row: TaskState | None) -> bool:
    """Whether a row says what the fold says.

    Where an emission stands may be unknown to the row; how long a finished task is kept depends on a setting that may
    have changed since. When a due task was set aside, its dead record tells by the owner's clock.
    """
    if folded is None or row is None:
        return folded is row
    return _comparable(folded, row) == _comparable(row, row)


def _comparable(state: TaskState, row: TaskState) -> TaskState:
    is_final = state.status in FINAL
    return msgspec.structs.replace(
        state,
        wake_at_ms=_UNSET if is_final else state.wake_at_ms,
        changed_at_ms=_UNSET if state.status is Status.DEAD else state.changed_at_ms,
        emitted_offset=Offset(-1) if row.emitted_offset < 0 else state.emitted_offset,
        headers=dict(state.headers) if state.headers else NO_HEADERS,
    )


def _may_be_forgotten(state: TaskState | None, at_ms: InstantMs) -> bool:
    return state is not None and state.status in FINAL and state.wake_at_ms - SKEW_MS <= at_ms
