"""The incident that duetasks was born from, on twins: it must not be able to happen."""

import pytest

from pipeline.core.tasks import Status, TaskId
from pipeline.testing.simulated_world import SimulatedWorld
from pipeline.testing.virtual_time import run_virtual

pytestmark = pytest.mark.simulation

MINUTE_MS = 60_000


def test_cancelled_task_stays_cancelled_across_restart() -> None:
    """April 1st: schedule at 14:00 for 14:30, pay, cancel, SIGKILL at 14:20, restart; the order must live."""

    async def main() -> None:
        world = SimulatedWorld()
        agent = await world.started()
        world.schedule("order-1", due_in_ms=30 * MINUTE_MS)
        await world.clock.advance(5 * MINUTE_MS)
        world.cancel("order-1")
        await world.clock.advance(15 * MINUTE_MS)

        await agent.kill()
        restarted = await world.started()
        await world.clock.advance(20 * MINUTE_MS)

        assert world.emitted() == []
        state = restarted.owner.get(TaskId("order-1"))
        assert state is not None
        assert state.status is Status.CANCELLED
        await world.heal_and_check()

    run_virtual(main)


@pytest.mark.parametrize("restart_after_ms", [0, 40 * MINUTE_MS])
def test_cancel_sent_while_the_agent_is_down_counts(restart_after_ms: int) -> None:
    """The cancel lies unread in the log when the timer is found overdue: the fence must wait for it."""

    async def main() -> None:
        world = SimulatedWorld()
        agent = await world.started()
        world.schedule("order-1", due_in_ms=30 * MINUTE_MS)
        await world.applied(agent)
        await agent.kill()
        world.cancel("order-1")
        await world.clock.advance(restart_after_ms)

        await world.started()
        await world.clock.advance(60 * MINUTE_MS)

        assert world.emitted() == []
        await world.heal_and_check()

    run_virtual(main)


def test_task_that_was_due_while_everything_was_down_fires_once() -> None:
    """Late, never lost: the restored owner finds it overdue and says how late it is."""

    async def main() -> None:
        world = SimulatedWorld()
        agent = await world.started()
        world.schedule("order-1", due_in_ms=MINUTE_MS)
        await world.applied(agent)
        await agent.kill()
        await world.clock.advance(10 * MINUTE_MS)

        await world.started()
        await world.until(lambda: world.emitted() == ["order-1"])

        (task,) = world.emissions()
        assert task.fired_at_ms - task.due_at_ms >= 9 * MINUTE_MS
        await world.heal_and_check()
        assert world.emitted() == ["order-1"]

    run_virtual(main)


def test_task_fires_at_its_instant_while_nothing_else_happens() -> None:
    """No new input, no rebalance: the timer itself wakes the owner, within a millisecond of virtual time."""

    async def main() -> None:
        world = SimulatedWorld()
        await world.started()
        world.schedule("call", due_in_ms=12_345)

        await world.until(lambda: world.emitted() == ["call"])

        (task,) = world.emissions()
        assert 0 <= task.fired_at_ms - task.due_at_ms <= 1

    run_virtual(main)


def test_cancelled_task_can_be_scheduled_again() -> None:
    """Only a new schedule, a new generation, follows CANCELLED; and it does fire."""

    async def main() -> None:
        world = SimulatedWorld()
        await world.started()
        world.schedule("order-1", due_in_ms=MINUTE_MS)
        world.cancel("order-1")
        second = world.schedule("order-1", due_in_ms=2 * MINUTE_MS)

        await world.clock.advance(5 * MINUTE_MS)

        assert [task.generation for task in world.emissions()] == [second + 1]
        await world.heal_and_check()

    run_virtual(main)
