"""What a consumer's ledger says: which occurrence of which task a group has finished with, and how it ended.

The key of a row is text that any Kafka tool can print: group, generation, occurrence and task id with a zero byte
between them. A group's name can't hold that byte, numbers don't, and the id, which may, stands last: no two rows that
differ in any part share a key.
"""

from enum import StrEnum
from hashlib import blake2b
from typing import Final

import msgspec

from pipeline.core.effects import DueTask
from pipeline.core.tasks import DurationMs, InstantMs, Offset

__all__ = [
    "DIGEST_BYTES",
    "AppliedTask",
    "Outcome",
    "belongs_to",
    "group_fault",
    "ledger_digest",
    "ledger_key",
    "retry_delay_ms",
]

DIGEST_BYTES: Final = 16
"""Of BLAKE2b: two of 10**12 rows collide with a chance below 10**-14, and no id's length makes a table larger."""
_GROUP_BYTES_MAX: Final = 200
_DOUBLINGS_MAX: Final = 30


class Outcome(StrEnum):
    """How a task ended for a group. FAILED: its handler kept raising, and the task is on `dead-tasks`."""

    APPLIED = "APPLIED"
    FAILED = "FAILED"


class AppliedTask(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One row of the ledger; it stands in the partition number that the due record came from."""

    group: str
    task_id: str
    generation: int
    occurrence: int
    attempt: int
    due_partition: int
    due_offset: Offset
    applied_at_ms: InstantMs
    outcome: Outcome


def ledger_key(group: str, task: DueTask) -> bytes:
    """The key of the row that says that `group` has finished with this occurrence; attempts of it share the row."""
    return f"{group}\0{task.generation}\0{task.occurrence}\0{task.task_id}".encode()


def ledger_digest(key: bytes) -> bytes:
    """The fixed-size name of a row in a local table."""
    return blake2b(key, digest_size=DIGEST_BYTES).digest()


def belongs_to(group: str, key: bytes) -> bool:
    """Whether a row is `group`'s; several groups keep their ledgers on one topic."""
    return key.startswith(f"{group}\0".encode())


def group_fault(group: str) -> str | None:
    """None if `group` can name a ledger, else the sentence that says why not."""
    if not 0 < len(group.encode()) <= _GROUP_BYTES_MAX:
        return f"The group's name must have 1 to {_GROUP_BYTES_MAX} bytes."
    if not group.isprintable():
        return f"The group's name {group!r} has unprintable characters: choose another."
    return None


def retry_delay_ms(failures: int, *, first_ms: DurationMs, max_ms: DurationMs) -> DurationMs:
    """How long to wait after the `failures`-th failure in a row: doubling from `first_ms`, never above `max_ms`."""
    assert failures > 0, f"nothing failed yet: {failures}"
    return DurationMs(min(max_ms, first_ms << min(failures - 1, _DOUBLINGS_MAX)))
