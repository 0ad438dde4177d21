"""Asks an agent over HTTP: where a task is in its life, which tasks there are, what became of a request."""

import time
from collections.abc import Callable, Iterator
from typing import Any, Final
from urllib.parse import quote

import httpx

from pipeline.adapters.agent_slot import running_agents
from pipeline.config import Settings
from pipeline.core.tasks import InstantMs, Offset, Status, TaskId
from pipeline.errors import DuetasksError, RefusedError, UnavailableError, UsageError

__all__ = ["AgentClient"]

_REQUEST_TIMEOUT_S: Final = 10.0
_PATIENCE_S: Final = 15.0
_PAUSE_S: Final = 0.2
_PAGE_MAX: Final = 1_000

Json = dict[str, Any]


class AgentClient:
    """Any agent answers for any task. A partition that is changing hands is waited for, at most `patience_s`.

    Every call raises `UnavailableError` if no agent answers, or the partition has no owner for that long.
    """

    def __init__(self, settings: Settings, *, patience_s: float = _PATIENCE_S) -> None:
        self._settings = settings
        self._patience_s = patience_s
        # Agents listen on loopback or on a network of their own: a proxy for the world outside would not find them.
        self._client = httpx.Client(timeout=_REQUEST_TIMEOUT_S, trust_env=False)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def get_task(self, task_id: TaskId) -> Json | None:
        """The task as the agent shows it, or None if there is none, never was or was forgotten."""
        # A path of dots would be shortened on its way, so dots are written as codes too.
        answer = self._get("/v1/tasks/" + quote(task_id, safe="").replace(".", "%2E"), {})
        if answer.status_code == httpx.codes.NOT_FOUND:
            return None
        return _content(answer)

    def list_tasks(
        self,
        *,
        status: Status | None = None,
        prefix: str = "",
        due_before_ms: InstantMs | None = None,
        limit: int,
    ) -> Iterator[Json]:
        """At most `limit` tasks that fit the filters, partition by partition, in the order of their ids."""
        query: dict[str, str] = {}
        if status is not None:
            query["status"] = status.value
        if prefix:
            query["prefix"] = prefix
        if due_before_ms is not None:
            query["due_before_ms"] = str(due_before_ms)
        left = limit
        while left > 0:
            page = _content(self._get("/v1/tasks", {**query, "limit": str(min(left, _PAGE_MAX))}))
            yield from page["tasks"]
            left -= len(page["tasks"])
            if page["next_page_token"] is None:
                return
            query["page_token"] = page["next_page_token"]

    def verdict(self, *, partition: int, offset: Offset, task_id: TaskId) -> Json:
        """What became of the event at `offset`: `{"passed": false}` until the owner has come to it."""
        query = {"partition": str(partition), "offset": str(offset), "task_id": task_id}
        return _content(self._get("/v1/verdicts", query))

    def _get(self, path: str, query: dict[str, str]) -> httpx.Response:
        until_s = time.monotonic() + self._patience_s
        while True:
            answer = self._first_answer(path, query)
            if not answer.is_server_error:
                return answer
            if time.monotonic() >= until_s:
                raise UnavailableError(f"The agent can't answer now: {_fault(answer)}.")
            time.sleep(_PAUSE_S)  # partitions change hands within seconds

    def _first_answer(self, path: str, query: dict[str, str]) -> httpx.Response:
        """The answer of the first agent that gives one."""
        urls = self._urls()
        failed: list[str] = []
        for url in urls:
            try:
                return self._client.get(url.rstrip("/") + path, params=query)
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                failed.append(f"{url}: {error or type(error).__name__}")
        if not failed:
            raise UnavailableError(
                f"No agent runs on {self._settings.data_dir}: start one with `duetasks up` or `duetasks agent`, or set "
                "DUETASKS_AGENT_URL to one that runs elsewhere."
            )
        raise UnavailableError(f"No agent answers ({'; '.join(failed)}): see that it runs, or set DUETASKS_AGENT_URL.")

    def _urls(self) -> list[str]:
        """Asked anew each time: an agent may have been started again on another port."""
        if self._settings.agent_url is not None:
            return [self._settings.agent_url]
        return [agent.url for agent in running_agents(self._settings.data_dir)]


_ERRORS: Final[dict[int, Callable[[str], DuetasksError]]] = {400: UsageError, 409: RefusedError}


def _content(answer: httpx.Response) -> Json:
    if not answer.is_success:
        kind = _ERRORS.get(answer.status_code, UnavailableError)
        raise kind(f"The agent answers {answer.status_code}: {_fault(answer)}")
    content: Json = answer.json()
    return content


def _fault(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]).rstrip(".")
    except (ValueError, KeyError, TypeError):
        return f"status {answer.status_code}"
