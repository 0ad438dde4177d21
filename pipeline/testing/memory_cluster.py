"""A broker in memory: topics with ids, transactions with epochs and time-outs, nothing else.

What matters is as in Kafka: a commit is decided before its markers are written, `read_committed` readers wait for the
markers, a newer producer of a `transactional.id` fences the older one and settles what it left open.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from pipeline.core.partitioning import partition_for_key
from pipeline.core.tasks import NO_HEADERS, Offset
from pipeline.errors import FencedError, NotFoundError
from pipeline.ports import Clock
from pipeline.testing.memory_log import LogEntry, MemoryLog, RunState, TransactionRun

__all__ = ["MemoryCluster", "MemoryProducer", "MemoryTopic", "NewRecord"]

_TRANSACTION_TIMEOUT_MS: Final = 10_000


class MemoryTopic(msgspec.Struct, kw_only=True):
    """A topic: its id, new with each creation, and its partitions."""

    topic_id: str
    logs: list[MemoryLog]


class NewRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A record that is to be appended."""

    topic: str
    partition: int
    key: bytes | None
    value: bytes | None
    headers: Mapping[str, bytes] = NO_HEADERS


class _Coordinated:
    """What the transaction coordinator knows of one `transactional.id`."""

    def __init__(self) -> None:
        self.epoch = -1
        self.run: TransactionRun | None = None


class MemoryCluster:
    """Topics and the transaction coordinator. `clock` stamps the records; `cluster_id` may be changed by tests.

    While `hold_markers` is set, transactions that were decided stay without markers, as long as nobody needs them.
    """

    def __init__(
        self, clock: Clock, *, cluster_id: str = "memory", transaction_timeout_ms: int = _TRANSACTION_TIMEOUT_MS
    ) -> None:
        self.clock = clock
        self.cluster_id = cluster_id
        self.hold_markers = False
        self._topics: dict[str, MemoryTopic] = {}
        self._coordinated: dict[str, _Coordinated] = {}
        self._transaction_timeout_ms = transaction_timeout_ms
        self._created = 0
        self._waiting: list[asyncio.Future[None]] = []

    # -- topics ------------------------------------------------------------------------------------------------

    def create_topic(self, name: str, partition_count: int) -> MemoryTopic:
        """A new topic; one of that name is gone with all it held, as if deleted before."""
        self._created += 1
        topic = MemoryTopic(topic_id=f"{name}#{self._created}", logs=[MemoryLog() for _ in range(partition_count)])
        self._topics[name] = topic
        return topic

    def delete_topic(self, name: str) -> None:
        """Remove the topic and all it held."""
        del self._topics[name]

    def add_partitions(self, name: str, partition_count: int) -> None:
        """Raise the partition count; keys move, records don't."""
        logs = self._topics[name].logs
        logs.extend(MemoryLog() for _ in range(partition_count - len(logs)))

    def topics(self) -> Mapping[str, MemoryTopic]:
        """The topics by name."""
        return self._topics

    def log(self, topic: str, partition: int) -> MemoryLog:
        """One partition's log; raises `NotFoundError`."""
        self.expire_transactions()
        if topic not in self._topics or not 0 <= partition < len(self._topics[topic].logs):
            raise NotFoundError(f"There is no partition {partition} of a topic {topic} in the simulated cluster.")
        return self._topics[topic].logs[partition]

    def committed(self, topic: str) -> list[LogEntry]:
        """What a `read_committed` reader of all partitions sees now."""
        return [entry for log in self._topics[topic].logs for entry in log.committed()]

    def send(self, topic: str, key: bytes | None, value: bytes | None, *, partition: int | None = None) -> LogEntry:
        """Append outside of any transaction, acknowledged when this returns; Java's partitioner chooses unless told."""
        if partition is None:
            assert key is not None, "a record without a key needs a partition"
            partition = partition_for_key(key, len(self._topics[topic].logs))
        log = self.log(topic, partition)
        log.append(key, value, at_ms=self.clock.now_ms())
        self.notify()
        return log.entries[-1]

    # -- transactions --------------------------------------------------------------------------------------------

    def producer(self, transactional_id: str, *, by: str = "") -> "MemoryProducer":
        """A transactional producer: an owner's, or an upstream's or stranger's; `by` names who has it."""
        return MemoryProducer(self, transactional_id, by)

    def init_transactions(self, transactional_id: str) -> int:
        """Settle what the last producer left open and fence it; returns the new producer's epoch."""
        self.expire_transactions()
        found = self._coordinated.setdefault(transactional_id, _Coordinated())
        self._settle(found)
        found.epoch += 1
        return found.epoch

    def append(self, transactional_id: str, epoch: int, records: Sequence[NewRecord], *, by: str = "") -> list[Offset]:
        """Add records to the open transaction, or open one; raises `FencedError` for an old epoch."""
        found = self._current(transactional_id, epoch)
        if found.run is not None and found.run.state is not RunState.OPEN:
            self._settle(found)
        if found.run is None:
            found.run = TransactionRun(transactional_id, self.clock.now_ms(), by)
        run, at_ms = found.run, self.clock.now_ms()
        offsets = [
            self.log(record.topic, record.partition).append(
                record.key, record.value, at_ms=at_ms, headers=record.headers, transaction=run
            )
            for record in records
        ]
        self.notify()
        return offsets

    def end(self, transactional_id: str, epoch: int, *, commit: bool) -> None:
        """Decide the open transaction; its markers follow at once unless `hold_markers` is set."""
        found = self._current(transactional_id, epoch)
        if found.run is None or found.run.state is not RunState.OPEN:
            return
        found.run.state = RunState.COMMITTING if commit else RunState.ABORTING
        if not self.hold_markers:
            self._settle(found)

    def write_markers(self) -> None:
        """Write the markers of every decided transaction."""
        for found in self._coordinated.values():
            if found.run is not None and found.run.state is not RunState.OPEN:
                self._settle(found)

    def expire_transactions(self) -> None:
        """Abort what has been open for too long, and fence its producer; every look at a log does this first."""
        oldest_ms = self.clock.now_ms() - self._transaction_timeout_ms
        for found in self._coordinated.values():
            if found.run is not None and found.run.state is RunState.OPEN and found.run.started_at_ms < oldest_ms:
                found.epoch += 1
                self._settle(found)

    def is_fenced(self, transactional_id: str, epoch: int) -> bool:
        """Whether a newer epoch exists."""
        self.expire_transactions()
        return self._coordinated[transactional_id].epoch != epoch

    def open_run(self, transactional_id: str) -> TransactionRun | None:
        """The transaction of that id that is neither committed nor aborted yet."""
        found = self._coordinated.get(transactional_id)
        return found.run if found is not None and found.run is not None and found.run.state is RunState.OPEN else None

    async def change(self, timeout_ms: int) -> None:
        """Return after the next append or marker, or when the time is over."""
        loop = asyncio.get_running_loop()
        waiting: asyncio.Future[None] = loop.create_future()
        self._waiting.append(waiting)
        timer = loop.call_later(timeout_ms / 1_000, _end, waiting)
        try:
            await waiting
        finally:
            timer.cancel()
            if waiting in self._waiting:
                self._waiting.remove(waiting)

    def notify(self) -> None:
        """End everybody's wait for a change."""
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            _end(future)

    def _current(self, transactional_id: str, epoch: int) -> _Coordinated:
        if self.is_fenced(transactional_id, epoch):
            raise FencedError(f"{transactional_id}: epoch {epoch} is not the newest; acquire again if still a member")
        return self._coordinated[transactional_id]

    def _settle(self, found: _Coordinated) -> None:
        run, found.run = found.run, None
        if run is None:
            return
        if run.state is RunState.OPEN:
            run.state = RunState.ABORTING
        for log in run.logs:
            log.append_marker(run, at_ms=self.clock.now_ms())
        run.state = RunState.COMMITTED if run.is_committed else RunState.ABORTED
        self.notify()


