"""The words of the domain as values: a task's state, its status, what became of each request.

Everything here is frozen and valid from birth. Instants are milliseconds since the Unix epoch, UTC.
"""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final, NewType

import msgspec

__all__ = [
    "EVENT_HASHES_MAX",
    "EVENT_HASH_BYTES",
    "FINAL",
    "NO_HEADERS",
    "VERDICTS_MAX",
    "DurationMs",
    "Generation",
    "IndexEntry",
    "IndexKind",
    "InstantMs",
    "Offset",
    "Partition",
    "Status",
    "TaskId",
    "TaskState",
    "Tracking",
    "Verdict",
    "VerdictEntry",
    "index_entry",
]

TaskId = NewType("TaskId", str)
InstantMs = NewType("InstantMs", int)
DurationMs = NewType("DurationMs", int)
Offset = NewType("Offset", int)
Partition = NewType("Partition", int)
Generation = NewType("Generation", int)

EVENT_HASH_BYTES: Final = 8
EVENT_HASHES_MAX: Final = 16
VERDICTS_MAX: Final = 4
NO_HEADERS: Final[Mapping[str, bytes]] = MappingProxyType({})


class Status(StrEnum):
    """Where a task is in its life; `lifecycle.py` has the table of moves."""

    SCHEDULED = "SCHEDULED"
    EMITTED = "EMITTED"
    CANCELLED = "CANCELLED"
    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    RETRY_WAIT = "RETRY_WAIT"
    DEAD = "DEAD"


FINAL: Final = frozenset({Status.EMITTED, Status.CANCELLED, Status.COMPLETED, Status.DEAD})
"""Statuses that only the PURGE timer or a new SCHEDULE leaves (EMITTED: of an untracked task)."""


class Verdict(StrEnum):
    """What became of one request."""

    SCHEDULED = "SCHEDULED"
    RESCHEDULED = "RESCHEDULED"
    DUPLICATE = "DUPLICATE"
    STALE = "STALE"
    CANCELLED = "CANCELLED"
    ALREADY_CANCELLED = "ALREADY_CANCELLED"
    TOO_LATE = "TOO_LATE"
    UNKNOWN_TASK = "UNKNOWN_TASK"
    REJECTED = "REJECTED"


class IndexKind(StrEnum):
    """Why the timer loop looks at a task again; the value is the byte in the index key, in firing order."""

    DUE = "0"
    RETRY = "1"
    LEASE = "2"
    PURGE = "3"


class Tracking(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """How an execution is watched after it was emitted; absent means emit and forget."""

    lease_ms: DurationMs
    attempts_max: int
    backoff_ms: DurationMs


class VerdictEntry(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One request's outcome: which event, at which offset of `task-events`, and the reason where it was refused."""

    event_id: str
    offset: Offset
    verdict: Verdict
    reason: str = ""


class TaskState(msgspec.Struct, frozen=True, gc=False):
    """All that is known of one task: a row of the timer table, and its public status.

    Id and status may be given by position: CPython makes calls with more than 15 keywords the slow way (compile.c,
    `STACK_USE_GUIDELINE`), which took as long as the rest of a SCHEDULE.
    `generation` 0 means never scheduled (only requests are remembered). `version` 0 means none seen.
    `wake_at_ms` is the instant of the task's one index entry; its kind follows from `status`.
    `fired_at_ms` and `emitted_offset` tell where the present generation's emission is, 0 and -1 before it.
    `event_hashes` are the last 16 event ids, 8 bytes each, oldest first.
    """

    task_id: TaskId
    status: Status
    generation: Generation = Generation(0)
    occurrence: int = 0
    attempt: int = 0
    version: int = 0
    due_at_ms: InstantMs = InstantMs(0)
    wake_at_ms: InstantMs = InstantMs(0)
    changed_at_ms: InstantMs = InstantMs(0)
    payload: bytes = b""
    content_type: str = ""
    headers: Mapping[str, bytes] = NO_HEADERS
    target_topic: str = ""
    source: str = ""
    created_at_ms: InstantMs = InstantMs(0)
    tracking: Tracking | None = None
    event_hashes: bytes = b""
    verdicts: tuple[VerdictEntry, ...] = ()
    fired_at_ms: InstantMs = InstantMs(0)
    emitted_offset: Offset = Offset(-1)


class IndexEntry(msgspec.Struct, frozen=True, gc=False, order=True):
    """One line of the ordered timer index; sorts by instant, then kind, then id."""

    at_ms: InstantMs
    kind: IndexKind
    task_id: TaskId


_KIND_OF: Final[Mapping[Status, IndexKind]] = {
    Status.SCHEDULED: IndexKind.DUE,
    Status.RUNNING: IndexKind.LEASE,
    Status.RETRY_WAIT: IndexKind.RETRY,
    Status.EMITTED: IndexKind.PURGE,
    Status.CANCELLED: IndexKind.PURGE,
    Status.COMPLETED: IndexKind.PURGE,
    Status.DEAD: IndexKind.PURGE,
}


def index_entry(state: TaskState) -> IndexEntry:
    """The one index entry of a task: every row has exactly one, so nothing is ever forgotten or stuck."""
    return IndexEntry(state.wake_at_ms, _KIND_OF[state.status], state.task_id)
