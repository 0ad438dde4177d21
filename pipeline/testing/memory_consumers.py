"""Twins of a consumer's ports on the in-memory cluster: a group, its ledger, local tables that survive a crash.

As in Kafka: offsets are records too, so they commit with the transaction that holds them, and a later record wins; a
member that the group has given up still believes in its partitions until it is served again.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from pipeline.core.applied import AppliedTask
from pipeline.core.effects import DueTask
from pipeline.core.partitioning import partition_for_key
from pipeline.core.tasks import NO_HEADERS, InstantMs, Offset
from pipeline.errors import CorruptStateError, FencedError, PoisonedBatchError, RetryableError, UnknownOutcomeError
from pipeline.ports import Clock
from pipeline.service.consumer.ports import (
    DueEnd,
    DueRecord,
    Fetched,
    LedgerBatch,
    LedgerBounds,
    LedgerEnd,
    LedgerRecord,
    PartitionListener,
    TableRows,
)
from pipeline.testing.memory_cluster import MemoryCluster, NewRecord
from pipeline.testing.memory_log import LogEntry
from pipeline.testing.memory_transaction import CommitFault
from pipeline.testing.plain_codec import PlainCodec, decode_plain, encode_plain
from pipeline.testing.simulated_process import SimulatedProcess

__all__ = [
    "ConsumerGroupWorld",
    "MemoryLedgerTable",
    "MemoryLedgerTables",
    "MemoryLedgerTransactions",
    "MemorySubscription",
    "PlainConsumerCodec",
    "SteppedClock",
    "WaitingClock",
]

DUE, DEAD, LEDGER, OFFSETS = "due-tasks", "dead-tasks", "applied-tasks", "offsets"


class WaitingClock(Clock, Protocol):
    """A clock that is told when somebody waits."""

    def advance(self, by_ms: int) -> None:
        """Somebody waits so long, if nothing happens before."""
        ...


class SteppedClock:
    """A clock port that stands still until somebody waits."""

    def __init__(self, start_ms: int = 1_767_268_800_000) -> None:
        self._start_ms = start_ms
        self._passed_ms = 0

    def now_ms(self) -> InstantMs:
        """Wall clock, milliseconds since 1970 UTC."""
        return InstantMs(self._start_ms + self._passed_ms)

    def monotonic_ms(self) -> int:
        """Milliseconds since the clock was made."""
        return self._passed_ms

    def advance(self, by_ms: int) -> None:
        """Let time pass."""
        self._passed_ms += by_ms


class PlainConsumerCodec(PlainCodec):
    """The consumer's codec port, for simulations."""

    def encode_applied(self, task: AppliedTask) -> bytes:
        """A ledger row."""
        return encode_plain(task)

    def decode_applied(self, value: bytes) -> AppliedTask:
        """The row in a value; raises `CorruptStateError`."""
        return decode_plain(value, AppliedTask)


class ConsumerGroupWorld:
    """One group on one cluster: topics, the group coordinator, and the disks of its machines.

    A cluster of its own unless it is given one with its `clock`: then time passes as others let it.
    """

    def __init__(
        self,
        *,
        partition_count: int = 1,
        group: str = "group",
        cluster: MemoryCluster | None = None,
        clock: WaitingClock | None = None,
    ) -> None:
        self.clock: WaitingClock = SteppedClock() if clock is None else clock
        self.cluster = MemoryCluster(self.clock) if cluster is None else cluster
        self.group = group
        self.partition_count = partition_count
        self.codec = PlainConsumerCodec()
        self.owners: dict[int, str] = {}
        self.disks: dict[tuple[str, int], tuple[Offset, frozenset[bytes]]] = {}
        self._news: dict[str, deque[tuple[str, int]]] = defaultdict(deque)
        self._upstream = self.cluster.producer("owner-of-due-tasks")
        for topic in (DUE, DEAD, LEDGER, OFFSETS, "outputs"):
            if topic not in self.cluster.topics():
                self.cluster.create_topic(topic, partition_count)
        self._upstream.init()

    # -- what tests do and see ---------------------------------------------------------------------------------------

    def emit(self, *tasks: DueTask, headers: Mapping[str, bytes] = NO_HEADERS, commit: bool = True) -> None:
        """Due records, in one transaction of the owner that commits or aborts."""
        for task in tasks:
            key = task.task_id.encode()
            partition = partition_for_key(key, self.partition_count)
            value = self.codec.encode_due(task)
            self._upstream.send(NewRecord(topic=DUE, partition=partition, key=key, value=value, headers=headers))
        if commit:
            self._upstream.commit()
        else:
            self._upstream.abort()

    def give(self, partition: int, member: str) -> None:
        """The group gives a partition to a member; whoever had it is asked for it first, in his next `serve`."""
        old = self.owners.get(partition)
        if old is None:
            self.owners[partition] = member
            self._news[member].append(("assigned", partition))
        else:
            self._news[old].append((f"revoked for {member}", partition))

    def expel(self, member: str, heir: str) -> None:
        """The session of a dead or frozen member is over: its partitions are the heir's now."""
        for partition, owner in list(self.owners.items()):
            if owner == member:
                self._news[member].append(("lost", partition))
                del self.owners[partition]
                self.give(partition, heir)

    def rows(self) -> list[AppliedTask]:
        """The group's committed ledger."""
        return [self.codec.decode_applied(entry.value or b"") for entry in self.cluster.committed(LEDGER)]

    def committed_offset(self, partition: int) -> Offset:
        """Where the group stands, or 0."""
        entries = self.cluster.log(OFFSETS, partition).committed()
        return Offset(int(entries[-1].value or b"0")) if entries else Offset(0)

    # -- what the twins ask ------------------------------------------------------------------------------------------

    def news(self, member: str) -> deque[tuple[str, int]]:
        """What the member is to be told."""
        return self._news[member]


