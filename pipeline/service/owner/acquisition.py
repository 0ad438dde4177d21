"""Becoming the owner of a partition: fence the one before, restore the table, find the place in the input.

The order of the steps is the guarantee; `docs/explanation/guarantees.md` tells what each step is there for.
"""

from collections.abc import Callable
from contextlib import aclosing
from typing import Final

import msgspec
import structlog

from pipeline.core.positions import POSITIONS_KEY, InputPosition, Positions, resume_input, table_fault
from pipeline.core.tasks import InstantMs, Offset, Partition
from pipeline.errors import CorruptStateError, DataLossError, TopicMismatchError
from pipeline.ports import (
    Clock,
    ClusterIdentity,
    ClusterView,
    Codec,
    EndOffsets,
    Membership,
    StateLog,
    TableMeta,
    TableStore,
    TimerTable,
    Transaction,
)
from pipeline.service.owner.settings import OwnerSettings
from pipeline.service.owner.state_restore import decode_meta, encode_meta, restore_table

__all__ = ["Acquisition", "Outside", "Owned", "decode_meta", "encode_meta"]

log = structlog.get_logger(__name__)

Progress = Callable[[int, int], None]

TAIL_RECORDS: Final = 10_000
"""More than a transaction or two: so many records of `task-state` hold a positions record, unless many were aborted."""


class Outside(msgspec.Struct, frozen=True, kw_only=True):
    """The ports that an owner works with; `transaction` makes a new producer for a `transactional.id`."""

    clock: Clock
    codec: Codec
    cluster: ClusterView
    end_offsets: EndOffsets
    state_log: StateLog
    membership: Membership
    tables: TableStore
    transaction: Callable[[str], Transaction]


class Owned(msgspec.Struct, kw_only=True):
    """A partition that was acquired: its producer, its table, and what the table reflects."""

    transaction: Transaction
    table: TimerTable
    positions: Positions
    state_position: Offset
    identity: ClusterIdentity


