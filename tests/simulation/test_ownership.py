"""Who may fire: zombies, unknown outcomes, time-outs, two deployments, strangers in the changelog."""

from collections.abc import Iterable

import pytest

from pipeline.core.tasks import Offset, Status, TaskId
from pipeline.service.owner.status import Phase
from pipeline.testing.memory_cluster import NewRecord
from pipeline.testing.memory_group import MemoryGroup
from pipeline.testing.memory_timer_table import MemoryDisk
from pipeline.testing.memory_transaction import CommitFault
from pipeline.testing.simulated_agent import SimulatedAgent
from pipeline.testing.simulated_owner import simulated_settings
from pipeline.testing.simulated_world import SimulatedWorld
from pipeline.testing.virtual_time import run_virtual

pytestmark = pytest.mark.simulation

ACQUIRE_STEPS = (
    "describe",
    "membership.prove",
    "transaction.acquire",
    "table.open",
    "end_offset",
    "start_offset",
    "transaction.flush",
    "transaction.commit",
    "membership.commit",
)


def _freeze_before(agent: SimulatedAgent, name: str, *, after: Iterable[str] = ()) -> None:
    """SIGSTOP the agent before the next effect called `name`."""
    before = list(after)

    def on_step(step: str) -> None:
        if before and step == before[0]:
            del before[0]
        elif not before and step == name:
            agent.process.on_step = None
            agent.process.freeze()

    agent.process.on_step = on_step


@pytest.mark.parametrize(
    "frozen_before", ["end_offset", "transaction.flush", "transaction.commit", "membership.commit"]
)
def test_thawed_zombie_emits_nothing_a_second_time(frozen_before: str) -> None:
    """Frozen in the middle of firing, thawed after another owner fired the same task: its transaction is fenced."""

    async def main() -> None:
        world = SimulatedWorld()
        first = await world.started()
        world.schedule("order-1", due_in_ms=5_000)
        await world.applied(first)
        await world.clock.advance(4_000)
        _freeze_before(first, frozen_before)
        if frozen_before == "membership.commit":
            world.schedule("moves the position", due_in_ms=600_000)
        await world.clock.advance(2_000)

        second = world.agent(disk=MemoryDisk())
        second.start()
        await world.until(lambda: second.owner.status.phase is Phase.ACTIVE and world.emitted() == ["order-1"])
        first.process.thaw()
        world.schedule("order-2", due_in_ms=1_000)
        await world.clock.advance(60_000)

        assert world.emitted() == ["order-1", "order-2"]
        assert second.owner.status.phase is Phase.ACTIVE
        assert second.owner.status.acquisitions == 1
        assert first.owner.status.phase is not Phase.ACTIVE
        await world.heal_and_check()

    run_virtual(main)


def test_thawed_zombie_without_membership_does_not_fence_the_right_owner() -> None:
    """It wakes up believing that it still has to acquire: the group says no before it touches anything."""

    async def main() -> None:
        world = SimulatedWorld()
        first = world.agent()
        _freeze_before(first, "membership.prove")
        first.start()
        await world.clock.advance(1_000)
        second = world.agent(disk=MemoryDisk())
        second.start()
        await world.until(lambda: second.owner.status.phase is Phase.ACTIVE)

        first.process.thaw()
        await world.clock.advance(60_000)
        world.schedule("order-1", due_in_ms=1_000)
        await world.clock.advance(5_000)

        assert second.owner.status.acquisitions == 1
        assert "transaction.acquire" not in first.process.steps
        assert world.emitted() == ["order-1"]

    run_virtual(main)


@pytest.mark.parametrize("frozen_before", ACQUIRE_STEPS)
def test_owner_frozen_while_it_acquires_does_no_harm(frozen_before: str) -> None:
    """Wherever it stands still, the next owner does its work, and the first finds out."""

    async def main() -> None:
        world = SimulatedWorld()
        first = world.agent()
        _freeze_before(first, frozen_before)
        first.start()
        world.schedule("order-1", due_in_ms=1_000)
        world.schedule("order-2", due_in_ms=30_000)
        world.cancel("order-1")
        await world.clock.advance(5_000)
        second = world.agent(disk=MemoryDisk())
        second.start()
        await world.clock.advance(5_000)
        first.process.thaw()
        await world.clock.advance(60_000)

        assert world.emitted() == ["order-2"]
        assert second.owner.status.phase is Phase.ACTIVE
        await world.heal_and_check()

    run_virtual(main)


