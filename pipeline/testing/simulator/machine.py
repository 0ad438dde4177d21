"""A simulated machine: a disk, a clock of its own, and one agent process after another."""

import asyncio
import random
from collections.abc import Callable, Sequence

import msgspec

from pipeline.core.tasks import Offset
from pipeline.service.owner.partition_owner import PartitionOwner
from pipeline.service.owner.pool import OwnerPool
from pipeline.service.owner.settings import OwnerSettings
from pipeline.service.owner.status import Phase
from pipeline.testing.memory_cluster import MemoryCluster
from pipeline.testing.memory_timer_table import DiskTable, MemoryDisk
from pipeline.testing.memory_transaction import TransactionFaults
from pipeline.testing.simulated_owner import SimulatedOwner
from pipeline.testing.simulated_process import SimulatedProcess
from pipeline.testing.simulator.coordinator import Coordinator
from pipeline.testing.simulator.plan import Shape
from pipeline.testing.virtual_time import VirtualClock

__all__ = ["AgentProcess", "Machine"]


EndAnswer = Callable[[str, Offset], Offset]
"""What is answered instead of the end of a topic."""


class AgentProcess:
    """One life of an agent: the production pool of owners, over twins that belong to one process."""

    def __init__(
        self,
        name: str,
        machine: "Machine",
        cluster: MemoryCluster,
        coordinator: Coordinator,
        *,
        settings: OwnerSettings,
        shape: Shape,
        seed: int,
    ) -> None:
        draw = random.Random(f"latency {seed} {name}")  # noqa: S311  # to be repeated, not to be secret
        self.process = SimulatedProcess(name, latency_ms=lambda: draw.choice(shape.latencies_ms))
        self.machine = machine.name
        self.faults = TransactionFaults()
        self.pool = OwnerPool(self._open_owner, lambda _: None)
        self.simulated: dict[int, SimulatedOwner] = {}
        self._answers: dict[int, EndAnswer] = {}
        self._disk, self._clock = machine.disk, machine.clock
        self._cluster = cluster
        self._coordinator = coordinator
        self._settings = msgspec.structs.replace(settings, owner=name)
        self._shape = shape

    @property
    def is_running(self) -> bool:
        """Alive, if perhaps frozen."""
        return self.process.alive

    def start(self) -> None:
        """Join the group; the partitions come with the next rebalance."""
        self._coordinator.join(self)

    async def revoked(self) -> None:
        """Let go of everything, as on a rebalance."""
        await self.pool.stop()
        self.simulated.clear()

    def assigned(self, partitions: Sequence[int]) -> None:
        """Start the owners of these."""
        if self.process.alive:
            self.pool.assign(partitions)

    async def kill(self) -> None:
        """SIGKILL, and wait until nothing of it is left; the group does not hear of it."""
        self.process.kill()
        tasks = self.pool.tasks
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def stop(self) -> None:
        """An orderly end."""
        self._coordinator.leave(self)
        await self.revoked()
        self.process.kill()

    def answer(self, partition: int, answer: EndAnswer) -> None:
        """From now on its owners of the partition are told this when they ask for an end."""
        self._answers[partition] = answer
        if partition in self.simulated:
            self.simulated[partition].end_offsets.answer = answer

    def is_active(self, partition: int) -> bool:
        """Whether it owns the partition, and has restored it."""
        owner = self.pool.owners.get(partition)
        return self.process.responds and owner is not None and owner.status.phase is Phase.ACTIVE

    def _open_owner(self, partition: int) -> PartitionOwner:
        simulated = SimulatedOwner(
            self._cluster,
            self._coordinator.group,
            self._disk,
            process=self.process,
            clock=self._clock,
            settings=msgspec.structs.replace(self._settings, partition=partition),
            faults=self.faults,
            batch_records=self._shape.fetch_records,
            fence_by_writing=self._shape.fence_by_writing,
        )
        simulated.end_offsets.answer = self._answers.get(partition)
        self.simulated[partition] = simulated
        return simulated.owner


class Machine:
    """What outlives the processes: disk, clock, and copies of tables that somebody keeps."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.disk = MemoryDisk(power_can_fail=True)
        self.clock = VirtualClock()
        self.copies: dict[int, DiskTable] = {}
        self.agent: AgentProcess | None = None

    @property
    def running(self) -> AgentProcess | None:
        """The process that lives there now, frozen or not."""
        return self.agent if self.agent is not None and self.agent.is_running else None
