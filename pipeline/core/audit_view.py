"""What is known of a partition before its tasks are judged: what is retained, and where the judged moment lies."""

from typing import Final

import msgspec

from pipeline.core.audit import Code, Finding
from pipeline.core.tasks import DurationMs, InstantMs, Offset, TaskState

__all__ = ["NEVER", "PartitionView", "Seen"]

NEVER: Final = 1 << 62
"""A place, offset or instant above all others."""


class PartitionView(msgspec.Struct, frozen=True, kw_only=True):
    """The view of one partition.

    `applied` is the position that the rows of `task-state` reflect, `stamp_ms` the owner's clock when it wrote them.
    From `events_whole_from` on every event is retained; what came before `events_unknown_until_ms` may repeat one that
    is not. Emissions are retained of schedules from the place on that `emissions_whole_from` has for their target
    topic; refusals and burials of events from `dead_whole_from` on. Emissions below `emissions_settled`, and dead tasks
    below `dead_settled`, certainly belong to what the rows reflect.
    """

    partition: int
    events_topic: str
    state_topic: str
    dead_topic: str
    generation_base: int
    applied: Offset
    stamp_ms: InstantMs
    now_ms: InstantMs
    overdue_ms: DurationMs
    retention_ms: DurationMs
    events_whole_from: Offset
    events_unknown_until_ms: InstantMs
    emissions_whole_from: dict[str, int]
    emissions_settled: dict[str, Offset]
    dead_whole_from: Offset
    dead_settled: Offset
    from_ms: InstantMs = InstantMs(0)
    to_ms: InstantMs = InstantMs(NEVER)

    @property
    def applied_place(self) -> int:
        """The place of the first event that the rows do not reflect."""
        return self.generation_base + self.applied

    @property
    def has_all_events(self) -> bool:
        """Whether no event was ever removed."""
        return self.events_whole_from == 0 and self.generation_base == 0

    def finding(self, code: Code, topic: str, offset: int, at_ms: InstantMs, detail: str, task_id: str) -> Finding:
        """A violation that a record of this partition shows."""
        return Finding(
            code=code,
            topic=topic,
            partition=self.partition,
            offset=offset,
            at_ms=at_ms,
            detail=detail,
            task_id=task_id,
        )

    def covers(self, at_ms: int) -> bool:
        """Whether something of that instant was asked for."""
        return self.from_ms <= at_ms < self.to_ms

    def keeps_event(self, place: int) -> bool:
        """Whether the event at a place must still be there."""
        return place - self.generation_base >= self.events_whole_from

    def keeps_emission_of(self, place: int, topic: str) -> bool:
        """Whether an emission of the schedule at `place` must still be there; a topic that is not read keeps none."""
        return place >= self.emissions_whole_from.get(topic, NEVER)

    def keeps_dead(self, offset: int) -> bool:
        """Whether the record that set the event at this offset aside must still be there."""
        return offset >= self.dead_whole_from


class Seen(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The last record of a task in `task-state`; `state` is None for a tombstone.

    `changed_later`: there is a newer record, so that compaction may have removed the one that was looked for.
    """

    state: TaskState | None
    offset: Offset
    at_ms: InstantMs
    changed_later: bool = False
