"""Puts audits together: what `duetasks verify` and `duetasks why` run."""

import asyncio
from collections.abc import Callable
from contextlib import closing

import msgspec

from pipeline.adapters.audit_codec import AvroAuditCodec
from pipeline.adapters.kafka_admin import KafkaAdmin
from pipeline.adapters.kafka_group_offsets import KafkaGroupOffsets
from pipeline.adapters.kafka_partition_log import KafkaPartitionLog
from pipeline.adapters.rocksdb_fact_store import RocksdbFactStore
from pipeline.adapters.scratch_folder import scratch_folder
from pipeline.adapters.system_clock import SystemClock
from pipeline.config import Settings
from pipeline.core.audit_view import NEVER
from pipeline.core.tasks import DurationMs, InstantMs, TaskId
from pipeline.errors import TopicMismatchError, UsageError
from pipeline.service.audit.auditor import Auditor, AuditReport
from pipeline.service.audit.ports import AuditOutside, AuditRequest, AuditTopics
from pipeline.service.audit.storyteller import Story, Storyteller

__all__ = ["AuditChoice", "audit", "tell_story"]

Progress = Callable[[str, int, int], None]


class AuditChoice(msgspec.Struct, frozen=True, kw_only=True):
    """What a person asked `verify` for; None stands for all."""

    overdue_ms: DurationMs
    from_ms: InstantMs | None = None
    to_ms: InstantMs | None = None
    partitions: tuple[int, ...] = ()
    groups: tuple[str, ...] = ()
    findings_max: int = 1_000


def audit(settings: Settings, choice: AuditChoice, *, on_progress: Progress) -> AuditReport:
    """Audit the topics of `settings`; changes nothing, and leaves nothing behind.

    Raises `TopicMismatchError` (topics missing, partition counts that differ), `UsageError`, `UnavailableError`.
    """
    request = _request(settings, choice)
    with (
        scratch_folder(settings.data_dir, "verify") as scratch,
        closing(RocksdbFactStore(scratch / "facts", memory_bytes=settings.table_memory_bytes)) as facts,
    ):
        return asyncio.run(Auditor(request, _outside(settings), facts, on_progress=on_progress).run())


def tell_story(settings: Settings, task_id: TaskId, *, from_ms: InstantMs | None, on_progress: Progress) -> Story:
    """The story of one task.

    Raises `NotFoundError` if no topic knows it, `TopicMismatchError`, `UsageError`, `UnavailableError`.
    """
    if not task_id or not task_id.isprintable():
        raise UsageError("A task's id is not empty and can be printed: check how your shell quotes it.")
    request = _request(settings, AuditChoice(overdue_ms=DurationMs(0), from_ms=from_ms))
    return asyncio.run(Storyteller(task_id, request, _outside(settings), on_progress=on_progress).tell())


def _outside(settings: Settings) -> AuditOutside:
    client = settings.client_config()
    return AuditOutside(
        clock=SystemClock(),
        codec=AvroAuditCodec(),
        cluster=KafkaAdmin(client),
        log=KafkaPartitionLog(client),
        group_offsets=KafkaGroupOffsets(client),
    )


def _topics(settings: Settings) -> AuditTopics:
    """The names of the topics that `settings` speak of."""
    topics = settings.topics
    return AuditTopics(
        events=topics.events,
        progress=topics.progress,
        state=topics.state,
        due=topics.due,
        dead=topics.dead,
        applied=topics.applied,
        targets=tuple(sorted(settings.target_topics)),
    )


def _request(settings: Settings, choice: AuditChoice) -> AuditRequest:
    from_ms = InstantMs(0) if choice.from_ms is None else choice.from_ms
    to_ms = InstantMs(NEVER) if choice.to_ms is None else choice.to_ms
    if from_ms >= to_ms:
        raise UsageError("--from must lie before --to.")
    events = settings.topics.events
    found = KafkaAdmin(settings.client_config()).topics([events]).get(events)
    if found is None:
        raise TopicMismatchError(f"Topic {events} does not exist: there is nothing to verify.")
    return AuditRequest(
        topics=_topics(settings),
        limits=settings.limits,
        retention_ms=DurationMs(settings.retention_ms),
        overdue_ms=choice.overdue_ms,
        compaction_lag_ms=int(found.settings.get("min.compaction.lag.ms", "0")),
        from_ms=from_ms,
        to_ms=to_ms,
        partitions=choice.partitions or None,
        groups=choice.groups or None,
        findings_max=choice.findings_max,
    )
