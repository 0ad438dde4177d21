"""Other people's transactions: upstreams that abort, and transactions that stay open on our topics."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import pytest

from tests.acceptance.harness import assert_fired_once, cancel, now_ms, schedule

if TYPE_CHECKING:
    from confluent_kafka import Producer

    from tests.acceptance.harness import Deployment

pytestmark = pytest.mark.acceptance


def transactional(deployment: Deployment, *, timeout_ms: int) -> Producer:
    """An upstream whose transaction the broker aborts after `timeout_ms`."""
    producer = deployment.new_producer(
        **{"transactional.id": f"upstream-{secrets.token_hex(4)}", "transaction.timeout.ms": timeout_ms}
    )
    producer.init_transactions(10)
    producer.begin_transaction()
    return producer


def test_aborted_events_do_nothing(deployment: Deployment) -> None:
    """An upstream that took everything back has neither scheduled nor cancelled anything."""
    deployment.start_agent()
    due_at_ms = now_ms() + 2_000
    kept = [f"kept-{n}" for n in range(20)]
    deployment.send(*(schedule(task_id, due_at_ms) for task_id in kept))
    upstream = transactional(deployment, timeout_ms=10_000)
    deployment.send(*(cancel(task_id) for task_id in kept), producer=upstream)
    deployment.send(*(schedule(f"aborted-{n}", due_at_ms) for n in range(20)), producer=upstream)
    upstream.abort_transaction(10)

    fired = deployment.pass_instant(due_at_ms)

    assert_fired_once(fired, kept)
    assert deployment.dead() == []


def test_open_transaction_makes_firing_late_and_never_wrong(deployment: Deployment) -> None:
    """A cancel may stand behind an open transaction, unread: until that ends, the task must wait."""
    agent = deployment.start_agent()
    due_at_ms = now_ms() + 1_500
    kept = [f"kept-{n}" for n in range(20)]
    gone = [f"gone-{n}" for n in range(20)]
    deployment.send(*(schedule(task_id, due_at_ms) for task_id in [*kept, *gone]))
    deployment.await_status("kept-0", "SCHEDULED")
    upstream = transactional(deployment, timeout_ms=60_000)
    inside = [f"inside-{n}" for n in range(20)]
    deployment.send(*(schedule(task_id, due_at_ms) for task_id in inside), producer=upstream)
    deployment.send(*(cancel(task_id) for task_id in gone))
    assert now_ms() < due_at_ms, "the cancels have to be acknowledged before the tasks are due"

    deployment.until(lambda: len(agent.logged("firing_waits_for_input")) == 2, within_s=20, what="it says why it waits")
    assert deployment.due() == []
    assert all(status["fence_waiting_ms"] > 0 for status in agent.partitions().values())
    upstream.commit_transaction(10)

    deployment.await_due([*kept, *inside])
    assert_fired_once(deployment.pass_instant(due_at_ms), [*kept, *inside])


def test_transaction_that_is_never_ended_holds_firing_up_until_the_broker_aborts_it(deployment: Deployment) -> None:
    """An upstream died in its transaction: timers go on by themselves, and what it had not committed never was."""
    deployment.start_agent()
    due_at_ms = now_ms() + 1_000
    kept = [f"kept-{n}" for n in range(20)]
    deployment.send(*(schedule(task_id, due_at_ms) for task_id in kept))
    upstream = transactional(deployment, timeout_ms=4_000)
    deployment.send(*(schedule(f"lost-{n}", due_at_ms) for n in range(20)), producer=upstream)

    deployment.await_due(kept)

    assert_fired_once(deployment.pass_instant(due_at_ms), kept)


def test_open_transaction_on_task_state_delays_a_restore_and_shortens_none(deployment: Deployment) -> None:
    """A restore that ended at the last stable offset would miss what lies behind: a cancel, for one."""
    agent = deployment.start_agent()
    due_at_ms = now_ms() + 4_000
    kept = [f"kept-{n}" for n in range(20)]
    gone = [f"gone-{n}" for n in range(20)]
    deployment.send(*(schedule(task_id, due_at_ms) for task_id in [*kept, *gone]))
    deployment.await_status("gone-0", "SCHEDULED")
    intruder = transactional(deployment, timeout_ms=60_000)
    for partition in range(deployment.settings.partitions):
        intruder.produce(deployment.topics.state, value=b"nonsense", key=b"intruder", partition=partition)
    intruder.flush(10)
    deployment.send(*(cancel(task_id) for task_id in gone))
    for task_id in gone:
        deployment.await_status(task_id, "CANCELLED")
    agent.kill()

    # On another disk, where nothing is known: all has to come from task-state.
    agent = deployment.start_agent("elsewhere", ready=False)

    deployment.until(lambda: agent.logged("restore_waits"), within_s=40, what="it says what it waits for")
    assert deployment.due() == []
    intruder.abort_transaction(10)
    deployment.await_due(kept)
    assert_fired_once(deployment.pass_instant(due_at_ms), kept)
