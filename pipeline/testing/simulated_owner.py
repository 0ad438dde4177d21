"""The real owner of one partition on in-memory twins, as one process has it."""

from typing import Final

import msgspec

from pipeline.core.tasks import Offset, Partition
from pipeline.errors import RetryableError, TopicMismatchError, UnavailableError
from pipeline.ports import TopicIdentity
from pipeline.service.admission import Admission
from pipeline.service.owner.acquisition import Outside
from pipeline.service.owner.fence import FENCE_KEY
from pipeline.service.owner.partition_owner import PartitionOwner
from pipeline.service.owner.settings import OwnerSettings
from pipeline.testing.memory_cluster import MemoryCluster
from pipeline.testing.memory_group import MemoryGroup, MemoryMembership
from pipeline.testing.memory_readers import MemoryClusterView, MemoryEndOffsets, MemoryEventSource, MemoryStateLog
from pipeline.testing.memory_timer_table import MemoryDisk, MemoryTableStore
from pipeline.testing.memory_transaction import ACKNOWLEDGE_MS_MAX, MemoryTransaction, TransactionFaults
from pipeline.testing.plain_codec import PlainCodec
from pipeline.testing.simulated_process import SimulatedProcess
from pipeline.testing.virtual_time import VirtualClock

__all__ = ["SIMULATED_TOPICS", "SimulatedOwner", "simulated_settings"]

SIMULATED_TOPICS: Final = ("task-events", "task-state", "due-tasks", "dead-tasks")
_LOOK_AGAIN_MS: Final = 200
_STATE_CHUNK: Final = 5
"""Times the records of an input batch: where those are small, a restore has many chunks."""


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


class SimulatedOwner:
    """`owner` runs the partition of `settings` in `process`; its twins may be told to fail.

    With `fence_by_writing` the fence is a record of its own, as `fence = "write"` has it.
    """

    def __init__(
        self,
        cluster: MemoryCluster,
        group: MemoryGroup,
        disk: MemoryDisk,
        *,
        process: SimulatedProcess,
        clock: VirtualClock,
        settings: OwnerSettings,
        faults: TransactionFaults,
        batch_records: int = 100,
        fence_by_writing: bool = False,
    ) -> None:
        codec = PlainCodec()
        self.end_offsets = MemoryEndOffsets(cluster, process)
        self.source = MemoryEventSource(
            cluster, settings.events_topic, settings.partition, process, batch_records=batch_records
        )
        self._cluster = cluster
        self._process = process
        self._settings = settings
        self._faults = faults
        outside = Outside(
            clock=clock,
            codec=codec,
            cluster=MemoryClusterView(cluster, process),
            end_offsets=self.end_offsets,
            state_log=MemoryStateLog(
                cluster, settings.state_topic, process, chunk_records=min(100, _STATE_CHUNK * batch_records)
            ),
            membership=MemoryMembership(group, process),
            tables=MemoryTableStore(disk, process),
            transaction=self._transaction,
        )
        admission = Admission(
            codec.decode_event,
            limits=settings.limits,
            partition=settings.partition,
            partition_count=len(cluster.topics()[settings.events_topic].logs),
        )
        self.owner = PartitionOwner(
            settings,
            outside,
            self.source,
            admit=admission.admit,
            fence_target=self._written_target if fence_by_writing else self._asked_target,
        )

    def _transaction(self, transactional_id: str) -> MemoryTransaction:
        return MemoryTransaction(
            self._cluster,
            transactional_id,
            partition=self._settings.partition,
            state_topic=self._settings.state_topic,
            process=self._process,
            faults=self._faults,
        )

    async def _asked_target(self, identity: TopicIdentity) -> Offset:
        self._check(identity)
        return await self.end_offsets.end_offset(self._settings.events_topic, self._settings.partition)

    async def _written_target(self, identity: TopicIdentity) -> Offset:
        """The position after a record that all replicas have: a leader that is none any more can't acknowledge it."""
        await self._process.reach("fence.write")
        cluster, topic, partition = self._cluster, self._settings.events_topic, self._settings.partition
        entry = cluster.send(topic, FENCE_KEY, b"\x00", partition=partition)
        log, until_ms = cluster.log(topic, partition), cluster.clock.monotonic_ms() + ACKNOWLEDGE_MS_MAX
        while log.end_offset <= entry.offset:
            if not log.holds(entry) or cluster.clock.monotonic_ms() >= until_ms:
                raise UnavailableError("the simulated fence record can't be written")
            await cluster.change(_LOOK_AGAIN_MS)
        await self._process.answered()
        self._check(identity)
        return Offset(entry.offset + 1)

    def _check(self, identity: TopicIdentity) -> None:
        topic = self._cluster.topics()[self._settings.events_topic]
        if len(topic.logs) != identity.partition_count:
            raise TopicMismatchError(f"{self._settings.events_topic} has {len(topic.logs)} partitions now")
        if topic.topic_id != identity.topic_id:
            raise RetryableError(f"{self._settings.events_topic} was created anew")
