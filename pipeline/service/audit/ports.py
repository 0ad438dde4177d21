"""What an audit needs of the outside beyond what rebuild and replay need, and what it is asked."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import msgspec

from pipeline.core.applied import AppliedTask
from pipeline.core.audit_view import NEVER
from pipeline.core.events import Limits
from pipeline.core.tasks import DurationMs, InstantMs, Offset
from pipeline.ports import Clock, ClusterView
from pipeline.service.recovery.ports import PartitionLog, RecoveryCodec

__all__ = ["AuditCodec", "AuditOutside", "AuditRequest", "AuditTopics", "FactStore", "GroupOffsets"]


class FactStore(Protocol):
    """A sorted heap of bytes on a disk: what an audit has read, sorted by what belongs together."""

    def put(self, facts: Sequence[tuple[bytes, bytes]]) -> None:
        """Add facts; one of the same key replaces the one before."""
        ...

    def get(self, key: bytes) -> bytes | None:
        """One fact, or None."""
        ...

    def scan(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """The facts whose keys begin so, in the order of their keys, one by one as they are asked for."""
        ...


class GroupOffsets(Protocol):
    """How far consumer groups have read."""

    async def committed(self, group: str, places: Sequence[tuple[str, int]]) -> Mapping[tuple[str, int], Offset]:
        """The group's committed offsets by topic and partition; raises `UnavailableError`."""
        ...


class AuditCodec(RecoveryCodec, Protocol):
    """The codec, with what consumers write."""

    def decode_applied(self, value: bytes) -> AppliedTask:
        """A ledger row; raises `CorruptStateError`."""
        ...

    def check_progress(self, value: bytes) -> None:
        """Raise `CorruptStateError` unless the value is a report of progress."""
        ...


class AuditTopics(msgspec.Struct, frozen=True, kw_only=True):
    """The names of the topics; `targets` are those besides `due` that tasks may be emitted to."""

    events: str
    progress: str
    state: str
    due: str
    dead: str
    applied: str
    targets: tuple[str, ...] = ()

    def target(self, name: str) -> str:
        """The topic that a task with this `target_topic` is emitted to."""
        return self.due if name in {"", "due-tasks"} else name

    @property
    def emitted_to(self) -> tuple[str, ...]:
        """All topics that tasks are emitted to, in the order of their numbers in facts."""
        return (self.due, *self.targets)


class AuditRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be audited, and by which settings: those of the agents.

    What was appended from `from_ms` on and before `to_ms` is judged; everything retained is read all the same, for an
    earlier record may overrule a later one. `partitions` and `groups`: only these, or None for all.
    `compaction_lag_ms` is `min.compaction.lag.ms` of `task-events`: nothing younger was compacted away.
    """

    topics: AuditTopics
    limits: Limits
    retention_ms: DurationMs
    overdue_ms: DurationMs
    compaction_lag_ms: int
    from_ms: InstantMs = InstantMs(0)
    to_ms: InstantMs = InstantMs(NEVER)
    partitions: tuple[int, ...] | None = None
    groups: tuple[str, ...] | None = None
    findings_max: int = 1_000


class AuditOutside(msgspec.Struct, frozen=True, kw_only=True):
    """The ports that an audit works with."""

    clock: Clock
    codec: AuditCodec
    cluster: ClusterView
    log: PartitionLog
    group_offsets: GroupOffsets
