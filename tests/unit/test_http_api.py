"""The agent's pages on a real web server, over owners in memory: which id is meant, who answers, what is not shown."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import faust
import httpx
import pytest
from aiohttp.test_utils import TestServer

from pipeline.adapters.http_api import HOP_HEADER, HttpApi
from pipeline.core.partitioning import partition_for_key
from pipeline.core.tasks import InstantMs, Offset, Status, TaskId, TaskState, Verdict, VerdictEntry
from pipeline.errors import UnavailableError
from pipeline.service.owner.status import OwnerStatus, Phase

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

pytestmark = pytest.mark.unit

PARTITIONS = 4
IDS = [
    "plain",
    "a/b",
    "/lead",
    "trail/",
    "a//b",
    "a%2Fb",
    "%",
    "100%25",
    "what?",
    "a?x=1&y=2",
    "#x",
    "a b+c",
    ".",
    "..",
    "../..",
    "line\nbreak",
    "null\x00byte",
    "Größe",
    "日本",
    "\U0001f980",
    "e\u0301",
    "\u00e9",
    "k" * 1_000,
]


class _Owner:
    def __init__(self, partition: int) -> None:
        self.rows: dict[str, TaskState] = {}
        self.status = OwnerStatus(partition=partition, phase=Phase.ACTIVE, position=100)
        self.asked = 0

    def get(self, task_id: TaskId) -> TaskState | None:
        self._active()
        self.asked += 1
        return self.rows.get(task_id)

    def scan(self, after: TaskId | None, limit: int) -> list[TaskState]:
        self._active()
        self.asked += 1
        return [self.rows[task_id] for task_id in sorted(self.rows) if after is None or task_id > after][:limit]

    def passing_verdict(self, offset: Offset) -> tuple[Verdict, str] | None:
        return (Verdict.REJECTED, "MALFORMED") if offset == 7 else None

    def _active(self) -> None:
        if self.status.phase is not Phase.ACTIVE:
            raise UnavailableError("partition is acquiring: try again")


class _Agent:
    """An agent's web server over owners in memory."""

    def __init__(self, owners: dict[int, _Owner], peers: dict[int, str]) -> None:
        self.owners = owners
        self.pool: Any = SimpleNamespace(owners=owners, assigned_once=True)
        app = faust.App(
            "test",
            broker="memory://",
            env={},
            web_tables_enabled=False,
            web_router_enabled=False,
            web_graph_enabled=False,
            web_stats_enabled=False,
            web_metrics_enabled=False,
        )
        self.api = HttpApi(
            self.pool,
            partition_count=PARTITIONS,
            due_topic="due-tasks",
            peers=lambda: peers,
            own_url="http://me",
            metrics=lambda: b"up 1\n",
        )
        self.api.register(app)
        app.web.init_server()
        self.server = TestServer(app.web.web_app)

    async def start(self) -> str:
        await self.server.start_server()
        return str(self.server.make_url("")).rstrip("/")

    async def stop(self) -> None:
        await self.api._client.aclose()
        await self.server.close()


@contextlib.asynccontextmanager
async def _two_agents(task_ids: Iterable[str] = ()) -> AsyncIterator[tuple[_Agent, _Agent, httpx.AsyncClient]]:
    """Two agents with two partitions each (0 and 2, 1 and 3), and a client of the first."""
    peers: dict[int, str] = {}
    first = _Agent({number: _Owner(number) for number in (0, 2)}, peers)
    second = _Agent({number: _Owner(number) for number in (1, 3)}, peers)
    owners = {**first.owners, **second.owners}
    for task_id in task_ids:
        partition = partition_for_key(task_id.encode(), PARTITIONS)
        owners[partition].rows[task_id] = TaskState(
            task_id=TaskId(task_id), status=Status.SCHEDULED, due_at_ms=InstantMs(len(task_id))
        )
    urls = [await first.start(), await second.start()]
    peers.update({number: urls[number % 2] for number in range(PARTITIONS)})
    try:
        async with httpx.AsyncClient(base_url=urls[0], trust_env=False) as client:
            yield first, second, client
    finally:
        await first.stop()
        await second.stop()


