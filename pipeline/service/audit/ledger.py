"""Reads the ledgers of consumer groups into facts, and how far each group has read.

A row and the group's offset commit together, in one transaction, and each gets its marker in its own time. So the
ledger is read twice: first to learn which groups there are; then their offsets are asked for; then the ledger up to its
end as of after that. Every row that belongs to one of those offsets lies below this end. All of it comes before the
ends of `due-tasks` are asked for, so what the rows speak of will be read too.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Final

import msgspec

from pipeline.core.audit import Code, Finding, Tally
from pipeline.core.audit_emissions import LedgerView
from pipeline.core.tasks import InstantMs, Offset
from pipeline.errors import CorruptStateError
from pipeline.service.audit import facts
from pipeline.service.audit.log import Progress
from pipeline.service.audit.ports import AuditOutside, AuditRequest, FactStore
from pipeline.service.recovery.ports import LogRecord

__all__ = ["READ_AT_ONCE", "LedgerReading"]

GROUPS_MAX: Final = 1_000
READ_AT_ONCE: Final = 4
"""Partitions that are read side by side: most of the time of a small one is spent on waiting."""
_KEY_PARTS: Final = 4


class LedgerReading:
    """Reads the ledger of all partitions that are asked for; `views` tells each one's, `notes` what is out of reach."""

    def __init__(
        self, request: AuditRequest, outside: AuditOutside, store: FactStore, tally: Tally, *, on_progress: Progress
    ) -> None:
        self._request = request
        self._outside = outside
        self._store = store
        self._tally = tally
        self._on_progress = on_progress
        self._groups: set[str] = set(request.groups or ())
        self.notes: list[str] = []
        self.records = 0

    async def read(self, partitions: Sequence[int], topics: Sequence[str]) -> Mapping[int, LedgerView]:
        """Read it all; `topics` are those that groups may have read from. Raises `UnavailableError`."""
        topic = self._request.topics.applied
        starts: dict[int, Offset] = {}
        ends: dict[int, Offset] = {}

        async def begin(partition: int) -> None:
            bounds = await self._outside.log.bounds(topic, partition)
            starts[partition], ends[partition] = bounds.start, bounds.stable_end
            await self._read(partition, bounds.start, bounds.stable_end)

        async def complete(partition: int) -> None:
            bounds = await self._outside.log.bounds(topic, partition)
            await self._read(partition, ends[partition], bounds.end)

        await _side_by_side(begin, partitions)
        committed = await self._committed(partitions, topics)
        await _side_by_side(complete, partitions)
        self.notes += [
            f"{topic}-{partition} starts at {start}: rows of before were deleted"
            for partition, start in sorted(starts.items())
            if start > 0
        ]
        return {
            partition: LedgerView(
                topic=topic,
                committed={
                    (group, name): offset for (group, name, number), offset in committed.items() if number == partition
                },
                is_whole=starts[partition] == 0,
            )
            for partition in partitions
        }

    async def _committed(self, partitions: Sequence[int], topics: Sequence[str]) -> dict[tuple[str, str, int], Offset]:
        places = [(topic, partition) for topic in topics for partition in partitions]
        found: dict[tuple[str, str, int], Offset] = {}
        if len(self._groups) >= GROUPS_MAX:
            self.notes.append(f"there are more than {GROUPS_MAX} groups: what the others missed is not looked for")
        for group in sorted(self._groups):
            for (topic, partition), offset in (await self._outside.group_offsets.committed(group, places)).items():
                found[group, topic, partition] = offset
        return found

    async def _read(self, partition: int, start: Offset, end: Offset) -> None:
        topic = self._request.topics.applied
        what = f"Reading {topic}, partition {partition}"
        async with aclosing(self._outside.log.read(topic, partition, start, end)) as chunks:
            async for chunk in chunks:
                batch: list[tuple[bytes, bytes]] = []
                for record in chunk.records:
                    batch += self._facts(partition, record)
                self._store.put(batch)
                self.records += len(chunk.records)
                self._on_progress(what, chunk.position - start, end - start)

    def _facts(self, partition: int, record: LogRecord) -> list[tuple[bytes, bytes]]:
        name = _name(record.key)
        if name is None:
            self._violated(partition, record, "", f"its key is {record.key!r:.60}, not that of a row")
            return []
        group, generation, occurrence, task_id = name
        if self._request.groups is not None and group not in self._request.groups:
            return []
        if record.value is not None:
            try:
                row = self._outside.codec.decode_applied(record.value)
            except (CorruptStateError, ValueError) as error:
                self._violated(partition, record, task_id, str(error))
                return []
            if (row.group, row.generation, row.occurrence, row.task_id) != name or row.due_partition != partition:
                self._violated(partition, record, task_id, "its key or its partition is not the one that its row names")
                return []
        if len(self._groups) < GROUPS_MAX:
            self._groups.add(group)
        fact = facts.LedgerFact(
            group=group,
            task_id=task_id,
            occurrence=occurrence,
            offset=record.offset,
            at_ms=record.timestamp,
            is_tombstone=record.value is None,
        )
        return [(facts.ledger_fact_key(partition, generation, record.offset), msgspec.msgpack.encode(fact))]

    def _violated(self, partition: int, record: LogRecord, task_id: str, detail: str) -> None:
        if self._request.from_ms <= record.timestamp < self._request.to_ms:
            self._tally.violated(
                Finding(
                    code=Code.UNDECODABLE,
                    topic=self._request.topics.applied,
                    partition=partition,
                    offset=record.offset,
                    at_ms=InstantMs(record.timestamp),
                    detail=detail,
                    task_id=task_id,
                )
            )


async def _side_by_side(read: Callable[[int], Awaitable[None]], partitions: Sequence[int]) -> None:
    for first in range(0, len(partitions), READ_AT_ONCE):
        await asyncio.gather(*(read(partition) for partition in partitions[first : first + READ_AT_ONCE]))


def _name(key: bytes | None) -> tuple[str, int, int, str] | None:
    """Group, generation, occurrence and task of a row's key."""
    try:
        parts = (key or b"").decode().split("\0", _KEY_PARTS - 1)
        if len(parts) != _KEY_PARTS:
            return None
        return parts[0], int(parts[1]), int(parts[2]), parts[3]
    except ValueError:  # also where it is no UTF-8
        return None
