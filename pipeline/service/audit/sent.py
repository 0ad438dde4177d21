"""Reads what the owner of one partition sent out: due records, and what it set aside."""

from collections.abc import Sequence

from pipeline.core.audit import Code
from pipeline.core.audit_view import NEVER
from pipeline.core.effects import DeadTask, DueTask
from pipeline.core.events import Reason
from pipeline.core.rebuild import REPLAY_HEADER, generation_base_of
from pipeline.errors import CorruptStateError
from pipeline.service.audit import facts
from pipeline.service.audit.log import KEY_BYTES_MAX, AuditLog
from pipeline.service.audit.ports import AuditCodec, AuditTopics, FactStore
from pipeline.service.recovery.ports import LogBounds, LogRecord

__all__ = ["SentReading"]


class SentReading:
    """Reads them into facts. `refusals` counts refused events; the others say from where on nothing is missing."""

    def __init__(
        self, log: AuditLog, topics: AuditTopics, codec: AuditCodec, store: FactStore, emitted_to: Sequence[str]
    ) -> None:
        self._log = log
        self._topics = topics
        self._codec = codec
        self._store = store
        self._emitted_to = emitted_to
        self._base = 0
        self.refusals = 0
        self.dead_whole_from = 0
        self.emissions_whole_from: dict[str, int] = {}

    async def read_dead(self, bounds: LogBounds) -> None:
        """What was set aside, up to the end of `bounds`."""
        self.dead_whole_from = NEVER
        async for records in self._log.chunks(self._topics.dead, bounds.start, bounds.end):
            batch = []
            for record in records:
                try:
                    dead = self._codec.decode_dead(record.value or b"")
                except (CorruptStateError, ValueError) as error:
                    self._log.violated(Code.UNDECODABLE, self._topics.dead, record, str(error))
                else:
                    batch += self._dead_facts(record, dead)
            self._store.put(batch)
        if not await self._has_expired(self._topics.dead):
            self.dead_whole_from = 0

    def _dead_facts(self, record: LogRecord, dead: DeadTask) -> list[tuple[bytes, bytes]]:
        origin = dead.origin
        if origin.partition != self._log.partition:
            return []
        if origin.topic != self._topics.events:
            if origin.topic not in self._emitted_to:
                return []
            number = self._topics.emitted_to.index(origin.topic)
            return [(facts.given_up_key(self._log.partition, number, origin.offset), b"")]
        if dead.generation:
            key = dead.task_id.encode("utf-8", "surrogatepass")
            if dead.reason is not Reason.UNDELIVERABLE or len(key) > KEY_BYTES_MAX:
                return []
            fact = facts.RecordFact(offset=record.offset, at_ms=record.timestamp, value=record.value)
            return [(facts.burial_key(self._log.partition, key, record.offset), facts.packed(fact))]
        self.dead_whole_from = min(self.dead_whole_from, origin.offset + 1)
        self.refusals += 1
        refusal = facts.RefusalFact(append_at_ms=origin.append_at_ms, reason=dead.reason, task_id=dead.task_id)
        return [(facts.refusal_key(self._log.partition, origin.offset), facts.packed(refusal))]

    async def read_due(self, number: int, topic: str, bounds: LogBounds, *, generation_base: int) -> None:
        """What was emitted to a topic, which has this number in facts, up to the end of `bounds`."""
        self._base = generation_base
        self.emissions_whole_from[topic] = NEVER
        async for records in self._log.chunks(topic, bounds.start, bounds.end):
            batch: list[tuple[bytes, bytes]] = []
            for record in records:
                batch += self._due_facts(number, topic, record)
            self._store.put(batch)
        if not await self._has_expired(topic):
            self.emissions_whole_from[topic] = 0

    async def _has_expired(self, topic: str) -> bool:
        """Whether some of it may be missing; asked after it was read, for it may have expired meanwhile."""
        start = (await self._log.bounds(topic)).start
        if start > 0:
            self._log.notes.append(f"{topic} starts at {start}: what was there before has expired")
        return start > 0

    def _latest_place(self, task: DueTask) -> int:
        """How far the events had been applied at most, counted over all creations of their topic.

        What was scheduled before the topic was created anew names no offset: when it fired the topic may have been the
        present one. Its place on the timeline is the lowest that it may have had.
        """
        base = generation_base_of(task)
        return max(0, (base if task.scheduled_offset >= 0 else max(base, self._base)) + task.applied_offset)

    def _due_facts(self, number: int, topic: str, record: LogRecord) -> list[tuple[bytes, bytes]]:
        try:
            task = self._codec.decode_due(record.value or b"")
        except CorruptStateError as error:
            if topic == self._topics.due:  # others may write to the other target topics
                self._log.violated(Code.UNDECODABLE, topic, record, str(error))
            return []
        is_copy = any(name == REPLAY_HEADER for name, _ in record.headers)
        due = facts.DueFact(
            task_id=task.task_id,
            occurrence=task.occurrence,
            attempt=task.attempt,
            topic=number,
            offset=record.offset,
            at_ms=record.timestamp,
            is_copy=is_copy,
        )
        found = [(facts.due_key(self._log.partition, task.generation, number, record.offset), facts.packed(due))]
        key = task.task_id.encode("utf-8", "surrogatepass")
        if is_copy or len(key) > KEY_BYTES_MAX:
            return found
        place = generation_base_of(task) + task.applied_offset
        self.emissions_whole_from[topic] = min(self.emissions_whole_from[topic], self._latest_place(task))
        fact = facts.RecordFact(
            offset=record.offset, at_ms=record.timestamp, value=record.value, topic=number, key=record.key
        )
        at = facts.timeline_key(self._log.partition, key, place, facts.EMISSION, number, record.offset)
        return [*found, (at, facts.packed(fact))]
