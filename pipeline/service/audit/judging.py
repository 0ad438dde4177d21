"""Goes through the facts of one partition, task by task and generation by generation, and has each judged.

One task's or one generation's judge is held at a time, and its facts come one by one: memory does not grow with the
topics, nor with the number of events of a task.
"""

from collections.abc import Callable, Iterator
from typing import Final, TypeVar

import msgspec

from pipeline.core.audit import Code, Finding, Tally
from pipeline.core.audit_emissions import DueSeen, GenerationAudit, LedgerSeen, LedgerView
from pipeline.core.audit_task import TaskAudit
from pipeline.core.audit_view import PartitionView, Seen
from pipeline.core.events import Origin, Rejection
from pipeline.core.rebuild import Burial, Emission
from pipeline.core.tasks import Generation, InstantMs, Offset, TaskId
from pipeline.errors import CorruptStateError
from pipeline.service.audit import facts
from pipeline.service.audit.admission import AuditAdmission
from pipeline.service.audit.ports import AuditCodec, AuditTopics, FactStore
from pipeline.service.recovery.ports import LogRecord

__all__ = ["PartitionJudging"]

TOLD_EVERY: Final = 1_000

_T = TypeVar("_T", bound=msgspec.Struct)


class PartitionJudging:
    """Judges one partition that was read."""

    def __init__(
        self,
        view: PartitionView,
        ledger: LedgerView | None,
        *,
        topics: AuditTopics,
        store: FactStore,
        codec: AuditCodec,
        admission: AuditAdmission,
        tally: Tally,
        on_judged: Callable[[int], None],
    ) -> None:
        self._view = view
        self._ledger = ledger
        self._topics = topics
        self._facts = store
        self._codec = codec
        self._admission = admission
        self._tally = tally
        self._on_judged = on_judged
        self._judged = 0

    def run(self) -> None:
        """Judge everything."""
        self._judge_tasks()
        self._judge_generations()
        self._on_judged(self._judged)

    def _scan(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        for fact in self._facts.scan(prefix):
            self._judged += 1
            if self._judged % TOLD_EVERY == 0:
                self._on_judged(self._judged)
            yield fact

    # -- tasks -------------------------------------------------------------------------------------------------

    def _judge_tasks(self) -> None:
        current: bytes | None = None
        one: _OneTask | None = None
        for fact_key, value in self._scan(facts.tasks(self._view.partition)):
            key, rest = facts.task_of_key(fact_key)
            if key != current or one is None:
                if one is not None:
                    one.finish()
                current, one = key, self._task(key)
            one.take(rest, value)
        if one is not None:
            one.finish()

    def _task(self, key: bytes) -> "_OneTask":
        return _OneTask(
            key,
            self._view,
            topics=self._topics,
            codec=self._codec,
            admission=self._admission,
            tally=self._tally,
        )

    # -- generations -------------------------------------------------------------------------------------------

    def _judge_generations(self) -> None:
        view, ledger = self._view, self._ledger
        if ledger is None:
            ledger = LedgerView(topic=self._topics.applied, committed={})
        current: int | None = None
        audit: GenerationAudit | None = None
        for fact_key, value in self._scan(facts.generations(view.partition)):
            generation, kind = facts.generation_of_key(fact_key)
            if generation != current or audit is None:
                if audit is not None:
                    audit.finish()
                current, audit = generation, GenerationAudit(generation, view, ledger, self._tally)
            if kind == facts.DUE:
                audit.due(self._due_seen(_unpacked(value, facts.DueFact)))
            else:
                audit.row(_ledger_seen(_unpacked(value, facts.LedgerFact)))
        if audit is not None:
            audit.finish()

    def _due_seen(self, fact: facts.DueFact) -> DueSeen:
        given_up = facts.given_up_key(self._view.partition, fact.topic, fact.offset)
        committed = () if self._ledger is None else self._ledger.committed
        return DueSeen(
            task_id=fact.task_id,
            occurrence=fact.occurrence,
            attempt=fact.attempt,
            topic=self._topics.emitted_to[fact.topic],
            offset=Offset(fact.offset),
            at_ms=InstantMs(fact.at_ms),
            is_copy=fact.is_copy,
            set_aside=bool(committed) and self._facts.get(given_up) is not None,
        )


class _OneTask:
    """Decodes the facts of one task and hands them to its audit."""

    def __init__(
        self,
        key: bytes,
        view: PartitionView,
        *,
        topics: AuditTopics,
        codec: AuditCodec,
        admission: AuditAdmission,
        tally: Tally,
    ) -> None:
        self._key = key
        self._task_id = TaskId(key.decode("utf-8", "replace"))
        self._view = view
        self._topics = topics
        self._codec = codec
        self._admission = admission
        self._tally = tally
        self._is_stray = bool(key) and admission.is_stray(key)
        self._audit = TaskAudit(self._task_id, view, tally, target=topics.target)
        self._row: Seen | None = None

    def take(self, rest: bytes, value: bytes) -> None:
        """One more fact; `rest` is its key after the task's. The row and its mark come first."""
        kind = rest[0]
        if kind == facts.CHANGED:
            self._mark_changed()
            return
        fact = _unpacked(value, facts.RecordFact)
        if kind == facts.ROW:
            self._row = self._seen(fact)
            if self._row is not None:
                self._audit.row(self._row)
        elif kind == facts.BURIAL:
            self._bury(fact)
        elif rest[9] == facts.EMISSION:
            self._emit(fact, facts.place_of(rest))
        else:
            self._apply(fact)

    def _mark_changed(self) -> None:
        """There is a newer row: compaction may have removed the one that is looked for."""
        row = self._row or Seen(state=None, offset=Offset(-1), at_ms=self._view.stamp_ms)
        self._audit.row(msgspec.structs.replace(row, changed_later=True))

    def finish(self) -> None:
        """That was all of the task."""
        self._audit.finish()

    def _seen(self, fact: facts.RecordFact) -> Seen | None:
        offset, at_ms = Offset(fact.offset), InstantMs(fact.at_ms)
        if fact.value is None:
            return Seen(state=None, offset=offset, at_ms=at_ms)
        try:
            state = self._codec.decode_state(fact.value)
        except (CorruptStateError, ValueError) as error:
            self._unreadable(fact, str(error))
            return None
        if state.task_id.encode("utf-8", "surrogatepass") != self._key:
            self._unreadable(fact, f"the row is that of {state.task_id!r}")
            return None
        return Seen(state=state, offset=offset, at_ms=at_ms)

    def _unreadable(self, fact: facts.RecordFact, detail: str) -> None:
        if self._view.covers(fact.at_ms):
            self._tally.violated(
                Finding(
                    code=Code.STATE_UNREADABLE,
                    topic=self._view.state_topic,
                    partition=self._view.partition,
                    offset=fact.offset,
                    at_ms=InstantMs(fact.at_ms),
                    detail=detail,
                    task_id=self._task_id,
                )
            )

    def _bury(self, fact: facts.RecordFact) -> None:
        dead = self._codec.decode_dead(fact.value or b"")
        burial = Burial(
            task_id=TaskId(dead.task_id),
            generation=Generation(dead.generation),
            dead_at_ms=dead.dead_at_ms,
            append_at_ms=InstantMs(fact.at_ms),
        )
        self._audit.burial(burial, Offset(fact.offset))

    def _emit(self, fact: facts.RecordFact, place: int) -> None:
        task = self._codec.decode_due(fact.value or b"")
        name = "" if fact.topic == 0 else self._topics.emitted_to[fact.topic]
        emission = Emission(task=task, target_topic=name, offset=Offset(fact.offset))
        self._audit.emission(
            emission, self._topics.emitted_to[fact.topic], place=place, key=fact.key, at_ms=InstantMs(fact.at_ms)
        )

    def _apply(self, fact: facts.RecordFact) -> None:
        record = LogRecord(offset=fact.offset, timestamp=fact.at_ms, key=fact.key, value=fact.value)
        origin = Origin(
            topic=self._view.events_topic,
            partition=self._view.partition,
            offset=Offset(fact.offset),
            append_at_ms=InstantMs(fact.at_ms),
        )
        event = self._admission.judge(record, fact.refusal)
        if isinstance(event, Rejection):
            self._audit.refusal(event, origin, is_recorded=fact.refusal is not None)
        else:
            self._audit.event(event, origin, is_stray=self._is_stray)


def _ledger_seen(fact: facts.LedgerFact) -> LedgerSeen:
    return LedgerSeen(
        group=fact.group,
        task_id=fact.task_id,
        occurrence=fact.occurrence,
        offset=Offset(fact.offset),
        at_ms=InstantMs(fact.at_ms),
        is_tombstone=fact.is_tombstone,
    )


def _unpacked(value: bytes, kind: type[_T]) -> _T:
    return msgspec.msgpack.decode(value, type=kind)
