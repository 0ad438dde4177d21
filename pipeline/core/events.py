"""What upstream asks for, and the rules that decide whether it may be asked (admission).

The same rules run in the producer SDK before anything is sent and in the agent for events that came another way;
in the agent they are judged against the record's append time, never against now, or replay would give other answers.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

import msgspec

from pipeline.core.tasks import NO_HEADERS, DurationMs, InstantMs, Offset, TaskId, Tracking

__all__ = [
    "DAY_MS",
    "OWN_TOPICS",
    "REASON_REMEDIES",
    "RESERVED_HEADER_PREFIX",
    "Cancel",
    "Event",
    "Limits",
    "Origin",
    "Reason",
    "Rejection",
    "Schedule",
    "check_event",
]

DAY_MS: Final = 86_400_000
RESERVED_HEADER_PREFIX: Final = "duetasks-"
OWN_TOPICS: Final = frozenset(
    {"task-events", "task-progress", "task-state", "due-tasks", "dead-tasks", "applied-tasks"}
)


class Reason(StrEnum):
    """Why an event or a task was set aside: the code on `dead-tasks`; `docs/reference/reason-codes.md` tells more."""

    MALFORMED = "MALFORMED"
    UNKNOWN_SCHEMA = "UNKNOWN_SCHEMA"
    NULL_VALUE = "NULL_VALUE"
    NULL_KEY = "NULL_KEY"
    INVALID_KEY = "INVALID_KEY"
    RESERVED_KEY = "RESERVED_KEY"
    KEY_MISMATCH = "KEY_MISMATCH"
    TASK_ID_LENGTH = "TASK_ID_LENGTH"
    EVENT_ID_LENGTH = "EVENT_ID_LENGTH"
    UNKNOWN_FIELD = "UNKNOWN_FIELD"
    DUPLICATE_FIELD = "DUPLICATE_FIELD"
    INVALID_FIELD = "INVALID_FIELD"
    MISSING_TIME = "MISSING_TIME"
    TWO_TIMES = "TWO_TIMES"
    IMPLAUSIBLE_TIME = "IMPLAUSIBLE_TIME"
    BEYOND_HORIZON = "BEYOND_HORIZON"
    INVALID_VERSION = "INVALID_VERSION"
    TOO_LARGE = "TOO_LARGE"
    UNKNOWN_TARGET = "UNKNOWN_TARGET"
    RESERVED_HEADER = "RESERVED_HEADER"
    WRONG_PARTITION = "WRONG_PARTITION"
    INTERNAL_ERROR = "INTERNAL_ERROR"
    UNDELIVERABLE = "UNDELIVERABLE"
    HANDLER_FAILED = "HANDLER_FAILED"


REASON_REMEDIES: Final[Mapping[Reason, tuple[str, str]]] = {
    Reason.MALFORMED: (
        "The value is neither Avro nor JSON as they are read here.",
        "Send a `TaskEvent` as `schemas/` has it, or JSON.",
    ),
    Reason.UNKNOWN_SCHEMA: (
        "The value's schema fingerprint is none of ours, or it is in a registry's framing.",
        "Write with our schema, single-object encoding.",
    ),
    Reason.NULL_VALUE: ("The record has no value.", "To cancel a task, send an event of type CANCEL."),
    Reason.NULL_KEY: ("The record has no key.", "Use the task's id as the key."),
    Reason.INVALID_KEY: ("The key is not UTF-8.", "Use the task's id in UTF-8 as the key."),
    Reason.RESERVED_KEY: ("The id starts with a zero byte.", "Choose another id."),
    Reason.KEY_MISMATCH: ("Key and `task_id` differ, so two tasks could be meant.", "Send the task's id as both."),
    Reason.TASK_ID_LENGTH: ("The id is empty or too long.", "Keep it within `DUETASKS_TASK_ID_BYTES_MAX`."),
    Reason.EVENT_ID_LENGTH: ("The `event_id` is too long.", "Keep it within 256 characters."),
    Reason.UNKNOWN_FIELD: ("A JSON field that there is not: most likely a typo.", "Correct its name."),
    Reason.DUPLICATE_FIELD: ("A JSON field is given twice, or in two spellings.", "Give it once."),
    Reason.INVALID_FIELD: ("A field has a wrong type or value.", "The message names the field and what it must be."),
    Reason.MISSING_TIME: ("Neither `due_at_ms` nor `delay_ms` is given.", "Give one."),
    Reason.TWO_TIMES: ("Both `due_at_ms` and `delay_ms` are given.", "Give one."),
    Reason.IMPLAUSIBLE_TIME: (
        "The due time lies long before the event itself, or the delay is negative.",
        "Give milliseconds since 1970; seconds are often meant.",
    ),
    Reason.BEYOND_HORIZON: (
        "The due time lies beyond the horizon.",
        "Give milliseconds, or raise `DUETASKS_HORIZON_MS`.",
    ),
    Reason.INVALID_VERSION: ("The version is no whole number from 1.", "Leave it out, or count up."),
    Reason.TOO_LARGE: ("Key and value together are too large.", "Send a reference instead of the content."),
    Reason.UNKNOWN_TARGET: (
        "The target topic is not on the allow-list.",
        "Add it to `DUETASKS_TARGET_TOPICS`, or leave it out.",
    ),
    Reason.RESERVED_HEADER: ("A header's name starts with `duetasks-`.", "Rename it."),
    Reason.WRONG_PARTITION: (
        "The record stands in a partition where its task does not belong.",
        "Partition with murmur2 (`murmur2_random` in librdkafka).",
    ),
    Reason.INTERNAL_ERROR: ("Our code raised twice on this record.", "Report it with the record: it is a bug."),
    Reason.UNDELIVERABLE: (
        "A due task, or a record set aside, that the broker does not take.",
        "The message says why: size, or a target topic that does not exist.",
    ),
    Reason.HANDLER_FAILED: (
        "A consumer's handler kept failing.",
        "Mend the handler, then `duetasks replay` the task or schedule it again.",
    ),
}
"""For each reason what happened and what to do, for the reference."""


class Schedule(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A request that a task be due at an instant, or after a delay from its append time: exactly one of the two."""

    task_id: TaskId
    event_id: str = ""
    version: int = 0
    due_at_ms: InstantMs | None = None
    delay_ms: DurationMs | None = None
    payload: bytes = b""
    content_type: str = ""
    headers: Mapping[str, bytes] = NO_HEADERS
    target_topic: str = ""
    tracking: Tracking | None = None
    source: str = ""
    created_at_ms: InstantMs = InstantMs(0)


