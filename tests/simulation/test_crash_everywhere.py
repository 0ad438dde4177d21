"""A short life in which the agent dies before its first, second, third ... effect, until it survives."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from itertools import count

import pytest

from pipeline.core.tasks import DurationMs
from pipeline.testing.memory_transaction import CommitFault
from pipeline.testing.simulated_agent import SimulatedAgent
from pipeline.testing.simulated_owner import simulated_settings
from pipeline.testing.simulated_world import SimulatedWorld
from pipeline.testing.virtual_time import run_virtual

pytestmark = pytest.mark.simulation

SETTINGS = simulated_settings(
    retention_ms=DurationMs(20_000), heartbeat_interval_ms=3_000, batch_records_max=4, fire_max=2
)
STEPS_MAX = 1_000

Story = Callable[[SimulatedWorld], Awaitable[None]]


async def _mixed(world: SimulatedWorld) -> None:
    """Schedules, cancels in time and too late, reschedules, duplicates, stale versions, refusals; some due at once."""
    world.schedule("fires", due_in_ms=1_000)
    world.schedule("cancelled", due_in_ms=1_500)
    world.schedule("moved", due_in_ms=500, version=1)
    await world.clock.advance(100)
    world.cancel("cancelled")
    world.schedule("moved", due_in_ms=2_000, version=2, event_id="m2")
    world.schedule("moved", due_in_ms=2_000, version=2, event_id="m2")
    world.cluster.send("task-events", b"refused", b"rubbish", partition=0)
    world.schedule("at once", due_in_ms=0)
    await world.clock.advance(950)
    world.cancel("fires")
    world.schedule("moved", due_in_ms=60_000, version=1)
    world.schedule("again", due_in_ms=200)
    await world.clock.advance(1_000)
    world.schedule("again", due_in_ms=300)
    for number in range(5):
        world.schedule(f"burst {number}", due_in_ms=400)
    await world.clock.advance(4_000)


async def _through_transactions(world: SimulatedWorld) -> None:
    """A transactional upstream: one transaction commits, one aborts, one stays open over a due instant."""
    upstream = world.cluster.producer("upstream")
    upstream.init()
    world.schedule("kept", due_in_ms=2_000)
    world.schedule("order", due_in_ms=1_000, through=upstream)
    world.commit_upstream(upstream)
    await world.clock.advance(200)
    world.cancel("kept", through=upstream)
    world.schedule("never", due_in_ms=100, through=upstream)
    await world.clock.advance(300)
    upstream.abort()
    world.cancel("order", through=upstream)
    await world.clock.advance(300)
    world.commit_upstream(upstream)
    await world.clock.advance(3_000)


async def _run(story: Story, agent_of: Callable[[SimulatedWorld], SimulatedAgent], restart_after_ms: int) -> bool:
    """One world; returns whether the first agent was still alive when the story was over."""
    world = SimulatedWorld()
    first = agent_of(world)
    first.start()

    async def restart() -> None:
        await world.until(lambda: not first.process.alive)
        await first.ended()
        await world.clock.advance(restart_after_ms)
        world.agent(settings=SETTINGS).start()

    restarting = asyncio.create_task(restart())
    await story(world)
    survived = first.process.alive
    restarting.cancel()
    world.check()
    await world.heal_and_check(pass_ms=100_000)
    return survived


@pytest.mark.parametrize("restart_after_ms", [0, 3_000])
@pytest.mark.parametrize("story", [_mixed, _through_transactions])
def test_crash_before_any_effect_loses_and_doubles_nothing(story: Story, restart_after_ms: int) -> None:
    """SIGKILL between any two effects, restarted at once or when the instants have passed: every promise holds."""
    for number in count(1):
        assert number < STEPS_MAX, "the story never ends without a crash"

        def dying(world: SimulatedWorld, number: int = number) -> SimulatedAgent:
            agent = world.agent(settings=SETTINGS)
            agent.process.crash_before_step(number)
            return agent

        if run_virtual(lambda: _run(story, dying, restart_after_ms)):
            assert number > 30, "the story is too short to show anything"
            break


@pytest.mark.parametrize("fault", list(CommitFault))
@pytest.mark.parametrize("story", [_mixed, _through_transactions])
def test_failure_of_any_one_commit_loses_and_doubles_nothing(story: Story, fault: CommitFault) -> None:
    """Fenced, refused, or an outcome that is unknown, committed or not: at the first, second, third ... commit."""
    for number in count():
        assert number < STEPS_MAX, "the story never ends without a fault"
        faults: list[deque[CommitFault | None]] = []

        def failing(
            world: SimulatedWorld, number: int = number, faults: list[deque[CommitFault | None]] = faults
        ) -> SimulatedAgent:
            agent = world.agent(settings=SETTINGS)
            agent.faults.commits.extend([None] * number)
            agent.faults.commits.append(fault)
            faults.append(agent.faults.commits)
            return agent

        run_virtual(lambda: _run(story, failing, 0))
        if faults[0]:
            assert number >= 3, "the story is too short to show anything"
            break
