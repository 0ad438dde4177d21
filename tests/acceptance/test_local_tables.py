"""Disks that were lost, swapped, restored from a backup or damaged: Kafka has the truth, and the table is rebuilt."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from tests.acceptance.harness import assert_fired_once, cancel, now_ms, schedule

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.acceptance.harness import Deployment

pytestmark = pytest.mark.acceptance

DELETED, OLD, SWAPPED, SWAPPED_TOO, GARBAGE, FOREIGN = range(6)


def spoil(folder: Path) -> None:
    """Overwrite every file of a database but the lock."""
    for file in folder.iterdir():
        if file.is_file() and file.name != "LOCK":
            file.write_bytes(b"\xde\xad\xbe\xef" * 64)


def replace_tables(tables: Path, old: Path, foreign: Path) -> None:
    """Do something else to the table of each partition."""
    shutil.rmtree(tables / str(DELETED))
    shutil.rmtree(tables / str(OLD))
    shutil.copytree(old / str(OLD), tables / str(OLD))
    (tables / str(SWAPPED)).rename(tables / "between")
    (tables / str(SWAPPED_TOO)).rename(tables / str(SWAPPED))
    (tables / "between").rename(tables / str(SWAPPED_TOO))
    spoil(tables / str(GARBAGE))
    shutil.rmtree(tables / str(FOREIGN))
    shutil.copytree(foreign / str(FOREIGN), tables / str(FOREIGN))


def test_wrong_tables_are_put_aside_and_rebuilt(deploy: Callable[..., Deployment]) -> None:
    """Each partition gets another wrong table; a cancel that only Kafka remembers must count in all of them."""
    stranger = deploy(partitions=6)
    stranger.start_agent()
    stranger.send(*(schedule(f"foreign-{n}", now_ms()) for n in range(60)))
    stranger.await_due([f"foreign-{n}" for n in range(60)])
    stranger.agents[0].stop()

    deployment = deploy(partitions=6)
    agent = deployment.start_agent()
    far_ms = now_ms() + 3_600_000
    fired = [f"fired-{n}" for n in range(100)]
    gone = [f"gone-{n}" for n in range(100)]
    kept = [f"kept-{n}" for n in range(100)]
    far = [f"far-{n}" for n in range(100)]
    due_at_ms = now_ms() + 15_000
    deployment.send(*(schedule(task_id, due_at_ms, payload=task_id.encode()) for task_id in [*gone, *kept]))
    deployment.send(*(schedule(task_id, far_ms) for task_id in far))
    deployment.until(lambda: len(agent.tasks()) == 300, within_s=20, what="all are in the tables")
    agent.stop()
    old = deployment.folder / "backup"
    shutil.copytree(agent.tables, old)
    agent = deployment.start_agent()
    deployment.send(*(schedule(task_id, now_ms()) for task_id in fired))
    deployment.await_due(fired)
    deployment.send(*(cancel(task_id) for task_id in gone))
    deployment.until(
        lambda: sum(task["status"] == "CANCELLED" for task in agent.tasks().values()) == 100,
        within_s=20,
        what="the cancels are in the tables",
    )
    before = agent.tasks()
    agent.kill()
    replace_tables(agent.tables, old, stranger.agents[0].tables)

    agent = deployment.start_agent()

    after = agent.tasks()
    assert [task_id for task_id in before if after.get(task_id) != before[task_id]] == []
    assert set(after) == set(before)
    told = {line["partition"]: line["reason"] for line in agent.logged("table_put_aside")}
    assert "belongs to partition" in told[SWAPPED]
    assert "belongs to partition" in told[SWAPPED_TOO]
    assert "belongs to task-state" in told[FOREIGN]
    assert told.keys() == {SWAPPED, SWAPPED_TOO, GARBAGE, FOREIGN}
    assert sorted(path.name.partition(".")[0] for path in agent.tables.glob("*.aside-*")) == ["2", "3", "4", "5"]
    deployment.await_due(kept)
    assert_fired_once(deployment.pass_instant(due_at_ms), [*fired, *kept])


def test_table_that_is_deleted_under_a_running_agent_is_rebuilt(deployment: Deployment) -> None:
    """Somebody cleaned up the wrong folder: nothing that Kafka acknowledged depends on it."""
    agent = deployment.start_agent()
    due_at_ms = now_ms() + 4_000
    kept = [f"kept-{n}" for n in range(100)]
    gone = [f"gone-{n}" for n in range(100)]
    deployment.send(*(schedule(task_id, due_at_ms) for task_id in [*kept, *gone]))
    deployment.until(lambda: len(agent.tasks()) == 200, within_s=20, what="all are in the tables")

    shutil.rmtree(agent.tables)
    deployment.send(*(cancel(task_id) for task_id in gone))

    deployment.await_due(kept)
    assert_fired_once(deployment.pass_instant(due_at_ms), kept)
    agent.kill()
    agent = deployment.start_agent()
    assert_fired_once(deployment.pass_instant(due_at_ms + 1), kept)
    assert agent.status("gone-0")["status"] == "CANCELLED"


def test_table_is_rebuilt_from_a_topic_that_was_compacted(deployment: Deployment) -> None:
    """Holes instead of offsets, markers without their records: a restore goes by position and never waits for one."""
    agent = deployment.start_agent()
    deployment.alter_topic(deployment.topics.state, segment_ms=300, min_cleanable_dirty_ratio=0, file_delete_delay_ms=0)
    far_ms = now_ms() + 3_600_000
    ids = [f"task-{n}" for n in range(200)]
    for number in range(5):
        deployment.send(*(schedule(task_id, far_ms + number) for task_id in ids))
        deployment.await_status(ids[-1], "SCHEDULED")
    deployment.send(*(cancel(task_id) for task_id in ids[:100]))
    deployment.until(
        lambda: sum(task["status"] == "CANCELLED" for task in agent.tasks().values()) == 100,
        within_s=20,
        what="the cancels are in the table",
    )
    written = len(deployment.reader(deployment.topics.state).catch_up())

    def is_compacted() -> bool:
        deployment.send(schedule(f"tick-{now_ms()}", far_ms))  # a new record closes a segment that is old enough
        return deployment.count(deployment.topics.state) < written / 2

    deployment.until(is_compacted, within_s=60, what="the cleaner has been there")
    before = agent.tasks()
    agent.kill()
    shutil.rmtree(agent.tables)

    agent = deployment.start_agent()

    after = agent.tasks()
    assert {task_id: after.get(task_id) for task_id in before} == before
