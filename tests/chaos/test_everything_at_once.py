"""A fleet that is never at rest: agents join, leave, die, freeze and wake, while upstreams schedule and cancel."""

from __future__ import annotations

import random
import secrets
import signal
from typing import TYPE_CHECKING

import pytest

from tests.acceptance.harness import now_ms
from tests.chaos.load import Load

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.acceptance.harness import Agent, Deployment

pytestmark = pytest.mark.chaos

STEPS = 10
AGENTS_MAX = 3
SESSION_MS = 3_000


def disturb(deployment: Deployment, rng: random.Random, number: int) -> str:
    """Do one thing to the fleet, and tell what it was."""
    awake = [agent for agent in deployment.running() if not agent.is_frozen]
    frozen = [agent for agent in deployment.running() if agent.is_frozen]
    actions: list[str] = ["kill", "stop", "freeze"] if awake else []
    if len(awake) + len(frozen) < AGENTS_MAX:
        actions += ["start"] * 3
    if frozen:
        actions += ["thaw"] * 2
    action = rng.choice(actions)
    if action == "start":
        # Two folders, so that folders are shared, and found again with other partitions' tables in them.
        deployment.start_agent(f"folder-{number % 2}", ready=False, fence=rng.choice(["offset", "write"]))
        return action
    agent: Agent = rng.choice(frozen if action == "thaw" else awake)
    if action == "stop":
        # Minus SIGTERM: it was still on its way to where it listens for signals.
        assert agent.stop() in {0, -signal.SIGTERM}, agent.log_tail()
    else:
        {"kill": agent.kill, "freeze": agent.freeze, "thaw": agent.thaw}[action]()
    return f"{action} {agent.name}"


def check_evidence(deployment: Deployment) -> None:
    """From the topics alone: no task was fired past a cancel that stood below its fence."""
    cancels: dict[str, int] = {}
    for record in deployment.reader(deployment.topics.events).catch_up():
        event = deployment.codec.decode_event(record.value or b"")
        if record.key is not None and type(event).__name__ == "Cancel":
            cancels[record.key.decode()] = record.offset
    for task in deployment.due():
        assert task.applied_offset >= task.fence_offset, f"{task.task_id} fired ahead of its fence"
        assert task.fence_clock_ms == task.fired_at_ms
        cancelled_at = cancels.get(task.task_id)
        assert cancelled_at is None or cancelled_at >= task.applied_offset, f"{task.task_id} was cancelled, and fired"


def check_places(deployment: Deployment, agent: Agent) -> None:
    """What the status says of an emission is where the emission is."""
    places = {
        (record.key or b"").decode(): (record.partition, record.offset)
        for record in deployment.reader(deployment.topics.due).catch_up()
    }
    for task_id, task in agent.tasks().items():
        emission = task["emission"]
        if emission is not None and emission["offset"] is not None:
            assert (emission["partition"], emission["offset"]) == places[task_id], task_id


def test_restless_fleet_fires_every_task_once_and_no_cancelled_one(deploy: Callable[..., Deployment]) -> None:
    """Nobody plans failures one at a time: whatever comes together, each promise holds when it is over."""
    seed = secrets.randbits(32)
    rng = random.Random(seed)
    deployment = deploy(partitions=4, session_timeout_ms=SESSION_MS, transaction_timeout_ms=3_000)
    deployment.start_agent("folder-0")
    done = []
    with Load(deployment, rng) as load:
        for number in range(STEPS):
            deployment.await_clock(now_ms() + rng.randrange(200, 3 * SESSION_MS // 2))
            done.append(disturb(deployment, rng, number))
        load.stop()
    print(f"seed {seed}: {', '.join(done)}")  # noqa: T201 - shown by pytest when it fails
    for agent in deployment.running():
        agent.thaw()
    if len(deployment.running()) < AGENTS_MAX:
        deployment.start_agent("folder-0", ready=False)
    deployment.await_ready(60)

    deployment.await_due(load.must_fire(), within_s=60)
    load.check(deployment.pass_instant(load.last_due_at_ms()))
    assert load.unknown == set(), "Kafka itself was well all the time"
    assert deployment.dead() == []
    deployment.until(deployment.group_is_at_the_end, within_s=10, what="the group hears how far all partitions are")
    check_evidence(deployment)
    check_places(deployment, deployment.running()[0])