class MemorySubscription:
    """The subscription of one process, whose name is its member id."""

    def __init__(self, world: ConsumerGroupWorld, process: SimulatedProcess, *, fetch_max: int = 10) -> None:
        self._world = world
        self._process = process
        self._fetch_max = fetch_max
        self._listener: PartitionListener | None = None
        self._reading: dict[int, tuple[str, Offset]] = {}
        self._told_ends: dict[int, Offset] = {}
        self._paused: set[int] = set()

    def open(self, listener: PartitionListener) -> None:
        """Join the group."""
        self._process.step("subscription.open")
        self._listener = listener

    def serve(self) -> None:
        """Tell the listener what has changed."""
        assert self._listener is not None, "open() comes first"
        self._process.step("subscription.serve")
        news = self._world.news(self._process.name)
        while news:
            what, partition = news.popleft()
            if what == "assigned":
                self._listener.on_assigned([partition])
            elif what == "lost":
                self._listener.on_lost([partition])
            elif self._world.owners.get(partition) == self._process.name:
                self._listener.on_revoked([partition])
                del self._world.owners[partition]
                self._world.give(partition, what.removeprefix("revoked for "))

    def prove(self, partition: int) -> None:
        """Raises `FencedError` unless the group takes this member for the owner."""
        self._process.step("subscription.prove")
        if self._world.owners.get(partition) != self._process.name:
            raise FencedError(f"{self._process.name} does not own partition {partition} in the group's eyes")
        offset = self._world.committed_offset(partition)
        self._world.cluster.send(OFFSETS, b"offset", str(offset).encode(), partition=partition)

    def start_position(self, partition: int) -> Offset:
        """The committed offset, or 0."""
        self._process.step("subscription.start_position")
        return self._world.committed_offset(partition)

    def ledger_bounds(self, partition: int) -> LedgerBounds:
        """Start and high watermark of the ledger partition."""
        self._process.step("subscription.ledger_bounds")
        log = self._world.cluster.log(LEDGER, partition)
        return LedgerBounds(start=log.start_offset, end=log.end_offset)

    def read_ledger(self, partition: int, position: Offset) -> None:
        """Hand over the ledger from `position` on."""
        self._read(LEDGER, partition, position)

    def read_due(self, partition: int, position: Offset) -> None:
        """Hand over due records from `position` on."""
        self._read(DUE, partition, position)

    def pause(self, partition: int) -> None:
        """Fetch no more for now."""
        self._paused.add(partition)

    def resume(self, partition: int) -> None:
        """Undo `pause`."""
        self._paused.discard(partition)

    def stop(self, partition: int) -> None:
        """Hand over nothing more."""
        self._reading.pop(partition, None)
        self._told_ends.pop(partition, None)
        self._paused.discard(partition)

    def take(self, timeout_ms: int) -> Sequence[Fetched]:
        """What there is; time passes if there is nothing."""
        self._process.step("subscription.take")
        found = [one for partition in list(self._reading) for one in self._fetch(partition)]
        if not found:
            self._world.clock.advance(max(1, timeout_ms))
        return found

    def close(self) -> None:
        """Leave the group."""
        self._process.step("subscription.close")
        for partition, owner in list(self._world.owners.items()):
            if owner == self._process.name:
                del self._world.owners[partition]

    def _read(self, topic: str, partition: int, position: Offset) -> None:
        self._process.step("subscription.read")
        self.stop(partition)
        self._reading[partition] = (topic, position)

    def _fetch(self, partition: int) -> list[Fetched]:
        topic, position = self._reading[partition]
        if partition in self._paused:
            return []
        log = self._world.cluster.log(topic, partition)
        entries, after = log.read_committed(position, self._fetch_max)
        self._reading[partition] = (topic, after)
        found: list[Fetched] = [_fetched(topic, partition, entry) for entry in entries]
        if after >= log.last_stable_offset and self._told_ends.get(partition) != after:
            self._told_ends[partition] = after
            end = LedgerEnd if topic == LEDGER else DueEnd
            found.append(end(partition=partition, position=after))
        return found


class MemoryLedgerTransactions:
    """The ledger's producers of one process. `commits` are the faults of the next commits, None for none."""

    def __init__(self, world: ConsumerGroupWorld, process: SimulatedProcess) -> None:
        self.world = world
        self.process = process
        self.commits: deque[CommitFault | None] = deque()
        self.is_poisoned: Callable[[NewRecord], bool] = lambda _: False

    def open(self, partition: int) -> "MemoryLedgerTransaction":
        """A new producer."""
        return MemoryLedgerTransaction(self, partition)


