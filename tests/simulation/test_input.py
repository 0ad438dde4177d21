"""The input as upstreams really write it: open and aborted transactions, busy topics, gaps, topics made anew."""

from typing import Any

import msgspec
import pytest

from pipeline.core.events import Reason
from pipeline.core.tasks import Offset, Status, TaskId
from pipeline.ports import InputBatch
from pipeline.service.owner.status import Phase
from pipeline.testing.simulated_owner import simulated_settings
from pipeline.testing.simulated_world import SimulatedWorld
from pipeline.testing.virtual_time import run_virtual

pytestmark = pytest.mark.simulation


def test_open_upstream_transaction_holds_firing_back_and_loses_no_cancel() -> None:
    """The cancel is in an open transaction when the timer is due: late is allowed, wrong is not."""

    async def main() -> None:
        world = SimulatedWorld()
        agent = await world.started()
        world.schedule("order-1", due_in_ms=3_000)
        world.schedule("order-2", due_in_ms=3_000)
        upstream = world.cluster.producer("upstream")
        upstream.init()
        world.cancel("order-1", through=upstream)
        await world.clock.advance(2_900)
        world.cluster.hold_markers = True
        world.commit_upstream(upstream)
        await world.clock.advance(3_000)
        assert world.emitted() == []
        assert agent.owner.status.fence_waiting_ms >= 2_000

        world.cluster.hold_markers = False
        world.cluster.write_markers()
        await world.until(lambda: world.emitted() == ["order-2"])

        assert agent.owner.status.fence_waiting_ms == 0
        await world.heal_and_check()
        assert world.emitted() == ["order-2"]

    run_virtual(main)


def test_upstream_transaction_that_stays_open_delays_timers_until_it_times_out() -> None:
    """Nobody ends it: the broker does after its time-out, and the timers fire then, by themselves."""

    async def main() -> None:
        world = SimulatedWorld()
        await world.started()
        world.schedule("order-1", due_in_ms=1_000)
        upstream = world.cluster.producer("upstream")
        upstream.init()
        world.cancel("order-1", through=upstream)
        await world.clock.advance(9_000)
        assert world.emitted() == []

        await world.until(lambda: world.emitted() == ["order-1"], within_ms=4_000)

        await world.heal_and_check()

    run_virtual(main)


def test_aborted_upstream_events_do_nothing() -> None:
    """An aborted cancel cancels nothing, an aborted schedule fires nothing, and both leave no row."""

    async def main() -> None:
        world = SimulatedWorld()
        agent = await world.started()
        world.schedule("order-1", due_in_ms=1_000)
        upstream = world.cluster.producer("upstream")
        upstream.init()
        world.cancel("order-1", through=upstream)
        world.schedule("order-2", due_in_ms=500, through=upstream)
        upstream.abort()

        await world.clock.advance(5_000)

        assert world.emitted() == ["order-1"]
        assert agent.owner.get(TaskId("order-2")) is None
        await world.heal_and_check()

    run_virtual(main)


def test_busy_input_does_not_starve_firing() -> None:
    """The fence waits for one fixed offset: events that come after the clock was read don't move it away."""

    async def main() -> None:
        world = SimulatedWorld()
        agent = await world.started(settings=simulated_settings(batch_records_max=3))
        agent.process.latency_ms = lambda: 2
        world.schedule("order-1", due_in_ms=1_000)
        for number in range(800):
            # Faster than it can be applied: the end is never reached.
            for part in range(4):
                world.schedule(f"noise {number} {part}", due_in_ms=600_000)
            await world.clock.advance(5)
            if world.emitted():
                break

        (task,) = world.emissions()
        assert task.task_id == "order-1"
        assert task.fence_offset < world.cluster.log("task-events", 0).end_offset
        assert world.position() < world.cluster.log("task-events", 0).end_offset

    run_virtual(main)


