"""The agent's HTTP interface: status of tasks, verdicts on requests, health.

Any agent answers for any task: it asks the owner, at most one hop away. There is no authentication; it listens on
loopback unless told otherwise.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Final
from urllib.parse import unquote

import httpx
import msgspec
from faust import web

from pipeline.core.effects import emission_id
from pipeline.core.partitioning import partition_for_key
from pipeline.core.tasks import Offset, Partition, Status, TaskId, TaskState
from pipeline.errors import DuetasksError, UnavailableError
from pipeline.service.owner.partition_owner import PartitionOwner
from pipeline.service.owner.pool import OwnerPool
from pipeline.service.owner.status import Phase
from pipeline.service.task_list import LOOKED_AT_MAX, ListQuery, PageToken, list_slice

__all__ = ["HttpApi", "task_view"]

HOP_HEADER: Final = "duetasks-hop"
HOP_TIMEOUT_S: Final = 5.0
HOP_COST: Final = 500
"""Rows that a question to another agent counts for, so that one page asks a bounded number of times."""
TASKS_PATH: Final = "/v1/tasks"

Json = dict[str, Any]


def task_view(state: TaskState, partition: int, due_topic: str) -> Json:
    """A task as people and programs see it."""
    view: Json = {
        "task_id": state.task_id,
        "status": state.status,
        "generation": state.generation,
        "occurrence": state.occurrence,
        "attempt": state.attempt,
        "version": state.version or None,
        "due_at_ms": state.due_at_ms,
        "changed_at_ms": state.changed_at_ms,
        "partition": partition,
        "content_type": state.content_type or None,
        "source": state.source or None,
        "target_topic": state.target_topic or due_topic,
        "payload_size": len(state.payload),
        "verdicts": [msgspec.to_builtins(entry) for entry in state.verdicts],
        "emission": None,
    }
    if state.fired_at_ms:
        view["emission"] = {
            "emission_id": emission_id(state, Partition(partition)),
            "topic": state.target_topic or due_topic,
            "partition": partition,
            "offset": state.emitted_offset if state.emitted_offset >= 0 else None,
            "fired_at_ms": state.fired_at_ms,
            "lateness_ms": state.fired_at_ms - state.due_at_ms,
        }
    return view


class HttpApi:
    """The pages, over the owners of this agent and the addresses of the others."""

    def __init__(
        self,
        pool: OwnerPool,
        *,
        partition_count: int,
        due_topic: str,
        peers: Callable[[], Mapping[int, str]],
        own_url: str,
        metrics: Callable[[], bytes],
    ) -> None:
        self._pool = pool
        self._partition_count = partition_count
        self._due_topic = due_topic
        self._peers = peers
        self._own_url = own_url.rstrip("/")
        self._metrics = metrics
        # Agents ask each other directly: a proxy meant for the world outside would not find them.
        self._client = httpx.AsyncClient(timeout=HOP_TIMEOUT_S, trust_env=False)

    def register(self, app: Any) -> None:  # noqa: ANN401  # Faust's app
        """Add the pages to the app's web server."""
        pages = {
            TASKS_PATH + r"/{id:[\s\S]+}": self._task,  # an id may hold a newline too
            TASKS_PATH: self._tasks,
            "/v1/verdicts": self._verdict,
            "/healthz": self._health,
            "/readyz": self._ready,
            "/metrics": self._metrics_page,
        }
        for path, page in pages.items():
            app.page(path, name=path)(_faust_view(page))

    # -- one task ----------------------------------------------------------------------------------------------

    async def _task(self, view: web.View, request: web.Request) -> web.Response:
        try:
            task_id = _task_id(request)
        except UnicodeDecodeError:
            return view.json({"error": "the id in the path is not UTF-8, percent-encoded"}, status=400)
        partition = partition_for_key(task_id.encode(), self._partition_count)
        owner = self._pool.owners.get(partition)
        if owner is None:
            return await self._ask_owner(view, request, partition)
        state = owner.get(task_id)
        if state is None:
            return view.json({"error": f"There is no task {task_id!r}: never seen, or forgotten."}, status=404)
        return view.json(task_view(state, partition, self._due_topic))

    async def _verdict(self, view: web.View, request: web.Request) -> web.Response:
        try:
            partition, offset = int(request.query["partition"]), int(request.query["offset"])
            task_id = TaskId(request.query["task_id"])
        except (KeyError, ValueError):
            return view.json({"error": "partition, offset (whole numbers) and task_id are needed"}, status=400)
        owner = self._pool.owners.get(partition)
        if owner is None:
            return await self._ask_owner(view, request, partition)
        return view.json(self._verdict_of(owner, partition, Offset(offset), task_id))

    def _verdict_of(self, owner: PartitionOwner, partition: int, offset: Offset, task_id: TaskId) -> Json:
        state = owner.get(task_id)
        if owner.status.position <= offset:
            return {"passed": False}
        answer: Json = {"passed": True, "verdict": "UNKNOWN", "reason": "", "emission": None}
        passing = owner.passing_verdict(offset)
        noted = [entry for entry in state.verdicts if entry.offset == offset] if state is not None else []
        if noted:
            answer["verdict"], answer["reason"] = noted[0].verdict, noted[0].reason
        elif passing is not None:
            answer["verdict"], answer["reason"] = passing
        if state is not None:
            answer["emission"] = task_view(state, partition, self._due_topic)["emission"]
        return answer

    # -- lists -------------------------------------------------------------------------------------------------

    async def _tasks(self, view: web.View, request: web.Request) -> web.Response:
        try:
            query = _list_query(request.query)
        except (ValueError, KeyError) as error:
            return view.json({"error": f"the query is wrong: {error}"}, status=400)
        tasks, token = await self._page(query, request)
        more = token.encode() if token.partition < self._partition_count else None
        return view.json({"tasks": tasks, "next_page_token": more})

    async def _page(self, query: ListQuery, request: web.Request) -> tuple[list[Json], PageToken]:
        """A page over all partitions, and where the next one begins; short if the rows to look at are used up."""
        tasks: list[Json] = []
        token, looked_at = query.token, 0
        while token.partition < self._partition_count and len(tasks) < query.limit and looked_at < LOOKED_AT_MAX:
            owner = self._pool.owners.get(token.partition)
            if owner is not None:
                part = list_slice(owner, query, token, query.limit - len(tasks))
                tasks += [task_view(state, token.partition, self._due_topic) for state in part.found]
                token, looked_at = part.next, looked_at + part.looked_at
                await asyncio.sleep(0)  # the owners of this agent have timers to fire
                continue
            if HOP_HEADER in request.headers and token != query.token:
                break  # the rest is not ours: the agent that asked goes on from here
            more = {"page_token": token.encode(), "limit": str(query.limit - len(tasks))}
            answer = (await self._asked(request, token.partition, more)).json()
            tasks += answer["tasks"]
            following = answer["next_page_token"]
            token = PageToken.decode(following) if following else PageToken(self._partition_count)
            looked_at += HOP_COST
        return tasks, token

    # -- health ------------------------------------------------------------------------------------------------

    async def _health(self, view: web.View, _request: web.Request) -> web.Response:
        return view.json({"status": "ok"})

    async def _ready(self, view: web.View, _request: web.Request) -> web.Response:
        statuses = [owner.status for owner in self._pool.owners.values()]
        ready = self._pool.assigned_once and all(status.phase is Phase.ACTIVE for status in statuses)
        body = {"ready": ready, "partitions": [msgspec.to_builtins(status) for status in statuses]}
        return view.json(body, status=200 if ready else 503)

    async def _metrics_page(self, view: web.View, _request: web.Request) -> web.Response:
        return view.bytes(self._metrics(), content_type="text/plain")

    # -- other agents ------------------------------------------------------------------------------------------

    async def _ask_owner(self, view: web.View, request: web.Request, partition: int) -> web.Response:
        """Pass the question on to the agent that owns the partition, and its answer back as it is."""
        answer = await self._asked(request, partition, {})
        return view.bytes(answer.content, content_type="application/json", status=answer.status_code)

    async def _asked(self, request: web.Request, partition: int, more: Mapping[str, str]) -> httpx.Response:
        """The owner's answer, one hop at most; raises `UnavailableError` if there is none, or it is not ready."""
        url = self._peers().get(partition)
        if url is None or url.rstrip("/") == self._own_url or HOP_HEADER in request.headers:
            raise UnavailableError(f"partition {partition} has no owner now: try again")
        try:
            answer = await self._client.get(
                url.rstrip("/") + request.rel_url.raw_path,  # as it was sent: ids may hold "/", "%" and "?"
                params={**request.query, **more},
                headers={HOP_HEADER: "1"},
            )
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise UnavailableError(f"the owner of partition {partition} at {url} does not answer: {error!r}") from error
        if answer.is_server_error:
            raise UnavailableError(f"the owner of partition {partition} at {url} is not ready: {_fault_of(answer)}")
        return answer


