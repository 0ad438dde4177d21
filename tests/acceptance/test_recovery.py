"""Rebuild and replay on a real deployment: tables, statuses and what consumers applied are as before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Consumer, TopicPartition

from pipeline.core.durations import format_instant
from pipeline.core.tasks import InstantMs
from tests.acceptance.harness import Deployment, assert_fired_once, cancel, now_ms, schedule

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.acceptance

HOUR_MS = 3_600_000


def test_rebuild_from_state_gives_the_same_tables(deployment: Deployment) -> None:
    """The local tables are only a copy: set aside on purpose, they come back as they were, and nothing fires again."""
    with_history(deployment)
    before = statuses(deployment)
    records = record_counts(deployment)
    stop_agents(deployment)

    assert duetasks(deployment, "rebuild", "--from", "state")[0] == 2, "nobody can be asked without a terminal"
    tables = {path.name for path in deployment.folder.glob("a/agents/*/tables/*")}
    code, dry = duetasks(deployment, "rebuild", "--from", "state", "--dry-run")
    assert (code, dry["done"]) == (0, False)
    assert {path.name for path in deployment.folder.glob("a/agents/*/tables/*")} == tables
    code, told = duetasks(deployment, "rebuild", "--from", "state", "--yes")
    assert (code, told["done"]) == (0, True)
    assert sorted(table["partition"] for table in told["tables"]) == [0, 1]
    assert sum(table["rows"] for table in told["tables"]) == len(before)
    assert all("aside" in table["put_aside"] for table in told["tables"])

    agent = deployment.start_agent("a")
    restored = agent.logged("table_restored")
    assert {line["warm"] for line in restored} == {True}, "the rebuilt tables are used, not rebuilt once more"
    assert statuses(deployment) == before
    assert record_counts(deployment) == records
    assert_history_once(deployment)


def test_rebuild_from_state_refuses_while_an_agent_has_the_tables(deployment: Deployment) -> None:
    """Renaming a table under a running agent would leave it writing into the one that was set aside."""
    with_history(deployment)

    code, told = duetasks(deployment, "rebuild", "--from", "state", "--yes")

    assert (code, told["type"]) == (4, "RefusedError")
    assert duetasks(deployment, "rebuild", "--from", "state", "--dry-run")[0] == 0
    assert duetasks(deployment, "rebuild", "--from", "state", "--yes", name="elsewhere")[0] == 3


def test_rebuild_from_events_confirms_a_sound_state(deployment: Deployment) -> None:
    """Rebuilt from the other topics, every row is as it was; a dry run beside running agents changes nothing."""
    with_history(deployment)
    before = statuses(deployment)
    consumed = consume(deployment)
    records = record_counts(deployment)

    code, told = duetasks(deployment, "rebuild", "--from", "events", "--yes")
    assert (code, told["type"]) == (4, "RefusedError"), "agents are running"
    code, dry = duetasks(deployment, "rebuild", "--from", "events", "--dry-run")
    assert (code, dry["done"]) == (0, False)
    assert sum(part["confirmed"] for part in dry["partitions"]) == len(before)
    stop_agents(deployment)
    ends = end_offsets(deployment)
    assert duetasks(deployment, "rebuild", "--from", "events", "--dry-run")[0] == 0
    assert end_offsets(deployment) == ends, "a dry run writes nothing, not even a transaction marker"

    code, told = duetasks(deployment, "rebuild", "--from", "events", "--yes")

    assert (code, told["done"]) == (0, True)
    assert sum(part["rows"] for part in told["partitions"]) == len(before)
    assert [part["corrected"] + part["added"] + part["removed"] + part["presumed"] for part in told["partitions"]] == [
        0,
        0,
    ]
    deployment.start_agent("a")
    assert statuses(deployment) == before
    assert record_counts(deployment)[deployment.topics.due] == records[deployment.topics.due]
    assert consume(deployment, idle="3s") == []
    assert len(consumed) == len({task["task_id"] for task in consumed})
    assert_history_once(deployment)


@pytest.mark.parametrize("local_table", ["kept", "lost"])
def test_lost_state_is_rebuilt_and_nothing_fires_twice(deployment: Deployment, local_table: str) -> None:
    """`task-state` is gone: agents refuse to go on, a rebuild from events brings it back, and what fired has fired."""
    with_history(deployment)
    before = statuses(deployment)
    stop_agents(deployment)
    recreate(deployment, deployment.topics.state)
    if local_table == "lost":
        for path in deployment.folder.glob("a/agents/*/tables"):
            path.rename(path.with_name("gone"))

    code, told = duetasks(deployment, "rebuild", "--from", "events", "--yes")

    assert (code, sum(part["added"] for part in told["partitions"])) == (0, len(before))
    deployment.start_agent("a")
    after = statuses(deployment)
    assert {task_id: as_told(task) for task_id, task in after.items()} == {
        task_id: as_told(task) for task_id, task in before.items()
    }
    assert_history_once(deployment)


def test_one_partition_is_rebuilt_alone(deployment: Deployment) -> None:
    """The others are not touched."""
    with_history(deployment)
    before = statuses(deployment)
    stop_agents(deployment)
    ends = end_offsets(deployment)

    code, told = duetasks(deployment, "rebuild", "--from", "events", "--partition", "1", "--yes")

    assert (code, [part["partition"] for part in told["partitions"]]) == (0, [1])
    assert end_offsets(deployment)[deployment.topics.state, 0] == ends[deployment.topics.state, 0]
    assert end_offsets(deployment)[deployment.topics.state, 1] > ends[deployment.topics.state, 1]
    assert duetasks(deployment, "rebuild", "--from", "events", "--partition", "7", "--dry-run")[0] == 2
    deployment.start_agent("a")
    assert statuses(deployment) == before


def test_replay_is_harmless_for_ledgers_and_serves_the_group_that_asks(deployment: Deployment) -> None:
    """Copies are marked; who has applied the tasks leaves them out, and a group whose ledger forgets applies them."""
    began_ms = now_ms()
    fired = with_history(deployment)
    before = statuses(deployment)
    applied = consume(deployment)
    assert {task["task_id"] for task in applied} == fired
    records = record_counts(deployment)
    count = records[deployment.topics.due]
    span = ["--from", format_instant(InstantMs(began_ms - 1_000)), "--to", format_instant(InstantMs(now_ms() + 1_000))]

    code, dry = duetasks(deployment, "replay", *span, "--dry-run")
    assert (code, dry["done"], dry["replay"]["records"]) == (0, False, count)
    assert record_counts(deployment) == records
    code, told = duetasks(deployment, "replay", *span, "--yes")
    assert (code, told["done"], told["replay"]["records"]) == (0, True, count)

    assert consume(deployment, idle="3s") == [], "the ledger leaves the copies out"
    originals, copies = due_records(deployment)
    assert len(copies) == len(originals) == count
    assert {replay_id for *_, replay_id in copies} == {told["replay"]["replay_id"].encode()}
    assert sorted(record[:3] for record in copies) == sorted(record[:3] for record in originals)
    # A later replay over all of the time does not pick up the copies of the first.
    code, again = duetasks(deployment, "replay", *span[:3], format_instant(InstantMs(now_ms() + 1_000)), "--dry-run")
    assert (code, again["replay"]["records"], again["replay"]["copies_left_out"]) == (0, count, count)

    one = min(fired)
    code, told = duetasks(deployment, "replay", *span, "--task", one, "--group", group_of(deployment), "--yes")
    assert (code, told["replay"]["records"]) == (0, 1)
    assert [task["task_id"] for task in consume(deployment, idle="3s")] == [one]
    assert statuses(deployment) == before
    assert duetasks(deployment, "rebuild", "--from", "events", "--dry-run")[1]["partitions"][0]["corrected"] == 0


def test_replay_refuses_what_would_do_harm(deployment: Deployment) -> None:
    """Due tasks on `task-events` would be refused a thousand times over; a typo in a topic is told before."""
    span = ["--from", "2026-01-01T00:00:00Z", "--to", "2026-01-02T00:00:00Z"]

    for topic in [deployment.topics.events, deployment.topics.state, deployment.topics.applied, "__consumer_offsets"]:
        assert duetasks(deployment, "replay", *span, "--to-topic", topic, "--dry-run")[0] == 4
    assert duetasks(deployment, "replay", *span, "--to-topic", "no-such-topic", "--dry-run")[0] == 3
    assert duetasks(deployment, "replay", *span[2:], *span[:2], "--dry-run")[0] == 0
    assert duetasks(deployment, "replay", "--from", span[3], "--to", span[1], "--dry-run")[0] == 2


def test_replay_while_timers_fire_loses_and_doubles_nothing(deployment: Deployment) -> None:
    """The owner writes down where its emissions will stand; a replay that writes in between makes it ask again."""
    deployment.start_agent("a")
    began_ms = now_ms()
    first = [f"old {number}" for number in range(200)]
    deployment.send(*(schedule(task_id, began_ms + 100) for task_id in first))
    deployment.await_due(first)
    span = ["--from", format_instant(InstantMs(began_ms)), "--to", format_instant(InstantMs(now_ms() + 1))]
    second = [f"new {number}" for number in range(2_000)]
    start_ms = now_ms() + 4_000
    deployment.send(*(schedule(task_id, start_ms + 4 * number) for number, task_id in enumerate(second)))

    replays = 0
    while now_ms() < start_ms + 8_000:
        code, told = duetasks(deployment, "replay", *span, "--yes")
        assert (code, told["replay"]["records"]) == (0, len(first))
        replays += 1
    deployment.pass_instant(start_ms + 8_000)

    originals, copies = due_records(deployment)
    assert len(copies) == replays * len(first)
    tasks = [deployment.codec.decode_due(value) for _, _, value, _ in originals]
    assert_fired_once([task for task in tasks if not task.task_id.startswith("marker-")], [*first, *second])
    agent = deployment.agents[0]
    places = {
        (record.partition, record.offset): record.key for record in deployment.reader(deployment.topics.due).records
    }
    for task_id in [*first, *second]:
        emission = agent.status(task_id)["emission"]
        if emission["offset"] is not None:
            assert places[emission["partition"], emission["offset"]] == task_id.encode()
    assert agent.logged("owner_raised") == []


# -- what the tests share --------------------------------------------------------------------------------------


def with_history(deployment: Deployment) -> set[str]:
    """Tasks in every status: fired, cancelled, too late to cancel, rescheduled, waiting. Returns those that fired."""
    deployment.start_agent("a")
    soon = now_ms() + 300
    fired = {f"fired {number}" for number in range(30)} | {"late cancel", "versioned", "again"}
    deployment.send(
        *(schedule(task_id, soon, payload=b"p", event_id=f"s {task_id}") for task_id in sorted(fired)),
        *(schedule(f"waits {number}", now_ms() + HOUR_MS, payload=b"later") for number in range(20)),
        *(schedule(f"stopped {number}", now_ms() + HOUR_MS) for number in range(10)),
        schedule("moved", soon, version=1),
        schedule("moved", now_ms() + 2 * HOUR_MS, version=2),
        cancel("never seen", version=3),
        *(cancel(f"stopped {number}") for number in range(10)),
    )
    deployment.await_due(fired)
    deployment.send(
        cancel("late cancel"),
        schedule("again", now_ms() + HOUR_MS),
        schedule("versioned", now_ms() + HOUR_MS, event_id="s versioned"),
        cancel("moved", version=1),
    )
    deployment.producer.produce(deployment.topics.events, key=b"waits 1", value=b"rubbish")
    deployment.producer.flush(10)
    deployment.await_status("again", "SCHEDULED")
    deployment.pass_instant(now_ms())
    return fired


def statuses(deployment: Deployment) -> dict[str, dict[str, Any]]:
    """Every task as an agent tells it."""
    return dict(sorted(deployment.running()[0].tasks().items()))


def as_told(task: dict[str, Any]) -> dict[str, Any]:
    """A task without the place of its emission where that was not written down when it fired."""
    emission = task["emission"]
    return {**task, "emission": None if emission is None else {**emission, "offset": None}}


def assert_history_once(deployment: Deployment) -> None:
    """After what was done to the deployment, everything due has fired, and once."""
    deployment.pass_instant(now_ms() + 500)
    counts: dict[tuple[str, int], int] = {}
    for task in deployment.due():
        counts[task.task_id, task.generation] = counts.get((task.task_id, task.generation), 0) + 1
    assert set(counts.values()) == {1}


def stop_agents(deployment: Deployment) -> None:
    """Stop all as an operator does."""
    for agent in deployment.running():
        agent.stop()


def record_counts(deployment: Deployment) -> dict[str, int]:
    """How many records a consumer sees on the topics that agents and people write to."""
    topics = deployment.topics
    return {name: len(deployment.reader(name).catch_up()) for name in (topics.events, topics.due, topics.dead)}


def end_offsets(deployment: Deployment) -> dict[tuple[str, int], int]:
    """Where the topics end that agents and consumers write to."""
    topics = deployment.topics
    return deployment.end_offsets(topics.events, topics.state, topics.due, topics.dead, topics.applied)


def due_records(deployment: Deployment) -> tuple[list[Any], list[Any]]:
    """All due tasks as (partition, key, value, replay id): those of the agents, and the copies of replays.

    With the markers: to a replay they are due tasks like others.
    """
    originals: list[Any] = []
    copies: list[Any] = []
    consumer = Consumer(
        {
            **deployment.settings.client_config(),
            "group.id": "records",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )
    partitions = range(deployment.settings.partitions)
    consumer.assign([TopicPartition(deployment.topics.due, partition, 0) for partition in partitions])
    ended: set[int] = set()
    try:
        while len(ended) < len(partitions):
            for message in consumer.consume(1_000, 0.2):
                if message.error() is not None:
                    ended.add(message.partition())
                    continue
                mark = dict(message.headers() or ()).get("duetasks-replay")
                record = (message.partition(), message.key(), message.value(), mark)
                (originals if mark is None else copies).append(record)
    finally:
        consumer.close()
    return originals, copies


def recreate(deployment: Deployment, topic: str) -> None:
    """Delete and create a topic, as somebody might who wants to start over."""
    deployment.admin.delete_topics([topic])[topic].result(20)
    create: Callable[[], object] = lambda: duetasks(deployment, "topics", "apply")[0] == 0  # noqa: E731
    deployment.until(create, within_s=30, what=f"{topic} exists again")


def group_of(deployment: Deployment) -> str:
    """The group of this test's consumers."""
    return f"billing-{deployment.settings.group_id}"


def consume(deployment: Deployment, *, idle: str = "5s") -> list[dict[str, Any]]:
    """What the group applies until nothing comes any more, but for the markers."""
    ended = run(deployment, "consume", "--group", group_of(deployment), "--idle-exit", idle)
    assert ended.returncode == 0, ended.stderr
    lines = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    return [line for line in lines if not line["task_id"].startswith("marker-")]


def duetasks(deployment: Deployment, *arguments: str, name: str = "a") -> tuple[int, Any]:
    """Run a command with `--json`; its exit code, and what it printed."""
    ended = run(deployment, *arguments, "--json", name=name)
    assert ended.returncode != 1, ended.stderr
    return ended.returncode, json.loads(ended.stdout) if ended.stdout else None


def run(deployment: Deployment, *arguments: str, name: str = "a") -> subprocess.CompletedProcess[str]:
    """Run a command on the data folder of an agent."""
    chosen = {**deployment._chosen, "data_dir": deployment.folder / name}
    environment = {key: value for key, value in os.environ.items() if not key.startswith("DUETASKS_")}
    environment |= {f"DUETASKS_{key.upper()}": str(value) for key, value in chosen.items()}
    return subprocess.run(
        [sys.executable, "-m", "pipeline.cli", *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
