"""The story of one task: every record of it, what became of each request, and what is gone."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from pipeline.core.events import Reason
from pipeline.core.rebuild import REPLAY_HEADER
from pipeline.core.tasks import Offset, TaskId
from pipeline.errors import NotFoundError
from pipeline.testing.memory_audit import story_in_cluster
from tests.memory_topics import HOUR_MS, MemoryTopics

if TYPE_CHECKING:
    from pipeline.service.audit.storyteller import Story

pytestmark = pytest.mark.unit


def told(topics: MemoryTopics, task_id: str = "x", *, from_ms: int = 0) -> Story:
    """The story."""
    return asyncio.run(story_in_cluster(topics.cluster, TaskId(task_id), from_ms=from_ms))


def chapters(story: Story) -> list[tuple[str, str, str, int]]:
    """What happened, with its verdict and record."""
    return [(one.what, one.verdict, one.topic, one.offset) for one in story.chapters]


def a_life(topics: MemoryTopics) -> None:
    """One task through all that may happen to it, beside another one."""
    topics.schedule("other", topics.now + HOUR_MS)
    topics.schedule("x", topics.now + HOUR_MS, event_id="e1", version=3)
    topics.schedule("x", topics.now + HOUR_MS, event_id="e1", version=3)
    topics.schedule("x", topics.now + HOUR_MS, version=2)
    topics.schedule("x", topics.now, version=4)
    topics.raw_event(b"x", b"rubbish")
    topics.dead(Reason.MALFORMED, topics.position - 1, b"x", task_id="x")
    task = topics.emit("x")
    topics.cancel("x")
    topics.settle()
    topics.applied(task)
    topics.forget(task)
    topics.write_due(task, {REPLAY_HEADER: b"replay-1"})
    topics.applied(task, due_offset=1)


def test_the_story_tells_everything_in_its_order() -> None:
    """Why did it fire although I cancelled it? Because the cancel came after it."""
    topics = MemoryTopics()
    a_life(topics)

    story = told(topics)

    assert chapters(story) == [
        ("SCHEDULE", "SCHEDULED", "task-events", 1),
        ("SCHEDULE", "DUPLICATE", "task-events", 2),
        ("SCHEDULE", "STALE", "task-events", 3),
        ("SCHEDULE", "RESCHEDULED", "task-events", 4),
        ("UNREADABLE", "REJECTED", "task-events", 5),
        ("SET_ASIDE", "", "dead-tasks", 0),
        ("EMITTED", "", "due-tasks", 0),
        ("CANCEL", "TOO_LATE", "task-events", 6),
        ("APPLIED", "", "applied-tasks", 0),
        ("LEDGER_FORGETS", "", "applied-tasks", 1),
        ("REPLAYED", "", "due-tasks", 1),
        ("APPLIED", "", "applied-tasks", 2),
    ]
    assert "emission at offset 0" in story.chapters[7].why
    assert "version is 2, and 3 was known" in story.chapters[2].why
    assert "billing" in story.chapters[8].why
    assert story.state == topics.states["x"]
    assert story.notes == ()


def test_verdicts_that_the_row_holds_are_told_as_given_and_others_as_derived() -> None:
    """The row keeps four; what is computed anew must not look like a record."""
    topics = MemoryTopics()
    for _ in range(6):
        topics.schedule("x", topics.now + HOUR_MS)
    topics.settle()

    story = told(topics)

    assert [one.is_derived for one in story.chapters] == [True, True, False, False, False, False]


def test_a_verdict_of_the_row_counts_more_than_what_is_left_tells() -> None:
    """The newer version has expired: derived from what is left, the stale one would have been accepted."""
    topics = MemoryTopics()
    topics.schedule("x", topics.now + HOUR_MS, version=5)
    topics.schedule("x", topics.now + HOUR_MS, version=4)
    topics.settle()
    topics.cluster.log("task-events", 0).delete_before(Offset(1))

    assert [(one.verdict, one.is_derived) for one in told(topics).chapters] == [("STALE", False)]


def test_a_request_above_the_applied_position_has_no_verdict_yet() -> None:
    """It may be waiting behind an open transaction, or its partition has no owner."""
    topics = MemoryTopics()
    topics.schedule("x", topics.now + HOUR_MS)
    topics.settle()
    topics.cancel("x")

    last = told(topics).chapters[-1]

    assert (last.what, last.verdict, last.why) == ("CANCEL", "", "not applied yet")


def test_a_task_whose_events_are_gone_is_told_by_its_row_alone() -> None:
    """And the story says what is missing."""
    topics = MemoryTopics()
    topics.schedule("x", topics.now + HOUR_MS)
    topics.schedule("y", topics.now + HOUR_MS)
    topics.settle()
    topics.cluster.log("task-events", 0).delete_before(Offset(1))

    story = told(topics)

    assert (chapters(story), story.state) == ([], topics.states["x"])
    assert any("starts at 1" in note for note in story.notes)
    assert any("its schedule, task-events offset 0, is gone" in note for note in story.notes)


def test_a_request_that_went_astray_is_found_on_dead_tasks() -> None:
    """The usual answer to "where is my cancel": in another partition, by another partitioner."""
    topics = MemoryTopics(partition_count=2, partition=1)
    offset = topics.schedule("stray", topics.now + HOUR_MS)
    topics.dead(Reason.WRONG_PARTITION, offset, b"stray")

    story = told(topics, "stray")

    assert [(one.what, one.topic, one.partition) for one in story.chapters] == [("SET_ASIDE", "dead-tasks", 1)]
    assert "WRONG_PARTITION" in story.chapters[0].why


def test_from_leaves_out_what_was_before() -> None:
    """A long-lived task has a long story."""
    topics = MemoryTopics()
    topics.schedule("x", topics.now + HOUR_MS)
    from_ms = topics.now + 1
    topics.schedule("x", topics.now + HOUR_MS)
    topics.settle()

    assert [one.offset for one in told(topics, from_ms=from_ms).chapters] == [1]


def test_nothing_known_is_not_found() -> None:
    """A typo in the id must not look like an empty story."""
    topics = MemoryTopics()
    a_life(topics)

    with pytest.raises(NotFoundError, match="'X'"):
        told(topics, "X")
