"""Rebuilds one partition of `task-state` from `task-events`, `due-tasks` and `dead-tasks`, with the agents stopped.

First everything is read and folded into a table of its own, and told; nothing outside has changed by then. Then the
rebuilt rows replace the old ones in **one** transaction under the owner's own `transactional.id`: an agent that starts
meanwhile fences the rebuild, and all stays as it was. Half a rebuild would be worse than none, as rows and positions
would not belong together: an event that was applied already would be applied again, and its task fire again.
"""

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import aclosing
from typing import Final

import msgspec
import structlog

from pipeline.core.events import Reason
from pipeline.core.positions import POSITIONS_KEY, InputPosition, Positions, resume_input
from pipeline.core.rebuild import Burial, Source, generation_base_of
from pipeline.core.tasks import Generation, InstantMs, Offset, TaskId
from pipeline.errors import CorruptStateError, RefusedError, TopicMismatchError
from pipeline.ports import ClusterIdentity, TimerTable
from pipeline.service.emission_queue import EmissionQueue, last_emission
from pipeline.service.owner_settings import OwnerSettings
from pipeline.service.rebuild_fold import SCAN_ROWS, FoldCounts, Known, RebuildFold, Refusal, SetAside
from pipeline.service.recovery_ports import LogBounds, LogChunk, LongTransaction, RebuildOutside
from pipeline.service.state_restore import restore_table
from pipeline.service.work import Admit

__all__ = ["RebuildReport", "Rebuilder"]

log = structlog.get_logger(__name__)

WRITE_BYTES: Final = 8_388_608
"""What is produced before the broker's answers are waited for."""

Progress = Callable[[int, int], None]


class RebuildReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a rebuild of one partition finds and does.

    `rows` are written; of the rows that `task-state` had, `confirmed` agree with the topics, `corrected` did not,
    `kept` are known to it alone, `removed` are forgotten; `added` it did not know. `overdue` fire as soon as an agent
    starts; `presumed` do not, as they must have fired although no emission is left. `notes` say what is out of reach.
    """

    partition: int
    position: int
    generation_base: int
    state_position: int | None
    events: int
    emissions: int
    rows: int
    statuses: dict[str, int]
    confirmed: int
    corrected: int
    kept: int
    added: int
    removed: int
    overdue: int
    presumed: int
    notes: tuple[str, ...]


class _Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where the fold stands: generations as they were given, and the position that is written down at the end."""

    folded: InputPosition
    written: InputPosition
    reflected: Offset | None


