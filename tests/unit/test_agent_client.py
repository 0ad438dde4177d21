"""How commands ask an agent: which one, with what patience, and what they make of its answers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import httpx
import pytest

from pipeline.adapters.agent_client import AgentClient
from pipeline.adapters.agent_slot import AgentSlot
from pipeline.cli.status_command import _task_lines
from pipeline.config import Settings
from pipeline.core.tasks import InstantMs, Offset, Status, TaskId
from pipeline.errors import RefusedError, UnavailableError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.unit

URL = "http://agent.example:1"


def _client(
    answer: Callable[[httpx.Request], httpx.Response],
    tmp_path: Path,
    *,
    agent_url: str | None = URL,
    patience_s: float = 0,
) -> AgentClient:
    client = AgentClient(Settings(agent_url=agent_url, data_dir=tmp_path), patience_s=patience_s)
    client._client.close()
    client._client = httpx.Client(transport=httpx.MockTransport(answer))
    return client


@pytest.mark.parametrize("task_id", ["a/b", "100%", "a?b=1", "..", "Größe\x00"])
def test_ids_arrive_as_they_are(task_id: str, tmp_path: Path) -> None:
    """What is sent must name the task, whatever characters its id has."""
    seen: list[bytes] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.url.raw_path)
        return httpx.Response(200, json={"task_id": task_id})

    found = _client(answer, tmp_path).get_task(TaskId(task_id))

    assert found == {"task_id": task_id}
    path = seen[0].decode()
    assert path.count("/") == 3
    assert "?" not in path
    assert not path.endswith(".")


def test_no_such_task_is_none(tmp_path: Path) -> None:
    """Absence is an answer, not a failure."""
    client = _client(lambda _: httpx.Response(404, json={"error": "no"}), tmp_path)

    assert client.get_task(TaskId("x")) is None


def test_lists_follow_the_pages_up_to_the_limit(tmp_path: Path) -> None:
    """A page may be short or empty and yet not the last one; each asks for no more than is left."""
    pages = {
        None: ([{"task_id": "1"}, {"task_id": "2"}], "p2"),
        "p2": ([], "p3"),
        "p3": ([{"task_id": "3"}], None),
    }
    asked: list[dict[str, str]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(dict(request.url.params))
        tasks, more = pages[request.url.params.get("page_token")]
        return httpx.Response(200, json={"tasks": tasks, "next_page_token": more})

    client = _client(answer, tmp_path)
    found = list(client.list_tasks(status=Status.DEAD, prefix="a", due_before_ms=InstantMs(5), limit=7))

    assert [task["task_id"] for task in found] == ["1", "2", "3"]
    assert [query["limit"] for query in asked] == ["7", "5", "5"]
    assert {query["status"] for query in asked} == {"DEAD"}
    assert {query["prefix"] + query["due_before_ms"] for query in asked} == {"a5"}
    assert [task["task_id"] for task in client.list_tasks(limit=2)] == ["1", "2"]


@pytest.mark.parametrize(
    ("status", "error"), [(400, UsageError), (409, RefusedError), (418, UnavailableError), (503, UnavailableError)]
)
def test_faults_are_told_by_remedy(status: int, error: type[Exception], tmp_path: Path) -> None:
    """The agent's own sentence reaches the person."""
    client = _client(lambda _: httpx.Response(status, json={"error": "because of that"}), tmp_path)

    with pytest.raises(error, match="because of that"):
        client.verdict(partition=0, offset=Offset(1), task_id=TaskId("x"))


def test_a_partition_that_changes_hands_is_waited_for(tmp_path: Path) -> None:
    """A rebalance takes seconds; a command that failed at once would only be typed again."""
    answers = iter([503, 503, 200])

    def answer(_: httpx.Request) -> httpx.Response:
        return httpx.Response(next(answers), json={"error": "acquiring", "passed": True})

    assert _client(answer, tmp_path, patience_s=30).verdict(partition=0, offset=Offset(1), task_id=TaskId("x"))[
        "passed"
    ]


def test_agents_are_found_by_the_data_folder(tmp_path: Path) -> None:
    """One that ended has left its address behind, and is not asked; of several the first that answers is."""
    slots = [AgentSlot.take(tmp_path) for _ in range(3)]
    for number, slot in enumerate(slots):
        slot.announce(f"http://agent-{number}.example:1")
    slots[0]._lock.close()  # killed
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.host)
        if request.url.host == "agent-1.example":
            raise httpx.ConnectError("refused", request=request)
        return httpx.Response(200, json={"task_id": "x"})

    assert _client(answer, tmp_path, agent_url=None).get_task(TaskId("x")) == {"task_id": "x"}
    assert asked == ["agent-1.example", "agent-2.example"]
    for slot in slots[1:]:
        slot.release()


def test_no_agent_says_how_to_start_one(tmp_path: Path) -> None:
    """Exit code 5 with the two ways out."""
    client = _client(lambda _: httpx.Response(200), tmp_path, agent_url=None)

    with pytest.raises(UnavailableError, match=r"duetasks agent.*DUETASKS_AGENT_URL"):
        client.get_task(TaskId("x"))


def test_every_slot_is_held_or_none(tmp_path: Path) -> None:
    """A rebuild that got some of the slots would rename tables under the agent that has the others."""
    first, second = AgentSlot.take(tmp_path), AgentSlot.take(tmp_path)
    first.release()

    with pytest.raises(RefusedError, match="stop the agents"):
        AgentSlot.hold_all(tmp_path)
    AgentSlot.take(tmp_path).release()  # what was held is free again
    second.release()

    held = AgentSlot.hold_all(tmp_path)
    assert [slot.folder.name for slot in held] == ["0", "1"]
    third = AgentSlot.take(tmp_path)
    assert third.folder.name == "2"
    for slot in (*held, third):
        slot.release()


def test_a_task_is_told_to_people_line_by_line() -> None:
    """What happened, when, and where the emission is; control characters of an id don't reach the terminal."""
    task = {
        "task_id": "order\x1b[2J",
        "status": "EMITTED",
        "generation": 7,
        "version": 2,
        "due_at_ms": 1_000,
        "changed_at_ms": 1_250,
        "partition": 3,
        "source": None,
        "content_type": None,
        "payload_size": 0,
        "verdicts": [
            {"offset": 6, "verdict": "SCHEDULED", "reason": "", "event_id": "e"},
            {"offset": 9, "verdict": "REJECTED", "reason": "MALFORMED", "event_id": ""},
        ],
        "emission": {"topic": "due-tasks", "partition": 3, "offset": 5, "fired_at_ms": 1_250, "lateness_ms": 250},
    }

    lines = _task_lines(json.loads(json.dumps(task)))

    assert lines == [
        r"Task          'order\x1b[2J'",
        "Status        EMITTED",
        "Due           1970-01-01T00:00:01.000Z",
        "Changed       1970-01-01T00:00:01.250Z",
        "Version       2",
        "Generation    7",
        "Partition     3",
        "Fired         1970-01-01T00:00:01.250Z, 250ms late",
        "Emission      due-tasks, partition 3, offset 5",
        "Requests, oldest first:",
        "  offset 6: SCHEDULED, event e",
        "  offset 9: REJECTED (MALFORMED)",
    ]
