"""Pages of tasks: partition by partition, in id order, bounded in rows looked at."""

import base64
from typing import Final, Self

import msgspec

from pipeline.core.tasks import Status, TaskId, TaskState
from pipeline.service.partition_owner import PartitionOwner

__all__ = ["LIMIT_MAX", "ListQuery", "PageToken", "list_page"]

LIMIT_MAX: Final = 1_000
LOOKED_AT_MAX: Final = 5_000
"""Rows that one page looks at, so that a rare filter cannot hold the agent up; the page may then be short."""


class PageToken(msgspec.Struct, frozen=True, array_like=True):
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
            return msgspec.json.decode(base64.urlsafe_b64decode(text), type=cls)
        except (ValueError, msgspec.DecodeError) as error:
            raise ValueError(f"page_token {text!r} is not one that was given out") from error


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


def list_page(
    owner: PartitionOwner, query: ListQuery, token: PageToken
) -> tuple[list[tuple[int, TaskState]], PageToken]:
    """Up to `query.limit` tasks of the owner's partition after the token, and the token of what follows."""
    found: list[tuple[int, TaskState]] = []
    after = None if token.after is None else TaskId(token.after)
    if after is None and query.prefix:
        after = TaskId(query.prefix[:-1])  # ids that sort before the prefix are not looked at
    looked_at = 0
    while looked_at < LOOKED_AT_MAX:
        states = owner.scan(after, query.limit)
        for state in states:
            after = state.task_id
            looked_at += 1
            if query.wants(state):
                found.append((token.partition, state))
                if len(found) >= query.limit:
                    return found, PageToken(token.partition, after)
        past_prefix = (
            bool(states) and states[-1].task_id > query.prefix and not states[-1].task_id.startswith(query.prefix)
        )
        if len(states) < query.limit or past_prefix:
            return found, PageToken(token.partition + 1)
    return found, PageToken(token.partition, after)