class MemoryProducer:
    """A transactional producer of one `transactional.id`; the first `send` after an end opens the next transaction."""

    def __init__(self, cluster: MemoryCluster, transactional_id: str, by: str) -> None:
        self._cluster = cluster
        self._transactional_id = transactional_id
        self._by = by
        self._epoch: int | None = None

    def init(self) -> None:
        """Fence earlier producers of this id."""
        self._epoch = self._cluster.init_transactions(self._transactional_id)

    @property
    def epoch(self) -> int:
        """The epoch of the last `init`."""
        assert self._epoch is not None, "init() comes first"
        return self._epoch

    @property
    def is_fenced(self) -> bool:
        """Whether a newer producer exists, or the transaction outlived its time."""
        return self._cluster.is_fenced(self._transactional_id, self.epoch)

    @property
    def run(self) -> TransactionRun | None:
        """The transaction that is open now."""
        return self._cluster.open_run(self._transactional_id)

    def send(self, *records: NewRecord) -> list[Offset]:
        """Append within the transaction; raises `FencedError`."""
        return self._cluster.append(self._transactional_id, self.epoch, records, by=self._by)

    def commit(self) -> None:
        """Commit; acknowledged when this returns. Raises `FencedError`."""
        self._cluster.end(self._transactional_id, self.epoch, commit=True)

    def abort(self) -> None:
        """Abort; raises `FencedError`."""
        self._cluster.end(self._transactional_id, self.epoch, commit=False)


def _end(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)