@pytest.mark.parametrize("wait_ms", range(10))
def test_cancel_that_races_with_the_fence_wins_or_is_told_too_late(wait_ms: int) -> None:
    """Acknowledged before the instant: it wins, even if the owner is already looking at its clock."""

    async def main() -> None:
        world = SimulatedWorld()
        agent = await world.started()
        agent.process.latency_ms = lambda: 3
        world.schedule("order-1", due_in_ms=1_000)
        await world.clock.advance(995 + wait_ms)
        world.cancel("order-1")
        await world.clock.advance(5_000)

        state = agent.owner.get(TaskId("order-1"))
        assert state is not None
        if wait_ms < 5:
            assert world.emitted() == []
        if world.emitted():
            assert state.status is Status.EMITTED
            assert state.verdicts[-1].verdict == "TOO_LATE"
            assert world.cluster.log("due-tasks", 0).committed()[0].offset == state.emitted_offset
        else:
            assert state.status is Status.CANCELLED
        await world.heal_and_check()

    run_virtual(main)


@pytest.mark.parametrize("wait_ms", range(12))
def test_clock_is_read_before_the_end_is_asked_for(wait_ms: int) -> None:
    """While the answer for one timer travels, the next falls due, and its cancel may lie beyond that answer."""

    async def main() -> None:
        world = SimulatedWorld()
        agent = await world.started()
        agent.process.latency_ms = lambda: 3
        world.schedule("first", due_in_ms=1_000)
        world.schedule("second", due_in_ms=1_000 + wait_ms)
        await world.clock.advance(999 + wait_ms)
        world.cancel("second")
        await world.clock.advance(5_000)

        assert world.emitted() == ["first"]
        await world.heal_and_check()

    run_virtual(main)


def test_topic_created_anew_is_read_from_its_start_with_new_generations(events: list[Any]) -> None:
    """Old offsets mean nothing there: timers of the old topic still fire, and none of its events is skipped."""

    async def main() -> None:
        world = SimulatedWorld()
        agent = await world.started()
        for number in range(5):
            world.schedule(f"old {number}", due_in_ms=60_000)
        world.schedule("twice", due_in_ms=1_000)
        await world.clock.advance(5_000)
        await world.applied(agent)
        await agent.stop()
        world.recreate_events()
        world.cancel("old 1")
        world.schedule("old 2", due_in_ms=10_000)
        world.schedule("twice", due_in_ms=1_000)

        await world.started()
        await world.clock.advance(120_000)

        assert sorted(world.emitted()) == ["old 0", "old 2", "old 3", "old 4", "twice", "twice"]
        assert [entry["event"] for entry in events].count("input_topic_recreated") == 1
        await world.heal_and_check()

    run_virtual(main)


def test_topic_created_anew_under_a_running_agent_stops_it_until_it_has_acquired_again() -> None:
    """The fence asks for the topic by its id, so nothing fires by the offsets of another log."""

    async def main() -> None:
        world = SimulatedWorld()
        agent = await world.started()
        world.schedule("order-1", due_in_ms=5_000)
        await world.applied(agent)
        world.recreate_events()
        world.cancel("order-1")
        await world.clock.advance(60_000)

        assert world.emitted() == []
        assert agent.owner.status.phase is Phase.ACTIVE
        assert agent.owner.status.acquisitions >= 2
        await world.heal_and_check()

    run_virtual(main)


def test_partition_count_raised_under_a_running_agent_pauses_firing() -> None:
    """With another count, a cancel may lie in a partition where nobody looks for it: an operator decides."""

    async def main() -> None:
        world = SimulatedWorld()
        agent = await world.started()
        world.schedule("order-1", due_in_ms=5_000)
        await world.applied(agent)
        world.cluster.add_partitions("task-events", 2)
        await world.clock.advance(600_000)

        assert world.emitted() == []
        assert agent.owner.status.phase is Phase.REFUSED
        assert "partition" in agent.owner.status.message

    run_virtual(main)


def test_all_topics_grown_while_stopped_still_refuse_to_run() -> None:
    """The count that the timers were placed with travels in the positions record."""

    async def main() -> None:
        world = SimulatedWorld()
        agent = await world.started()
        world.schedule("order-1", due_in_ms=5_000)
        await world.applied(agent)
        await agent.stop()
        for topic in list(world.cluster.topics()):
            world.cluster.add_partitions(topic, 2)

        restarted = world.agent()
        restarted.start()
        await world.clock.advance(600_000)

        assert world.emitted() == []
        assert restarted.owner.status.phase is Phase.REFUSED

    run_virtual(main)


