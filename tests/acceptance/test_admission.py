"""Events that come another way than through our SDK: each is taken as meant, or refused where people look."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from pipeline.core.events import Schedule
from pipeline.core.partitioning import partition_for_key
from pipeline.core.tasks import DurationMs, TaskId
from tests.acceptance.harness import assert_fired_once, cancel, now_ms, schedule

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.acceptance.harness import Deployment

pytestmark = pytest.mark.acceptance

HOUR_MS = 3_600_000
STRANGE_IDS = [
    "|",
    ":",
    "%2F",
    "a/../b",
    "line\nbreak",
    "tab\tnul-like\x01",
    "кириллица",
    "😀",
    "nfc-\u00e9",
    "nfd-e\u0301",
    " blank ",
    "x" * 1_024,
]


def refused_records(deployment: Deployment) -> dict[str, tuple[bytes, bytes | None]]:
    """A record for each reason that a stranger's client can give, under the reason code that it must get.

    Without a key there is none: a compacted topic takes no such record.
    """
    encode = deployment.codec.encode_event
    soon_ms = now_ms() + 1_000
    return {
        "NULL_VALUE": (b"null-value", None),
        "INVALID_KEY": (b"\xff\xfe", encode(schedule("no-utf-8", soon_ms))),
        "RESERVED_KEY": (b"\x00mine", encode(schedule("\x00mine", soon_ms))),
        "KEY_MISMATCH": (b"one", encode(schedule("another", soon_ms))),
        "MALFORMED": (b"garbage", b"\xde\xad\xbe\xef"),
        "UNKNOWN_SCHEMA": (b"unknown-schema", b"\xc3\x01" + b"\x07" * 8 + b"body"),
        "MISSING_TIME": (b"no-time", b'{"task_id":"no-time","type":"SCHEDULE"}'),
        "UNKNOWN_FIELD": (b"typo", b'{"task_id":"typo","type":"SCHEDULE","delay_ms":1,"paylod":"x"}'),
        "INVALID_FIELD": (b"wrong-type", b'{"task_id":"wrong-type","type":"SCHEDULE","delay_ms":"soon"}'),
        "IMPLAUSIBLE_TIME": (b"seconds", encode(schedule("seconds", soon_ms // 1_000))),
        "BEYOND_HORIZON": (b"far", encode(schedule("far", soon_ms + 11 * 366 * 24 * HOUR_MS))),
        "TASK_ID_LENGTH": (b"y" * 1_025, encode(schedule("y" * 1_025, soon_ms))),
        "UNKNOWN_TARGET": (b"target", encode(schedule("target", soon_ms, target_topic="somewhere"))),
        "TOO_LARGE": (b"huge", encode(schedule("huge", soon_ms, payload=b"x" * 1_000_000))),
    }


def test_refused_events_are_told_and_delay_nothing(deployment: Deployment) -> None:
    """One of each kind between good ones: all are on dead-tasks with their reason and place, and the others fire."""
    agent = deployment.start_agent()
    records = refused_records(deployment)
    due_at_ms = now_ms() + 1_500
    good: list[str] = []
    for key, value in records.values():
        good.append(f"good-{len(good)}")
        deployment.send(schedule(good[-1], due_at_ms))
        partition = partition_for_key(key, deployment.settings.partitions)
        deployment.producer.produce(deployment.topics.events, value, key, partition=partition)
    # What is refused of a task says nothing against it later.
    deployment.send(schedule("null-value", due_at_ms))

    fired = deployment.pass_instant(due_at_ms)

    assert_fired_once(fired, [*good, "null-value"])
    found = {str(task.reason): (task.key, task.value, task.value_size) for task in deployment.dead()}
    assert found.keys() == records.keys()
    assert [reason for reason, (key, value) in records.items() if found[reason][:2] != (key, value)] == []
    assert sum(status["refused"] for status in agent.partitions().values()) == len(records)


def test_strange_ids_stay_what_they_are(deployment: Deployment) -> None:
    """Any UTF-8 is an id, and no two of them are one."""
    agent = deployment.start_agent()
    deployment.send(*(schedule(task_id, now_ms(), payload=task_id.encode()) for task_id in STRANGE_IDS))

    fired = deployment.await_due(STRANGE_IDS)

    assert_fired_once(fired, STRANGE_IDS)
    assert {task.task_id: task.payload for task in fired} == {task_id: task_id.encode() for task_id in STRANGE_IDS}
    assert [task_id for task_id in STRANGE_IDS if agent.status(task_id).get("task_id") != task_id] == []


def test_of_many_requests_at_once_the_last_by_offset_counts(deployment: Deployment) -> None:
    """Ten upstreams ask for one task at the same moment: each gets a verdict, and one emission comes of it."""
    deployment.start_agent()
    due_at_ms = now_ms() + 2_000
    places: dict[int, int] = {}

    def ask(number: int) -> None:
        event = schedule("contended", due_at_ms + number, payload=str(number).encode())
        places[deployment.send(event, producer=deployment.new_producer())[0][1]] = number

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    (task,) = deployment.pass_instant(due_at_ms + 10)

    assert len(places) == 10
    assert task.payload == str(places[max(places)]).encode()
    assert task.scheduled_offset == max(places)


def test_delay_counts_from_the_brokers_clock(deployment: Deployment) -> None:
    """The upstream's clock is an hour fast or slow: what it says of now is nobody's business."""
    deployment.start_agent()
    events = {name: Schedule(task_id=TaskId(name), delay_ms=DurationMs(1_000)) for name in ("fast", "slow")}
    for event, shift_ms in zip(events.values(), (HOUR_MS, -HOUR_MS), strict=True):
        deployment.producer.produce(
            deployment.topics.events,
            deployment.codec.encode_event(event),
            event.task_id.encode(),
            timestamp=now_ms() + shift_ms,
        )
    deployment.producer.flush(10)

    fired = deployment.await_due(events)

    appended = {record.key: record.timestamp_ms for record in deployment.reader(deployment.topics.events).catch_up()}
    assert {task.task_id: task.due_at_ms for task in fired} == {
        name: appended[name.encode()] + 1_000 for name in events
    }


def test_forgotten_task_leaves_a_true_null(deploy: Callable[..., Deployment]) -> None:
    """Compaction reclaims a key for a null and for nothing else, not even for an empty value."""
    deployment = deploy(retention_ms=500)
    agent = deployment.start_agent()
    deployment.send(schedule("fired", now_ms()), schedule("cancelled", now_ms() + 500), cancel("cancelled"))

    deployment.until(
        lambda: deployment.due() and not agent.tasks(), within_s=20, what="both were forgotten after their retention"
    )

    last = {record.key: record.value for record in deployment.reader(deployment.topics.state).catch_up()}
    assert last[b"fired"] is None
    assert last[b"cancelled"] is None