def test_every_id_is_found_by_any_agent_and_is_not_another() -> None:
    """Ids are any text: what a path, a query or a router could change must arrive as it was sent, also over a hop."""

    async def main() -> None:
        async with _two_agents(IDS) as (_, _, client):
            for task_id in IDS:
                answer = await client.get("/v1/tasks/" + quote(task_id, safe="").replace(".", "%2E"))
                assert answer.status_code == 200, f"{task_id!r}: {answer.text}"
                assert answer.json()["task_id"] == task_id

    asyncio.run(main())


def test_a_path_that_was_not_encoded_is_the_id_too() -> None:
    """`curl .../v1/tasks/order/7` is what people type."""

    async def main() -> None:
        async with _two_agents(["order/7"]) as (_, _, client):
            assert (await client.get("/v1/tasks/order/7")).json()["task_id"] == "order/7"

    asyncio.run(main())


def test_unknown_ids_are_not_found_and_impossible_ones_refused() -> None:
    """404 says that there is no such task; bytes that are no UTF-8 can't be an id."""

    async def main() -> None:
        async with _two_agents(["a"]) as (_, _, client):
            for task_id in ["b", "a/", "A", "c", "d", "e"]:
                assert (await client.get("/v1/tasks/" + quote(task_id, safe=""))).status_code == 404
            assert (await client.get("/v1/tasks/%FF")).status_code == 400

    asyncio.run(main())


@pytest.mark.parametrize("limit", [1, 2, 7, 1_000])
def test_a_listing_over_two_agents_is_complete(limit: int) -> None:
    """Partitions lie with the agents by turns; whoever is asked, every task is listed once, in pages of any size."""

    async def main() -> None:
        ids = [f"t{number}" for number in range(60)]
        async with _two_agents(ids) as (_, _, client):
            assert sorted(await _list(client, limit=str(limit))) == sorted(ids)
            assert sorted(await _list(client, limit=str(limit), prefix="t1")) == sorted(
                task_id for task_id in ids if task_id.startswith("t1")
            )
            assert await _list(client, limit=str(limit), status="EMITTED") == []

    asyncio.run(main())


def test_a_page_is_filled_from_several_partitions() -> None:
    """`--limit 50` gives 50 where there are so many, and never more."""

    async def main() -> None:
        async with _two_agents([f"t{number}" for number in range(80)]) as (_, _, client):
            page = (await client.get("/v1/tasks", params={"limit": "50"})).json()
            assert len(page["tasks"]) == 50

    asyncio.run(main())


def test_a_rare_filter_ends_the_page_early_and_goes_on() -> None:
    """One answer looks at a bounded number of rows, or a busy caller would keep timers waiting."""

    async def main() -> None:
        async with _two_agents([]) as (first, _, client):
            first.owners[0].rows = {
                f"{number:06}": TaskState(task_id=TaskId(f"{number:06}"), status=Status.EMITTED)
                for number in range(12_000)
            }
            last = "zz"
            first.owners[0].rows[last] = TaskState(task_id=TaskId(last), status=Status.SCHEDULED)

            page = (await client.get("/v1/tasks", params={"status": "SCHEDULED"})).json()

            assert page["tasks"] == []
            assert page["next_page_token"] is not None
            assert await _list(client, status="SCHEDULED") == [last]

    asyncio.run(main())


def test_a_question_makes_one_hop_only() -> None:
    """Two agents with stale knowledge of each other must not send a question to and fro."""

    async def main() -> None:
        async with _two_agents(["x"]) as (_, second, client):
            for owner in list(second.owners):
                del second.owners[owner]  # revoked, and nobody knows it yet
            other = next(key for key in "abcdefgh" if partition_for_key(key.encode(), PARTITIONS) in {1, 3})

            answer = await client.get(f"/v1/tasks/{other}")
            hop = await client.get(f"/v1/tasks/{other}", headers={HOP_HEADER: "1"})
            listing = await client.get("/v1/tasks")

            assert (answer.status_code, hop.status_code, listing.status_code) == (503, 503, 503)

    asyncio.run(main())