class Acquisition:
    """One attempt to acquire one partition; `on_progress` hears (position, end) of the restore."""

    def __init__(self, settings: OwnerSettings, outside: Outside, on_progress: Progress) -> None:
        self._settings = settings
        self._outside = outside
        self._on_progress = on_progress
        self._log = log.bind(partition=settings.partition)

    async def run(self) -> Owned:
        """The acquired partition, ready to apply and fence.

        Raises `FencedError` (no member's partition, or somebody newer), `RefusedError` kinds (an operator decides),
        `UnavailableError`. Nothing stays open then.
        """
        settings, outside = self._settings, self._outside
        topics = [settings.events_topic, settings.state_topic, settings.due_topic, settings.dead_topic]
        identity = await outside.cluster.describe([*topics, *sorted(settings.target_topics)])
        self._check_counts(identity, topics)
        # Membership first: a thawed zombie that is no longer a member must not fence the right owner.
        await outside.membership.prove(settings.partition)
        # Derived from the data: two deployments on the same topics fence each other instead of both firing.
        state_id = identity.topics[settings.state_topic].topic_id
        transaction = outside.transaction(f"duetasks-{state_id}-{settings.partition}")
        table: TimerTable | None = None
        try:
            await transaction.acquire()
            table, owned = await self._restore(transaction, identity)
            owned.positions = await self._find_place(owned, identity)
        except BaseException:
            if table is not None:
                table.close()
            await transaction.close()
            raise
        return owned

    def _check_counts(self, identity: ClusterIdentity, topics: list[str]) -> None:
        missing = [name for name in topics if name not in identity.topics]
        if missing:
            raise TopicMismatchError(f"topic {', '.join(missing)} does not exist: run `duetasks topics apply`")
        counts = {name: identity.topics[name].partition_count for name in topics}
        if len(set(counts.values())) > 1:
            raise TopicMismatchError(
                f"partition counts differ ({counts}): a cancel could miss its task; nothing fires until they are equal"
            )

    async def _restore(self, transaction: Transaction, identity: ClusterIdentity) -> tuple[TimerTable, Owned]:
        settings, outside = self._settings, self._outside
        stamp_ms = outside.clock.now_ms()
        table = await self._open_table()
        try:
            meta = self._usable_meta(table, identity)
            # The high watermark, captured after the fence: every record of every earlier owner lies below it.
            end = await outside.end_offsets.end_offset(settings.state_topic, settings.partition)
            if meta is not None and meta.state_position > end:
                self._put_aside(table, f"it reflects task-state up to {meta.state_position}, which ends at {end}")
                table, meta = await self._open_table(), None
            if table.meta() is not None and meta is None:
                self._put_aside(table, self._fault)
                table = await self._open_table()
            positions, position = await self._replay(table, meta, end, stamp_ms)
            fresh = await self._fresh_or_known(positions, identity, stamp_ms)
        except BaseException:
            table.close()
            raise
        owned = Owned(transaction=transaction, table=table, positions=fresh, state_position=position, identity=identity)
        return table, owned

    _fault = ""

    def _usable_meta(self, table: TimerTable, identity: ClusterIdentity) -> TableMeta | None:
        """The local table's meta if it may be restored from; else None, with the reason kept in `_fault`."""
        raw = table.meta()
        if raw is None:
            return None
        try:
            meta = decode_meta(raw, self._outside.codec)
        except CorruptStateError as error:
            self._fault = f"its meta can't be read: {error}"
            return None
        fault = table_fault(
            meta.positions,
            cluster_id=identity.cluster_id,
            state_topic_id=identity.topics[self._settings.state_topic].topic_id,
            partition=self._settings.partition,
            now_ms=self._outside.clock.now_ms(),
            offline_max_ms=self._settings.offline_max_ms,
        )
        if fault is None:
            return meta
        self._fault = fault.message
        return None

    async def _open_table(self) -> TimerTable:
        try:
            return await self._outside.tables.open(self._settings.partition)
        except CorruptStateError as error:
            place = self._outside.tables.put_aside(self._settings.partition, str(error))
            self._log.warning("table_put_aside", reason=str(error), place=place)
            return await self._outside.tables.open(self._settings.partition)

    def _put_aside(self, table: TimerTable, reason: str) -> None:
        table.close()
        place = self._outside.tables.put_aside(self._settings.partition, reason)
        self._log.warning("table_put_aside", reason=reason, place=place)

    async def _replay(
        self, table: TimerTable, meta: TableMeta | None, end: Offset, stamp_ms: InstantMs
    ) -> tuple[Positions | None, Offset]:
        """Bring the table up to `end` of `task-state`; the positions that it then reflects, and how far it is.

        Raises `CorruptStateError` if that takes until what it had, or read first, is too old.
        """
        good_ms = meta.positions.stamp_ms if meta is not None else stamp_ms
        restored = await restore_table(
            table,
            codec=self._outside.codec,
            state_log=self._outside.state_log,
            partition=self._settings.partition,
            meta=meta,
            end=end,
            clock=self._outside.clock,
            until_ms=InstantMs(good_ms + self._settings.offline_max_ms),
            on_progress=self._on_progress,
        )
        self._log.info("table_restored", rows=restored.rows, position=restored.position, end=end, warm=meta is not None)
        return restored.positions, restored.position

    async def _fresh_or_known(
        self, positions: Positions | None, identity: ClusterIdentity, stamp_ms: InstantMs
    ) -> Positions:
        settings = self._settings
        count = identity.topics[settings.events_topic].partition_count
        if positions is None:
            await self._refuse_lost_state()
            await self._refuse_added_partition(count)
            return Positions(
                cluster_id=identity.cluster_id,
                state_topic_id=identity.topics[settings.state_topic].topic_id,
                partition=settings.partition,
                partition_count=count,
                inputs={},
                stamp_ms=stamp_ms,
                owner=settings.owner,
            )
        _check_recorded_count(positions, count)
        return msgspec.structs.replace(
            positions,
            cluster_id=identity.cluster_id,
            state_topic_id=identity.topics[settings.state_topic].topic_id,
            stamp_ms=stamp_ms,
            owner=settings.owner,
        )

    async def _refuse_lost_state(self) -> None:
        """`task-state` knows nothing: fine at the very first start, a lost topic if work was done before."""
        settings = self._settings
        committed = await self._outside.membership.committed(settings.partition)
        emitted = await self._outside.end_offsets.end_offset(settings.due_topic, settings.partition)
        if committed or emitted:
            raise DataLossError(
                f"task-state of partition {settings.partition} is empty, but work was done before (group at "
                f"{committed or 0}, due-tasks ends at {emitted}): reading on would fire again what has fired; stop the "
                "agents and run `duetasks rebuild --from events`"
            )

    async def _refuse_added_partition(self, count: int) -> None:
        """A partition without a past is new as all are, or was added to topics in use: partition 0 tells which.

        It never had a task itself, but a cancel of one that it is given now may still be sent by the count before.
        """
        if self._settings.partition == 0:
            return
        end = await self._outside.end_offsets.end_offset(self._settings.state_topic, 0)
        for start in dict.fromkeys((max(0, end - TAIL_RECORDS), 0)):
            chunks = self._outside.state_log.read(Partition(0), Offset(start), end)
            async with aclosing(chunks):
                async for chunk in chunks:
                    raw = dict(chunk.records).get(POSITIONS_KEY)
                    if raw is not None:
                        _check_recorded_count(self._outside.codec.decode_positions(raw), count)
                        return

    async def _find_place(self, owned: Owned, identity: ClusterIdentity) -> Positions:
        """The positions with the input's place made sure of: a topic created anew starts at 0, lost records refuse."""
        settings, outside = self._settings, self._outside
        topic = settings.events_topic
        recorded = owned.positions.inputs.get(topic)
        place = resume_input(recorded, identity.topics[topic].topic_id)
        if recorded is not None and recorded.topic_id != place.topic_id:
            self._log.warning(
                "input_topic_recreated",
                topic=topic,
                was=recorded.topic_id,
                now=place.topic_id,
                old_end=recorded.position,
            )
        start = await outside.end_offsets.start_offset(topic, settings.partition)
        end = await outside.end_offsets.end_offset(topic, settings.partition)
        if not start <= place.position <= end:
            place = self._lost_place(place, start, end)
        return msgspec.structs.replace(owned.positions, inputs={**owned.positions.inputs, topic: place})

    def _lost_place(self, place: InputPosition, start: Offset, end: Offset) -> InputPosition:
        message = (
            f"task-events of partition {self._settings.partition} holds {start} to {end}, the table has read up to "
            f"{place.position}: records were lost"
        )
        if not self._settings.accept_loss:
            raise DataLossError(f"{message}; the partition waits: start with --accept-loss to go on from {start}")
        self._log.error("loss_accepted", start=start, end=end, position=place.position)
        if place.position < start:
            return msgspec.structs.replace(place, position=start)
        # The log ends before our place: offsets will be used again, generations must not be.
        return msgspec.structs.replace(
            place, position=end, generation_base=place.generation_base + place.position - end
        )


def _check_recorded_count(recorded: Positions, count: int) -> None:
    """Raise `TopicMismatchError` if the topics have another partition count than the one that tasks were placed by."""
    if recorded.partition_count != count:
        raise TopicMismatchError(
            f"task-events has {count} partitions, the timers were placed with {recorded.partition_count}: "
            "cancels would miss their tasks; move to new topics, see docs/how-to/change-the-partition-count.md"
        )
