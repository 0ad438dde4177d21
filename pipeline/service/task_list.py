"""Pages of tasks: partition by partition, in id order, bounded in rows looked at."""

import base64
from collections.abc import Sequence
from typing import Final, Protocol, Self

import msgspec

from pipeline.core.tasks import Status, TaskId, TaskState

__all__ = ["LIMIT_MAX", "LOOKED_AT_MAX", "ListQuery", "PageToken", "Readable", "Slice", "list_slice"]

LIMIT_MAX: Final = 1_000
LOOKED_AT_MAX: Final = 5_000
"""Rows that one page looks at, so that a rare filter cannot hold the agent up; the page may then be short or empty."""
SLICE_ROWS: Final = 500
"""Rows that are looked at in one go, a few milliseconds: timers of the same process wait for no longer than that."""
PARTITION_MAX: Final = 1_000_000


class Readable(Protocol):
    """What a listing needs of an owner."""

    def get(self, task_id: TaskId) -> TaskState | None:
        """The committed state of a task; raises `UnavailableError` while the partition is not active."""
        ...

    def scan(self, after: TaskId | None, limit: int) -> list[TaskState]:
        """Committed states in id order after `after`; raises `UnavailableError` while not active."""
        ...


class PageToken(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where the next page begins: partition, and the last id seen in it."""

    partition: int = 0
    after: str | None = None

    def encode(self) -> str:
        """As callers carry it."""
        return base64.urlsafe_b64encode(msgspec.json.encode(self)).decode()

    @classmethod
    def decode(cls, text: str) -> Self:
        """From what a caller brought back; raises `ValueError`."""
        try:
            token = msgspec.json.decode(base64.urlsafe_b64decode(text), type=cls)
        except (ValueError, msgspec.DecodeError) as error:
            raise ValueError(f"page_token {text!r} is not one that was given out") from error
        if not 0 <= token.partition < PARTITION_MAX:
            raise ValueError(f"page_token {text!r} is not one that was given out")
        return token


class ListQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which tasks are asked for."""

    status: Status | None = None
    prefix: str = ""
    due_before_ms: int | None = None
    limit: int = 100
    token: PageToken = PageToken()

    def __post_init__(self) -> None:
        if not 1 <= self.limit <= LIMIT_MAX:
            raise ValueError(f"limit is {self.limit}; it must be 1 to {LIMIT_MAX}")

    def wants(self, state: TaskState) -> bool:
        """Whether the task fits the filters."""
        return (
            (self.status is None or state.status is self.status)
            and state.task_id.startswith(self.prefix)
            and (self.due_before_ms is None or state.due_at_ms < self.due_before_ms)
        )


class Slice(msgspec.Struct, frozen=True, kw_only=True):
    """What one look into a partition found, where the next one begins, and how many rows were looked at."""

    found: Sequence[TaskState]
    next: PageToken
    looked_at: int


def list_slice(owner: Readable, query: ListQuery, token: PageToken, room: int) -> Slice:
    """Up to `room` tasks of the owner's partition after the token, of the next few hundred rows."""
    rows = _rows(owner, query, token)
    found: list[TaskState] = []
    for number, state in enumerate(rows, start=1):
        if _is_past(state, query.prefix):
            return Slice(found=found, next=PageToken(token.partition + 1), looked_at=number)
        if query.wants(state):
            found.append(state)
            if len(found) == room:
                return Slice(found=found, next=PageToken(token.partition, state.task_id), looked_at=number)
    if len(rows) < SLICE_ROWS:
        return Slice(found=found, next=PageToken(token.partition + 1), looked_at=len(rows))
    return Slice(found=found, next=PageToken(token.partition, rows[-1].task_id), looked_at=len(rows))


def _rows(owner: Readable, query: ListQuery, token: PageToken) -> list[TaskState]:
    """The next rows that may fit: ids that sort before the prefix are never looked at."""
    if token.after is not None and token.after >= query.prefix:
        return owner.scan(TaskId(token.after), SLICE_ROWS)
    if not query.prefix:
        return owner.scan(None, SLICE_ROWS)
    # A scan begins *after* an id, and there is no id just before the prefix: so the id that is the prefix comes first.
    first = owner.get(TaskId(query.prefix))
    others = owner.scan(TaskId(query.prefix), SLICE_ROWS if first is None else SLICE_ROWS - 1)
    return others if first is None else [first, *others]


def _is_past(state: TaskState, prefix: str) -> bool:
    """Whether this and all later ids lie behind the prefix: UTF-8 sorts as Python's strings do, by code points."""
    return state.task_id > prefix and not state.task_id.startswith(prefix)
