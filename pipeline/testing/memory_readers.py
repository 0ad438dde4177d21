"""Twins of the ports that only look at the cluster: ends, identity, the input and `task-state`."""

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Final

from pipeline.core.tasks import Offset
from pipeline.errors import NotFoundError, UnavailableError
from pipeline.ports import ClusterIdentity, InputBatch, StateChunk, TopicIdentity
from pipeline.testing.memory_cluster import MemoryCluster
from pipeline.testing.memory_log import LogEntry, MemoryLog
from pipeline.testing.simulated_process import SimulatedProcess

__all__ = ["MemoryClusterView", "MemoryEndOffsets", "MemoryEventSource", "MemoryStateLog"]

_LOOK_AGAIN_MS: Final = 100
"""Transactions time out without an append, so who waits for one looks again this often."""


class MemoryEndOffsets:
    """The end offsets port. `answers` may replace the truth: a deposed leader's old one, or an error to raise."""

    def __init__(self, cluster: MemoryCluster, process: SimulatedProcess) -> None:
        self._cluster = cluster
        self._process = process
        self.unavailable = 0
        self.answer: Callable[[str, Offset], Offset] | None = None

    async def end_offset(self, topic: str, partition: int) -> Offset:
        """The high watermark; raises `UnavailableError` as often as `unavailable` says."""
        await self._process.reach("end_offset")
        end = self._log(topic, partition).end_offset
        await self._process.answered()
        return end if self.answer is None else self.answer(topic, end)

    async def start_offset(self, topic: str, partition: int) -> Offset:
        """The first retained offset; raises `UnavailableError` as often as `unavailable` says."""
        await self._process.reach("start_offset")
        return self._log(topic, partition).start_offset

    def _log(self, topic: str, partition: int) -> MemoryLog:
        if self.unavailable:
            self.unavailable -= 1
            raise UnavailableError("the simulated leader does not answer")
        try:
            return self._cluster.log(topic, partition)
        except NotFoundError as error:
            raise UnavailableError(str(error)) from error


class MemoryClusterView:
    """The cluster view port."""

    def __init__(self, cluster: MemoryCluster, process: SimulatedProcess) -> None:
        self._cluster = cluster
        self._process = process

    async def describe(self, topics: Sequence[str]) -> ClusterIdentity:
        """Identity of the cluster and of those topics that exist."""
        await self._process.reach("describe")
        known = self._cluster.topics()
        return ClusterIdentity(
            cluster_id=self._cluster.cluster_id,
            topics={
                name: TopicIdentity(topic_id=known[name].topic_id, partition_count=len(known[name].logs))
                for name in topics
                if name in known
            },
        )


class MemoryStateLog:
    """The state log port: `read_committed`, by position, in chunks of `chunk_records`."""

    def __init__(
        self, cluster: MemoryCluster, topic: str, process: SimulatedProcess, *, chunk_records: int = 100
    ) -> None:
        self._cluster = cluster
        self._topic = topic
        self._process = process
        self._chunk_records = chunk_records

    async def read(self, partition: int, start: Offset, end: Offset) -> AsyncGenerator[StateChunk]:
        """Chunks until the position reaches `end`; waits for open transactions."""
        position = start
        while position < end:
            await self._process.reach("state_log.read")
            entries, stable = self._cluster.log(self._topic, partition).read_committed(position, self._chunk_records)
            if stable == position:
                await self._cluster.change(_LOOK_AGAIN_MS)
                continue
            position = stable
            yield StateChunk(
                records=[(entry.key, entry.value) for entry in entries if entry.key is not None], position=position
            )


class MemoryEventSource:
    """The event source port. Each `take` reads the log as it is then; `disturb` may replace the next batch."""

    def __init__(
        self,
        cluster: MemoryCluster,
        topic: str,
        partition: int,
        process: SimulatedProcess,
        *,
        batch_records: int = 100,
    ) -> None:
        self._cluster = cluster
        self._topic = topic
        self._partition = partition
        self._process = process
        self._batch_records = batch_records
        self._position = Offset(0)
        self._paused = True
        self._woken = False
        self.disturb: Callable[[InputBatch], InputBatch] | None = None

    def seek(self, position: Offset) -> None:
        """Fetch from `position` on."""
        self._process.check()
        self._position, self._paused = position, False

    def pause(self) -> None:
        """Fetch nothing until the next `seek`."""
        self._paused = True

    def take(self) -> InputBatch | None:
        """The next batch, or None if the position is as far as it gets."""
        self._process.check()
        entries, position = self._read(self._batch_records)
        if position == self._position:
            return None
        batch = InputBatch(start_position=self._position, end_position=position, records=entries)
        self._position = position
        if self.disturb is not None:
            disturb, self.disturb = self.disturb, None
            batch = disturb(batch)
        return batch

    async def wait(self, timeout_ms: int) -> None:
        """Return when something may be buffered, `wake` was called, or the time is over."""
        await self._process.reach("wait")
        clock = self._cluster.clock
        until_ms = clock.monotonic_ms() + timeout_ms
        while not self._woken and (left_ms := until_ms - clock.monotonic_ms()) > 0:
            if self._read(1)[1] != self._position:
                break
            await self._cluster.change(min(left_ms, _LOOK_AGAIN_MS) if self._is_held_back() else left_ms)
            await self._process.stand()
        self._woken = False

    def wake(self) -> None:
        """End a wait now."""
        self._woken = True
        self._cluster.notify()

    def _is_held_back(self) -> bool:
        topic = self._cluster.topics().get(self._topic)
        return (
            topic is not None
            and topic.logs[self._partition].last_stable_offset < topic.logs[self._partition].end_offset
        )

    def _read(self, limit: int) -> tuple[list[LogEntry], Offset]:
        try:
            log = self._cluster.log(self._topic, self._partition)
        except NotFoundError:
            return [], self._position
        if self._paused or self._position < log.start_offset:
            return [], self._position  # out of range: a client without a reset policy gets nothing
        return log.read_committed(self._position, limit)
