"""What an owner needs to know before it starts: names, bounds and intervals."""

import msgspec

from pipeline.core.events import DAY_MS, Limits
from pipeline.core.tasks import DurationMs, Partition

__all__ = ["OwnerSettings"]


class OwnerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one partition's owner.

    `*_value_bytes_max` bound a record's value on the topic of that name: what is larger is set aside, not tried.
    `offline_max_ms` is `delete.retention.ms` of `task-state`: an older local table may have missed deletions.
    """

    partition: Partition
    owner: str
    events_topic: str
    state_topic: str
    due_topic: str
    dead_topic: str
    target_topics: frozenset[str] = frozenset()
    limits: Limits = Limits()
    retention_ms: DurationMs = DurationMs(7 * DAY_MS)
    offline_max_ms: DurationMs = DurationMs(7 * DAY_MS)
    heartbeat_interval_ms: int = 60_000
    group_commit_interval_ms: int = 1_000
    batch_records_max: int = 2_000
    batch_bytes_max: int = 4_194_304
    fire_max: int = 2_000
    emit_bytes_max: int = 1_000_000
    clock_jump_max_ms: int = 0
    accept_loss: bool = False

    def target(self, name: str) -> str:
        """The topic that a task with this `target_topic` is emitted to."""
        return self.due_topic if name in {"", "due-tasks"} else name
