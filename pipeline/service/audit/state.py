"""Reads `task-state` of one partition up to the moment that its rows are judged at, and what came to it since."""

from typing import Final

import msgspec

from pipeline.core.audit import Code
from pipeline.core.positions import POSITIONS_KEY, Positions
from pipeline.core.tasks import InstantMs, Offset
from pipeline.errors import CorruptStateError
from pipeline.ports import ClusterIdentity
from pipeline.service.audit import facts
from pipeline.service.audit.log import KEY_BYTES_MAX, AuditLog
from pipeline.service.audit.ports import AuditCodec, AuditTopics, FactStore
from pipeline.service.recovery.ports import LogBounds, LogRecord

__all__ = ["StatePlace", "StateReading"]

TAIL_RECORDS: Final = 4_000
ATTEMPTS_MAX: Final = 5


class StatePlace(msgspec.Struct, frozen=True, kw_only=True):
    """What the rows reflect: the next event to apply, the base of its generations, and the owner's clock then."""

    applied: Offset
    generation_base: int
    stamp_ms: InstantMs


class StateReading:
    """Reads rows into facts, and follows the positions."""

    def __init__(
        self, log: AuditLog, topics: AuditTopics, codec: AuditCodec, store: FactStore, identity: ClusterIdentity
    ) -> None:
        self._log = log
        self._topics = topics
        self._codec = codec
        self._store = store
        self._events = identity.topics[topics.events]
        self._positions: Positions | None = None
        self._before: Positions | None = None
        self._row_first: LogRecord | None = None

    def place(self, events: LogBounds) -> StatePlace:
        """Where the rows stand among the events that there are."""
        positions, topic = self._positions, self._topics.events
        place = None if positions is None else positions.inputs.get(topic)
        if positions is None or place is None:
            return StatePlace(applied=Offset(0), generation_base=0, stamp_ms=InstantMs(0))
        if place.topic_id != self._events.topic_id:
            self._log.notes.append(f"{topic} was created anew and nothing of it is applied yet")
            base = place.generation_base + place.position
            return StatePlace(applied=Offset(0), generation_base=base, stamp_ms=positions.stamp_ms)
        if place.position > events.end:
            detail = f"{topic} ends at {events.end}, but was applied up to {place.position}"
            self._log.accuse(Code.POSITIONS_WRONG, self._topics.state, -1, positions.stamp_ms, detail)
        elif place.position < events.stable_end:
            self._log.notes.append(f"events not applied yet: {events.stable_end - place.position}")
        return StatePlace(applied=place.position, generation_base=place.generation_base, stamp_ms=positions.stamp_ms)

    async def find_cut(self) -> tuple[LogBounds, Offset]:
        """The end of `task-state` as of now, and the offset after the last positions record below it (else the start).

        Compaction may take away the record that is looked for, when there is a newer one: then the end is asked for
        once more.
        """
        for _ in range(ATTEMPTS_MAX):
            bounds = await self._log.bounds(self._topics.state)
            cut = await self._last_positions(bounds)
            if bounds.start == bounds.end:
                break
            if cut is not None and await self._is_there(Offset(cut - 1)):
                return bounds, cut
        self._positions = None
        return bounds, bounds.start

    async def _last_positions(self, bounds: LogBounds) -> Offset | None:
        """Keep the last positions below the end; returns the offset after them."""
        reach, upper = TAIL_RECORDS, bounds.end
        while upper > bounds.start:
            lower = Offset(max(bounds.start, bounds.end - reach))
            cut = None
            async for records in self._log.chunks(self._topics.state, lower, upper):
                for record in records:
                    positions = self._decoded_positions(record) if record.key == POSITIONS_KEY else None
                    if positions is not None:
                        self._positions, cut = positions, Offset(record.offset + 1)
                    elif self._row_first is None or record.offset < self._row_first.offset:
                        self._row_first = record
            if cut is not None:
                return cut
            upper, reach = lower, reach * 10
        return None

    async def _is_there(self, offset: Offset) -> bool:
        return [
            record
            async for records in self._log.chunks(self._topics.state, offset, Offset(offset + 1))
            for record in records
        ] != []

    async def read(self, bounds: LogBounds, cut: Offset) -> None:
        """The rows below `cut`, and the positions."""
        async for records in self._log.chunks(self._topics.state, bounds.start, cut):
            batch = []
            for record in records:
                if record.key == POSITIONS_KEY:
                    self._follow(record)
                elif record.key is None or not 0 < len(record.key) <= KEY_BYTES_MAX:
                    self._log.violated(
                        Code.STATE_UNREADABLE, self._topics.state, record, f"its key is {record.key!r:.60}"
                    )
                else:
                    fact = facts.RecordFact(offset=record.offset, at_ms=record.timestamp, value=record.value)
                    batch.append((facts.row_key(self._log.partition, record.key), facts.packed(fact)))
            self._store.put(batch)

    def _decoded_positions(self, record: LogRecord) -> Positions | None:
        try:
            return self._codec.decode_positions(record.value or b"")
        except CorruptStateError:
            return None

    def _follow(self, record: LogRecord) -> None:
        """Positions never go back, and are those of this partition."""
        positions = self._decoded_positions(record)
        if positions is None:
            self._log.violated(Code.STATE_UNREADABLE, self._topics.state, record, "its positions can't be read")
            return
        topic, before = self._topics.events, self._before
        count = self._events.partition_count
        if (positions.partition, positions.partition_count) != (self._log.partition, count):
            self._log.accuse(
                Code.POSITIONS_WRONG,
                self._topics.state,
                record.offset,
                record.timestamp,
                f"they are of partition {positions.partition} of {positions.partition_count}, not of "
                f"{self._log.partition} of {count}",
            )
        new, old = positions.inputs.get(topic), None if before is None else before.inputs.get(topic)
        if old is not None and (new is None or new.generation_base + new.position < old.generation_base + old.position):
            self._log.accuse(
                Code.POSITIONS_WRONG,
                self._topics.state,
                record.offset,
                record.timestamp,
                f"they go back from {old.position}",
            )
        self._before = positions

    async def read_changed(self, cut: Offset) -> None:
        """Which tasks have newer rows, above `cut`."""
        bounds = await self._log.bounds(self._topics.state)
        has_positions = self._positions is not None
        async for records in self._log.chunks(self._topics.state, Offset(max(cut, bounds.start)), bounds.stable_end):
            has_positions = has_positions or any(record.key == POSITIONS_KEY for record in records)
            self._store.put(
                [
                    (facts.changed_key(self._log.partition, record.key), b"")
                    for record in records
                    if record.key is not None and 0 < len(record.key) <= KEY_BYTES_MAX
                ]
            )
        if self._row_first is not None and not has_positions:
            row, topic = self._row_first, self._topics.state
            self._log.accuse(Code.POSITIONS_WRONG, topic, row.offset, row.timestamp, "there are rows, but no positions")
