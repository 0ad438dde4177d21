"""What a task's state says about its emission, also when somebody else writes to `due-tasks`."""

from typing import Any

import pytest

from pipeline.core.tasks import Status, TaskId
from pipeline.testing.simulated_agent import SimulatedAgent
from pipeline.testing.simulated_world import SimulatedWorld
from pipeline.testing.virtual_time import run_virtual

pytestmark = pytest.mark.simulation


def _told(agent: SimulatedAgent, task_id: str) -> int:
    state = agent.owner.get(TaskId(task_id))
    assert state is not None
    assert state.status is Status.EMITTED
    return state.emitted_offset


def _offsets(world: SimulatedWorld) -> dict[str, int]:
    log = world.cluster.log("due-tasks", 0)
    return {entry.key.decode(): entry.offset for entry in log.committed() if entry.key is not None}


def test_state_tells_the_offset_of_each_emission(events: list[Any]) -> None:
    """`TOO_LATE` points there: through many transactions, each with a marker, and without a second attempt."""

    async def main() -> None:
        world = SimulatedWorld()
        agent = await world.started()
        names = [f"task {number}" for number in range(20)]
        for number, name in enumerate(names):
            world.schedule(name, due_in_ms=1_000 + 50 * (number // 3))
        await world.until(lambda: len(world.emitted()) == len(names))

        assert {name: _told(agent, name) for name in names} == _offsets(world)
        assert len(set(_offsets(world).values())) == len(names)
        assert agent.process.steps.count("transaction.abort") == 0
        assert [entry for entry in events if entry["log_level"] in {"warning", "error"}] == []

    run_virtual(main)


def test_foreign_record_on_due_tasks_costs_at_most_the_knowledge_of_an_offset() -> None:
    """A replay writes there too: the emission is done again without the guess, once, and the next ones are right."""

    async def main() -> None:
        world = SimulatedWorld()
        agent = await world.started()
        for number in range(4):
            world.schedule(f"task {number}", due_in_ms=1_000 * (number + 1))
        await world.clock.advance(1_500)
        replay = world.codec.encode_due(world.emissions()[0])
        world.cluster.send("due-tasks", b"replayed", replay, partition=0)
        await world.clock.advance(5_000)

        assert world.emitted().count("task 0") == 2
        assert [world.emitted().count(f"task {number}") for number in (1, 2, 3)] == [1, 1, 1]
        offsets = _offsets(world)
        assert _told(agent, "task 1") in {-1, offsets["task 1"]}
        assert [_told(agent, f"task {number}") for number in (2, 3)] == [offsets["task 2"], offsets["task 3"]]

    run_virtual(main)