class Rebuilder:
    """One rebuild of one partition: `plan`, then perhaps `write`, then `close`.

    `on_progress` hears (done, all) in offsets while it reads and in rows while it writes.
    """

    def __init__(
        self, settings: OwnerSettings, outside: RebuildOutside, *, admit: Admit, on_progress: Progress
    ) -> None:
        self._settings = settings
        self._outside = outside
        self._admit = admit
        self._on_progress = on_progress
        self._partition = settings.partition
        self._now_ms = outside.clock.now_ms()
        self._events_end: Offset | None = None
        self._notes: list[str] = []
        self._known_table: TimerTable | None = None
        self._table: TimerTable | None = None
        self._attempts = 0

    # -- reading -----------------------------------------------------------------------------------------------

    async def plan(self) -> RebuildReport:
        """Read and fold everything; changes nothing.

        Raises `TopicMismatchError` (topics missing, partition counts that differ), `RefusedError` (the state needs a
        newer reader), `UnavailableError`.
        """
        self.close()
        self._attempts += 1
        self._notes = []
        self._identity = await self._identify()
        self._bounds = await self._ask_bounds()
        if self._events_end is None:
            self._events_end = self._bounds[self._settings.events_topic].stable_end
        self._known_table = await self._scratch("known")
        self._table = await self._scratch("rebuilt")
        positions = await self._restore(self._known_table)
        self._place = await self._find_place(positions)
        counts = await self._fold()
        return await self._report(counts)

    async def _identify(self) -> ClusterIdentity:
        settings = self._settings
        own = [settings.events_topic, settings.state_topic, settings.due_topic, settings.dead_topic]
        identity = await self._outside.cluster.describe([*own, *sorted(settings.target_topics)])
        missing = [name for name in own if name not in identity.topics]
        if missing:
            raise TopicMismatchError(f"Topic {', '.join(missing)} does not exist: create it, `duetasks topics apply`.")
        counts = {name: identity.topics[name].partition_count for name in own}
        if len(set(counts.values())) > 1:
            raise TopicMismatchError(
                f"Partition counts differ ({counts}): nothing can be rebuilt until they are equal."
            )
        return identity

    async def _ask_bounds(self) -> dict[str, LogBounds]:
        """The bounds of this partition of every topic that has it."""
        return {
            name: await self._outside.log.bounds(name, self._partition)
            for name, topic in self._identity.topics.items()
            if self._partition < topic.partition_count
        }

    async def _scratch(self, name: str) -> TimerTable:
        return await self._outside.scratch(f"{name}-{self._attempts}").open(self._partition)

    async def _restore(self, table: TimerTable) -> Positions | None:
        """The rows that `task-state` has now, and what they reflect."""
        topic = self._settings.state_topic
        restored = await restore_table(
            table,
            codec=self._outside.codec,
            state_log=self._outside.state_log,
            partition=self._partition,
            meta=None,
            end=self._bounds[topic].end,
            on_progress=lambda _position, _end: None,
        )
        positions = restored.positions
        if positions is None:
            if restored.rows:
                self._notes.append("task-state has rows, but nothing says what they reflect: they are replaced")
            return None
        count = self._identity.topics[self._settings.events_topic].partition_count
        if positions.partition_count != count:
            raise TopicMismatchError(
                f"task-events has {count} partitions, the timers were placed with {positions.partition_count}: events "
                "of one task lie in two partitions, and no rebuild can bring them together."
            )
        return positions

    async def _find_place(self, positions: Positions | None) -> _Place:
        topic = self._settings.events_topic
        topic_id = self._identity.topics[topic].topic_id
        start, end = self._bounds[topic].start, self._end()
        recorded = None if positions is None else positions.inputs.get(topic)
        if recorded is None:
            base = await self._derived_base()
            folded = InputPosition(topic_id=topic_id, position=end, generation_base=base)
            if start > 0:
                self._notes.append(
                    f"task-events starts at {start}: timers that were scheduled before that can't be rebuilt"
                )
            self._notes.append("what compaction removed from task-events can't be seen: its last event a task remains")
            return _Place(folded=folded, written=folded, reflected=None)
        place = resume_input(recorded, topic_id)
        if place.topic_id != recorded.topic_id:
            self._notes.append("task-events was created anew since: rows of before are kept as they are")
        if place.position < start:
            self._notes.append(f"{start - place.position} events expired before they were applied: they are lost")
        written = msgspec.structs.replace(place, position=end)
        if place.position > end:
            self._notes.append(f"task-events ends at {end}, task-state has seen {place.position}: events were lost")
            # Offsets will be used again; generations must not be.
            base = place.generation_base + place.position - end
            written = msgspec.structs.replace(written, generation_base=base)
        return _Place(folded=place, written=written, reflected=Offset(min(place.position, end)))

    async def _derived_base(self) -> int:
        """The base of generations, from the last emission: above all that were used if the topic was created anew."""
        found = []
        for topic, bounds in self._target_bounds():
            last = await last_emission(
                self._outside.log, self._outside.codec, topic, self._partition, bounds.start, bounds.end
            )
            if last is not None:
                found.append(last)
        if not found:
            return 0
        emission, record = max(found, key=lambda item: item[0].position)
        base = generation_base_of(emission.task)
        if not await self._is_of_these_events(emission.task.scheduled_offset, emission.task.task_id, record.timestamp):
            self._notes.append("task-events was created anew since the last emission: generations go on above it")
            return emission.position
        if emission.task.applied_offset > self._end():
            self._notes.append("the last emission had seen more of task-events than there is: events were lost")
            return emission.position
        return base

    async def _is_of_these_events(self, offset: Offset, task_id: str, emitted_at_ms: int) -> bool:
        """Whether the schedule at `offset` may be the emission's: gone by now, or of that task and older."""
        topic = self._settings.events_topic
        if not self._bounds[topic].start <= offset < self._end():
            return offset < self._end()
        async with aclosing(self._outside.log.read(topic, self._partition, offset, Offset(offset + 1))) as chunks:
            records = [record async for chunk in chunks for record in chunk.records]
        return all(record.key == task_id.encode() and record.timestamp <= emitted_at_ms for record in records)

    def _target_bounds(self) -> list[tuple[str, LogBounds]]:
        names = [self._settings.due_topic, *sorted(self._settings.target_topics)]
        return [(name, self._bounds[name]) for name in names if name in self._bounds]

    def _end(self) -> Offset:
        assert self._events_end is not None, "the end is captured first"
        return self._events_end

    # -- folding -----------------------------------------------------------------------------------------------

    async def _fold(self) -> FoldCounts:
        settings, outside = self._settings, self._outside
        assert self._table is not None
        assert self._known_table is not None
        reflected = self._place.reflected
        streams = {
            "" if topic == settings.due_topic else topic: outside.log.read(
                topic, self._partition, bounds.start, bounds.end
            )
            for topic, bounds in self._target_bounds()
        }
        expired = [topic for topic, bounds in self._target_bounds() if bounds.start > 0]
        if expired:
            self._notes.append(f"emissions have expired from {', '.join(expired)}: what fired then is inferred")
        fold = RebuildFold(
            settings=settings,
            codec=outside.codec,
            table=self._table,
            place=self._place.folded,
            start=self._bounds[settings.events_topic].start,
            partition_count=self._identity.topics[settings.events_topic].partition_count,
            known=None if reflected is None else Known(table=self._known_table, position=reflected),
            set_aside=await self._read_set_aside(),
            emissions=EmissionQueue(streams, outside.codec),
            admit=self._admit,
            now_ms=self._now_ms,
            have_expired=bool(expired),
        )
        return await fold.run(self._events())

    async def _events(self) -> AsyncIterator[LogChunk]:
        topic = self._settings.events_topic
        start, end = self._bounds[topic].start, self._end()
        self._on_progress(0, end - start)
        async for chunk in self._outside.log.read(topic, self._partition, start, end):
            yield chunk
            self._on_progress(chunk.position - start, end - start)

    async def _read_set_aside(self) -> SetAside:
        settings, codec = self._settings, self._outside.codec
        bounds = self._bounds[settings.dead_topic]
        refusals: dict[int, Refusal] = {}
        burials: list[Burial] = []
        async for chunk in self._outside.log.read(settings.dead_topic, self._partition, bounds.start, bounds.end):
            for record in chunk.records:
                try:
                    dead = codec.decode_dead(record.value or b"")
                except CorruptStateError:
                    continue  # not ours
                if dead.origin.topic != settings.events_topic or dead.origin.partition != self._partition:
                    continue
                if dead.generation and dead.reason is Reason.UNDELIVERABLE:
                    burials.append(
                        Burial(
                            task_id=TaskId(dead.task_id),
                            generation=Generation(dead.generation),
                            dead_at_ms=dead.dead_at_ms,
                            append_at_ms=InstantMs(record.timestamp),
                        )
                    )
                elif not dead.generation:
                    refusals[dead.origin.offset] = Refusal(
                        append_at_ms=dead.origin.append_at_ms,
                        reason=dead.reason,
                        message=dead.message,
                        task_id=dead.task_id,
                    )
        return SetAside(refusals=refusals, burials=burials)

    async def _report(self, counts: FoldCounts) -> RebuildReport:
        assert self._table is not None
        assert self._known_table is not None
        place = self._place
        return RebuildReport(
            partition=self._partition,
            position=place.written.position,
            generation_base=place.written.generation_base,
            state_position=place.reflected,
            events=counts.events,
            emissions=counts.emissions,
            rows=counts.rows,
            statuses=dict(sorted(counts.statuses.items())),
            confirmed=counts.sources[Source.CONFIRMED],
            corrected=counts.sources[Source.CORRECTED],
            kept=counts.sources[Source.KEPT],
            added=sum(1 for _ in _missing(self._table, self._known_table)),
            removed=sum(1 for _ in _missing(self._known_table, self._table)),
            overdue=counts.overdue,
            presumed=counts.presumed,
            notes=tuple(self._notes),
        )

    # -- writing -----------------------------------------------------------------------------------------------

    async def write(self, planned: RebuildReport) -> None:
        """Replace the partition's content of `task-state` by what was planned, all or nothing.

        Raises `RefusedError` if the topics changed so that the plan is no longer right, `FencedError` if an agent has
        started, `UnavailableError`, `UnknownOutcomeError` (look with another dry run).
        """
        state_id = self._identity.topics[self._settings.state_topic].topic_id
        transaction = self._outside.transaction(f"duetasks-{state_id}-{self._partition}")
        try:
            await transaction.acquire()
            # Settling what a killed agent left open writes markers; an agent that ran meanwhile wrote more than that.
            if self._owned_ends(await self._ask_bounds()) != self._owned_ends(self._bounds):
                await self._plan_again(planned)
            await self._replace_all(transaction)
        finally:
            await transaction.close()

    def _owned_ends(self, bounds: dict[str, LogBounds]) -> dict[str, Offset]:
        return {name: found.end for name, found in bounds.items() if name != self._settings.events_topic}

    async def _plan_again(self, planned: RebuildReport) -> None:
        if await self.plan() != planned:
            raise RefusedError(
                f"Partition {self._partition} changed while it was read: see that no agent runs, then rebuild again. "
                "Nothing was written."
            )

    async def _replace_all(self, transaction: LongTransaction) -> None:
        assert self._table is not None
        assert self._known_table is not None
        topic, codec = self._settings.state_topic, self._outside.codec
        positions = self._positions()
        transaction.begin()
        tombstones = ((task_id.encode(), None) for task_id in _missing(self._known_table, self._table))
        done = 0
        for batch in _batches([_rows(self._table), tombstones]):
            transaction.produce_many(topic, batch)
            await transaction.flush()
            done += len(batch)
            self._on_progress(done, done)
        transaction.produce_last(POSITIONS_KEY, codec.encode_positions(positions))
        await transaction.commit()
        log.info("partition_rebuilt", partition=self._partition, written=done, position=self._place.written.position)

    def _positions(self) -> Positions:
        settings, identity = self._settings, self._identity
        return Positions(
            cluster_id=identity.cluster_id,
            state_topic_id=identity.topics[settings.state_topic].topic_id,
            partition=self._partition,
            partition_count=identity.topics[settings.events_topic].partition_count,
            inputs={settings.events_topic: self._place.written},
            stamp_ms=self._outside.clock.now_ms(),
            owner=settings.owner,
        )

    def close(self) -> None:
        """Let go of the scratch tables."""
        for table in (self._known_table, self._table):
            if table is not None:
                table.close()
        self._known_table = self._table = None


def _rows(table: TimerTable) -> Iterator[tuple[bytes, bytes | None]]:
    after: TaskId | None = None
    while page := table.scan(after, SCAN_ROWS):
        after = page[-1][0]
        for task_id, value in page:
            yield task_id.encode(), value


def _missing(table: TimerTable, other: TimerTable) -> Iterator[TaskId]:
    """The ids of the table's rows that the other has not."""
    after: TaskId | None = None
    while page := table.scan(after, SCAN_ROWS):
        after = page[-1][0]
        ids = [task_id for task_id, _ in page]
        for task_id, value in zip(ids, other.get_many(ids), strict=True):
            if value is None:
                yield task_id


def _batches(
    parts: Iterable[Iterable[tuple[bytes, bytes | None]]],
) -> Iterator[list[tuple[bytes, bytes | None]]]:
    batch: list[tuple[bytes, bytes | None]] = []
    size = 0
    for part in parts:
        for key, value in part:
            batch.append((key, value))
            size += len(key) + len(value or b"")
            if size >= WRITE_BYTES or len(batch) >= SCAN_ROWS:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch
