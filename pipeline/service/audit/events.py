"""Reads the events of one partition, and finds out from where on none is missing."""

import msgspec

from pipeline.core.tasks import InstantMs, Offset
from pipeline.ports import Clock
from pipeline.service.audit import facts
from pipeline.service.audit.log import KEY_BYTES_MAX, AuditLog
from pipeline.service.audit.ports import AuditTopics, FactStore
from pipeline.service.owner.fence import FENCE_KEY
from pipeline.service.recovery.ports import LogBounds, LogRecord

__all__ = ["EventReading"]


class EventReading:
    """Reads them into facts, with their refusals if there are any."""

    def __init__(
        self,
        log: AuditLog,
        topics: AuditTopics,
        store: FactStore,
        *,
        generation_base: int,
        compaction_lag_ms: int,
        has_refusals: bool,
    ) -> None:
        self._log = log
        self._topics = topics
        self._store = store
        self._base = generation_base
        self._compaction_lag_ms = compaction_lag_ms
        self._has_refusals = has_refusals

    async def read(self, bounds: LogBounds, clock: Clock) -> tuple[Offset, InstantMs]:
        """Keep the events; returns from which offset on none is missing, and when that one was appended.

        A hole is a marker, an aborted record, or what compaction removed; the latter only if it may be old enough.
        """
        whole_from, unknown_until_ms = bounds.start, InstantMs(0)
        expected, before_ms = bounds.start, 0
        async for records in self._log.chunks(self._topics.events, bounds.start, bounds.stable_end):
            batch = []
            compacted_until_ms = clock.now_ms() - self._compaction_lag_ms
            for record in records:
                if record.offset > expected and before_ms <= compacted_until_ms:
                    whole_from = Offset(record.offset)
                if record.offset == whole_from:
                    unknown_until_ms = InstantMs(record.timestamp)
                expected, before_ms = Offset(record.offset + 1), record.timestamp
                if record.key != FENCE_KEY:
                    batch.append(self._event_fact(record))
            self._store.put(batch)
        now_ms = clock.now_ms()
        if bounds.stable_end > expected and before_ms <= now_ms - self._compaction_lag_ms:
            whole_from, unknown_until_ms = bounds.stable_end, now_ms
        # Asked once more: what expires while it is read is a hole, too.
        start = (await self._log.bounds(self._topics.events)).start
        if start > 0:
            self._log.notes.append(f"{self._topics.events} starts at {start}: events before that have expired")
        if start > whole_from:
            return start, now_ms
        if whole_from > start:
            self._log.notes.append(
                f"{self._topics.events} may be compacted below {whole_from}: only the last event of a task is sure "
                "to be there"
            )
        return whole_from, unknown_until_ms

    def _event_fact(self, record: LogRecord) -> tuple[bytes, bytes]:
        refusal = self._refusal_of(record) if self._has_refusals else None
        fact = facts.RecordFact(
            offset=record.offset, at_ms=record.timestamp, value=record.value, refusal=refusal, key=record.key
        )
        place = self._base + record.offset
        at = facts.timeline_key(self._log.partition, _task_key(record.key), place, facts.EVENT, 0, record.offset)
        return at, facts.packed(fact)

    def _refusal_of(self, record: LogRecord) -> facts.RefusalFact | None:
        raw = self._store.get(facts.refusal_key(self._log.partition, record.offset))
        if raw is None:
            return None
        refusal = msgspec.msgpack.decode(raw, type=facts.RefusalFact)
        return refusal if refusal.append_at_ms == record.timestamp else None


def _task_key(key: bytes | None) -> bytes:
    """The key if it can name a task; else the empty one, which stands for all of those."""
    if not key or len(key) > KEY_BYTES_MAX or key[:1] == b"\0":
        return b""
    try:
        key.decode()
    except UnicodeDecodeError:
        return b""
    return key
