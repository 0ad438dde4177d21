"""Whether an owner has read all that it must have read: a matter of offsets, and of nothing that a record says."""

import pytest

from pipeline.core.events import Cancel
from pipeline.core.tasks import InstantMs, Status, TaskId
from pipeline.testing.simulated_world import SimulatedWorld
from pipeline.testing.virtual_time import run_virtual

pytestmark = pytest.mark.simulation

HOUR_MS = 3_600_000


def test_record_from_the_future_proves_nothing_about_having_caught_up() -> None:
    """It stands before the cancel that counts: who took it for the present would fire what was cancelled."""

    async def main() -> None:
        world = SimulatedWorld()
        agent = await world.started()
        world.schedule("order-1", due_in_ms=1_000)
        await world.applied(agent)
        await agent.kill()
        log = world.cluster.log("task-events", 0)
        encode = world.codec.encode_event
        future_ms = InstantMs(world.clock.now_ms() + HOUR_MS)
        log.append(b"stranger", encode(Cancel(task_id=TaskId("stranger"))), at_ms=future_ms)
        # Far more than one fetch or one transaction takes.
        for number in range(10_000):
            name = f"filler-{number}"
            log.append(name.encode(), encode(Cancel(task_id=TaskId(name))), at_ms=world.clock.now_ms())
        world.cancel("order-1")
        await world.clock.advance(2_000)

        restarted = await world.started()
        await world.clock.advance(60_000)

        assert world.emitted() == []
        state = restarted.owner.get(TaskId("order-1"))
        assert state is not None
        assert state.status is Status.CANCELLED

    run_virtual(main)
