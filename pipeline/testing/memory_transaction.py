"""The twin of the transactional producer, with the faults that a real one meets."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Final

from pipeline.core.tasks import NO_HEADERS, Offset
from pipeline.errors import (
    FencedError,
    PoisonedBatchError,
    RetryableError,
    UnavailableError,
    UnknownOutcomeError,
    UsageError,
)
from pipeline.ports import Commit, OffsetsMovedError
from pipeline.testing.memory_cluster import MemoryCluster, MemoryProducer, NewRecord
from pipeline.testing.simulated_process import SimulatedProcess

__all__ = ["ACKNOWLEDGE_MS_MAX", "CommitFault", "MemoryTransaction", "TransactionFaults"]

IsRefused = Callable[[NewRecord], bool]

ACKNOWLEDGE_MS_MAX: Final = 8_000
"""How long a producer waits for the replicas."""
_LOOK_AGAIN_MS: Final = 200


def _none(_record: NewRecord) -> bool:
    return False


class CommitFault(StrEnum):
    """What happens to one commit."""

    FENCED = "FENCED"
    RETRYABLE = "RETRYABLE"
    UNKNOWN_COMMITTED = "UNKNOWN_COMMITTED"
    UNKNOWN_NOT_COMMITTED = "UNKNOWN_NOT_COMMITTED"


class TransactionFaults:
    """The faults of one process: the next commits' and acquires', and which records are refused.

    `is_too_large` is found out by `produce`, `is_poisoned` only by the broker, so that `commit` fails. `records_max` is
    the size of the largest transaction so far.
    """

    def __init__(self) -> None:
        self.commits: deque[CommitFault | None] = deque()
        self.unavailable_acquires = 0
        self.records_max = 0
        self.is_too_large: IsRefused = _none
        self.is_poisoned: IsRefused = _none


class MemoryTransaction:
    """The transaction port on a `MemoryCluster`. Records reach the broker at `commit`, as if all sat in the client."""

    def __init__(
        self,
        cluster: MemoryCluster,
        transactional_id: str,
        *,
        partition: int,
        state_topic: str,
        process: SimulatedProcess,
        faults: TransactionFaults | None = None,
    ) -> None:
        self.transactional_id = transactional_id
        self._cluster = cluster
        self._producer: MemoryProducer = cluster.producer(transactional_id, by=process.name)
        self._partition = partition
        self._state_topic = state_topic
        self._process = process
        self._faults = faults if faults is not None else TransactionFaults()
        self._pending: list[NewRecord] | None = None
        self._expected: dict[int, Offset] = {}
        self._acquired = False

    async def acquire(self) -> None:
        """Fence every earlier owner and settle its open transaction; raises `UnavailableError` if told to."""
        await self._process.reach("transaction.acquire")
        if self._faults.unavailable_acquires:
            self._faults.unavailable_acquires -= 1
            raise UnavailableError("the simulated coordinator does not answer")
        self._producer.init()
        self._acquired = True

    def begin(self) -> None:
        """Open a transaction; the broker hears of it with the first record."""
        self._process.check()
        if not self._acquired or self._pending is not None:
            raise UsageError("begin() comes after acquire(), and after the end of the transaction before")
        self._pending, self._expected = [], {}

    def produce(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        headers: Mapping[str, bytes] | None = None,
        *,
        expected: Offset | None = None,
    ) -> None:
        """Add a record; raises `PoisonedBatchError` if the client finds it too large."""
        self._process.check()
        record = NewRecord(topic=topic, partition=self._partition, key=key, value=value, headers=headers or NO_HEADERS)
        if self._faults.is_too_large(record):
            raise PoisonedBatchError(f"a record of {len(value or b'')} bytes for {topic} can't be sent")
        records = self._open()
        if expected is not None:
            self._expected[len(records)] = expected
        records.append(record)

    def produce_many(self, topic: str, records: Sequence[tuple[bytes | None, bytes | None]]) -> None:
        """Add records without headers; raises `PoisonedBatchError`."""
        for key, value in records:
            self.produce(topic, key, value)

    def produce_last(self, key: bytes, value: bytes) -> None:
        """Add the last record, to `task-state`."""
        self.produce(self._state_topic, key, value)

    async def commit(self) -> Commit:
        """All or nothing; raises what the faults say, and `FencedError` if somebody newer exists."""
        records = self._open()
        self._faults.records_max = max(self._faults.records_max, len(records))
        await self._process.reach("transaction.flush")
        fault = self._faults.commits.popleft() if self._faults.commits else None
        if fault is CommitFault.FENCED:
            # Somebody initialises the same transactional.id at the worst moment, then goes away.
            self._producer.send(*records)
            self._producer.init()
            self._pending, self._acquired = None, False
            raise FencedError(f"{self.transactional_id}: a newer producer exists")
        offsets = self._producer.send(*records)
        if not await self._are_acknowledged(records, offsets):
            await self.abort()
            raise RetryableError("the simulated leader changed before it acknowledged these records")
        if any(offsets[at] != expected for at, expected in self._expected.items()):
            await self.abort()
            raise OffsetsMovedError("a record got another offset than the one that was written down")
        if any(self._faults.is_poisoned(record) for record in records):
            await self.abort()
            raise PoisonedBatchError("the simulated broker refuses a record of this batch")
        await self._process.reach("transaction.commit")
        self._pending = None
        if fault is CommitFault.RETRYABLE:
            self._producer.abort()
            raise RetryableError("the simulated broker asks to try again")
        if fault is CommitFault.UNKNOWN_NOT_COMMITTED:
            raise UnknownOutcomeError("no answer to the commit (it did not happen)")
        self._producer.commit()
        await self._process.answered()
        if fault is CommitFault.UNKNOWN_COMMITTED:
            raise UnknownOutcomeError("no answer to the commit (it did happen)")
        at_state = [
            offset for offset, record in zip(offsets, records, strict=True) if record.topic == self._state_topic
        ]
        last_offsets = {
            record.topic: offset
            for offset, record in zip(offsets, records, strict=True)
            if record.topic != self._state_topic
        }
        return Commit(last_state_offset=at_state[-1] if at_state else Offset(-1), last_offsets=last_offsets)

    async def abort(self) -> None:
        """Give the open transaction up; raises `FencedError`."""
        await self._process.reach("transaction.abort")
        self._pending = None
        self._producer.abort()

    async def close(self) -> None:
        """Let go; an open transaction is left to the next owner or the time-out."""
        self._process.check()
        self._pending, self._acquired = None, False

    async def _are_acknowledged(self, records: Sequence[NewRecord], offsets: Sequence[Offset]) -> bool:
        """Wait until the replicas have it all; False if a change of the leader lost some, or they take too long."""
        appended = [
            (log, log.entry(offset))
            for record, offset in zip(records, offsets, strict=True)
            if (log := self._cluster.log(record.topic, record.partition)).end_offset <= offset
        ]
        until_ms = self._cluster.clock.monotonic_ms() + ACKNOWLEDGE_MS_MAX
        while any(log.end_offset <= entry.offset and log.holds(entry) for log, entry in appended):
            if self._cluster.clock.monotonic_ms() >= until_ms:
                return False
            await self._cluster.change(_LOOK_AGAIN_MS)
            await self._process.stand()
        return all(log.holds(entry) for log, entry in appended)

    def _open(self) -> list[NewRecord]:
        if self._pending is None:
            raise UsageError("there is no open transaction: begin() one")
        return self._pending
