"""The producer of events for asyncio: `TaskProducer`'s twin, awaited."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from datetime import datetime, timedelta
from itertools import islice
from types import TracebackType
from typing import Final, Self

from pipeline.adapters.send_results import unanswered
from pipeline.config import Settings
from pipeline.core.events import Event
from pipeline.core.tasks import NO_HEADERS
from pipeline.errors import UsageError
from pipeline.producer import DEADLINE, LINGER, Request, TaskProducer
from pipeline.service.receipts import Outcome, Receipt
from pipeline.service.task_requests import CancelRequest, ScheduleRequest

__all__ = ["AsyncTaskProducer"]

_CHUNK: Final = 500


class AsyncTaskProducer:
    """`TaskProducer` for asyncio: the same calls, awaited; no call blocks the loop.

    `async with AsyncTaskProducer() as producer:` connects on entry. Without `async with`, call `open` and `close`.
    The arguments are those of `TaskProducer`.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        source: str = "",
        deadline: timedelta = DEADLINE,
        linger: timedelta = LINGER,
    ) -> None:
        self._connect: Callable[[], TaskProducer] = lambda: TaskProducer(
            settings, source=source, deadline=deadline, linger=linger
        )
        self._producer: TaskProducer | None = None

    async def open(self) -> None:
        """Connect; raises `UnavailableError` if no broker answers, or the topic is missing."""
        if self._producer is None:
            self._producer = await asyncio.to_thread(self._connect)

    async def close(self, timeout: timedelta | None = None) -> None:  # noqa: ASYNC109  # the bound is the thread's
        """Wait until everything is answered, and let go; raises as `TaskProducer.close` does."""
        if self._producer is not None:
            await asyncio.to_thread(self._producer.close, timeout)

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def schedule(
        self,
        task_id: str,
        *,
        due_at: datetime | None = None,
        delay: timedelta | None = None,
        payload: bytes | str = b"",
        content_type: str = "",
        version: int | None = None,
        headers: Mapping[str, bytes | str] = NO_HEADERS,
        target_topic: str = "",
        event_id: str = "",
        deadline: timedelta | None = None,
    ) -> Receipt:
        """Let the task be due: `TaskProducer.schedule`."""
        request = ScheduleRequest(
            task_id=task_id,
            due_at=due_at,
            delay=delay,
            payload=payload,
            content_type=content_type,
            version=version,
            headers=headers,
            target_topic=target_topic,
            event_id=event_id,
        )
        return await self._send(request, deadline)

    async def cancel(
        self, task_id: str, *, version: int | None = None, event_id: str = "", deadline: timedelta | None = None
    ) -> Receipt:
        """Let the task be forgotten: `TaskProducer.cancel`."""
        return await self._send(CancelRequest(task_id=task_id, version=version, event_id=event_id), deadline)

    async def send_event(self, event: Event, *, deadline: timedelta | None = None) -> Receipt:
        """Send an event as it is: `TaskProducer.send_event`."""
        return await self._send(event, deadline)

    async def schedule_many(self, requests: Iterable[Request]) -> AsyncIterator[Outcome]:
        """Send many, pipelined: `TaskProducer.schedule_many`. `requests` is read in a worker thread."""
        outcomes = self._opened().schedule_many(requests)
        while chunk := await asyncio.to_thread(lambda: list(islice(outcomes, _CHUNK))):
            for outcome in chunk:
                yield outcome

    async def _send(self, request: Request, deadline: timedelta | None) -> Receipt:
        producer = self._opened()
        future = producer.try_submit(request)
        if future is None:  # the queue is full, and waiting for room must not block the loop
            future = await asyncio.to_thread(producer.submit, request)
        limit = producer.deadline if deadline is None else min(deadline, producer.deadline)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), limit.total_seconds())
        except TimeoutError as error:
            raise unanswered(future, limit) from error

    def _opened(self) -> TaskProducer:
        if self._producer is None:
            raise UsageError("The producer is not open: use `async with`, or await open() first.")
        return self._producer
