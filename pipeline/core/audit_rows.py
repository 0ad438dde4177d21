"""Judges the row of one task: what it promises to fire, what it claims to have done, and that it is the fold (G7)."""

from collections.abc import Callable, Collection

from pipeline.core.audit import Code, Outcome, Promise, Tally, Unprovable
from pipeline.core.audit_fold import Histories
from pipeline.core.audit_requests import Request, Standing
from pipeline.core.audit_view import PartitionView, Seen
from pipeline.core.durations import format_instant
from pipeline.core.events import Schedule
from pipeline.core.lifecycle import has_seen
from pipeline.core.tasks import InstantMs, Status, TaskId, TaskState

__all__ = ["RowJudge"]


class RowJudge:
    """`row` is the task's last record in `task-state`, if it has any.

    `is_emitted`: an emission of the row's generation is there.
    `has_old_events`: some were applied so long ago that dead tasks of then have expired.
    """

    def __init__(
        self,
        task_id: TaskId,
        view: PartitionView,
        tally: Tally,
        *,
        row: Seen | None,
        is_emitted: bool,
        target: Callable[[str], str],
        has_old_events: bool,
    ) -> None:
        self._task_id = task_id
        self._view = view
        self._tally = tally
        self._row = row
        self._state = None if row is None else row.state
        self._is_emitted = is_emitted
        self._target = target
        self._has_old_events = has_old_events

    # -- G1 and G2 ---------------------------------------------------------------------------------------------

    def judge_waiting(self, waiting: Standing | None) -> None:
        """The schedule that waited, or should have waited, at the moment that the rows reflect."""
        view, state = self._view, self._state
        generation = 0 if waiting is None else waiting.request.place + 1
        if waiting is not None and view.covers(waiting.request.at_ms):
            self._judge_schedule(waiting)
        if (
            state is not None
            and state.status is Status.SCHEDULED
            and state.generation != generation
            and not self._is_emitted
            and self._row is not None
            and view.covers(self._row.at_ms)
        ):
            self._judge_due(state.due_at_ms, view.state_topic, self._row.offset, self._row.at_ms)

    def _judge_schedule(self, waiting: Standing) -> None:
        request, state = waiting.request, self._state
        is_row = state is not None and state.generation == request.place + 1
        if waiting.outcome is not None or waiting.overruled_by is not None:
            return  # by what came after the moment that the rows reflect: it was waiting rightly
        if is_row and state is not None and state.status is Status.SCHEDULED:
            self._tally.outcomes[Outcome.PENDING] += 1
            self._judge_due(request.due_at_ms, self._view.events_topic, request.offset, request.at_ms)
        elif not is_row or state is None or state.status not in {Status.EMITTED, Status.DEAD}:
            doubt = self._doubt_of(waiting)
            if doubt is not None:
                self._tally.doubt(Promise.G1, doubt)
                return
            self._violated(
                Code.SCHEDULE_LOST,
                self._view.events_topic,
                request.offset,
                request.at_ms,
                f"due at {format_instant(request.due_at_ms)}; its row in task-state is {_told(state)}",
            )

    def _doubt_of(self, waiting: Standing) -> Unprovable | None:
        """Why a schedule without an outcome can't be called lost."""
        request, view = waiting.request, self._view
        if waiting.is_doubtful:
            return Unprovable.FORGOTTEN if view.has_all_events else Unprovable.EVENTS_GONE
        if self._row is not None and self._row.changed_later:
            return Unprovable.CHANGED_MEANWHILE
        is_known = self._state is not None and request.digest and has_seen(self._state.event_hashes, request.digest)
        if is_known and not view.has_all_events:
            return Unprovable.EVENTS_GONE  # a second sending: of the first, only the row remembers
        if not view.keeps_emission_of(request.place, self._target(request.target_topic)):
            return Unprovable.EMISSIONS_GONE
        return None if view.keeps_dead(request.offset) else Unprovable.DEAD_TASKS_GONE

    def _judge_due(self, due_at_ms: InstantMs, topic: str, offset: int, at_ms: InstantMs) -> None:
        view = self._view
        if due_at_ms > view.now_ms:
            return
        self._tally.checked[Promise.G2] += 1
        if due_at_ms <= view.now_ms - view.overdue_ms:
            self._violated(
                Code.OVERDUE,
                topic,
                offset,
                at_ms,
                f"due at {format_instant(due_at_ms)}, overdue by {(view.now_ms - due_at_ms) // 1000} s",
            )

    def judge_claims(self, *, buried: Collection[int]) -> None:
        """A row that says that something was sent out: it must be there."""
        row, state, view = self._row, self._state, self._view
        if row is None or state is None or not view.covers(row.at_ms):
            return
        place, topic = state.generation - 1, self._target(state.target_topic)
        if state.status is Status.EMITTED and not self._is_emitted:
            if view.keeps_emission_of(place, topic):
                self._violated(
                    Code.EMISSION_MISSING,
                    view.state_topic,
                    row.offset,
                    row.at_ms,
                    f"emitted at {format_instant(state.fired_at_ms)} to {topic}, offset {state.emitted_offset}",
                )
            else:
                self._tally.doubt(Promise.G1, Unprovable.EMISSIONS_GONE)
        elif state.status is Status.DEAD and state.generation not in buried:
            if view.keeps_dead(place - view.generation_base):
                self._violated(
                    Code.BURIAL_MISSING, view.state_topic, row.offset, row.at_ms, f"generation {state.generation}"
                )
            else:
                self._tally.doubt(Promise.G1, Unprovable.DEAD_TASKS_GONE)

    # -- G7 ----------------------------------------------------------------------------------------------------

    def judge_fold(self, histories: Histories, schedule: tuple[Schedule, Request] | None, *, has_events: bool) -> None:
        """The row is what the inputs amount to, as far as they are retained."""
        row, view = self._row, self._view
        if (row is None and not has_events) or (row is not None and not view.covers(row.at_ms)):
            return
        self._tally.checked[Promise.G7] += 1
        if histories.allows(self._state) and not histories.is_lost:
            return
        doubt = self._fold_doubt(histories)
        if doubt is not None and not self._contradicts(schedule):
            self._tally.doubt(Promise.G7, doubt)
            return
        code = Code.STATE_DIFFERS
        if self._state is None:
            code = Code.STATE_MISSING
        elif not has_events:
            code = Code.STATE_UNFOUNDED
        offset, at_ms = (-1, view.stamp_ms) if row is None else (row.offset, row.at_ms)
        self._violated(code, view.state_topic, offset, at_ms, _difference(self._state, histories.example()))

    def _fold_doubt(self, histories: Histories) -> Unprovable | None:
        view, state = self._view, self._state
        if self._row is not None and self._row.changed_later:
            return Unprovable.CHANGED_MEANWHILE
        if histories.is_lost:
            return Unprovable.TOO_TANGLED
        if not view.has_all_events:
            return Unprovable.EVENTS_GONE
        if any(view.emissions_whole_from.values()) and histories.awaits_emission(view.now_ms):
            return Unprovable.EMISSIONS_GONE
        is_dead = state is not None and state.status is Status.DEAD
        if self._has_old_events or (is_dead and view.dead_whole_from > 0):
            return Unprovable.DEAD_TASKS_GONE
        return None

    def _contradicts(self, schedule: tuple[Schedule, Request] | None) -> bool:
        """Whether the row contradicts the schedule that it names itself: no missing event explains that."""
        state = self._state
        if state is None or schedule is None or schedule[1].place + 1 != state.generation:
            return False
        event, request = schedule
        if state.due_at_ms != request.due_at_ms or state.target_topic != event.target_topic:
            return True
        return state.status is Status.SCHEDULED and state.payload != event.payload

    def _violated(self, code: Code, topic: str, offset: int, at_ms: InstantMs, detail: str) -> None:
        self._tally.violated(self._view.finding(code, topic, offset, at_ms, detail, self._task_id))


def _told(state: TaskState | None) -> str:
    return "missing" if state is None else f"{state.status}, generation {state.generation}"


def _difference(row: TaskState | None, folded: TaskState | None) -> str:
    """The first fields that differ, or which of the two is missing."""
    if row is None or folded is None:
        return f"the row is {_told(row)}; its inputs amount to {_told(folded)}"
    names = [name for name in row.__struct_fields__ if getattr(row, name) != getattr(folded, name)]
    shown = [f"{name} {_short(getattr(row, name))}, not {_short(getattr(folded, name))}" for name in names[:3]]
    return "its " + "; its ".join(shown) if shown else "it differs in nothing that can be shown"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."  # noqa: PLR2004  # a cell of a table
