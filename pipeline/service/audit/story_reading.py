"""Reads what the topics hold of one task: the partition that it belongs to, and `dead-tasks` of all partitions.

A request that went astray stands in another partition, and is refused to `dead-tasks` there.
"""

from collections import deque
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Final

import msgspec

from pipeline.core.effects import DeadTask
from pipeline.core.positions import POSITIONS_KEY, InputPosition
from pipeline.core.tasks import Offset, TaskId
from pipeline.errors import CorruptStateError
from pipeline.ports import ClusterIdentity
from pipeline.service.audit.log import Progress
from pipeline.service.audit.ports import AuditOutside, AuditRequest
from pipeline.service.recovery.ports import LogRecord

__all__ = ["RECORDS_MAX", "StoryReading", "StoryRecords"]

RECORDS_MAX: Final = 1_000
"""The last so many of each topic are told."""


class StoryRecords(msgspec.Struct, kw_only=True):
    """What was read; each list is bounded. `place` is how far the owner has come."""

    events: deque[LogRecord]
    dues: deque[tuple[str, LogRecord]]
    applied: deque[LogRecord]
    dead: deque[tuple[int, LogRecord, DeadTask]]
    row: LogRecord | None = None
    place: InputPosition | None = None


class StoryReading:
    """Reads one task's records; `notes` say what is out of reach."""

    def __init__(self, task_id: TaskId, request: AuditRequest, outside: AuditOutside, *, on_progress: Progress) -> None:
        self._task_id = task_id
        self._key = task_id.encode()
        self._request = request
        self._outside = outside
        self._on_progress = on_progress
        self.notes: list[str] = []

    async def read(self, partition: int, identity: ClusterIdentity) -> StoryRecords:
        """All topics; raises `UnavailableError`."""
        topics = self._request.topics
        found = StoryRecords(
            events=deque(maxlen=RECORDS_MAX),
            dues=deque(maxlen=RECORDS_MAX),
            applied=deque(maxlen=RECORDS_MAX),
            dead=deque(maxlen=RECORDS_MAX),
        )
        await self._read_state(found, partition)
        await self._read_dead(found, identity)
        await self._read_due(found, partition, identity)
        if topics.applied in identity.topics:
            ending = b"\0" + self._key
            async for record in self._records(topics.applied, partition):
                if record.key is not None and record.key.endswith(ending):
                    found.applied.append(record)
        async for record in self._records(topics.events, partition):
            if record.key == self._key:
                found.events.append(record)
        if RECORDS_MAX in {len(found.events), len(found.dues), len(found.applied), len(found.dead)}:
            self.notes.append(f"only the last {RECORDS_MAX} records of a topic are told")
        return found

    async def _read_state(self, found: StoryRecords, partition: int) -> None:
        async for record in self._records(self._request.topics.state, partition, whole=True):
            if record.key == self._key:
                found.row = record
            elif record.key == POSITIONS_KEY:
                found.place = self._place(record) or found.place

    async def _read_due(self, found: StoryRecords, partition: int, identity: ClusterIdentity) -> None:
        for name in self._request.topics.emitted_to:
            if name in identity.topics and partition < identity.topics[name].partition_count:
                async for record in self._records(name, partition):
                    if record.key == self._key:
                        found.dues.append((name, record))

    async def _read_dead(self, found: StoryRecords, identity: ClusterIdentity) -> None:
        topic = self._request.topics.dead
        known = identity.topics.get(topic)
        for number in range(0 if known is None else known.partition_count):
            async for record in self._records(topic, number):
                try:
                    dead = self._outside.codec.decode_dead(record.value or b"")
                except (CorruptStateError, ValueError):
                    continue
                if self._key == record.key or dead.task_id == self._task_id:
                    found.dead.append((number, record, dead))

    async def _records(self, topic: str, partition: int, *, whole: bool = False) -> AsyncIterator[LogRecord]:
        bounds = await self._outside.log.bounds(topic, partition)
        start = bounds.start
        if self._request.from_ms and not whole:
            later = await self._outside.log.offset_at(topic, partition, self._request.from_ms)
            start = Offset(max(start, bounds.stable_end if later is None else later))
        elif start > 0 and not whole:
            self.notes.append(f"{topic}-{partition} starts at {start}: what was there before has expired")
        what = f"Reading {topic}, partition {partition}"
        async with aclosing(self._outside.log.read(topic, partition, start, bounds.stable_end)) as chunks:
            async for chunk in chunks:
                for record in chunk.records:
                    yield record
                self._on_progress(what, chunk.position - start, bounds.stable_end - start)

    def _place(self, record: LogRecord) -> InputPosition | None:
        try:
            positions = self._outside.codec.decode_positions(record.value or b"")
        except CorruptStateError:
            return None
        return positions.inputs.get(self._request.topics.events)