@pytest.mark.parametrize(
    ("fault", "emitted_at_once"), [(CommitFault.UNKNOWN_COMMITTED, True), (CommitFault.UNKNOWN_NOT_COMMITTED, False)]
)
def test_unknown_outcome_is_found_out_by_acquiring_again(fault: CommitFault, *, emitted_at_once: bool) -> None:
    """Nobody knows whether the emission is out: what `task-state` says decides, never what was in memory."""

    async def main() -> None:
        world = SimulatedWorld()
        agent = await world.started()
        world.schedule("order-1", due_in_ms=1_000)
        await world.applied(agent)
        agent.faults.commits.append(fault)
        await world.until(lambda: not agent.faults.commits)
        assert (world.emitted() == ["order-1"]) is emitted_at_once

        await world.clock.advance(30_000)

        assert world.emitted() == ["order-1"]
        assert agent.owner.status.acquisitions == 2
        state = agent.owner.get(TaskId("order-1"))
        assert state is not None
        assert state.status is Status.EMITTED
        await world.heal_and_check()

    run_virtual(main)


def test_every_owner_whose_transaction_timed_out_acquires_again_by_itself() -> None:
    """A broker paused for longer than the time-out fences every owner: stopping for good would orphan the partition."""

    async def main() -> None:
        world = SimulatedWorld()
        agent = await world.started()
        world.schedule("order-1", due_in_ms=1_000)
        await world.applied(agent)
        _freeze_before(agent, "transaction.commit")
        await world.clock.advance(30_000)

        agent.process.thaw()
        await world.until(lambda: world.emitted() == ["order-1"])

        assert agent.owner.status.acquisitions == 2
        await world.heal_and_check()

    run_virtual(main)


def test_idle_owner_notices_that_it_was_fenced() -> None:
    """A heartbeat is a transaction: an owner with nothing to do still learns that somebody took its place."""

    async def main() -> None:
        world = SimulatedWorld()
        settings = simulated_settings(heartbeat_interval_ms=5_000)
        agent = await world.started(settings=settings)
        await world.clock.advance(2_000)
        stranger = world.cluster.producer(f"duetasks-{world.cluster.topics()['task-state'].topic_id}-0")
        stranger.init()

        await world.clock.advance(10_000)

        assert agent.owner.status.acquisitions == 2
        assert agent.owner.status.phase is Phase.ACTIVE

    run_virtual(main)


def test_two_deployments_on_the_same_topics_fence_each_other() -> None:
    """Another group, another app name, the same data: they may quarrel, but a task comes out once."""

    async def main() -> None:
        world = SimulatedWorld()
        first = await world.started()
        world.schedule("order-1", due_in_ms=60_000)
        await world.applied(first)
        mine, world.group = world.group, MemoryGroup()
        other = world.agent("other deployment", disk=MemoryDisk())
        other.start()
        await world.clock.advance(120_000)

        assert world.emitted() == ["order-1"]
        assert first.owner.status.acquisitions + other.owner.status.acquisitions > 2
        world.check()
        assert mine.is_owner(0, first.process.name)

    run_virtual(main)


def test_strangers_open_transaction_in_task_state_does_not_end_the_restore_early() -> None:
    """The last stable offset stands before our newest rows: an owner restored only up to there would fire again."""

    async def main() -> None:
        world = SimulatedWorld()
        agent = await world.started()
        stranger = world.cluster.producer("stranger")
        stranger.init()
        stranger.send(NewRecord(topic="task-state", partition=0, key=b"foreign", value=b"not committed"))
        world.schedule("order-1", due_in_ms=1_000)
        await world.until(lambda: world.emitted() == ["order-1"], within_ms=5_000)
        await agent.kill()
        world.disk.lose(0)

        restarted = world.agent()
        restarted.start()
        await world.clock.advance(1_000)
        assert restarted.owner.status.phase is Phase.ACQUIRING
        await world.until(lambda: restarted.owner.status.phase is Phase.ACTIVE)
        await world.clock.advance(60_000)

        assert world.emitted() == ["order-1"]
        await world.heal_and_check()

    run_virtual(main)


