"""Where a rebuild stands: how generations are counted, how far the rows of `task-state` reflect the events.

The positions record says it. Where that is lost, the emissions do: each tells its generation, the offset of its
schedule, and how far the events had been applied.
"""

from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Final

import msgspec

from pipeline.core.positions import InputPosition, resume_input
from pipeline.core.rebuild import Emission, generation_base_of
from pipeline.core.tasks import Offset
from pipeline.ports import ClusterIdentity
from pipeline.service.owner.settings import OwnerSettings
from pipeline.service.recovery.emission_queue import last_emissions
from pipeline.service.recovery.known_rows import KnownRows
from pipeline.service.recovery.ports import LogBounds, LogRecord, PartitionLog, RecoveryCodec

__all__ = ["Place", "PlaceFinder"]

_LOOKED_UP_MAX: Final = 50


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where the fold stands: generations as they were given, and the position that is written down at the end.

    `reflected` is how far the rows of `task-state` reflect the events (None: there are none); unless `is_exact`, they
    reflect at least that.
    """

    folded: InputPosition
    written: InputPosition
    reflected: Offset | None
    is_exact: bool


class PlaceFinder:
    """Finds the place of one partition; `notes` collects what cannot be known or was lost."""

    def __init__(
        self,
        settings: OwnerSettings,
        log: PartitionLog,
        codec: RecoveryCodec,
        *,
        identity: ClusterIdentity,
        bounds: Mapping[str, LogBounds],
        targets: Sequence[str],
        end: Offset,
    ) -> None:
        self._settings = settings
        self._log = log
        self._codec = codec
        self._bounds = bounds
        self._targets = targets
        self._topic_id = identity.topics[settings.events_topic].topic_id
        self._start = bounds[settings.events_topic].start
        self._end = end
        self.notes: list[str] = []

    async def find(self, known: KnownRows) -> Place:
        """The place; raises `UnavailableError`."""
        recorded = None if known.positions is None else known.positions.inputs.get(self._settings.events_topic)
        if recorded is None:
            return await self._derived(has_rows=known.has_rows)
        place = resume_input(recorded, self._topic_id)
        if place.topic_id != recorded.topic_id:
            self.notes.append("task-events was created anew since: rows of before are kept as they are")
        if place.position < self._start:
            self.notes.append(f"{self._start - place.position} events expired before they were applied: they are lost")
        return Place(
            folded=place,
            written=self._written(place.generation_base, place.position),
            reflected=Offset(min(place.position, self._end)),
            is_exact=True,
        )

    def _written(self, base: int, applied: int) -> InputPosition:
        """The position at the end; if more had been applied than there is, offsets are used again, generations not."""
        if applied > self._end:
            self.notes.append(f"task-events ends at {self._end}, but was applied up to {applied}: events were lost")
        return InputPosition(
            topic_id=self._topic_id, position=self._end, generation_base=base + max(0, applied - self._end)
        )

    async def _derived(self, *, has_rows: bool) -> Place:
        """The place from the last emissions.

        Rows reflect at least what had been applied then. Folding the events after that into them once more is
        harmless: nothing that fired is among those, and the same event gives the same generation again.
        """
        if self._start > 0:
            self.notes.append(f"task-events starts at {self._start}: what was scheduled before stands in no event")
        base, applied = await self._base_and_applied()
        folded = InputPosition(topic_id=self._topic_id, position=self._end, generation_base=base)
        written = self._written(base, applied)
        if not has_rows:
            self.notes.append("what compaction removed from task-events can't be seen: its last event a task remains")
            return Place(folded=folded, written=written, reflected=None, is_exact=False)
        self.notes.append("nothing readable says what the rows of task-state reflect: it is derived from emissions")
        return Place(folded=folded, written=written, reflected=Offset(min(applied, self._end)), is_exact=False)

    async def _base_and_applied(self) -> tuple[int, int]:
        """The base of generations, and how far these events had been applied at the last emission."""
        tail = await self._tail()
        if not tail:
            return 0, 0
        last, _ = tail[0]
        if await self._are_of_these_events(tail):
            return generation_base_of(last.task), last.task.applied_offset
        self.notes.append("task-events was created anew since the last emission: generations go on above it")
        return last.position, 0

    async def _tail(self) -> list[tuple[Emission, LogRecord]]:
        """The last emissions over all topics, the latest first."""
        found = []
        for topic in self._targets:
            bounds = self._bounds[topic]
            found += await last_emissions(
                self._log, self._codec, topic, self._settings.partition, bounds.start, bounds.end
            )
        return sorted(found, key=lambda item: item[0].position, reverse=True)

    async def _are_of_these_events(self, tail: Sequence[tuple[Emission, LogRecord]]) -> bool:
        """Whether the emissions came of the events that there are now, not of an earlier topic of that name."""
        last = tail[0][0]
        base = generation_base_of(last.task)
        mine = [item for item in tail if generation_base_of(item[0].task) == base]
        for emission, record in mine[:_LOOKED_UP_MAX]:
            schedule = await self._event_at(emission.task.scheduled_offset)
            if schedule is not None:
                same_task = schedule.key == emission.task.task_id.encode()
                return same_task and schedule.timestamp <= record.timestamp
        return last.task.applied_offset <= self._end

    async def _event_at(self, offset: Offset) -> LogRecord | None:
        """The event at an offset, if it is still there."""
        if not self._start <= offset < self._end:
            return None
        topic, partition = self._settings.events_topic, self._settings.partition
        async with aclosing(self._log.read(topic, partition, offset, Offset(offset + 1))) as chunks:
            records = [record async for chunk in chunks for record in chunk.records]
        return records[0] if records else None
