"""The incident that duetasks was made for, with real processes killed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.acceptance.harness import assert_fired_once, cancel, now_ms, schedule

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipeline.embedded import EmbeddedBroker
    from tests.acceptance.harness import Deployment

pytestmark = pytest.mark.acceptance


def test_cancelled_task_stays_cancelled_across_a_kill(deployment: Deployment) -> None:
    """April 1st: schedule, pay, cancel, SIGKILL, restart after the due time; the order must live.

    Once with the cancel applied before the kill, once with a cancel that Kafka only just acknowledged.
    """
    agent = deployment.start_agent()
    due_at_ms = now_ms() + 3_000
    deployment.send(schedule("seen", due_at_ms), cancel("seen"), schedule("unseen", due_at_ms))
    deployment.await_status("seen", "CANCELLED")
    deployment.send(cancel("unseen"))
    agent.kill()
    deployment.await_clock(due_at_ms)

    agent = deployment.start_agent()

    assert deployment.pass_instant(due_at_ms) == []
    assert agent.status("seen")["status"] == "CANCELLED"
    assert agent.status("unseen")["status"] == "CANCELLED"


def test_cancel_sent_while_the_agent_is_down_counts(deployment: Deployment) -> None:
    """Nobody was there to hear the customer pay; Kafka was, and that has to be enough."""
    agent = deployment.start_agent()
    due_at_ms = now_ms() + 3_000
    deployment.send(schedule("order", due_at_ms))
    deployment.await_status("order", "SCHEDULED")
    agent.kill()
    deployment.send(cancel("order"))
    assert now_ms() < due_at_ms, "the cancel has to be acknowledged before the task is due"
    deployment.await_clock(due_at_ms)

    agent = deployment.start_agent()

    assert deployment.pass_instant(due_at_ms) == []
    assert agent.status("order")["status"] == "CANCELLED"


def test_when_everything_was_down_the_cancelled_rest_and_the_overdue_fire_once(
    deploy: Callable[..., Deployment], private_broker: Callable[..., EmbeddedBroker]
) -> None:
    """April 1st with the whole broker killed too, and the other half of the promise: what fell due meanwhile fires."""
    broker = private_broker()
    deployment = deploy(bootstrap_servers=broker.start().bootstrap_servers)
    agent = deployment.start_agent()
    due_at_ms = now_ms() + 4_000
    overdue = [f"overdue-{n}" for n in range(50)]
    deployment.send(*(schedule(task_id, due_at_ms) for task_id in overdue))
    deployment.send(schedule("order", due_at_ms), cancel("order"))
    deployment.await_status("order", "CANCELLED")
    agent.kill()
    broker.kill()
    deployment.await_clock(due_at_ms + 1_000)

    broker.start()
    agent = deployment.start_agent()

    deployment.await_due(overdue)
    fired = deployment.pass_instant(due_at_ms)
    assert_fired_once(fired, overdue)
    assert min(task.fired_at_ms - task.due_at_ms for task in fired) > 1_000
    assert agent.status("order")["status"] == "CANCELLED"
    for task in fired:
        emission = agent.status(task.task_id)["emission"]
        assert emission["lateness_ms"] == task.fired_at_ms - task.due_at_ms
