"""The auditor over worlds that are sound: whatever crashed, was compacted or expired, it finds nothing to accuse."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from pipeline.core.tasks import DurationMs
from pipeline.testing.memory_audit import audit_cluster
from pipeline.testing.simulated_owner import simulated_settings
from pipeline.testing.simulated_world import SimulatedWorld
from pipeline.testing.virtual_time import run_virtual
from tests.simulation.recovering import settle

if TYPE_CHECKING:
    from pipeline.service.auditor import AuditReport
    from pipeline.service.owner_settings import OwnerSettings

pytestmark = pytest.mark.simulation

KEEP = simulated_settings(retention_ms=DurationMs(10**12), heartbeat_interval_ms=2_000, batch_records_max=5, fire_max=3)
FORGET = simulated_settings(retention_ms=DurationMs(700), heartbeat_interval_ms=2_000, batch_records_max=5, fire_max=3)


async def _audit(world: SimulatedWorld, settings: OwnerSettings, **options: int) -> AuditReport:
    return await audit_cluster(
        world.cluster, limits=settings.limits, retention_ms=settings.retention_ms, chunk_records=7, **options
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


@pytest.mark.parametrize("seed", range(40))
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
