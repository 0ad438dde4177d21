"""One record that the broker refuses must not hold up the others."""

import pytest

from pipeline.core.events import Reason
from pipeline.core.tasks import Status, TaskId
from pipeline.testing.memory_cluster import NewRecord
from pipeline.testing.simulated_owner import simulated_settings
from pipeline.testing.simulated_world import SimulatedWorld
from pipeline.testing.virtual_time import run_virtual

pytestmark = pytest.mark.simulation


@pytest.mark.parametrize("found_by_the_client", [False, True])
@pytest.mark.parametrize("poisoned_topic", ["due-tasks", "task-state"])
def test_poisoned_record_is_isolated_by_halving_and_the_others_fire(
    poisoned_topic: str,
    *,
    found_by_the_client: bool,
) -> None:
    """Refused at its emission or at its row: it ends on `dead-tasks`, once, and hundreds around it are unharmed."""

    async def main() -> None:
        world = SimulatedWorld()
        agent = await world.started()

        def is_poisoned(record: NewRecord) -> bool:
            return record.topic == poisoned_topic and b"POISON" in (record.value or b"")

        if found_by_the_client:
            agent.faults.is_too_large = is_poisoned
        else:
            agent.faults.is_poisoned = is_poisoned
        for number in range(300):
            world.schedule(f"task {number}", due_in_ms=2_000, payload=b"POISON" if number == 123 else b"fine")
        await world.clock.advance(60_000)

        expected = {f"task {number}" for number in range(300) if number != 123}
        assert set(world.emitted()) == expected
        assert len(world.emitted()) == len(expected)
        (dead,) = world.dead()
        assert dead.reason is Reason.UNDELIVERABLE
        if poisoned_topic == "due-tasks":
            state = agent.owner.get(TaskId("task 123"))
            assert state is not None
            assert state.status is Status.DEAD
            assert dead.task_id == "task 123"
        else:
            assert dead.key == b"task 123"
        world.check()

    run_virtual(main)


def test_many_poisoned_records_among_many_are_all_set_aside() -> None:
    """Isolation is repeated for each of them, and comes to an end."""

    async def main() -> None:
        world = SimulatedWorld()
        agent = await world.started()
        agent.faults.is_poisoned = lambda record: record.topic == "due-tasks" and b"POISON" in (record.value or b"")
        for number in range(200):
            world.schedule(f"task {number}", due_in_ms=2_000, payload=b"POISON" if number % 20 == 7 else b"fine")
        await world.clock.advance(120_000)

        assert len(set(world.emitted())) == 190
        assert len(world.emitted()) == 190
        assert len(world.dead()) == 10
        world.check()

    run_virtual(main)


def test_poisoned_timer_is_isolated_while_the_input_is_busy() -> None:
    """Inputs that keep coming must not travel with the timers of a narrowed turn: the one at fault must stand alone."""

    async def main() -> None:
        world = SimulatedWorld()
        agent = await world.started(settings=simulated_settings(batch_records_max=3))
        agent.process.latency_ms = lambda: 2
        agent.faults.is_poisoned = lambda record: record.topic == "due-tasks" and b"POISON" in (record.value or b"")
        world.schedule("bad", due_in_ms=1_000, payload=b"POISON")
        world.schedule("good", due_in_ms=1_000)
        for number in range(1_000):
            for part in range(4):
                world.schedule(f"noise {number} {part}", due_in_ms=600_000)
            await world.clock.advance(10)
            if world.dead() and world.emitted():
                break

        assert world.emitted() == ["good"]
        assert [dead.task_id for dead in world.dead()] == ["bad"]
        assert world.position() < world.cluster.log("task-events", 0).end_offset

    run_virtual(main)


@pytest.mark.parametrize("poisoned_topic", ["due-tasks", "task-state"])
def test_owner_rests_after_a_poisoned_record(poisoned_topic: str) -> None:
    """With its turns still narrowed and nothing to do it waits, instead of spinning and starving its event loop."""

    async def main() -> None:
        world = SimulatedWorld()
        agent = await world.started()
        agent.faults.is_poisoned = lambda record: record.topic == poisoned_topic and b"POISON" in (record.value or b"")
        for number in range(10):
            world.schedule(f"task {number}", due_in_ms=1_000, payload=b"POISON" if number == 3 else b"fine")
        await world.until(lambda: len(world.dead()) == 1)
        await world.clock.advance(2_000)
        steps = len(agent.process.steps)

        await world.clock.advance(30_000)

        assert len(agent.process.steps) - steps < 100
        world.schedule("later", due_in_ms=100)
        await world.clock.advance(200)
        assert "later" in world.emitted()

    run_virtual(main)


@pytest.mark.parametrize("refused_on", ["due-tasks", "dead-tasks"])
def test_what_is_set_aside_keeps_its_bytes_unless_even_those_are_refused(refused_on: str) -> None:
    """The content of a task that can't be emitted stands nowhere else any more; if it must go, its hash stays."""

    async def main() -> None:
        world = SimulatedWorld()
        agent = await world.started()
        agent.faults.is_poisoned = lambda record: (
            record.topic in {"due-tasks", refused_on} and b"POISON" in (record.value or b"")
        )
        world.schedule("poison", due_in_ms=2_000, payload=b"POISON")
        world.schedule("fine", due_in_ms=2_000)
        await world.clock.advance(60_000)

        (dead,) = world.dead()
        assert (dead.value is not None) == (refused_on == "due-tasks")
        assert bool(dead.value_sha256) == (refused_on == "dead-tasks")
        assert world.emitted() == ["fine"]
        world.check()

    run_virtual(main)
