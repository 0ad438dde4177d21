"""Emits again what was emitted in a stretch of time, unchanged and marked as a replay.

Copies carry the header `duetasks-replay` with the replay's id. The ends of the topic are captured first and copies are
left out, so a replay never picks up its own output, nor that of another. It is at least once: a replay that fails in
the middle has written whole batches, and can be done again, as ledgers leave out what was applied.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final

import msgspec

from pipeline.core.applied import ledger_key
from pipeline.core.effects import DueTask
from pipeline.core.partitioning import partition_for_key
from pipeline.core.rebuild import REPLAY_HEADER
from pipeline.core.tasks import InstantMs, Offset, TaskId
from pipeline.errors import CorruptStateError
from pipeline.service.recovery.ports import LogRecord, PartitionLog, RecoveryCodec, ReplayWriter

__all__ = ["PartitionRange", "ReplayPlan", "ReplayRequest", "Replayer"]

BATCH_RECORDS: Final = 500
BATCH_BYTES: Final = 4_194_304

Progress = Callable[[int, int], None]


class ReplayRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be emitted again: appended at `from_ms` or later, and before `to_ms`; of one task or of all.

    `forget_for`: a consumer group whose ledger is made to forget these tasks, so that it applies them again.
    """

    replay_id: str
    source_topic: str
    target_topic: str
    ledger_topic: str
    partition_count: int
    from_ms: InstantMs
    to_ms: InstantMs
    task_id: TaskId | None = None
    forget_for: str | None = None
    include_replays: bool = False


class PartitionRange(msgspec.Struct, frozen=True, kw_only=True):
    """The offsets of one partition that were appended in the time asked for, and what was found there."""

    partition: int
    start: Offset
    end: Offset
    records: int = 0
    copies_left_out: int = 0


class ReplayPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a replay does or has done; `notes` say what is out of reach."""

    replay_id: str
    source_topic: str
    target_topic: str
    records: int
    copies_left_out: int
    partitions: Sequence[PartitionRange]
    notes: Sequence[str]


class Replayer:
    """One replay: `plan` looks, `run` copies what was planned. `on_progress` hears (done, all) in records."""

    def __init__(
        self, request: ReplayRequest, log: PartitionLog, codec: RecoveryCodec, *, on_progress: Progress
    ) -> None:
        self._request = request
        self._log = log
        self._codec = codec
        self._on_progress = on_progress

    async def plan(self) -> ReplayPlan:
        """Find and count the records; changes nothing. Raises `UnavailableError`."""
        notes: list[str] = []
        ranges = []
        for partition in self._partitions():
            found = await self._range(partition, notes)
            records = copies = 0
            async for record in self._records(found):
                if self._is_copy(record):
                    copies += 1
                else:
                    records += 1
            ranges.append(msgspec.structs.replace(found, records=records, copies_left_out=copies))
        return ReplayPlan(
            replay_id=self._request.replay_id,
            source_topic=self._request.source_topic,
            target_topic=self._request.target_topic,
            records=sum(found.records for found in ranges),
            copies_left_out=sum(found.copies_left_out for found in ranges),
            partitions=ranges,
            notes=notes,
        )

    async def run(self, plan: ReplayPlan, writer: ReplayWriter) -> int:
        """Copy the records of the plan, in order, in transactions of a few hundred; returns how many.

        Raises `UnavailableError`, `UnknownOutcomeError` or `FencedError` with what is committed by then left in place.
        """
        await writer.acquire()
        done = 0
        self._on_progress(0, plan.records)
        for found in plan.partitions:
            batch: list[LogRecord] = []
            size = 0
            async for record in self._records(found):
                if self._is_copy(record):
                    continue
                batch.append(record)
                size += len(record.value or b"")
                if len(batch) >= BATCH_RECORDS or size >= BATCH_BYTES:
                    done += await self._copy(found.partition, batch, writer)
                    self._on_progress(done, plan.records)
                    batch, size = [], 0
            if batch:
                done += await self._copy(found.partition, batch, writer)
                self._on_progress(done, plan.records)
        return done

    async def _copy(self, partition: int, batch: Sequence[LogRecord], writer: ReplayWriter) -> int:
        request = self._request
        headers = {REPLAY_HEADER: request.replay_id.encode()}
        writer.begin()
        for record in batch:
            # The ledger forgets first: a group that reads both sees no moment with the copy and the old row.
            if request.forget_for is not None and (task := self._task(record)) is not None:
                writer.delete(request.ledger_topic, partition, ledger_key(request.forget_for, task))
            writer.copy(request.target_topic, partition, record, headers)
        await writer.commit()
        return len(batch)

    def _task(self, record: LogRecord) -> DueTask | None:
        try:
            return self._codec.decode_due(record.value or b"")
        except CorruptStateError:
            return None

    def _partitions(self) -> Sequence[int]:
        request = self._request
        if request.task_id is not None:
            return [partition_for_key(request.task_id.encode(), request.partition_count)]
        return range(request.partition_count)

    async def _range(self, partition: int, notes: list[str]) -> PartitionRange:
        request, topic = self._request, self._request.source_topic
        bounds = await self._log.bounds(topic, partition)
        start = await self._log.offset_at(topic, partition, request.from_ms)
        end = await self._log.offset_at(topic, partition, request.to_ms)
        start = bounds.end if start is None else start
        if 0 < bounds.start == start:
            notes.append(
                f"partition {partition} of {topic} starts at {bounds.start}: what was emitted before that has expired"
            )
        return PartitionRange(partition=partition, start=start, end=max(start, bounds.end if end is None else end))

    async def _records(self, found: PartitionRange) -> AsyncIterator[LogRecord]:
        """The records of the range that are asked for; the log's order is not always that of its time stamps."""
        request = self._request
        key = None if request.task_id is None else request.task_id.encode()
        async for chunk in self._log.read(request.source_topic, found.partition, found.start, found.end):
            for record in chunk.records:
                if request.from_ms <= record.timestamp < request.to_ms and key in {None, record.key}:
                    yield record

    def _is_copy(self, record: LogRecord) -> bool:
        return not self._request.include_replays and any(name == REPLAY_HEADER for name, _ in record.headers)
