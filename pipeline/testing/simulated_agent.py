"""One agent on in-memory twins: a process that owns one partition, runs the real owner, and can be killed."""

import asyncio
import contextlib

import msgspec

from pipeline.service.owner.settings import OwnerSettings
from pipeline.testing.memory_cluster import MemoryCluster
from pipeline.testing.memory_group import MemoryGroup
from pipeline.testing.memory_timer_table import MemoryDisk
from pipeline.testing.memory_transaction import TransactionFaults
from pipeline.testing.plain_codec import PlainCodec
from pipeline.testing.simulated_owner import SimulatedOwner, simulated_settings
from pipeline.testing.simulated_process import SimulatedCrashError, SimulatedProcess
from pipeline.testing.virtual_time import VirtualClock

__all__ = ["SimulatedAgent"]


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
        self._group = group
        simulated = SimulatedOwner(
            cluster,
            group,
            disk,
            process=process,
            clock=clock,
            settings=self.settings,
            faults=self.faults,
            batch_records=batch_records,
        )
        self.end_offsets = simulated.end_offsets
        self.source = simulated.source
        self.owner = simulated.owner
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