def test_a_partition_without_owner_is_unavailable_not_empty() -> None:
    """A listing that leaves a partition out would look complete."""

    async def main() -> None:
        async with _two_agents(["x"]) as (_, second, client):
            second.owners[1].status.phase = Phase.ACQUIRING

            answer = await client.get("/v1/tasks")

            assert answer.status_code == 503
            assert "acquiring" in answer.json()["error"]

    asyncio.run(main())


@pytest.mark.parametrize(
    "query",
    ["status=NONE", "limit=0", "limit=1001", "limit=x", "due_before_ms=soon", "page_token=x", "prefx=a"],
)
def test_wrong_queries_are_told_so(query: str) -> None:
    """A filter that is silently ignored lists what nobody asked for."""

    async def main() -> None:
        async with _two_agents() as (_, _, client):
            answer = await client.get(f"/v1/tasks?{query}")
            assert answer.status_code == 400
            assert "error" in answer.json()

    asyncio.run(main())


def test_verdicts_come_from_the_row_or_from_memory() -> None:
    """A request that left a row is told from it; one that left none, from what the owner still remembers."""

    async def main() -> None:
        async with _two_agents() as (first, _, client):
            entry = VerdictEntry(event_id="e", offset=Offset(3), verdict=Verdict.CANCELLED)
            state = TaskState(task_id=TaskId("t"), status=Status.CANCELLED, verdicts=(entry,))
            first.owners[0].rows["t"] = state

            async def verdict(offset: int, partition: int = 0) -> dict[str, Any]:
                query = {"partition": str(partition), "offset": str(offset), "task_id": "t"}
                return dict((await client.get("/v1/verdicts", params=query)).json())

            assert (await verdict(3))["verdict"] == "CANCELLED"
            assert (await verdict(7))["reason"] == "MALFORMED"
            assert (await verdict(8))["verdict"] == "UNKNOWN"
            assert await verdict(100) == {"passed": False}
            assert (await verdict(7, partition=1))["verdict"] == "REJECTED"
            assert (await client.get("/v1/verdicts")).status_code == 400

    asyncio.run(main())


def test_ready_means_that_every_owned_partition_is_active() -> None:
    """A load balancer may go by it; who owns nothing by assignment is ready, who waits for an assignment is not."""

    async def main() -> None:
        async with _two_agents() as (first, _, client):
            assert (await client.get("/readyz")).status_code == 200
            first.owners[2].status.phase = Phase.ACQUIRING
            answer = await client.get("/readyz")
            assert answer.status_code == 503
            assert {part["partition"] for part in answer.json()["partitions"]} == {0, 2}
            assert (await client.get("/healthz")).status_code == 200
            first.owners.clear()
            assert (await client.get("/readyz")).status_code == 200
            first.pool.assigned_once = False
            assert (await client.get("/readyz")).status_code == 503

    asyncio.run(main())


@pytest.mark.parametrize("path", ["/table", "/table/", "/router", "/router/", "/graph", "/stats", "/assignment"])
def test_fausts_own_pages_are_not_served(path: str) -> None:
    """They tell about tables and hosts, without authentication."""

    async def main() -> None:
        async with _two_agents() as (_, _, client):
            assert (await client.get(path)).status_code == 404

    asyncio.run(main())


async def _list(client: httpx.AsyncClient, **query: str) -> list[str]:
    found: list[str] = []
    while True:
        answer = await client.get("/v1/tasks", params=query)
        assert answer.status_code == 200, answer.text
        page = answer.json()
        found += [task["task_id"] for task in page["tasks"]]
        if page["next_page_token"] is None:
            return found
        query["page_token"] = page["next_page_token"]
