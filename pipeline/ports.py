"""What the service layer needs of the outside, as protocols; `adapters` and `testing` implement them.

Everything that may wait is a coroutine, so that a simulator can run the same code on virtual time.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Protocol

import msgspec

from pipeline.core.effects import DeadTask, DueTask
from pipeline.core.events import Event, Rejection
from pipeline.core.positions import Positions
from pipeline.core.tasks import IndexEntry, InstantMs, Offset, TaskId, TaskState
from pipeline.errors import RetryableError

__all__ = [
    "Clock",
    "ClusterIdentity",
    "ClusterView",
    "Codec",
    "Commit",
    "EndOffsets",
    "EventSource",
    "InputBatch",
    "InputRecord",
    "Membership",
    "OffsetsMovedError",
    "StateChunk",
    "StateLog",
    "TableMeta",
    "TableRow",
    "TableStore",
    "TimerTable",
    "TopicIdentity",
    "Transaction",
]


class Clock(Protocol):
    """The owner's clock, and a counter that nobody can set."""

    def now_ms(self) -> InstantMs:
        """Wall clock, milliseconds since 1970 UTC."""
        ...

    def monotonic_ms(self) -> int:
        """Milliseconds since some start; includes time asleep, never steps."""
        ...


class Codec(Protocol):
    """Values of the core to bytes and back."""

    def decode_event(self, value: bytes) -> Event | Rejection:
        """The event in a `task-events` value, or why it is none; never raises on bad input."""
        ...

    def encode_state(self, state: TaskState) -> bytes:
        """A row."""
        ...

    def decode_state(self, value: bytes) -> TaskState:
        """A row's state; raises `CorruptStateError`."""
        ...

    def encode_positions(self, positions: Positions) -> bytes:
        """A positions record."""
        ...

    def decode_positions(self, value: bytes) -> Positions:
        """A positions record's content; raises `CorruptStateError`."""
        ...

    def encode_due(self, task: DueTask) -> bytes:
        """A `due-tasks` value."""
        ...

    def encode_dead(self, task: DeadTask) -> bytes:
        """A `dead-tasks` value."""
        ...


class InputRecord(Protocol):
    """One record of an input topic, as the consumer client hands it over."""

    @property
    def offset(self) -> int:
        """Its place."""
        ...

    @property
    def timestamp(self) -> int:
        """When the broker appended it (milliseconds): the topic's timestamps are `LogAppendTime`."""
        ...

    @property
    def key(self) -> bytes | None:
        """The key's bytes."""
        ...

    @property
    def value(self) -> bytes | None:
        """The value's bytes."""
        ...


