"""What the consuming side needs of the outside, as protocols; `adapters` and `testing` implement them.

A handler is an ordinary function that may block, so nothing here is a coroutine. Every call that waits has a bound of
its own and raises when it is over; only `DueSubscription.take` may wait for something to happen.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from pipeline.core.applied import AppliedTask
from pipeline.core.effects import DeadTask, DueTask
from pipeline.core.tasks import Offset

__all__ = [
    "ConsumerCodec",
    "DueEnd",
    "DueRecord",
    "DueSubscription",
    "Fetched",
    "KeyValue",
    "LedgerBatch",
    "LedgerBounds",
    "LedgerEnd",
    "LedgerRecord",
    "LedgerTable",
    "LedgerTables",
    "LedgerTransaction",
    "LedgerTransactions",
    "Output",
    "PartitionListener",
    "ReadFailed",
    "TableIdentity",
    "TableRows",
]

KeyValue = tuple[bytes | None, bytes | None]


class DueRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One committed record of the due topic."""

    partition: int
    offset: Offset
    append_at_ms: int
    key: bytes | None
    value: bytes | None
    headers: Mapping[str, bytes]


class DueEnd(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Everything of the due partition below `position` was handed over; markers and aborted records lie below it."""

    partition: int
    position: Offset


class LedgerRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One committed record of the ledger topic, of whatever group; without a value: the row was deleted."""

    partition: int
    offset: Offset
    key: bytes | None
    has_value: bool


class LedgerEnd(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Everything of the ledger partition below `position` was handed over; an open transaction may lie above it."""

    partition: int
    position: Offset


class ReadFailed(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A partition can't be read on from where it was: acquire it again."""

    partition: int
    why: str


Fetched = DueRecord | DueEnd | LedgerRecord | LedgerEnd | ReadFailed


class LedgerBounds(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """First retained offset of a ledger partition, and its high watermark (`read_uncommitted`)."""

    start: Offset
    end: Offset


class PartitionListener(Protocol):
    """Who is told which partitions this member has; called within `serve` and `close` only."""

    def on_assigned(self, partitions: Sequence[int]) -> None:
        """These are this member's from now on."""
        ...

    def on_revoked(self, partitions: Sequence[int]) -> None:
        """These go to somebody else when this returns: commit what is finished, briefly."""
        ...

    def on_lost(self, partitions: Sequence[int]) -> None:
        """These are somebody else's already: drop everything, write nothing."""
        ...


class DueSubscription(Protocol):
    """Membership of the group, and the reading of its partitions of the due topic and of the ledger topic.

    The group only says who owns a partition; where reading begins is said here, call by call.
    """

    def open(self, listener: PartitionListener) -> None:
        """Join the group; raises `NotFoundError`, `TopicMismatchError`, `UnavailableError`."""
        ...

    def serve(self) -> None:
        """Tell the listener what has changed; never waits. Must be called at least every `max.poll.interval.ms`."""
        ...

    def prove(self, partition: int) -> None:
        """Commit under the present generation, changing nothing; raises `FencedError`, `UnavailableError`."""
        ...

    def start_position(self, partition: int) -> Offset:
        """Where the group stands: its committed offset, or the first retained; raises `UnavailableError`."""
        ...

    def ledger_bounds(self, partition: int) -> LedgerBounds:
        """Bounds of the ledger partition, asked for after this call began; raises `UnavailableError`."""
        ...

    def read_ledger(self, partition: int, position: Offset) -> None:
        """Begin to hand over the ledger partition from `position` on, by `take`, until `stop` or `read_due`."""
        ...

    def read_due(self, partition: int, position: Offset) -> None:
        """Begin to hand over the due partition from `position` on, by `take`, until `stop`."""
        ...

    def pause(self, partition: int) -> None:
        """Fetch no more of the due partition for now; what was fetched before may still come."""
        ...

    def resume(self, partition: int) -> None:
        """Undo `pause`."""
        ...

    def stop(self, partition: int) -> None:
        """Hand over nothing more of this partition."""
        ...

    def take(self, timeout_ms: int) -> Sequence[Fetched]:
        """What was fetched, in order within each partition, a bounded number; waits until there is something."""
        ...

    def close(self) -> None:
        """Leave the group."""
        ...


class Output(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A record that a handler adds to the transaction of its task; its key decides the partition."""

    topic: str
    key: bytes | None
    value: bytes | None
    headers: Mapping[str, bytes]


class LedgerBatch(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one transaction holds. `position` is the due offset that the group goes on from."""

    rows: Sequence[tuple[bytes, bytes]]
    dead: Sequence[KeyValue]
    outputs: Sequence[Output]
    position: Offset


class LedgerTransaction(Protocol):
    """The transactional producer of one (ledger, group, partition); every batch is one transaction."""

    def acquire(self) -> None:
        """Fence every earlier owner and settle its open transaction; raises `FencedError`, `UnavailableError`."""
        ...

    def commit(self, batch: LedgerBatch) -> Sequence[Offset]:
        """Rows, dead tasks, outputs and the group's offset: all or nothing. Returns the offsets of the rows.

        Raises `PoisonedBatchError` (aborted; fewer records may do), `RetryableError` (aborted cleanly), `FencedError`,
        `UnknownOutcomeError` (it may have committed: forget everything and acquire again).
        """
        ...

    def close(self) -> None:
        """Let go without waiting for an open transaction."""
        ...


class LedgerTransactions(Protocol):
    """Makes the producers of partitions."""

    def open(self, partition: int) -> LedgerTransaction:
        """A new producer, not acquired yet."""
        ...


class TableIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Whose rows a local table holds; a table that says something else is another's."""

    cluster_id: str
    ledger_topic_id: str
    group: str
    partition: int


class TableRows(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One change of a local table: digests of new rows, and of deleted ones."""

    added: Sequence[bytes]
    removed: Sequence[bytes] = ()


class LedgerTable(Protocol):
    """The group's rows of one ledger partition, on the local disk: a copy that is never newer than the topic.

    Every method may raise `CorruptStateError` (put it aside) and `UnavailableError` (the disk refuses).
    """

    def position(self) -> Offset:
        """How far the ledger partition is in this table; 0 for a new one."""
        ...

    def contains(self, digest: bytes) -> bool:
        """Whether the row is there."""
        ...

    def write(self, rows: TableRows, position: Offset) -> None:
        """Apply rows and position, both or neither."""
        ...

    def close(self) -> None:
        """Release files and lock."""
        ...


class LedgerTables(Protocol):
    """Where local tables live."""

    def open(self, partition: int) -> LedgerTable:
        """The table of `partition`, as it was left or new.

        One that is of another identity or can't be read is put aside first. Raises `UnavailableError`.
        """
        ...

    def put_aside(self, partition: int, reason: str) -> None:
        """Rename the (closed) table out of the way, so that the next `open` gives a new one."""
        ...


class ConsumerCodec(Protocol):
    """Values of the consuming side to bytes and back."""

    def decode_due(self, value: bytes) -> DueTask:
        """The due task in a record; raises `CorruptStateError`."""
        ...

    def encode_dead(self, task: DeadTask) -> bytes:
        """A `dead-tasks` value."""
        ...

    def encode_applied(self, task: AppliedTask) -> bytes:
        """A ledger row."""
        ...
