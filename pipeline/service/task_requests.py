"""What applications ask for, in Python's own types, made into events that the agent will admit: refused here or never.

The rules are the agent's own (`core.events.check_event`, `admission.event_size`), judged against this machine's clock
instead of the append time, which is not known yet.
"""

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Final

import msgspec

from pipeline.core.durations import duration_ms, instant_ms
from pipeline.core.events import Cancel, Event, Limits, Reason, Schedule, check_event
from pipeline.core.tasks import NO_HEADERS, DurationMs, InstantMs, TaskId
from pipeline.errors import RejectedTaskError
from pipeline.service.admission import event_size

__all__ = ["CancelRequest", "EventMaker", "OutgoingEvent", "ScheduleRequest"]

_SHOWN_MAX: Final = 60


class ScheduleRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Be due at `due_at` (an aware datetime), or after `delay` from the broker's append time: give one of them.

    `version`: a rising number of your own from 1, if events of this task can travel on different roads.
    `event_id`: names this request; sent again with the same id it changes nothing. One is made if it is left out.
    `target_topic`: one from the allow-list (`DUETASKS_TARGET_TOPICS`) instead of `due-tasks`.
    """

    task_id: str
    due_at: datetime | None = None
    delay: timedelta | None = None
    payload: bytes | str = b""
    content_type: str = ""
    version: int | None = None
    headers: Mapping[str, bytes | str] = NO_HEADERS
    target_topic: str = ""
    event_id: str = ""


class CancelRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Forget the task. `version` and `event_id` are as in `ScheduleRequest`."""

    task_id: str
    version: int | None = None
    event_id: str = ""


class OutgoingEvent(msgspec.Struct, frozen=True, gc=False):
    """An event that keeps the rules, as it will stand in the topic."""

    event: Event
    key: bytes
    value: bytes


class EventMaker:
    """Makes events of requests. `encode` gives an event's value; `new_event_id` a name that nobody used before."""

    def __init__(
        self,
        encode: Callable[[Event], bytes],
        *,
        limits: Limits,
        source: str,
        now_ms: Callable[[], InstantMs],
        new_event_id: Callable[[], str],
    ) -> None:
        self._encode = encode
        self._limits = limits
        self._source = _text("source", source)
        self._now_ms = now_ms
        self._new_event_id = new_event_id

    def make(self, request: ScheduleRequest | CancelRequest) -> Event:
        """The event that asks for it; raises `RejectedTaskError` if a field is no such value at all."""
        if isinstance(request, CancelRequest):
            return Cancel(
                task_id=TaskId(_text("task_id", request.task_id)),
                event_id=_text("event_id", request.event_id) or self._new_event_id(),
                version=_version(request.version),
                source=self._source,
                created_at_ms=self._now_ms(),
            )
        return Schedule(
            task_id=TaskId(_text("task_id", request.task_id)),
            event_id=_text("event_id", request.event_id) or self._new_event_id(),
            version=_version(request.version),
            due_at_ms=None if request.due_at is None else _instant(request.due_at),
            delay_ms=None if request.delay is None else _duration(request.delay),
            payload=_bytes("payload", request.payload),
            content_type=_text("content_type", request.content_type),
            headers=_headers(request.headers) if request.headers else NO_HEADERS,
            target_topic=_text("target_topic", request.target_topic),
            source=self._source,
            created_at_ms=self._now_ms(),
        )

    def outgoing(self, event: Event) -> OutgoingEvent:
        """The record of `event`; raises `RejectedTaskError` with the reason for which the agent would refuse it."""
        try:
            key = event.task_id.encode()
        except UnicodeEncodeError as error:
            message = "task_id holds half of a surrogate pair, so it is no text: use whole characters"
            raise RejectedTaskError(message, reason=Reason.INVALID_KEY) from error
        rejection = check_event(event, append_at_ms=self._now_ms(), limits=self._limits)
        if rejection is not None:
            raise RejectedTaskError(rejection.message, reason=rejection.reason)
        try:
            value = self._encode(event)
        except (ValueError, TypeError) as error:
            raise RejectedTaskError(f"a field does not fit: {error}", reason=Reason.INVALID_FIELD) from error
        headers = event.headers if isinstance(event, Schedule) else NO_HEADERS
        size = event_size(len(key), len(value), headers)
        if size > self._limits.event_bytes_max:
            raise _too_large(event, size, self._limits.event_bytes_max)
        return OutgoingEvent(event, key, value)


def _too_large(event: Event, size: int, bytes_max: int) -> RejectedTaskError:
    payload_bytes = len(event.payload) if isinstance(event, Schedule) else 0
    envelope_bytes = size - payload_bytes
    return RejectedTaskError(
        f"the event has {size} bytes, {payload_bytes} of payload and {envelope_bytes} of envelope (id, headers counted "
        f"twice, other fields); at most {bytes_max} are taken, so the payload may have "
        f"{max(0, bytes_max - envelope_bytes)}: send a reference instead of the content",
        reason=Reason.TOO_LARGE,
    )


def _invalid(message: str) -> RejectedTaskError:
    return RejectedTaskError(message, reason=Reason.INVALID_FIELD)


def _shown(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= _SHOWN_MAX else text[:_SHOWN_MAX] + '...'}"


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise _invalid(f"{name} must be a string, not {_shown(value)}")
    return value


def _version(value: object) -> int:
    if value is None:
        return 0
    if not isinstance(value, int) or isinstance(value, bool):
        raise _invalid(f"version must be a whole number, not {_shown(value)}")
    if value == 0:
        raise RejectedTaskError(
            "version is 0; it counts from 1: leave it out or count up", reason=Reason.INVALID_VERSION
        )
    return value


def _instant(value: object) -> InstantMs:
    if not isinstance(value, datetime):
        raise _invalid(
            f"due_at must be an aware datetime, not {_shown(value)}: a bare number could be seconds or milliseconds; "
            "datetime.fromtimestamp(seconds, UTC) makes one"
        )
    try:
        return instant_ms(value)
    except ValueError as error:
        raise _invalid(f"due_at: {error}, like datetime.now(UTC)") from error


def _duration(value: object) -> DurationMs:
    if not isinstance(value, timedelta):
        raise _invalid(
            f"delay must be a timedelta, not {_shown(value)}: a bare number could be seconds or milliseconds; "
            "timedelta(seconds=...) makes one"
        )
    return duration_ms(value)


def _bytes(name: str, value: object) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    if not isinstance(value, str):
        raise _invalid(f"{name} must be bytes or a string, not {_shown(value)}: encode it, with json.dumps for example")
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise _invalid(f"{name} holds half of a surrogate pair, so it is no text: send bytes") from error


def _headers(value: object) -> Mapping[str, bytes]:
    if not isinstance(value, Mapping):
        raise _invalid(f"headers must be a mapping of names to bytes or strings, not {_shown(value)}")
    return {_text("a header's name", name): _bytes(f"header {name!r}", content) for name, content in value.items()}