def test_a_restore_that_a_deposed_leader_ended_too_early_is_done_again() -> None:
    """It told an end below the newest rows; firing from such a table would repeat what they say has fired."""

    async def main() -> None:
        world = SimulatedWorld()
        agent = await world.started()
        world.schedule("order-1", due_in_ms=1_000)
        await world.applied(agent)
        old_end = world.cluster.log("task-state", 0).end_offset
        for number in range(200):  # more than one fetch: what is read beyond the end by chance must not do
            world.schedule(f"another {number}", due_in_ms=3_600_000)
        await world.until(lambda: world.emitted() == ["order-1"], within_ms=5_000)
        await agent.kill()
        world.disk.lose(0)

        restarted = world.agent()
        told: list[Offset] = []

        def answer(topic: str, end: Offset) -> Offset:
            if topic != "task-state" or told:
                return end
            told.append(old_end)
            return old_end

        restarted.end_offsets.answer = answer
        restarted.start()
        await world.until(lambda: restarted.owner.status.phase is Phase.ACTIVE)
        await world.clock.advance(60_000)

        assert told == [old_end]
        assert restarted.owner.status.acquisitions == 2
        assert world.emitted() == ["order-1"]
        await world.heal_and_check()

    run_virtual(main)


def test_a_restore_that_ended_too_early_leaves_no_trace() -> None:
    """If it committed what it knows, the next owner would find old positions, and fire again what was read again."""

    async def main() -> None:
        world = SimulatedWorld()
        agent = await world.started()
        old_end = world.cluster.log("task-state", 0).end_offset
        world.schedule("order-1", due_in_ms=1_000)
        for number in range(200):  # more than one fetch: what is read beyond the end by chance must not do
            world.schedule(f"another {number}", due_in_ms=3_600_000)
        await world.until(lambda: world.emitted() == ["order-1"], within_ms=5_000)
        await agent.kill()
        world.disk.lose(0)

        restarted = world.agent()
        ends = [old_end]
        restarted.end_offsets.answer = lambda topic, end: ends.pop() if topic == "task-state" and ends else end
        restarted.start()
        await world.until(lambda: restarted.owner.status.phase is Phase.ACTIVE)
        await world.clock.advance(60_000)

        assert world.emitted() == ["order-1"]
        await world.heal_and_check()

    run_virtual(main)


def test_restore_waits_for_the_markers_of_the_last_owner() -> None:
    """The last commit is decided but not visible: it must be in the table before anything fires."""

    async def main() -> None:
        world = SimulatedWorld()
        agent = await world.started()
        world.schedule("order-1", due_in_ms=1_000)
        await world.applied(agent)
        world.cluster.hold_markers = True
        await world.until(lambda: agent.process.steps[-2:] != [] and agent.owner.status.fired == 1)
        await agent.kill()
        world.disk.lose(0)

        await world.started()
        await world.clock.advance(60_000)

        world.cluster.write_markers()
        assert world.emitted() == ["order-1"]
        await world.heal_and_check()

    run_virtual(main)


def test_group_offset_never_passes_the_table() -> None:
    """Observers and other tools take the group's offset for what is done: it must be in a table by then."""

    async def main() -> None:
        world = SimulatedWorld()
        agent = await world.started(settings=simulated_settings(batch_records_max=2, group_commit_interval_ms=1))
        agent.process.latency_ms = lambda: 1
        seen: list[int] = []

        def on_step(_step: str) -> None:
            committed = world.group.offsets.get(0, 0)
            assert committed <= world.position()
            seen.append(committed)

        agent.process.on_step = on_step
        for number in range(50):
            for part in range(7):
                world.schedule(f"task {number} {part}", due_in_ms=number * 37)
            await world.clock.advance(97)
        await world.clock.advance(3_000)

        assert len(set(seen)) > 100
        assert world.group.offsets[0] == world.position()
        await world.heal_and_check()

    run_virtual(main)
