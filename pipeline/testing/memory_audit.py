"""An audit of a cluster in memory: the auditor that people run, over twins of its ports.

`audit_cluster(cluster)` is all that a simulation needs at the end of a world, or in the middle of one.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence

from pipeline.core.audit_view import NEVER
from pipeline.core.events import DAY_MS, Limits
from pipeline.core.tasks import DurationMs, InstantMs, Offset, TaskId
from pipeline.ports import Clock
from pipeline.service.audit.auditor import Auditor, AuditReport
from pipeline.service.audit.ports import AuditCodec, AuditOutside, AuditRequest, AuditTopics, FactStore, GroupOffsets
from pipeline.service.audit.storyteller import Story, Storyteller
from pipeline.service.recovery.ports import PartitionLog
from pipeline.testing.memory_cluster import MemoryCluster
from pipeline.testing.memory_consumers import PlainConsumerCodec
from pipeline.testing.memory_partition_log import MemoryPartitionLog
from pipeline.testing.memory_readers import MemoryClusterView
from pipeline.testing.simulated_process import SimulatedProcess

__all__ = [
    "MEMORY_TOPICS",
    "MemoryFactStore",
    "MemoryGroupOffsets",
    "PlainAuditCodec",
    "audit_cluster",
    "story_in_cluster",
]

MEMORY_TOPICS = AuditTopics(
    events="task-events",
    progress="task-progress",
    state="task-state",
    due="due-tasks",
    dead="dead-tasks",
    applied="applied-tasks",
)


class MemoryFactStore:
    """The fact store in memory; keys are sorted when they are asked for."""

    def __init__(self) -> None:
        self._facts: dict[bytes, bytes] = {}
        self._sorted: list[bytes] = []

    def put(self, facts: Sequence[tuple[bytes, bytes]]) -> None:
        """Add facts."""
        self._facts.update(facts)

    def get(self, key: bytes) -> bytes | None:
        """One fact."""
        return self._facts.get(key)

    def scan(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """The facts whose keys begin so, in order."""
        if len(self._sorted) != len(self._facts):
            self._sorted = sorted(self._facts)
        for at in range(bisect_left(self._sorted, prefix), len(self._sorted)):
            key = self._sorted[at]
            if not key.startswith(prefix):
                return
            yield key, self._facts[key]


class MemoryGroupOffsets:
    """The group offsets port over a mapping of (group, topic, partition)."""

    def __init__(self, offsets: Mapping[tuple[str, str, int], Offset] | None = None) -> None:
        self._offsets = offsets or {}

    async def committed(self, group: str, places: Sequence[tuple[str, int]]) -> Mapping[tuple[str, int], Offset]:
        """The group's committed offsets."""
        return {place: self._offsets[group, *place] for place in places if (group, *place) in self._offsets}


class PlainAuditCodec(PlainConsumerCodec):
    """The audit's codec port, for simulations."""

    def check_progress(self, value: bytes) -> None:
        """Nothing reports progress in simulations."""


async def audit_cluster(
    cluster: MemoryCluster,
    *,
    clock: Clock | None = None,
    topics: AuditTopics = MEMORY_TOPICS,
    limits: Limits | None = None,
    retention_ms: int = 7 * DAY_MS,
    overdue_ms: int = 300_000,
    compaction_lag_ms: int = NEVER,
    from_ms: int = 0,
    to_ms: int = NEVER,
    partitions: tuple[int, ...] | None = None,
    groups: tuple[str, ...] | None = None,
    group_offsets: Mapping[tuple[str, str, int], Offset] | None = None,
    findings_max: int = 1_000,
    codec: AuditCodec | None = None,
    facts: FactStore | None = None,
    log: PartitionLog | None = None,
) -> AuditReport:
    """Audit the topics of `cluster` as they are now; `report.findings` are the violations.

    `retention_ms` and `limits` must be those of the agents. `compaction_lag_ms`: leave it out if nothing compacts
    `task-events`, give 0 if something may at any time. `group_offsets` tells how far consumer groups have read
    `due-tasks`, so that what they missed is found. Waits for open transactions, so time must be able to pass.
    Raises `UnavailableError` if a topic is created anew meanwhile.
    """
    request = AuditRequest(
        topics=topics,
        limits=limits or Limits(),
        retention_ms=DurationMs(retention_ms),
        overdue_ms=DurationMs(overdue_ms),
        compaction_lag_ms=compaction_lag_ms,
        from_ms=InstantMs(from_ms),
        to_ms=InstantMs(to_ms),
        partitions=partitions,
        groups=groups,
        findings_max=findings_max,
    )
    outside = _outside(
        cluster,
        clock or cluster.clock,
        codec or PlainAuditCodec(),
        MemoryGroupOffsets(group_offsets),
        log or MemoryPartitionLog(cluster),
    )
    return await Auditor(request, outside, facts or MemoryFactStore(), on_progress=_unheard).run()


async def story_in_cluster(
    cluster: MemoryCluster,
    task_id: TaskId,
    *,
    topics: AuditTopics = MEMORY_TOPICS,
    limits: Limits | None = None,
    retention_ms: int = 7 * DAY_MS,
    from_ms: int = 0,
) -> Story:
    """The story of one task, as `duetasks why` tells it; raises `NotFoundError`."""
    request = AuditRequest(
        topics=topics,
        limits=limits or Limits(),
        retention_ms=DurationMs(retention_ms),
        overdue_ms=DurationMs(0),
        compaction_lag_ms=NEVER,
        from_ms=InstantMs(from_ms),
    )
    outside = _outside(cluster, cluster.clock, PlainAuditCodec(), MemoryGroupOffsets(), MemoryPartitionLog(cluster))
    return await Storyteller(task_id, request, outside, on_progress=_unheard).tell()


def _outside(
    cluster: MemoryCluster, clock: Clock, codec: AuditCodec, offsets: GroupOffsets, log: PartitionLog
) -> AuditOutside:
    return AuditOutside(
        clock=clock,
        codec=codec,
        cluster=MemoryClusterView(cluster, SimulatedProcess("audit")),
        log=log,
        group_offsets=offsets,
    )


def _unheard(_what: str, _done: int, _total: int) -> None:
    """Nobody watches the progress of a simulated audit."""
