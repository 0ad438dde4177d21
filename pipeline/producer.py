"""The producer of events for applications: one object, put together from settings. Its twin: `async_producer.py`."""

import os
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import Future
from datetime import datetime, timedelta
from types import TracebackType
from typing import Final, Self, TypeVar

from msgspec.structs import replace

from pipeline import wiring
from pipeline.adapters.avro_codec import AvroCodec
from pipeline.adapters.event_json import decode_json_event
from pipeline.adapters.event_sender import EventSender
from pipeline.adapters.send_results import outcomes_in_order, receipt_of, submit_one, try_submit_one
from pipeline.adapters.system_clock import SystemClock
from pipeline.config import Settings
from pipeline.core.durations import duration_ms
from pipeline.core.events import Event, Rejection
from pipeline.core.tasks import NO_HEADERS
from pipeline.errors import DuetasksError, RejectedTaskError, UsageError
from pipeline.service.receipts import Outcome, Receipt
from pipeline.service.task_requests import CancelRequest, EventMaker, OutgoingEvent, ScheduleRequest

__all__ = ["CancelRequest", "Outcome", "Receipt", "Request", "ScheduleRequest", "TaskProducer", "new_event_id"]

Request = ScheduleRequest | CancelRequest | Event
"""What can be sent: a request, or an event as it is."""

_Item = TypeVar("_Item")

DEADLINE: Final = timedelta(seconds=30)
LINGER: Final = timedelta(milliseconds=5)
_DEADLINE_MS_MIN: Final = 1_000