class MemoryLedgerTransaction:
    """One partition's producer."""

    def __init__(self, parent: MemoryLedgerTransactions, partition: int) -> None:
        world = parent.world
        topic_id = world.cluster.topics()[LEDGER].topic_id
        self._parent = parent
        self._world = world
        self._partition = partition
        self._producer = world.cluster.producer(f"duetasks-ledger-{topic_id}-{world.group}-{partition}")

    def acquire(self) -> None:
        """Fence every earlier owner."""
        self._parent.process.step("ledger.acquire")
        self._producer.init()

    def commit(self, batch: LedgerBatch) -> Sequence[Offset]:
        """All or nothing; raises what the faults say."""
        step, commits = self._parent.process.step, self._parent.commits
        fault = commits.popleft() if commits else None
        records = self._records(batch)
        step("ledger.send")
        offsets = self._producer.send(*records)
        if any(self._parent.is_poisoned(record) for record in records):
            self._producer.abort()
            raise PoisonedBatchError("the simulated broker refuses a record of this batch")
        # The group is asked when the offsets are sent; after that only a newer producer can stop the commit.
        if fault is CommitFault.RETRYABLE or self._world.owners.get(self._partition) != self._parent.process.name:
            self._producer.abort()
            raise RetryableError("aborted: the group does not take these offsets now")
        step("ledger.commit")
        if fault is CommitFault.FENCED:
            self._producer.init()
            raise FencedError("a newer producer exists")
        if fault is not CommitFault.UNKNOWN_NOT_COMMITTED:
            self._producer.commit()
        if fault in {CommitFault.UNKNOWN_COMMITTED, CommitFault.UNKNOWN_NOT_COMMITTED}:
            raise UnknownOutcomeError("no answer to the commit")
        step("ledger.committed")
        return offsets[: len(batch.rows)]

    def close(self) -> None:
        """Let go."""

    def _records(self, batch: LedgerBatch) -> list[NewRecord]:
        at = self._partition
        rows = [NewRecord(topic=LEDGER, partition=at, key=key, value=value) for key, value in batch.rows]
        dead = [NewRecord(topic=DEAD, partition=at, key=key, value=value) for key, value in batch.dead]
        outputs = [
            NewRecord(topic=output.topic, partition=at, key=output.key, value=output.value, headers=output.headers)
            for output in batch.outputs
        ]
        position = str(batch.position).encode()
        return [*rows, *dead, *outputs, NewRecord(topic=OFFSETS, partition=at, key=b"offset", value=position)]


class MemoryLedgerTable:
    """A local table on a disk that outlives its process: `disk` is where the last write is."""

    def __init__(
        self,
        disks: dict[tuple[str, int], tuple[Offset, frozenset[bytes]]],
        place: tuple[str, int],
        on_step: Callable[[str], None],
    ) -> None:
        self._disks = disks
        self._place = place
        self._on_step = on_step
        self._position, digests = disks.get(place, (Offset(0), frozenset[bytes]()))
        self._digests = set(digests)

    def position(self) -> Offset:
        """How far the ledger is in this table."""
        return self._position

    def contains(self, digest: bytes) -> bool:
        """Whether the row is there."""
        return digest in self._digests

    def write(self, rows: TableRows, position: Offset) -> None:
        """Apply rows and position, both or neither."""
        self._on_step("table.write")
        self._digests |= set(rows.added)
        self._digests -= set(rows.removed)
        self._position = position
        self._disks[self._place] = (position, frozenset(self._digests))

    def close(self) -> None:
        """Nothing to release."""


class MemoryLedgerTables:
    """The tables of one machine. `corrupt_once` makes the next `open` of a partition fail."""

    def __init__(self, world: ConsumerGroupWorld, process: SimulatedProcess, *, machine: str = "machine") -> None:
        self._world = world
        self._process = process
        self._machine = machine
        self.corrupt_once: set[int] = set()
        self.put_asides: list[int] = []

    def open(self, partition: int) -> MemoryLedgerTable:
        """The table as it was left."""
        self._process.step("tables.open")
        if partition in self.corrupt_once:
            self.corrupt_once.remove(partition)
            raise CorruptStateError("the simulated table is unreadable")
        return MemoryLedgerTable(self._world.disks, (self._machine, partition), self._process.step)

    def put_aside(self, partition: int, reason: str) -> None:
        """The next `open` gives a new one."""
        del reason
        self.put_asides.append(partition)
        self._world.disks.pop((self._machine, partition), None)


def _fetched(topic: str, partition: int, entry: LogEntry) -> Fetched:
    if topic == LEDGER:
        return LedgerRecord(partition=partition, offset=entry.offset, key=entry.key, has_value=entry.value is not None)
    return DueRecord(
        partition=partition,
        offset=entry.offset,
        append_at_ms=entry.timestamp,
        key=entry.key,
        value=entry.value,
        headers=entry.headers,
    )
