"""The auditor over worlds that are sound: whatever crashed, was compacted or expired, it finds nothing to accuse."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import pytest

from pipeline.core.audit_view import NEVER
from pipeline.core.tasks import DurationMs, Offset
from pipeline.errors import UnavailableError
from pipeline.testing.memory_audit import audit_cluster
from pipeline.testing.memory_partition_log import MemoryPartitionLog
from pipeline.testing.simulated_owner import simulated_settings
from pipeline.testing.simulated_world import SimulatedWorld
from pipeline.testing.virtual_time import run_virtual
from tests.simulation.recovering import settle

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from pipeline.service.audit.auditor import AuditReport
    from pipeline.service.owner.settings import OwnerSettings
    from pipeline.service.recovery.ports import LogBounds, LogChunk

pytestmark = pytest.mark.simulation

KEEP = simulated_settings(retention_ms=DurationMs(10**12), heartbeat_interval_ms=2_000, batch_records_max=5, fire_max=3)
FORGET = simulated_settings(retention_ms=DurationMs(700), heartbeat_interval_ms=2_000, batch_records_max=5, fire_max=3)


class SlowLog(MemoryPartitionLog):
    """A log that takes its time, so that everything goes on while it is read."""

    def __init__(self, world: SimulatedWorld, rng: random.Random) -> None:
        super().__init__(world.cluster, chunk_records=7)
        self._rng = rng

    async def bounds(self, topic: str, partition: int) -> LogBounds:
        found = await super().bounds(topic, partition)
        await asyncio.sleep(self._rng.choice([0, 0.001, 0.3]))
        return found

    async def read(self, topic: str, partition: int, start: Offset, end: Offset) -> AsyncGenerator[LogChunk]:
        async for chunk in super().read(topic, partition, start, end):
            yield chunk
            await asyncio.sleep(self._rng.choice([0, 0.001, 0.05]))


async def _audit(
    world: SimulatedWorld, settings: OwnerSettings, rng: random.Random | None = None, *, compaction_lag_ms: int = NEVER
) -> AuditReport:
    return await audit_cluster(
        world.cluster,
        limits=settings.limits,
        retention_ms=settings.retention_ms,
        compaction_lag_ms=compaction_lag_ms,
        log=MemoryPartitionLog(world.cluster, chunk_records=7) if rng is None else SlowLog(world, rng),
    )


async def _history(world: SimulatedWorld, seed: int, settings: OwnerSettings, *, actions: int = 80) -> AuditReport:
    """A busy upstream, agents that come and go, and an audit in the middle; all randomness comes from `seed`."""
    rng = random.Random(seed)
    middle: AuditReport | None = None
    agent = await world.started(settings=settings)
    for number in range(actions):
        task_id = f"task {rng.randrange(8)}"
        version = rng.choice([0, rng.randint(1, 6)]) if task_id[-1] in "0123" else 0
        event_id = f"e{seed}-{number}" if rng.random() < 0.7 else ""
        choice = rng.random()
        if choice < 0.5:
            due_in_ms = rng.choice([-500, 0, 1, 50, 400, 2_000, 50_000])
            world.schedule(task_id, due_in_ms=due_in_ms, version=version, event_id=event_id)
        elif choice < 0.8:
            world.cancel(task_id, version=version, event_id=event_id)
        elif choice < 0.87 and world.acknowledged:
            world.send(rng.choice(world.acknowledged[-5:]).event)
        elif choice < 0.91:
            world.cluster.send("task-events", b"task 3", rng.choice([None, b"rubbish"]), partition=0)
        elif choice < 0.94:
            upstream = world.cluster.producer("upstream")
            upstream.init()
            world.schedule(task_id, due_in_ms=10, through=upstream)
            if rng.random() < 0.5:
                world.commit_upstream(upstream)
            else:
                upstream.abort()
        elif choice < 0.97:
            await agent.kill()
            await world.clock.advance(rng.choice([0, 1_000]))
            agent = await world.started(settings=settings)
        await world.clock.advance(rng.choice([0, 0, 1, 20, 300, 900]))
        if number % 9 == seed % 9:
            middle = await _audit(world, settings)
            assert middle.findings == []
    await settle(world)
    return await _audit(world, settings)


@pytest.mark.parametrize("seed", range(15))
@pytest.mark.parametrize("settings", [KEEP, FORGET], ids=["keep", "forget"])
def test_a_sound_world_is_never_accused(seed: int, settings: OwnerSettings) -> None:
    """While it runs, and at its end; where everything is retained and nothing forgotten, all of it is proved."""

    async def main() -> None:
        world = SimulatedWorld()
        report = await _history(world, seed, settings)

        assert report.findings == []
        if settings is KEEP:
            assert {promise.promise: promise.unprovable for promise in report.promises if promise.unprovable} == {}

    run_virtual(main)


@pytest.mark.parametrize("seed", range(25))
def test_a_world_that_loses_its_past_while_it_is_audited_is_never_accused(seed: int) -> None:
    """Compaction, retention and topics created anew, all under a slow audit: it says what it can't prove."""

    async def main() -> None:
        world, rng = SimulatedWorld(), random.Random(seed)
        upstream = asyncio.create_task(_upstream(world, random.Random(-seed)))
        await world.started(settings=KEEP)
        judged = []
        for _ in range(8):
            try:
                report = await _audit(world, KEEP, rng, compaction_lag_ms=0)
            except UnavailableError as error:
                assert "created anew" in str(error)  # noqa: PT017 - the only one that may come
            else:
                assert report.findings == []
                judged.append(report)
        upstream.cancel()

        assert judged
        assert any(promise.unprovable for promise in judged[-1].promises) or judged[-1].notes == []

    run_virtual(main)


async def _upstream(world: SimulatedWorld, rng: random.Random) -> None:
    """Requests without end, and now and then the cleaner, retention, or somebody who creates `task-events` anew."""
    while True:
        task_id = f"task {rng.randrange(12)}"
        choice = rng.random()
        if choice < 0.6:
            world.schedule(task_id, due_in_ms=rng.choice([0, 30, 700, 50_000]), event_id=f"e{rng.random()}")
        elif choice < 0.9:
            world.cancel(task_id)
        elif choice < 0.93:
            world.cluster.log("task-events", 0).compact(before=world.position())
            world.cluster.log("task-state", 0).compact()
        elif choice < 0.96:
            world.cluster.log("task-events", 0).delete_before(world.position())
        elif choice < 0.99:
            due = world.cluster.log("due-tasks", 0)
            due.delete_before(Offset(rng.randint(0, due.last_stable_offset)))
        elif world.position() == world.cluster.log("task-events", 0).end_offset:
            world.recreate_events()
        await asyncio.sleep(rng.choice([0, 0.001, 0.02, 0.3]))