class Cancel(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A request that a task be forgotten: a value with an author and an instant, never a null."""

    task_id: TaskId
    event_id: str = ""
    version: int = 0
    source: str = ""
    created_at_ms: InstantMs = InstantMs(0)


Event = Schedule | Cancel


class Origin(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Where a record stands in its topic, and when the broker appended it."""

    topic: str
    partition: int
    offset: Offset
    append_at_ms: InstantMs


class Rejection(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An event that is set aside: the reason code, the sentence for people, and what was still legible of it."""

    reason: Reason
    message: str
    task_id: TaskId | None = None
    event_id: str = ""
    version: int = 0


class Limits(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The bounds of admission; all agents and producers of one deployment should share them.

    `past_max_ms`: how long before its append time a task may have been due (an upstream that was down may be late;
    a value given in seconds lies half a century back). `event_bytes_max` bounds key plus encoded value.
    """

    horizon_ms: DurationMs = DurationMs(3_653 * DAY_MS)
    past_max_ms: DurationMs = DurationMs(366 * DAY_MS)
    task_id_bytes_max: int = 1_024
    event_id_bytes_max: int = 256
    event_bytes_max: int = 1_000_000
    target_topics: frozenset[str] = frozenset()


def check_event(event: Event, *, append_at_ms: InstantMs, limits: Limits) -> Rejection | None:
    """None if the event may be applied, else why not; the first rule that it breaks, in the order of the file."""
    reason = _identity_fault(event, limits)
    if reason is None and isinstance(event, Schedule):
        reason = _time_fault(event, append_at_ms, limits) or _content_fault(event, limits)
    if reason is None:
        return None
    code, message = reason
    version = max(0, event.version)
    legible = event.event_id if len(event.event_id) <= limits.event_id_bytes_max else ""
    return Rejection(reason=code, message=message, task_id=event.task_id, event_id=legible, version=version)


_Fault = tuple[Reason, str] | None


def _identity_fault(event: Event, limits: Limits) -> _Fault:
    id_bytes = len(event.task_id) if event.task_id.isascii() else len(event.task_id.encode("utf-8", "surrogatepass"))
    if not 0 < id_bytes <= limits.task_id_bytes_max:
        return Reason.TASK_ID_LENGTH, (f"task_id has {id_bytes} bytes; it must have 1 to {limits.task_id_bytes_max}")
    if event.task_id[0] == "\x00":
        return Reason.RESERVED_KEY, "task_id starts with a zero character, which is reserved: choose another id"
    if len(event.event_id) > limits.event_id_bytes_max:
        return Reason.EVENT_ID_LENGTH, (
            f"event_id has {len(event.event_id)} characters; at most {limits.event_id_bytes_max} are kept: shorten it"
        )
    if not 0 <= event.version < 2**63:
        return (
            Reason.INVALID_VERSION,
            (f"version is {event.version}; it must be a whole number from 1: leave it out or count up"),
        )
    return None


def _time_fault(event: Schedule, append_at_ms: InstantMs, limits: Limits) -> _Fault:
    if event.due_at_ms is None and event.delay_ms is None:
        return Reason.MISSING_TIME, "neither due_at_ms nor delay_ms is given: give one"
    if event.due_at_ms is not None and event.delay_ms is not None:
        return Reason.TWO_TIMES, "both due_at_ms and delay_ms are given: give one"
    delay_ms = event.delay_ms if event.delay_ms is not None else 0
    if delay_ms < 0:
        return Reason.IMPLAUSIBLE_TIME, f"delay_ms is {delay_ms}, before its own beginning: give 0 or more"
    due_at_ms = event.due_at_ms if event.due_at_ms is not None else append_at_ms + delay_ms
    if due_at_ms < append_at_ms - limits.past_max_ms:
        return Reason.IMPLAUSIBLE_TIME, (
            f"due_at_ms {due_at_ms} is over {limits.past_max_ms // DAY_MS} days before the event itself: "
            "milliseconds since 1970 are meant; were these seconds?"
        )
    if due_at_ms > append_at_ms + limits.horizon_ms:
        return Reason.BEYOND_HORIZON, (
            f"due_at_ms {due_at_ms} is more than {limits.horizon_ms // DAY_MS} days ahead, the horizon: "
            "milliseconds are meant; were these microseconds?"
        )
    return None


def _content_fault(event: Schedule, limits: Limits) -> _Fault:
    if event.tracking is not None:
        return Reason.INVALID_FIELD, "tracking is not available in this release: leave it out, the task is emitted once"
    target = event.target_topic
    if target and target != "due-tasks" and target not in limits.target_topics:
        return (
            Reason.UNKNOWN_TARGET,
            (f"target_topic {target!r} is not on the allow-list: add it to DUETASKS_TARGET_TOPICS, or leave it out"),
        )
    for name in event.headers:
        if name.lower().startswith(RESERVED_HEADER_PREFIX):
            return (
                Reason.RESERVED_HEADER,
                (f"header {name!r} starts with {RESERVED_HEADER_PREFIX!r}, which is reserved: rename it"),
            )
    return None
