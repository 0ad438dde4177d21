"""Hand-written topics on a cluster in memory, and audits of them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from pipeline.testing.memory_audit import PlainAuditCodec, audit_cluster
from pipeline.testing.memory_cluster import MemoryCluster
from pipeline.testing.memory_consumers import SteppedClock
from tests.audit_topics import HandWritten

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeline.service.audit.auditor import AuditReport

TOPICS = ("task-events", "task-progress", "task-state", "due-tasks", "dead-tasks", "applied-tasks")
HOUR_MS = 3_600_000


class MemoryWriter:
    """Writes to one partition of a cluster in memory; a millisecond passes with each record."""

    def __init__(self, *, partition_count: int = 1, partition: int = 0) -> None:
        self.clock = SteppedClock()
        self.cluster = MemoryCluster(self.clock)
        self._partition = partition
        for name in TOPICS:
            self.cluster.create_topic(name, partition_count)

    def now_ms(self) -> int:
        """The clock of everybody."""
        return self.clock.now_ms()

    def topic(self, name: str) -> str:
        """No prefix."""
        return name

    def send(
        self, topic: str, key: bytes | None, value: bytes | None, headers: Mapping[str, bytes] | None = None
    ) -> tuple[int, int]:
        """Append outside of any transaction."""
        log = self.cluster.log(topic, self._partition)
        self.clock.advance(1)
        offset = log.append(key, value, at_ms=self.clock.now_ms(), headers=headers or {})
        return offset, self.clock.now_ms()

    def identity(self) -> tuple[str, str, str]:
        """Ids of the cluster, `task-state` and `task-events`."""
        topics = self.cluster.topics()
        return self.cluster.cluster_id, topics["task-state"].topic_id, topics["task-events"].topic_id


class MemoryTopics(HandWritten):
    """Empty topics on a cluster of their own."""

    def __init__(self, *, partition_count: int = 1, partition: int = 0) -> None:
        self.memory = MemoryWriter(partition_count=partition_count, partition=partition)
        super().__init__(self.memory, PlainAuditCodec(), partition=partition, partition_count=partition_count)

    @property
    def cluster(self) -> MemoryCluster:
        """Where they are."""
        return self.memory.cluster

    @property
    def now(self) -> int:
        """The clock."""
        return self.memory.now_ms()

    def pass_time(self, by_ms: int) -> None:
        """Let time pass."""
        self.memory.clock.advance(by_ms)

    def audit(self, **options: Any) -> AuditReport:  # noqa: ANN401  # those of the audit
        """The report on what was written."""
        return asyncio.run(audit_cluster(self.cluster, **options))
