"""Judges one task: its events, emissions and burials in the order in which the owner met them, then its row.

The order is that of `place`: an emission that was made when the events below its `applied_offset` were applied comes
before the event at that place. Two judges look at the same stream: `Requests` compares events in pairs (G1 to G4),
`Histories` runs the production fold (G7).

Rows are judged at one moment, that of the last positions record (`applied_place`). Of what came after it, only what
stands on its own is judged: an emission's evidence, and that nothing below its applied offset overruled it.
"""

from collections.abc import Callable

from pipeline.core.audit import Code, Outcome, Promise, Tally, Unprovable
from pipeline.core.audit_evidence import content_fault, evidence_fault
from pipeline.core.audit_fold import BURIALS_MAX, Histories
from pipeline.core.audit_requests import Request, Requests, Standing
from pipeline.core.audit_rows import RowJudge
from pipeline.core.audit_view import PartitionView, Seen
from pipeline.core.events import Event, Origin, Rejection, Schedule
from pipeline.core.lifecycle import event_hash
from pipeline.core.rebuild import Burial, Emission, generation_base_of
from pipeline.core.tasks import Generation, InstantMs, Offset, TaskId

__all__ = ["TaskAudit"]


class TaskAudit:
    """One task. Feed it the row and burials first, then events and emissions by place, then `finish`.

    `target` names the topic that a task with a `target_topic` is emitted to.
    """

    def __init__(self, task_id: TaskId, view: PartitionView, tally: Tally, *, target: Callable[[str], str]) -> None:
        self._task_id = task_id
        self._view = view
        self._tally = tally
        self._target = target
        self._requests = Requests(
            retention_ms=view.retention_ms,
            is_whole=view.has_all_events,
            unknown_until_ms=view.events_unknown_until_ms,
        )
        self._histories = Histories(retention_ms=view.retention_ms)
        self._buried: dict[int, InstantMs] = {}
        self._burials_settled = True
        self._schedule: tuple[Schedule, Request] | None = None
        self._waiting: Standing | None = None
        self._is_past = False
        self._has_events = False
        self._has_old_events = False
        self._row: Seen | None = None
        self._row_is_emitted = False

    # -- what comes in -----------------------------------------------------------------------------------------

    def row(self, row: Seen) -> None:
        """The last record of the task in `task-state`."""
        self._row = row

    def burial(self, burial: Burial, offset: Offset) -> None:
        """The task was set aside as undeliverable."""
        self._buried[burial.generation] = burial.dead_at_ms
        if len(self._buried) > BURIALS_MAX:
            del self._buried[next(iter(self._buried))]
        self._burials_settled = self._burials_settled and offset < self._view.dead_settled
        self._histories.expect_burial(burial)

    def event(self, event: Event, origin: Origin, *, is_stray: bool) -> None:
        """An event that may be applied, unless it is a stray for a task that has no row here."""
        if is_stray and self._histories.is_empty and self._view.has_all_events:
            self._passed_over(Code.STRAY_NOT_REFUSED, origin, "murmur2 puts its key into another partition")
            return
        place = self._enter(origin)
        request = _request(event, origin, place)
        waited = self._requests.live
        outcome = self._requests.add(request)
        if waited is not None and waited.overruled_by is request:
            self._count(Outcome.CANCELLED if request.is_cancel else Outcome.REPLACED, waited.request)
        if isinstance(event, Schedule):
            self._tally_schedule(request, outcome)
            self._schedule = (event, request)
            standing = self._requests.find(place)
            if place + 1 in self._buried and standing is not None:
                self._requests.finish(standing, Outcome.UNDELIVERABLE, self._buried[place + 1])
                self._count(Outcome.UNDELIVERABLE, request)
        if not self._is_past:
            self._histories.apply(event, origin, Generation(place + 1))

    def refusal(self, rejection: Rejection, origin: Origin, *, is_recorded: bool) -> None:
        """An event that was refused; it must be recorded on `dead-tasks`."""
        if not is_recorded:
            self._passed_over(Code.REFUSAL_MISSING, origin, f"{rejection.reason}: {rejection.message}")
        place = self._enter(origin)
        self._requests.refuse(rejection, place, origin.append_at_ms)
        if not self._is_past:
            self._histories.refuse(rejection, origin)
        if self._view.covers(origin.append_at_ms):
            self._tally.checked[Promise.G1] += 1
            self._tally.outcomes[Outcome.REFUSED] += 1

    def emission(self, emission: Emission, topic: str, *, place: int, key: bytes | None, at_ms: InstantMs) -> None:
        """A record of a target topic that is no replay; the events below `place` were applied when it was made."""
        view, task = self._view, emission.task
        settled = emission.offset < view.emissions_settled.get(topic, 0)
        if place > view.applied_place:
            self._pass()
        if not self._is_past:
            self._histories.emit(emission, perhaps=not settled and place >= view.applied_place)
        standing = self._requests.find(task.generation - 1)
        if view.covers(at_ms):
            fault = evidence_fault(task, key=key, partition=view.partition, generation_base=view.generation_base)
            if fault is None and settled and place > view.applied_place:
                fault = Code.EVIDENCE_WRONG, f"applied up to {task.applied_offset}, but task-state is at {view.applied}"
            if fault is not None:
                self._violated(fault[0], topic, emission.offset, at_ms, fault[1])
            self._judge_emission(emission, topic, at_ms, standing, has_fault=fault is not None)
        state = None if self._row is None else self._row.state
        self._row_is_emitted = self._row_is_emitted or (state is not None and state.generation == task.generation)
        if standing is not None and standing.outcome is None:
            self._requests.finish(standing, Outcome.EMITTED, task.fired_at_ms)
            self._count(Outcome.EMITTED, standing.request)

    def finish(self) -> None:
        """All came."""
        self._pass()
        judge = RowJudge(
            self._task_id,
            self._view,
            self._tally,
            row=self._row,
            is_emitted=self._row_is_emitted,
            target=self._target,
            has_old_events=self._has_old_events,
        )
        judge.judge_waiting(self._waiting)
        judge.judge_claims(buried=self._buried.keys())
        self._histories.end(self._view.stamp_ms, burials_settled=self._burials_settled)
        judge.judge_fold(self._histories, self._schedule, has_events=self._has_events)

    # -- judging what comes in ---------------------------------------------------------------------------------

    def _enter(self, origin: Origin) -> int:
        """The place of the next event."""
        place = self._view.generation_base + origin.offset
        if place >= self._view.applied_place:
            self._pass()
        self._has_events = self._has_events or not self._is_past
        self._has_old_events = self._has_old_events or not self._view.keeps_dead(origin.offset)
        return place

    def _pass(self) -> None:
        """The stream passes the moment that the rows reflect: note what waited then."""
        if not self._is_past:
            self._is_past = True
            self._waiting = self._requests.live

    def _passed_over(self, code: Code, origin: Origin, detail: str) -> None:
        view = self._view
        applied = view.generation_base + origin.offset < view.applied_place
        if not applied or not view.covers(origin.append_at_ms):
            return
        if view.keeps_dead(origin.offset):
            self._violated(code, view.events_topic, origin.offset, origin.append_at_ms, detail)
        else:
            self._tally.doubt(Promise.G1, Unprovable.DEAD_TASKS_GONE)

    def _tally_schedule(self, request: Request, outcome: Outcome | None) -> None:
        if self._view.covers(request.at_ms):
            self._tally.checked[Promise.G1] += 1
        if self._is_past:
            self._count(Outcome.WAITING, request)
        elif outcome is not None:
            self._count(outcome, request)

    def _count(self, outcome: Outcome, request: Request) -> None:
        if self._view.covers(request.at_ms) and (
            request.place < self._view.applied_place or outcome is Outcome.WAITING
        ):
            self._tally.outcomes[outcome] += 1

    def _judge_emission(
        self, emission: Emission, topic: str, at_ms: InstantMs, standing: Standing | None, *, has_fault: bool
    ) -> None:
        self._tally.checked.update((Promise.G2, Promise.G3, Promise.G4))
        if standing is None:
            if not has_fault:
                self._judge_unknown(emission, topic, at_ms)
            return
        by = standing.overruled_by
        if standing.outcome is Outcome.UNDELIVERABLE:
            self._violated(Code.TWO_OUTCOMES, topic, emission.offset, at_ms, "it is on dead-tasks as undeliverable too")
        elif standing.is_doubtful:
            self._tally.doubt(Promise.G4, self._why_doubtful())
        elif by is not None:
            what = "cancelled" if by.is_cancel else "replaced"
            self._violated(
                Code.OVERRULED,
                topic,
                emission.offset,
                at_ms,
                f"scheduled at offset {standing.request.offset}, {what} at offset {by.offset}, applied up to "
                f"{emission.task.applied_offset} when it fired",
            )
        if self._schedule is not None and self._schedule[1] is standing.request:
            content = content_fault(emission.task, self._schedule[0], standing.request.due_at_ms)
            if content is not None:
                self._violated(content[0], topic, emission.offset, at_ms, content[1])

    def _judge_unknown(self, emission: Emission, topic: str, at_ms: InstantMs) -> None:
        """An emission whose schedule is not among those that may fire."""
        view, task = self._view, emission.task
        place = task.generation - 1
        ended = self._requests.ended(place)
        if ended is Outcome.REFUSED:
            self._violated(Code.TWO_OUTCOMES, topic, emission.offset, at_ms, "its schedule was refused, see dead-tasks")
        elif ended is not None:
            self._violated(
                Code.OVERRULED, topic, emission.offset, at_ms, f"its schedule at {task.scheduled_offset} was {ended}"
            )
        elif generation_base_of(task) == view.generation_base and view.keeps_event(place):
            self._violated(
                Code.EMITTED_WITHOUT_SCHEDULE,
                topic,
                emission.offset,
                at_ms,
                f"offset {task.scheduled_offset} of {view.events_topic} holds no schedule of this task that could fire",
            )
        else:
            self._tally.doubt(Promise.G4, Unprovable.EVENTS_GONE)

    def _why_doubtful(self) -> Unprovable:
        return Unprovable.FORGOTTEN if self._view.has_all_events else Unprovable.EVENTS_GONE

    def _violated(self, code: Code, topic: str, offset: int, at_ms: InstantMs, detail: str) -> None:
        self._tally.violated(self._view.finding(code, topic, offset, at_ms, detail, self._task_id))


def _request(event: Event, origin: Origin, place: int) -> Request:
    return Request(
        place=place,
        offset=origin.offset,
        at_ms=origin.append_at_ms,
        is_cancel=not isinstance(event, Schedule),
        version=event.version,
        digest=event_hash(event.event_id) if event.event_id else b"",
        due_at_ms=_due_at_ms(event, origin) if isinstance(event, Schedule) else InstantMs(0),
        target_topic=event.target_topic if isinstance(event, Schedule) else "",
    )


def _due_at_ms(event: Schedule, origin: Origin) -> InstantMs:
    if event.due_at_ms is not None:
        return event.due_at_ms
    return InstantMs(origin.append_at_ms + (event.delay_ms or 0))
