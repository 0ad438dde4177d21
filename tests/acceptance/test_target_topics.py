"""Tasks that are emitted to a topic of their own, and what becomes of them when it is gone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from confluent_kafka.admin import NewTopic

from tests.acceptance.harness import assert_fired_once, now_ms, schedule

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.acceptance.harness import Deployment

pytestmark = pytest.mark.acceptance


def test_target_topic_gets_its_tasks_and_its_loss_holds_up_no_other(deploy: Callable[..., Deployment]) -> None:
    """Somebody deletes the topic while tasks wait for it: they are set aside with their content, the others fire."""
    target = f"notify-{now_ms()}"
    deployment = deploy(target_topics=frozenset({target}), transaction_timeout_ms=3_000)
    deployment.admin.create_topics([NewTopic(target, deployment.settings.partitions, 1)])[target].result(10)
    agent = deployment.start_agent()
    first_ms = now_ms() + 1_000
    deployment.send(*(schedule(f"first-{n}", first_ms, target_topic=target) for n in range(10)))
    deployment.until(
        lambda: len(deployment.reader(target).catch_up()) == 10, within_s=20, what="they are on their own topic"
    )
    there = [deployment.codec.decode_due(record.value or b"") for record in deployment.reader(target).catch_up()]
    assert_fired_once(there, [f"first-{n}" for n in range(10)])
    second_ms = now_ms() + 3_000
    kept = [f"kept-{n}" for n in range(200)]
    deployment.send(*(schedule(f"lost-{n}", second_ms, target_topic=target, payload=b"content") for n in range(4)))
    deployment.send(*(schedule(task_id, second_ms) for task_id in kept))
    deployment.await_status(kept[-1], "SCHEDULED")
    deployment.admin.delete_topics([target], operation_timeout=10)[target].result(15)

    deployment.await_due(kept, within_s=90)

    for number in range(4):
        deployment.await_status(f"lost-{number}", "DEAD")
    assert_fired_once(deployment.pass_instant(second_ms), kept)
    dead = deployment.dead()
    assert sorted(task.task_id for task in dead) == [f"lost-{number}" for number in range(4)]
    assert {task.reason for task in dead} == {"UNDELIVERABLE"}
    assert {deployment.codec.decode_due(task.value or b"").payload for task in dead} == {b"content"}
    assert agent.status("first-0")["emission"]["topic"] == target
