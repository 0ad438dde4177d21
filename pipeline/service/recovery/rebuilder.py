"""Rebuilds one partition of `task-state` from `task-events`, `due-tasks` and `dead-tasks`, with the agents stopped.

First everything is read and folded into a table of its own, and told; nothing outside has changed by then. Then the
rebuilt rows replace the old ones in **one** transaction under the owner's own `transactional.id`: an agent that starts
meanwhile fences the rebuild, and all stays as it was. Half a rebuild would be worse than none, as rows and positions
would not belong together: an event that was applied already would be applied again, and its task fire again.
"""

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Final

import msgspec
import structlog

from pipeline.core.positions import POSITIONS_KEY, Positions
from pipeline.core.rebuild import Source
from pipeline.core.tasks import Offset, TaskId
from pipeline.errors import RefusedError, TopicMismatchError
from pipeline.ports import ClusterIdentity, TimerTable
from pipeline.service.owner.settings import OwnerSettings
from pipeline.service.owner.work import Admit
from pipeline.service.recovery.emission_queue import EmissionQueue
from pipeline.service.recovery.known_rows import KnownRows, load_known
from pipeline.service.recovery.ports import LogBounds, LogChunk, LongTransaction, RebuildOutside
from pipeline.service.recovery.rebuild_fold import SCAN_ROWS, FoldCounts, Known, RebuildFold
from pipeline.service.recovery.rebuild_place import Place, PlaceFinder
from pipeline.service.recovery.set_aside_log import read_set_aside

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
        self._known = await self._load_known(self._known_table)
        self._place = await self._find_place()
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

    async def _load_known(self, table: TimerTable) -> KnownRows:
        """The rows that `task-state` has now, and what they reflect."""
        settings, outside = self._settings, self._outside
        known = await load_known(
            table,
            outside.state_log,
            outside.codec,
            partition=self._partition,
            end=self._bounds[settings.state_topic].end,
        )
        count = self._identity.topics[settings.events_topic].partition_count
        if known.positions is not None and known.positions.partition_count != count:
            raise TopicMismatchError(
                f"task-events has {count} partitions, the timers were placed with {known.positions.partition_count}: "
                "events of one task lie in two partitions, and no rebuild can bring them together."
            )
        return known

    async def _find_place(self) -> Place:
        finder = PlaceFinder(
            self._settings,
            self._outside.log,
            self._outside.codec,
            identity=self._identity,
            bounds=self._bounds,
            targets=[topic for topic, _ in self._target_bounds()],
            end=self._end(),
        )
        place = await finder.find(self._known)
        self._notes += finder.notes
        return place

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
        known = None
        if self._place.reflected is not None:
            known = Known(table=self._known_table, position=self._place.reflected, is_exact=self._place.is_exact)
        streams = {
            "" if topic == settings.due_topic else topic: outside.log.read(
                topic, self._partition, bounds.start, bounds.end
            )
            for topic, bounds in self._target_bounds()
        }
        expired = [topic for topic, bounds in self._target_bounds() if bounds.start > 0]
        if expired:
            self._notes.append(f"emissions have expired from {', '.join(expired)}: what fired then is inferred")
        set_aside = await read_set_aside(
            outside.log,
            outside.codec,
            topic=settings.dead_topic,
            events_topic=settings.events_topic,
            partition=self._partition,
            bounds=self._bounds[settings.dead_topic],
        )
        fold = RebuildFold(
            settings=settings,
            codec=outside.codec,
            table=self._table,
            place=self._place.folded,
            start=self._bounds[settings.events_topic].start,
            partition_count=self._identity.topics[settings.events_topic].partition_count,
            known=known,
            set_aside=set_aside,
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

    async def _report(self, counts: FoldCounts) -> RebuildReport:
        assert self._table is not None
        assert self._known_table is not None
        place = self._place
        unreadable = counts.unreadable + len(self._known.strange_keys)
        if unreadable:
            self._notes.append(f"{unreadable} rows of task-state can't be read: they are replaced")
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
            removed=sum(1 for _ in self._to_remove()),
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
        done = 0
        for batch in _batches([_rows(self._table), ((key, None) for key in self._to_remove())]):
            transaction.produce_many(topic, batch)
            await transaction.flush()
            done += len(batch)
            self._on_progress(done, done)
        transaction.produce_last(POSITIONS_KEY, codec.encode_positions(positions))
        await transaction.commit()
        log.info("partition_rebuilt", partition=self._partition, written=done, position=self._place.written.position)

    def _to_remove(self) -> Iterator[bytes]:
        """The keys of `task-state` that the rebuilt table has no row for."""
        assert self._table is not None
        assert self._known_table is not None
        for task_id in _missing(self._known_table, self._table):
            yield task_id.encode()
        yield from sorted(self._known.strange_keys)

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