class InputBatch(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one fetch brought: the position moved from `start_position` to `end_position`, also over markers."""

    start_position: Offset
    end_position: Offset
    records: Sequence[InputRecord]


class EventSource(Protocol):
    """The input of one partition, bounded: a full source stops being fetched."""

    def seek(self, position: Offset) -> None:
        """Forget what is buffered and fetch from `position` on."""
        ...

    def take(self) -> InputBatch | None:
        """The next buffered batch, or None; in order, never waits."""
        ...

    async def wait(self, timeout_ms: int) -> None:
        """Return when something may be buffered, `wake` was called, or the time is over."""
        ...

    def wake(self) -> None:
        """End a wait now."""
        ...

    def pause(self) -> None:
        """Forget what is buffered and fetch nothing until the next `seek`."""
        ...


class TopicIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """What makes a topic the one that it was, and how many partitions it has."""

    topic_id: str
    partition_count: int


class ClusterIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Which cluster this is, and its topics by name; a topic that does not exist is absent."""

    cluster_id: str
    topics: Mapping[str, TopicIdentity]


class ClusterView(Protocol):
    """Asks the cluster what it is."""

    async def describe(self, topics: Sequence[str]) -> ClusterIdentity:
        """Identity of cluster and topics as of now; raises `UnavailableError`."""
        ...


class EndOffsets(Protocol):
    """Asks leaders for the ends of partitions, `read_uncommitted`: the high watermark, never the last stable offset."""

    async def end_offset(self, topic: str, partition: int) -> Offset:
        """The high watermark, asked for after this call began; raises `UnavailableError`."""
        ...

    async def start_offset(self, topic: str, partition: int) -> Offset:
        """The first offset still retained; raises `UnavailableError`."""
        ...


class OffsetsMovedError(RetryableError):
    """A record did not get the offset that it was expected to get: somebody else wrote to the partition; aborted."""


class Commit(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a committed transaction learned: the offset of the last record that it wrote to `task-state`.

    `last_offsets`: where the last record added by `produce` stands, by topic.
    """

    last_state_offset: Offset
    last_offsets: Mapping[str, Offset]


class Transaction(Protocol):
    """The transactional producer of one partition; one transaction at a time."""

    async def acquire(self) -> None:
        """Fence every earlier owner and settle its open transaction; raises `FencedError`, `UnavailableError`."""
        ...

    def begin(self) -> None:
        """Open a transaction; raises `FencedError`."""
        ...

    def produce(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        headers: Mapping[str, bytes] | None = None,
        *,
        expected: Offset | None = None,
    ) -> None:
        """Add a record for the owner's partition of `topic`; raises `PoisonedBatchError` if it can't be sent at all.

        `expected`: the offset it must get, for it was written down; if it gets another, `commit` aborts and raises
        `OffsetsMovedError`.
        """
        ...

    def produce_many(self, topic: str, records: Sequence[tuple[bytes | None, bytes | None]]) -> None:
        """Add records without headers, cheaper than one by one; raises `PoisonedBatchError`."""
        ...

    def produce_last(self, key: bytes, value: bytes) -> None:
        """Add the transaction's last record, to `task-state`: `commit` tells its offset."""
        ...

    async def commit(self) -> Commit:
        """All or nothing.

        Raises `PoisonedBatchError` (aborted; fewer records may do), `OffsetsMovedError` (aborted; somebody else
        wrote in between), `RetryableError` (aborted cleanly),
        `FencedError`, `UnknownOutcomeError` (it may have committed: forget everything and acquire again).
        """
        ...

    async def abort(self) -> None:
        """Give the open transaction up; raises `FencedError`, `UnknownOutcomeError`."""
        ...

    async def close(self) -> None:
        """Let go without waiting; an open transaction is left to the next owner or the broker's time-out."""
        ...


class StateChunk(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A stretch of committed `task-state` records as (key, value), and the position after it."""

    records: Sequence[tuple[bytes, bytes | None]]
    position: Offset


class StateLog(Protocol):
    """Reads one partition of `task-state`, `read_committed`, by position."""

    def read(self, partition: int, start: Offset, end: Offset) -> AsyncGenerator[StateChunk]:
        """Chunks until the position reaches `end`, also over markers and aborted records; waits for open transactions.

        Raises `UnavailableError`. An end that is a last stable offset or a last record seen would stop too early.
        """
        ...


class Membership(Protocol):
    """The consumer group's word on who owns a partition."""

    async def prove(self, partition: int) -> None:
        """Commit under the present generation, changing nothing; raises `FencedError` if it is not ours."""
        ...

    async def commit(self, partition: int, position: Offset) -> None:
        """Record `position` for observers; best effort under the present generation, raises `FencedError`."""
        ...

    async def committed(self, partition: int) -> Offset | None:
        """What the group last committed, or None; only evidence that work was done, never a position to read from."""
        ...


class TableMeta(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a local table reflects: the positions, and how far `task-state` is in it."""

    positions: Positions
    state_position: Offset


class TableRow(msgspec.Struct, frozen=True, gc=False):
    """One change to the table: the row's new bytes (None: removed), the index entry to drop and the one to add."""

    task_id: TaskId
    value: bytes | None
    drop: IndexEntry | None
    add: IndexEntry | None


class TimerTable(Protocol):
    """The timer table of one partition: rows by id, one ordered index, meta. All changes of a `write` or none."""

    def meta(self) -> bytes | None:
        """The meta bytes of the last write, or None for a new table."""
        ...

    def get_many(self, task_ids: Sequence[TaskId]) -> list[bytes | None]:
        """Rows in the order asked for; None where there is none."""
        ...

    def due(self, until_ms: InstantMs, limit: int) -> list[IndexEntry]:
        """The first `limit` index entries with `at_ms <= until_ms`, in order."""
        ...

    def next_at_ms(self) -> InstantMs | None:
        """The instant of the first index entry, or None if there is no timer."""
        ...

    def scan(self, after: TaskId | None, limit: int) -> list[tuple[TaskId, bytes]]:
        """Rows in id order, after `after` (None: from the first), at most `limit`."""
        ...

    def write(self, rows: Sequence[TableRow], meta: bytes) -> None:
        """Apply in one atomic batch, together with the meta bytes."""
        ...

    def close(self) -> None:
        """Release the files and their lock; further calls raise."""
        ...


class TableStore(Protocol):
    """Where the local tables of an agent live."""

    async def open(self, partition: int) -> TimerTable:
        """The table of `partition`, new or as it was left.

        Raises `UnavailableError` if another process keeps holding its lock, `CorruptStateError` if it can't be read.
        """
        ...

    def put_aside(self, partition: int, reason: str) -> str:
        """Rename the (closed) table out of the way, never delete it; returns where it went.

        Raises `NotFoundError` if there is none, `UnavailableError` if the disk refuses.
        """
        ...
