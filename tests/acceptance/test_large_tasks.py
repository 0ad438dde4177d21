"""Tasks that are large, or too large: they may be slow or set aside, and never hold up the others."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from pipeline.service.admission import event_size
from tests.acceptance.harness import assert_fired_once, now_ms, schedule

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipeline.core.events import Schedule
    from tests.acceptance.harness import Deployment

pytestmark = pytest.mark.acceptance

SMALL = 3_000
LARGE = 1_500
LARGE_BYTES = 100_000


def test_task_that_became_too_large_to_emit_is_set_aside_and_the_others_fire(deployment: Deployment) -> None:
    """Somebody lowered the topic's limit after the task was accepted: one poison timer among thousands."""
    agent = deployment.start_agent()
    due_at_ms = now_ms() + 8_000
    small = [f"small-{n}" for n in range(SMALL)]
    deployment.send(*(schedule(task_id, due_at_ms) for task_id in small[: SMALL // 2]))
    content = random.Random(9).randbytes(60_000)  # nothing compresses it
    deployment.send(schedule("poison", due_at_ms, payload=content))
    deployment.send(*(schedule(task_id, due_at_ms) for task_id in small[SMALL // 2 :]))
    deployment.await_status("poison", "SCHEDULED")
    deployment.alter_topic(deployment.topics.due, max_message_bytes=50_000)
    assert now_ms() < due_at_ms, "the limit has to be lowered before the tasks are due"

    deployment.await_due(small)

    deployment.await_status("poison", "DEAD")
    assert_fired_once(deployment.pass_instant(due_at_ms), small)
    (dead,) = deployment.dead()
    assert (dead.task_id, dead.reason) == ("poison", "UNDELIVERABLE")
    assert dead.value is not None
    assert deployment.codec.decode_due(dead.value).payload == content
    assert agent.status(small[0])["status"] == "EMITTED"


def test_thousands_of_large_tasks_due_at_one_instant_all_fire(deploy: Callable[..., Deployment]) -> None:
    """More bytes than one transaction can carry within its time-out: they go out in several, and none is given up."""
    deployment = deploy(transaction_timeout_ms=2_000)
    deployment.start_agent()
    due_at_ms = now_ms() + 10_000
    content = random.Random(10).randbytes(LARGE_BYTES)
    large = [f"large-{n}" for n in range(LARGE)]
    small = [f"small-{n}" for n in range(100)]
    deployment.send(*(schedule(task_id, due_at_ms, payload=content) for task_id in large))
    deployment.send(*(schedule(task_id, due_at_ms + 1) for task_id in small))

    deployment.await_due([*large, *small], within_s=90)

    fired = deployment.pass_instant(due_at_ms)
    assert_fired_once(fired, [*large, *small])
    assert {task.payload for task in fired if task.task_id.startswith("large")} == {content}


@pytest.mark.parametrize("filled_by", ["payload", "headers"])
def test_largest_event_that_is_admitted_can_be_emitted(deployment: Deployment, filled_by: str) -> None:
    """State, due task and dead task have an envelope of their own: room for it is kept when an event is admitted."""
    deployment.start_agent()
    due_at_ms = now_ms() + 2_000
    task_id = "l" * deployment.settings.task_id_bytes_max
    limit = deployment.settings.event_bytes_max

    def event(room: int) -> Schedule:
        content = random.Random(11).randbytes(max(1, room))
        if filled_by == "payload":
            return schedule(task_id, due_at_ms, payload=content)
        pieces = [content[at : at + 10_000] for at in range(0, len(content), 10_000)]
        return schedule(task_id, due_at_ms, headers={f"header-{n}": piece for n, piece in enumerate(pieces)})

    def size(candidate: Schedule) -> int:
        value = deployment.codec.encode_event(candidate)
        return event_size(len(task_id), len(value), candidate.headers)

    room = limit if filled_by == "payload" else limit // 2
    while size(event(room)) > limit:
        room -= size(event(room)) - limit if filled_by == "payload" else max(1, (size(event(room)) - limit) // 2)
    assert size(event(room)) in {limit, limit - 1}, "as large as it may be"
    deployment.send(event(room), schedule("small", due_at_ms))

    assert_fired_once(deployment.pass_instant(due_at_ms), [task_id, "small"])
    assert deployment.dead() == []
