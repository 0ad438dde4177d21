"""Twins of what rebuild and replay need: any partition by position, and a transaction that is written in parts."""

from collections.abc import AsyncGenerator
from typing import Final

from pipeline.core.tasks import InstantMs, Offset
from pipeline.service.recovery.ports import LogBounds, LogChunk, LogRecord
from pipeline.testing.memory_cluster import MemoryCluster
from pipeline.testing.memory_transaction import MemoryTransaction

__all__ = ["MemoryLongTransaction", "MemoryPartitionLog"]

_LOOK_AGAIN_MS: Final = 100


class MemoryPartitionLog:
    """The partition log port: `read_committed`, by position, in chunks of `chunk_records`."""

    def __init__(self, cluster: MemoryCluster, *, chunk_records: int = 100) -> None:
        self._cluster = cluster
        self._chunk_records = chunk_records

    async def bounds(self, topic: str, partition: int) -> LogBounds:
        """As of now."""
        log = self._cluster.log(topic, partition)
        return LogBounds(start=log.start_offset, stable_end=log.last_stable_offset, end=log.end_offset)

    async def offset_at(self, topic: str, partition: int, at_ms: InstantMs) -> Offset | None:
        """The first offset that was appended at `at_ms` or later."""
        entries = self._cluster.log(topic, partition).entries
        return next((entry.offset for entry in entries if entry.timestamp >= at_ms), None)

    async def read(self, topic: str, partition: int, start: Offset, end: Offset) -> AsyncGenerator[LogChunk]:
        """Chunks until the position reaches `end`; waits for open transactions."""
        position = start
        while position < end:
            entries, stable = self._cluster.log(topic, partition).read_committed(position, self._chunk_records)
            if stable == position:
                await self._cluster.change(_LOOK_AGAIN_MS)
                continue
            position = stable
            yield LogChunk(
                records=[
                    LogRecord(
                        offset=entry.offset,
                        timestamp=entry.timestamp,
                        key=entry.key,
                        value=entry.value,
                        headers=tuple(entry.headers.items()),
                    )
                    for entry in entries
                    if entry.offset < end
                ],
                position=min(position, end),
            )


class MemoryLongTransaction(MemoryTransaction):
    """The transaction twin; all of it fits in memory here."""

    async def flush(self) -> None:
        """Nothing to wait for."""
