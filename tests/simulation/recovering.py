"""Runs a rebuild on a simulated world, as the command does with the agents stopped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.core.positions import POSITIONS_KEY
from pipeline.service.admission import Admission
from pipeline.service.owner.status import Phase
from pipeline.service.recovery.ports import RebuildOutside
from pipeline.service.recovery.rebuilder import Rebuilder, RebuildReport
from pipeline.testing.memory_partition_log import MemoryLongTransaction, MemoryPartitionLog
from pipeline.testing.memory_readers import MemoryClusterView, MemoryStateLog
from pipeline.testing.memory_timer_table import MemoryDisk, MemoryTableStore
from pipeline.testing.simulated_owner import simulated_settings
from pipeline.testing.simulated_process import SimulatedProcess

if TYPE_CHECKING:
    from pipeline.core.tasks import TaskState
    from pipeline.service.owner.settings import OwnerSettings
    from pipeline.testing.simulated_world import SimulatedWorld


def rebuilder(world: SimulatedWorld, settings: OwnerSettings | None = None, *, chunk_records: int = 7) -> Rebuilder:
    """A rebuild of partition 0; small chunks, so that their ends lie everywhere."""
    settings = settings if settings is not None else simulated_settings()
    process = SimulatedProcess("rebuild")
    admission = Admission(world.codec.decode_event, limits=settings.limits, partition=0, partition_count=1)
    outside = RebuildOutside(
        clock=world.clock,
        codec=world.codec,
        cluster=MemoryClusterView(world.cluster, process),
        log=MemoryPartitionLog(world.cluster, chunk_records=chunk_records),
        state_log=MemoryStateLog(world.cluster, "task-state", process),
        scratch=lambda _: MemoryTableStore(MemoryDisk(), process),
        transaction=lambda name: MemoryLongTransaction(
            world.cluster, name, partition=0, state_topic="task-state", process=process
        ),
    )
    return Rebuilder(settings, outside, admit=admission.admit, on_progress=lambda _done, _all: None)


async def rebuild(world: SimulatedWorld, settings: OwnerSettings | None = None) -> RebuildReport:
    """Plan and write."""
    work = rebuilder(world, settings)
    try:
        report = await work.plan()
        await work.write(report)
    finally:
        work.close()
    return report


async def settle(world: SimulatedWorld) -> None:
    """Stop every agent as an operator does, after it has applied all that there is."""
    for agent in world.agents:
        if agent.process.alive and agent.owner.status.phase is not Phase.STOPPED:
            await world.applied(agent)
            await agent.stop()


def states(world: SimulatedWorld) -> dict[str, TaskState]:
    """What a reader of `task-state` makes of it."""
    rows: dict[bytes, bytes | None] = {}
    for entry in world.cluster.committed("task-state"):
        assert entry.key is not None
        rows[entry.key] = entry.value
    rows.pop(POSITIONS_KEY, None)
    return {key.decode(): world.codec.decode_state(value) for key, value in rows.items() if value is not None}
