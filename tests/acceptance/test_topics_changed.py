"""Topics that are lost, created anew or repartitioned: told by their ids and counts, and never fired from twice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.acceptance.harness import assert_fired_once, cancel, now_ms, schedule

if TYPE_CHECKING:
    from tests.acceptance.harness import Agent, Deployment

pytestmark = pytest.mark.acceptance


def refusals(agent: Agent) -> dict[int, str]:
    """The message of each partition that the agent refuses to serve."""
    return {n: status["message"] for n, status in agent.partitions().items() if status["phase"] == "REFUSED"}


def await_refusals(deployment: Deployment, agent: Agent) -> None:
    """Wait until the agent refuses every partition."""
    count = deployment.settings.partitions
    deployment.until(lambda: len(refusals(agent)) == count, within_s=30, what="all partitions are refused")


def test_task_events_created_anew_starts_at_its_beginning_and_repeats_no_generation(deployment: Deployment) -> None:
    """Timers live in task-state, so they outlive the topic that they came from; offsets begin anew, those not."""
    agent = deployment.start_agent()
    tasks = [f"task-{n}" for n in range(40)]
    waiting = [f"waiting-{n}" for n in range(40)]
    later_ms = now_ms() + 11_000
    deployment.send(*(schedule(task_id, now_ms()) for task_id in tasks))
    deployment.send(*(schedule(task_id, later_ms) for task_id in waiting))
    deployment.await_due(tasks)
    agent.stop()
    deployment.recreate_topic(deployment.topics.events)
    # Fewer events than before: every position of the old topic lies beyond the end of the new one.
    again = tasks[:10]
    deployment.send(*(schedule(task_id, now_ms()) for task_id in again), cancel(waiting[0]))

    agent = deployment.start_agent()

    assert len(agent.logged("input_topic_recreated")) == deployment.settings.partitions
    deployment.await_due(waiting[1:])
    fired = deployment.pass_instant(later_ms)
    assert sorted(task.task_id for task in fired) == sorted([*tasks, *again, *waiting[1:]])
    assert len({(task.task_id, task.generation) for task in fired}) == len(fired), "a generation was used twice"
    assert agent.status(waiting[0])["status"] == "CANCELLED"


def test_lost_task_state_refuses_every_partition(deployment: Deployment) -> None:
    """Without it nobody knows what has fired: reading task-events again would fire all of it a second time.

    Not even `--accept-loss` may do that: it is for records that are gone.
    """
    agent = deployment.start_agent()
    tasks = [f"task-{n}" for n in range(40)]
    deployment.send(*(schedule(task_id, now_ms()) for task_id in tasks))
    deployment.await_due(tasks)
    agent.stop()
    deployment.recreate_topic(deployment.topics.state)

    for arguments in ([], ["--accept-loss"]):
        agent = deployment.start_agent("a", *arguments, ready=False)

        await_refusals(deployment, agent)
        assert all("duetasks rebuild" in message for message in refusals(agent).values())
        assert len(agent.logged("partition_refused")) == 2
        assert not agent.is_ready
        agent.stop()
    assert_fired_once(deployment.due(), tasks)


def test_event_sent_to_another_partition_is_refused_where_people_look(deployment: Deployment) -> None:
    """An upstream with librdkafka's own partitioner: its cancel would miss its schedule, so neither may pass unseen."""
    deployment.start_agent()
    due_at_ms = now_ms() + 2_000
    ids = [f"task-{n}" for n in range(40)]
    crc = deployment.new_producer(partitioner="consistent_random")
    right = dict(zip(ids, deployment.send(*(schedule(task_id, due_at_ms) for task_id in ids)), strict=True))
    stray_ids = [f"stray-{n}" for n in range(40)]
    crc_places = deployment.send(*(schedule(task_id, due_at_ms) for task_id in stray_ids), producer=crc)
    expected = dict(zip(stray_ids, deployment.send(*(cancel(task_id) for task_id in stray_ids)), strict=True))
    strays = {
        task_id: place for task_id, place in zip(stray_ids, crc_places, strict=True) if place[0] != expected[task_id][0]
    }
    missed = dict(zip(ids, deployment.send(*(cancel(task_id) for task_id in ids), producer=crc), strict=True))
    missed = {task_id: place for task_id, place in missed.items() if place[0] != right[task_id][0]}
    assert strays
    assert missed

    fired = deployment.pass_instant(due_at_ms)

    # The others were cancelled by a cancel that came where it belongs.
    assert_fired_once(fired, missed)
    deployment.until(
        lambda: len(deployment.dead()) == len(strays) + len(missed), within_s=10, what="all strays are told"
    )
    dead = deployment.dead()
    assert {task.reason for task in dead} == {"WRONG_PARTITION"}
    assert {(task.origin.partition, task.origin.offset) for task in dead} == {*strays.values(), *missed.values()}
    assert all("murmur2_random" in task.message for task in dead)


@pytest.mark.parametrize("which", ["task-events alone", "all topics"])
def test_raised_partition_count_stops_all_firing(deployment: Deployment, which: str) -> None:
    """Cancels would go to another partition than their tasks: nothing may fire until a person has acted."""
    agent = deployment.start_agent()
    due_at_ms = now_ms() + 7_000
    ids = [f"task-{n}" for n in range(40)]
    deployment.send(*(schedule(task_id, due_at_ms) for task_id in ids))
    deployment.await_status(ids[0], "SCHEDULED")
    topics = deployment.topics
    everything = [topics.events, topics.progress, topics.state, topics.due, topics.dead, topics.applied]
    deployment.add_partitions([topics.events] if which == "task-events alone" else everything, 5)
    fresh = deployment.new_producer()  # knows of the new partitions
    places = deployment.send(*(cancel(task_id) for task_id in ids[:30]), producer=fresh)
    # These may hash anywhere; new ones are what a partition without a past would fire.
    new_places = deployment.send(*(schedule(f"new-{n}", due_at_ms) for n in range(40)), producer=fresh)
    assert now_ms() < due_at_ms, "the cancels have to be acknowledged before the tasks are due"
    assert {partition for partition, _ in [*places, *new_places]} >= {2, 3, 4}

    def refused() -> bool:
        # The old partitions must be refused; of the new ones none may work.
        found = agent.partitions()
        return set(refusals(agent)) >= {0, 1} and all(status["phase"] != "ACTIVE" for status in found.values())

    deployment.await_clock(due_at_ms + 1_000)
    deployment.until(refused, within_s=30, what="no partition works")
    assert all("partitions" in message and "cancel" in message for message in refusals(agent).values())
    assert deployment.due() == []
    # And a restart changes nothing.
    agent.kill()
    agent = deployment.start_agent(ready=False)
    deployment.until(
        lambda: refused() or not agent.is_running, within_s=30, what="no partition works, or the agent refuses to run"
    )
    assert deployment.due() == []
