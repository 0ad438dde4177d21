"""Puts a replay together: what `duetasks replay` runs."""

import asyncio
import secrets
from collections.abc import Callable

import msgspec

from pipeline.adapters.avro_codec import AvroCodec
from pipeline.adapters.group_members import group_members
from pipeline.adapters.kafka_admin import KafkaAdmin
from pipeline.adapters.kafka_partition_log import KafkaPartitionLog
from pipeline.adapters.recovery_producers import KafkaReplayWriter
from pipeline.config import Settings
from pipeline.core.events import OWN_TOPICS
from pipeline.core.tasks import InstantMs, TaskId
from pipeline.errors import NotFoundError, RefusedError, TopicMismatchError, UsageError
from pipeline.service.recovery.replayer import Replayer, ReplayPlan, ReplayRequest

__all__ = ["ReplayChoice", "replay"]


class ReplayChoice(msgspec.Struct, frozen=True, kw_only=True):
    """What a person asked `replay` for."""

    from_ms: InstantMs
    to_ms: InstantMs
    task_id: TaskId | None = None
    to_topic: str | None = None
    forget_for: str | None = None
    include_replays: bool = False


def replay(
    settings: Settings,
    choice: ReplayChoice,
    *,
    confirm: Callable[[ReplayPlan], bool],
    on_progress: Callable[[int, int], None],
) -> ReplayPlan:
    """Emit again what was emitted in a stretch of time; what was done, or would be if `confirm` says no.

    Raises `RefusedError` (a topic that replays must not write to, a group that runs), `NotFoundError` (no such topic),
    `TopicMismatchError` (too few partitions), `UnavailableError`, `UnknownOutcomeError`.
    """
    request = _replay_request(settings, choice)
    client, codec = settings.client_config(), AvroCodec()

    async def main() -> ReplayPlan:
        replayer = Replayer(request, KafkaPartitionLog(client), codec, on_progress=on_progress)
        plan = await replayer.plan()
        if not confirm(plan) or not plan.records:
            return plan
        if choice.forget_for is not None:
            _refuse_if_group_runs(settings, choice.forget_for)
        writer = KafkaReplayWriter(client, f"duetasks-replay-{request.replay_id}")
        try:
            await replayer.run(plan, writer)
        finally:
            await writer.close()
        return plan

    return asyncio.run(main())


def _replay_request(settings: Settings, choice: ReplayChoice) -> ReplayRequest:
    topics = settings.topics
    if choice.from_ms >= choice.to_ms:
        raise UsageError("--from must lie before --to.")
    target = topics.target(choice.to_topic or "")
    own = {settings.topic_prefix + name for name in OWN_TOPICS} - {topics.due}
    if target in own or target.startswith("__"):
        raise RefusedError(f"{target} is not for due tasks: name another topic, or leave --to-topic out.")
    found = KafkaAdmin(settings.client_config()).identity(sorted({topics.due, target, topics.applied})).topics
    for name in (topics.due, target):
        if name not in found:
            raise NotFoundError(f"There is no topic {name}.")
    count = found[topics.due].partition_count
    if found[target].partition_count < count:
        raise TopicMismatchError(
            f"{target} has {found[target].partition_count} partitions, {topics.due} has {count}: copies keep their "
            "partition, so it needs as many."
        )
    if choice.forget_for is not None and topics.applied not in found:
        raise NotFoundError(f"There is no topic {topics.applied}, so no ledger that could forget.")
    return ReplayRequest(
        replay_id=secrets.token_hex(8),
        source_topic=topics.due,
        target_topic=target,
        ledger_topic=topics.applied,
        partition_count=count,
        from_ms=choice.from_ms,
        to_ms=choice.to_ms,
        task_id=choice.task_id,
        forget_for=choice.forget_for,
        include_replays=choice.include_replays,
    )


def _refuse_if_group_runs(settings: Settings, group: str) -> None:
    members = group_members(settings.client_config(), group)
    if members:
        raise RefusedError(
            f"Consumers run in group {group} ({', '.join(members[:3])}): stop them first, they hold "
            "copies of its ledger."
        )