def test_records_lost_below_the_position_refuse_the_partition_until_loss_is_accepted() -> None:
    """Retention passed the table: a cancel may be among what is gone, so only a person may go on."""

    async def main() -> None:
        world = SimulatedWorld()
        agent = await world.started()
        world.schedule("order-1", due_in_ms=60_000)
        await world.applied(agent)
        await agent.kill()
        world.schedule("lost", due_in_ms=60_000)
        world.schedule("kept", due_in_ms=60_000)
        world.cluster.log("task-events", 0).delete_before(Offset(2))

        refused = world.agent()
        refused.start()
        await world.clock.advance(120_000)
        assert world.emitted() == []
        assert refused.owner.status.phase is Phase.REFUSED
        await refused.kill()
        await world.started(settings=simulated_settings(accept_loss=True))
        await world.clock.advance(120_000)

        assert sorted(world.emitted()) == ["kept", "order-1"]
        world.check()

    run_virtual(main)


def test_empty_task_state_after_work_was_done_is_refused() -> None:
    """A lost changelog looks like a first start, and would emit everything once more."""

    async def main() -> None:
        world = SimulatedWorld()
        agent = await world.started()
        world.schedule("order-1", due_in_ms=1_000)
        await world.until(lambda: world.emitted() == ["order-1"])
        await agent.kill()
        world.cluster.create_topic("task-state", 1)

        restarted = world.agent()
        restarted.start()
        await world.clock.advance(60_000)

        assert world.emitted() == ["order-1"]
        assert restarted.owner.status.phase is Phase.REFUSED

    run_virtual(main)


def test_gap_between_batches_is_noticed_and_nothing_is_skipped() -> None:
    """A client that jumps ahead would lose events silently: each batch says where it starts."""

    async def main() -> None:
        world = SimulatedWorld()
        agent = await world.started()

        def skip(batch: InputBatch) -> InputBatch:
            first = batch.records[1].offset
            return msgspec.structs.replace(batch, start_position=Offset(first), records=batch.records[1:])

        agent.source.disturb = skip
        world.schedule("order-1", due_in_ms=1_000)
        world.schedule("order-2", due_in_ms=1_000)
        await world.clock.advance(5_000)

        assert sorted(world.emitted()) == ["order-1", "order-2"]
        await world.heal_and_check()

    run_virtual(main)


def test_refused_records_go_to_dead_tasks_and_delay_nothing() -> None:
    """Nulls, rubbish and foreign keys are set aside with a reason; the timer between them fires on time."""

    async def main() -> None:
        world = SimulatedWorld()
        await world.started()
        world.cluster.send("task-events", b"order-1", None, partition=0)
        world.cluster.send("task-events", None, b"value", partition=0)
        world.cluster.send("task-events", b"\xff\xfe", b"value", partition=0)
        world.schedule("order-1", due_in_ms=1_000)
        world.cluster.send("task-events", b"order-1", b"rubbish", partition=0)
        world.cluster.send("task-events", b"\x00positions", b"rubbish", partition=0)
        await world.clock.advance(1_010)

        assert world.emitted() == ["order-1"]
        reasons = [Reason.NULL_VALUE, Reason.NULL_KEY, Reason.INVALID_KEY, Reason.MALFORMED, Reason.RESERVED_KEY]
        assert [dead.reason for dead in world.dead()] == reasons
        assert [dead.origin.offset for dead in world.dead()] == [0, 1, 2, 4, 5]
        await world.heal_and_check()

    run_virtual(main)


def test_backward_clock_step_fires_nothing_early_and_nothing_twice() -> None:
    """The owner's clock is the clock: set back, it waits again for what is not due any more."""

    async def main() -> None:
        world = SimulatedWorld()
        await world.started()
        world.schedule("order-1", due_in_ms=2_000)
        world.schedule("order-2", due_in_ms=10_000)
        await world.until(lambda: world.emitted() == ["order-1"])
        world.clock.step(-3_600_000)
        world.schedule("order-3", due_in_ms=1_000)
        await world.until(lambda: len(world.emitted()) == 2)
        assert world.emitted() == ["order-1", "order-3"]
        await world.clock.advance(3_700_000)

        assert world.emitted() == ["order-1", "order-3", "order-2"]
        world.check()

    run_virtual(main)
