"""What rebuild and replay need of the outside beyond the owner's ports."""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from pipeline.core.effects import DeadTask, DueTask
from pipeline.core.tasks import InstantMs, Offset
from pipeline.ports import Clock, ClusterView, Codec, StateLog, TableStore, Transaction

__all__ = [
    "LogBounds",
    "LogChunk",
    "LogRecord",
    "LongTransaction",
    "PartitionLog",
    "RebuildOutside",
    "RecoveryCodec",
    "ReplayWriter",
]


class LogRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A committed record as it stands in its partition; `timestamp` is when the broker appended it."""

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]] = ()


class LogChunk(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A stretch of a partition: its committed records, and the position after it, also over markers."""

    records: Sequence[LogRecord]
    position: Offset


class LogBounds(msgspec.Struct, frozen=True, kw_only=True):
    """First retained offset; first offset of an open transaction, or the end; the end (high watermark)."""

    start: Offset
    stable_end: Offset
    end: Offset


class PartitionLog(Protocol):
    """Reads any partition, `read_committed`, by position. Every call raises `UnavailableError`."""

    async def bounds(self, topic: str, partition: int) -> LogBounds:
        """As of now."""
        ...

    async def offset_at(self, topic: str, partition: int, at_ms: InstantMs) -> Offset | None:
        """The first offset that was appended at `at_ms` or later; None if there is none."""
        ...

    def read(self, topic: str, partition: int, start: Offset, end: Offset) -> AsyncGenerator[LogChunk]:
        """Chunks until the position reaches `end`; waits for open transactions."""
        ...


class RecoveryCodec(Codec, Protocol):
    """The codec, with what only recovery reads back."""

    def decode_due(self, value: bytes) -> DueTask:
        """A due task; raises `CorruptStateError`."""
        ...

    def decode_dead(self, value: bytes) -> DeadTask:
        """A dead task; raises `CorruptStateError`."""
        ...


class LongTransaction(Transaction, Protocol):
    """A transaction of more records than fit in memory."""

    async def flush(self) -> None:
        """Wait until what was produced so far has been answered for; errors show at the commit."""
        ...


class RebuildOutside(msgspec.Struct, frozen=True, kw_only=True):
    """The ports that a rebuild works with.

    `scratch` gives a store of its own for each name; what is in it may be deleted afterwards. `transaction` makes a
    producer for a `transactional.id`.
    """

    clock: Clock
    codec: RecoveryCodec
    cluster: ClusterView
    log: PartitionLog
    state_log: StateLog
    scratch: Callable[[str], TableStore]
    transaction: Callable[[str], LongTransaction]


class ReplayWriter(Protocol):
    """A transactional producer that copies records to partitions of its choice."""

    async def acquire(self) -> None:
        """Get ready; raises `UnavailableError`."""
        ...

    def begin(self) -> None:
        """Open a transaction."""
        ...

    def copy(self, topic: str, partition: int, record: LogRecord, headers: Mapping[str, bytes]) -> None:
        """Add the record unchanged, with `headers` behind its own."""
        ...

    def delete(self, topic: str, partition: int, key: bytes) -> None:
        """Add a tombstone."""
        ...

    async def commit(self) -> None:
        """All or nothing; raises `UnavailableError`, `UnknownOutcomeError`, `FencedError`."""
        ...

    async def abort(self) -> None:
        """Give the open transaction up."""
        ...

    async def close(self) -> None:
        """Let go."""
        ...
