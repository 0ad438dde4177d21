"""One agent on in-memory twins: a process that owns one partition, runs the real owner, and can be killed."""

import asyncio
import contextlib
from typing import Final

import msgspec

from pipeline.core.tasks import Offset, Partition
from pipeline.errors import RetryableError, TopicMismatchError
from pipeline.ports import TopicIdentity
from pipeline.service.acquisition import Outside
from pipeline.service.admission import Admission
from pipeline.service.owner_settings import OwnerSettings
from pipeline.service.partition_owner import PartitionOwner
from pipeline.testing.memory_cluster import MemoryCluster
from pipeline.testing.memory_group import MemoryGroup, MemoryMembership
from pipeline.testing.memory_readers import MemoryClusterView, MemoryEndOffsets, MemoryEventSource, MemoryStateLog
from pipeline.testing.memory_timer_table import MemoryDisk, MemoryTableStore
from pipeline.testing.memory_transaction import MemoryTransaction, TransactionFaults
from pipeline.testing.plain_codec import PlainCodec
from pipeline.testing.simulated_process import SimulatedCrashError, SimulatedProcess
from pipeline.testing.virtual_time import VirtualClock

__all__ = ["SIMULATED_TOPICS", "SimulatedAgent", "simulated_settings"]

SIMULATED_TOPICS: Final = ("task-events", "task-state", "due-tasks", "dead-tasks")


def simulated_settings(partition: int = 0, **changes: object) -> OwnerSettings:
    """The default settings of an owner, with `changes`."""
    settings = OwnerSettings(
        partition=Partition(partition),
        owner="simulated",
        events_topic="task-events",
        state_topic="task-state",
        due_topic="due-tasks",
        dead_topic="dead-tasks",
    )
    return msgspec.structs.replace(settings, **changes)


class SimulatedAgent:
    """A process with its twins; `start` runs the owner as a task, `kill` is SIGKILL. To restart, make another."""

    def __init__(
        self,
        cluster: MemoryCluster,
        group: MemoryGroup,
        disk: MemoryDisk,
        *,
        process: SimulatedProcess,
        clock: VirtualClock,
        settings: OwnerSettings | None = None,
        batch_records: int = 100,
    ) -> None:
        self.process = process
        self.settings = settings if settings is not None else simulated_settings()
        self.settings = msgspec.structs.replace(self.settings, owner=process.name)
        self.faults = TransactionFaults()
        self.codec = PlainCodec()
        self.end_offsets = MemoryEndOffsets(cluster, process)
        self.source = MemoryEventSource(
            cluster, self.settings.events_topic, self.settings.partition, process, batch_records=batch_records
        )
        self._cluster = cluster
        self._group = group
        outside = Outside(
            clock=clock,
            codec=self.codec,
            cluster=MemoryClusterView(cluster, process),
            end_offsets=self.end_offsets,
            state_log=MemoryStateLog(cluster, self.settings.state_topic, process),
            membership=MemoryMembership(group, process),
            tables=MemoryTableStore(disk, process),
            transaction=self._transaction,
        )
        admission = Admission(
            self.codec.decode_event,
            limits=self.settings.limits,
            partition=self.settings.partition,
            partition_count=len(cluster.topics()[self.settings.events_topic].logs),
        )
        self.owner = PartitionOwner(
            self.settings, outside, self.source, admit=admission.admit, fence_target=self._fence_target
        )
        self._task: asyncio.Task[None] | None = None

    def start(self, *, join: bool = True) -> None:
        """Run the owner; `join` gives it the partition in the group first."""
        if join:
            self._group.rebalance({self.settings.partition: self.process.name})
        self._task = asyncio.create_task(self.owner.run(), name=self.process.name)

    async def ended(self) -> None:
        """Wait until the owner has stopped or its process is dead; raises what it should not have raised."""
        if self._task is not None:
            with contextlib.suppress(SimulatedCrashError, asyncio.CancelledError):
                await self._task

    async def kill(self) -> None:
        """SIGKILL, and wait until nothing of it is left."""
        self.process.kill()
        if self._task is not None:
            self._task.cancel()
        await self.ended()

    async def stop(self) -> None:
        """Let the owner end after the transaction in hand."""
        self.owner.stop()
        await self.ended()

    def _transaction(self, transactional_id: str) -> MemoryTransaction:
        return MemoryTransaction(
            self._cluster,
            transactional_id,
            partition=self.settings.partition,
            state_topic=self.settings.state_topic,
            process=self.process,
            faults=self.faults,
        )

    async def _fence_target(self, identity: TopicIdentity) -> Offset:
        topic = self._cluster.topics()[self.settings.events_topic]
        if len(topic.logs) != identity.partition_count:
            raise TopicMismatchError(f"{self.settings.events_topic} has {len(topic.logs)} partitions now")
        if topic.topic_id != identity.topic_id:
            raise RetryableError(f"{self.settings.events_topic} was created anew")
        return await self.end_offsets.end_offset(self.settings.events_topic, self.settings.partition)