class TaskProducer:
    """Schedules and cancels tasks. Each call returns a receipt: the broker has the event, on all in-sync replicas.

    Requests that break a rule are refused before anything is sent (`RejectedTaskError`, with the reason code that the
    agent would record). A call that ends without a receipt says what is known: `UnsentError`: certainly not sent;
    `UnknownOutcomeError`: perhaps. Both carry the `event`; `send_event(error.event)` repeats it with the same
    `event_id`, so that a second arrival changes nothing.

    A receipt is not the verdict: whether a cancel came in time is decided when the agent applies it
    (`duetasks cancel --wait`, or the task's `verdicts`).

    Use it as a context manager, or call `close`. Safe to share between threads; not between processes (fork).

    Args:
        settings: brokers, topic prefix, limits; from the environment if not given, with the embedded broker of the
            data folder where no brokers are set.
        source: who asks; kept with the task for people.
        deadline: how long one event may take, from the call to the receipt.
        linger: how long the first of several events waits for others, to share a request.

    Raises:
        UnavailableError: no broker answers, or the topic is missing.

    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        source: str = "",
        deadline: timedelta = DEADLINE,
        linger: timedelta = LINGER,
    ) -> None:
        settings = wiring.connected_settings() if settings is None else wiring.with_brokers(settings)
        deadline_ms = duration_ms(deadline)
        if deadline_ms < _DEADLINE_MS_MIN:
            raise UsageError(f"deadline is {deadline_ms} ms; it must be at least {_DEADLINE_MS_MIN} ms.")
        self.deadline = deadline
        self._unread_bulks = 0
        self._maker = EventMaker(
            AvroCodec().encode_event,
            limits=settings.limits,
            source=source,
            now_ms=SystemClock().now_ms,
            new_event_id=new_event_id,
        )
        self._sender = EventSender(
            settings.client_config(),
            settings.topics.events,
            deadline_ms=deadline_ms,
            linger_ms=duration_ms(linger),
            bytes_max=settings.event_bytes_max,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except DuetasksError as undelivered:
            error.add_note(str(undelivered))  # what ended the block is told first

    def schedule(
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
        """Let the task be due; `ScheduleRequest` tells what the fields mean. Replaces what was scheduled under the id.

        Raises:
            RejectedTaskError: it breaks a rule; `reason` says which.
            UnsentError: it was not sent; send it again.
            UnknownOutcomeError: the deadline passed without an answer; send `error.event` again.

        """
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
        return self._wait(self.submit(request), deadline)

    def cancel(
        self, task_id: str, *, version: int | None = None, event_id: str = "", deadline: timedelta | None = None
    ) -> Receipt:
        """Let the task be forgotten; raises as `schedule` does."""
        request = CancelRequest(task_id=task_id, version=version, event_id=event_id)
        return self._wait(self.submit(request), deadline)

    def send_event(self, event: Event, *, deadline: timedelta | None = None) -> Receipt:
        """Send an event as it is: one that failed before, or one made elsewhere; raises as `schedule` does."""
        return self._wait(self.submit(event), deadline)

    def submit(self, request: Request) -> Future[Receipt]:
        """Send without waiting for the receipt; waits only while the queue is full.

        The future has the receipt or the error. An error that nobody asked for is raised by `close`.

        Raises:
            RejectedTaskError: it breaks a rule; nothing was sent.
            UnsentError: the queue stayed full up to the deadline.

        """
        return submit_one(self._sender, self._prepare(request))

    def try_submit(self, request: Request) -> Future[Receipt] | None:
        """As `submit`, but None at once if the queue is full: for event loops, which must not wait."""
        return try_submit_one(self._sender, self._prepare(request))

    def submit_schedule(
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
    ) -> Future[Receipt]:
        """`schedule` without waiting for the receipt: see `submit`."""
        return self.submit(
            ScheduleRequest(
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
        )

    def submit_cancel(self, task_id: str, *, version: int | None = None, event_id: str = "") -> Future[Receipt]:
        """`cancel` without waiting for the receipt: see `submit`."""
        return self.submit(CancelRequest(task_id=task_id, version=version, event_id=event_id))

    def schedule_many(self, requests: Iterable[Request]) -> Generator[Outcome]:
        """Send many, pipelined; yields one `Outcome` for each request, in their order, as it becomes known.

        Nothing is sent before the outcomes are read, and reading them to the end is what sends all: a `for` loop.
        At most 50,000 wait for their answers at a time. One that is refused or lost is an outcome with an `error`;
        the others go on. `close` raises `UsageError` if nobody read to the end.
        """
        return self._bulk(requests, self._prepare)

    def send_json(
        self, values: Iterable[bytes], *, event_id: Callable[[bytes], str] | None = None
    ) -> Generator[Outcome]:
        """Send many events written as JSON, as a line of `duetasks import` or a value on `task-events` is.

        As `schedule_many` in all else. `event_id` names the events that have no id of their own, by their value; left
        out, they get new ones.
        """
        return self._bulk(values, lambda value: self._prepare_json(value, event_id))

    def _bulk(self, items: Iterable[_Item], prepare: Callable[[_Item], OutgoingEvent]) -> Generator[Outcome]:
        self._unread_bulks += 1
        return self._read_bulk(items, prepare)

    def _read_bulk(self, items: Iterable[_Item], prepare: Callable[[_Item], OutgoingEvent]) -> Generator[Outcome]:
        try:
            yield from outcomes_in_order(self._sender, items, prepare)
        finally:
            self._unread_bulks -= 1

    def close(self, timeout: timedelta | None = None) -> None:
        """Wait until everything is answered, at most `timeout` (default: the deadline), and let go.

        Raises:
            UndeliveredError: events were not delivered, and nobody has asked their futures; `failures` names each.
            UsageError: outcomes of `schedule_many` were never read, so its requests were not sent.

        """
        self._sender.close(None if timeout is None else timeout.total_seconds())
        if self._unread_bulks:
            unread, self._unread_bulks = self._unread_bulks, 0
            raise UsageError(
                f"{unread} schedule_many() were not read to the end, so not everything was sent: loop over them."
            )

    def _prepare(self, request: Request) -> OutgoingEvent:
        event = self._maker.make(request) if isinstance(request, ScheduleRequest | CancelRequest) else request
        return self._maker.outgoing(event)

    def _prepare_json(self, value: bytes, event_id: Callable[[bytes], str] | None) -> OutgoingEvent:
        event = decode_json_event(value)
        if isinstance(event, Rejection):
            raise RejectedTaskError(event.message, reason=event.reason)
        if not event.event_id:
            event = replace(event, event_id=event_id(value) if event_id is not None else new_event_id())
        return self._maker.outgoing(event)

    def _wait(self, future: Future[Receipt], deadline: timedelta | None) -> Receipt:
        return receipt_of(future, self.deadline if deadline is None else min(deadline, self.deadline))


def new_event_id() -> str:
    """A name for an event that nobody used before."""
    return os.urandom(12).hex()