def _faust_view(page: Callable[..., Any]) -> Callable[..., Any]:
    async def handler(view: Any, request: Any, **_: Any) -> Any:  # noqa: ANN401  # Faust's view and request
        try:
            return await page(view, request)
        except UnavailableError as error:
            return view.json({"error": str(error)}, status=503)
        except DuetasksError as error:
            return view.json({"error": str(error)}, status=409)

    return handler


def _task_id(request: web.Request) -> TaskId:
    """The id in the path, from the path as it was sent: a router that decodes could not tell `%2F` from `%252F`."""
    raw: str = request.rel_url.raw_path
    return TaskId(unquote(raw.removeprefix(TASKS_PATH + "/"), errors="strict"))


def _fault_of(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"])
    except (ValueError, KeyError, TypeError):
        return f"status {answer.status_code}"


def _list_query(query: Mapping[str, str]) -> ListQuery:
    unknown = set(query) - {"status", "prefix", "due_before_ms", "limit", "page_token"}
    if unknown:
        raise ValueError(f"unknown parameters {sorted(unknown)}")
    return ListQuery(
        status=Status(query["status"]) if "status" in query else None,
        prefix=query.get("prefix", ""),
        due_before_ms=int(query["due_before_ms"]) if "due_before_ms" in query else None,
        limit=int(query.get("limit", "100")),
        token=PageToken.decode(query["page_token"]) if "page_token" in query else PageToken(),
    )
