"""Reads one partition of all topics into facts, in an order that makes a snapshot of a running system.

An owner writes everything of one transaction to several topics, the positions record of `task-state` last, and Kafka
commits it as a whole; but each partition gets its marker in its own time, and nothing can be read at one moment. So:

1. **First the stable ends of `due-tasks` and `dead-tasks`.** What is below is decided and marked: *settled*.
2. **Then the end (high watermark) of `task-state`.** A settled emission's transaction had written all its rows before
   it was decided, so they lie below this end. Reading `read_committed` up to it, by position, waits for every
   transaction that is open there, and leaves out aborted ones.
3. **The last positions record below it is the moment that rows are judged at.** It is the last record of its
   transaction, so all rows before it belong to whole transactions, and no row after it is looked at.
4. **Only then the ends of `due-tasks` and `dead-tasks` to read to.** Every transaction of that moment was decided, so
   all of its emissions and dead tasks are below. Those between 1 and 4 may be of a later transaction: they are judged
   on their own evidence, and the fold allows for both.
5. **Last the stable end of `task-events`.** Whatever any of those emissions had applied was committed before it fired,
   so it is below; an open upstream transaction is not waited for, nobody has applied it.
6. **Then what came to `task-state` since**: compaction may have removed the row of a task that has a newer one, so a
   missing row of such a task proves nothing.

The ledger is read before all that (`audit_ledger.py`): what it speaks of had been emitted by then.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Final

import msgspec

from pipeline.core.audit import Code, Finding, Tally
from pipeline.core.audit_view import NEVER, PartitionView
from pipeline.core.effects import DeadTask
from pipeline.core.events import Reason
from pipeline.core.positions import POSITIONS_KEY, Positions
from pipeline.core.rebuild import REPLAY_HEADER, Emission
from pipeline.core.tasks import InstantMs, Offset
from pipeline.errors import CorruptStateError
from pipeline.ports import ClusterIdentity
from pipeline.service import audit_facts as facts
from pipeline.service.audit_ports import AuditOutside, AuditRequest, FactStore
from pipeline.service.fence import FENCE_KEY
from pipeline.service.recovery_ports import LogBounds, LogRecord

__all__ = ["PartitionReading", "Progress"]

KEY_BYTES_MAX: Final = 8_192
"""The longest key that can name a task, whatever the settings are."""
TAIL_RECORDS: Final = 4_000

Progress = Callable[[str, int, int], None]
"""Hears what is being read, how far it is, and how much it is."""


class PartitionReading:
    """Reads one partition; afterwards `view` says what is known of it, `notes` what is out of reach."""

    def __init__(
        self,
        partition: int,
        request: AuditRequest,
        outside: AuditOutside,
        store: FactStore,
        identity: ClusterIdentity,
        tally: Tally,
        *,
        on_progress: Progress,
    ) -> None:
        self._partition = partition
        self._request = request
        self._topics = request.topics
        self._outside = outside
        self._facts = store
        self._identity = identity
        self._tally = tally
        self._on_progress = on_progress
        self._emitted_to = [name for name in request.topics.emitted_to if self._has(name)]
        self._refusals = 0
        self._positions: Positions | None = None
        self._dead_whole_from = 0
        self._emissions_whole_from: dict[str, int] = {}
        self.notes: list[str] = []
        self.records: dict[str, int] = {}

    async def read(self) -> PartitionView:
        """All of it, in the order of the module's docstring; raises `UnavailableError`."""
        topics = self._topics
        settled = {name: await self._bounds(name) for name in [*self._emitted_to, topics.dead]}
        now_ms = self._outside.clock.now_ms()
        state = await self._bounds(topics.state)
        cut = await self._find_cut(state)
        await self._read_state(state, cut)
        await self._read_dead(await self._bounds(topics.dead))
        ends = {name: await self._bounds(name) for name in self._emitted_to}
        events = await self._bounds(topics.events)
        for number, name in enumerate(topics.emitted_to):
            if name in ends:
                await self._read_due(number, name, ends[name])
        whole_from, unknown_until_ms = await self._read_events(events, now_ms)
        await self._read_changed(cut)
        await self._read_progress()
        return self._view(settled, events, whole_from, unknown_until_ms, now_ms)

    def _view(
        self,
        settled: Mapping[str, LogBounds],
        events: LogBounds,
        whole_from: Offset,
        unknown_until_ms: InstantMs,
        now_ms: InstantMs,
    ) -> PartitionView:
        topics, request = self._topics, self._request
        whole = self._emissions_whole_from
        base, applied, stamp_ms = self._place(events)
        return PartitionView(
            partition=self._partition,
            events_topic=topics.events,
            state_topic=topics.state,
            dead_topic=topics.dead,
            generation_base=base,
            applied=applied,
            stamp_ms=stamp_ms,
            now_ms=now_ms,
            overdue_ms=request.overdue_ms,
            retention_ms=request.retention_ms,
            events_whole_from=whole_from,
            events_unknown_until_ms=unknown_until_ms,
            emissions_whole_from={**whole, "": max(whole.values(), default=0)},
            emissions_settled={name: bounds.stable_end for name, bounds in settled.items()},
            dead_whole_from=Offset(self._dead_whole_from),
            dead_settled=settled[topics.dead].stable_end,
            from_ms=request.from_ms,
            to_ms=request.to_ms,
        )

    def _place(self, events: LogBounds) -> tuple[int, Offset, InstantMs]:
        """Generation base, applied position and stamp of the moment that rows are judged at."""
        positions, topic = self._positions, self._topics.events
        place = None if positions is None else positions.inputs.get(topic)
        if positions is None or place is None:
            return 0, Offset(0), InstantMs(0)
        if place.topic_id != self._identity.topics[topic].topic_id:
            self.notes.append(f"{topic} was created anew and nothing of it is applied yet: rows are those of before")
            return place.generation_base + place.position, Offset(0), positions.stamp_ms
        if place.position > events.end:
            self._wrong_positions(
                -1, positions.stamp_ms, f"{topic} ends at {events.end}, but was applied up to {place.position}"
            )
        elif place.position < events.stable_end:
            self.notes.append(f"events not applied yet: {events.stable_end - place.position}")
        return place.generation_base, place.position, positions.stamp_ms

    # -- task-state --------------------------------------------------------------------------------------------

    async def _find_cut(self, bounds: LogBounds) -> Offset:
        """The offset after the last positions record that can be read; the start if there is none."""
        reach, upper = TAIL_RECORDS, bounds.end
        while upper > bounds.start:
            lower = Offset(max(bounds.start, bounds.end - reach))
            cut = None
            async with aclosing(self._outside.log.read(self._topics.state, self._partition, lower, upper)) as chunks:
                async for chunk in chunks:
                    for record in chunk.records:
                        if record.key == POSITIONS_KEY and self._decoded_positions(record) is not None:
                            cut = Offset(record.offset + 1)
            if cut is not None:
                return cut
            upper, reach = lower, reach * 10
        return bounds.start

    async def _read_state(self, bounds: LogBounds, cut: Offset) -> None:
        if cut == bounds.start < bounds.end:
            self._wrong_positions(bounds.end - 1, InstantMs(0), "there are rows, but no positions that can be read")
        async for records in self._chunks(self._topics.state, bounds.start, cut):
            batch = []
            for record in records:
                if record.key == POSITIONS_KEY:
                    self._follow(record)
                elif record.key is None or not 0 < len(record.key) <= KEY_BYTES_MAX:
                    self._violated(Code.STATE_UNREADABLE, self._topics.state, record, f"its key is {record.key!r:.60}")
                else:
                    fact = facts.RecordFact(offset=record.offset, at_ms=record.timestamp, value=record.value)
                    batch.append((facts.row_key(self._partition, record.key), _packed(fact)))
            self._facts.put(batch)

    def _decoded_positions(self, record: LogRecord) -> Positions | None:
        try:
            return self._outside.codec.decode_positions(record.value or b"")
        except CorruptStateError:
            return None

    def _follow(self, record: LogRecord) -> None:
        """Positions never go back, and are those of this partition."""
        positions = self._decoded_positions(record)
        if positions is None:
            self._violated(Code.STATE_UNREADABLE, self._topics.state, record, "its positions can't be read")
            return
        topic, before = self._topics.events, self._positions
        count = self._identity.topics[topic].partition_count
        if (positions.partition, positions.partition_count) != (self._partition, count):
            self._wrong_positions(
                record.offset,
                record.timestamp,
                f"they are of partition {positions.partition} of {positions.partition_count}, not of "
                f"{self._partition} of {count}",
            )
        new, old = positions.inputs.get(topic), None if before is None else before.inputs.get(topic)
        if old is not None and (new is None or new.generation_base + new.position < old.generation_base + old.position):
            self._wrong_positions(record.offset, record.timestamp, f"they go back from {old.position}")
        self._positions = positions

    def _wrong_positions(self, offset: int, at_ms: int, detail: str) -> None:
        topic = self._topics.state
        self._tally.violated(
            Finding(
                code=Code.POSITIONS_WRONG,
                topic=topic,
                partition=self._partition,
                offset=offset,
                at_ms=InstantMs(at_ms),
                detail=detail,
            )
        )

    async def _read_changed(self, cut: Offset) -> None:
        bounds = await self._bounds(self._topics.state)
        async for records in self._chunks(self._topics.state, Offset(max(cut, bounds.start)), bounds.stable_end):
            self._facts.put(
                [
                    (facts.changed_key(self._partition, record.key), b"")
                    for record in records
                    if record.key is not None and 0 < len(record.key) <= KEY_BYTES_MAX
                ]
            )

    # -- what was sent out -------------------------------------------------------------------------------------

    async def _read_dead(self, bounds: LogBounds) -> None:
        self._dead_whole_from = 0 if bounds.start == 0 else NEVER
        async for records in self._chunks(self._topics.dead, bounds.start, bounds.end):
            batch = []
            for record in records:
                try:
                    dead = self._outside.codec.decode_dead(record.value or b"")
                except (CorruptStateError, ValueError) as error:
                    self._violated(Code.UNDECODABLE, self._topics.dead, record, str(error))
                else:
                    batch += self._dead_facts(record, dead)
            self._facts.put(batch)

    def _dead_facts(self, record: LogRecord, dead: DeadTask) -> list[tuple[bytes, bytes]]:
        origin = dead.origin
        if origin.partition != self._partition:
            return []
        if origin.topic != self._topics.events:
            if origin.topic not in self._emitted_to:
                return []
            number = self._topics.emitted_to.index(origin.topic)
            return [(facts.given_up_key(self._partition, number, origin.offset), b"")]
        if dead.generation:
            key = dead.task_id.encode("utf-8", "surrogatepass")
            if dead.reason is not Reason.UNDELIVERABLE or len(key) > KEY_BYTES_MAX:
                return []
            fact = facts.RecordFact(offset=record.offset, at_ms=record.timestamp, value=record.value)
            return [(facts.burial_key(self._partition, key, record.offset), _packed(fact))]
        self._dead_whole_from = min(self._dead_whole_from, origin.offset + 1)
        self._refusals += 1
        refusal = facts.RefusalFact(append_at_ms=origin.append_at_ms, reason=dead.reason, task_id=dead.task_id)
        return [(facts.refusal_key(self._partition, origin.offset), _packed(refusal))]

    async def _read_due(self, number: int, topic: str, bounds: LogBounds) -> None:
        self._emissions_whole_from[topic] = 0 if bounds.start == 0 else NEVER
        if bounds.start > 0:
            self.notes.append(f"{topic} starts at {bounds.start}: what was emitted before has expired")
        async for records in self._chunks(topic, bounds.start, bounds.end):
            batch: list[tuple[bytes, bytes]] = []
            for record in records:
                batch += self._due_facts(number, topic, record)
            self._facts.put(batch)

    def _due_facts(self, number: int, topic: str, record: LogRecord) -> list[tuple[bytes, bytes]]:
        try:
            task = self._outside.codec.decode_due(record.value or b"")
        except CorruptStateError as error:
            if topic == self._topics.due:  # others may write to the other target topics
                self._violated(Code.UNDECODABLE, topic, record, str(error))
            return []
        is_copy = any(name == REPLAY_HEADER for name, _ in record.headers)
        due = facts.DueFact(
            task_id=task.task_id,
            occurrence=task.occurrence,
            attempt=task.attempt,
            topic=number,
            offset=record.offset,
            at_ms=record.timestamp,
            is_copy=is_copy,
        )
        found = [(facts.due_key(self._partition, task.generation, number, record.offset), _packed(due))]
        key = task.task_id.encode("utf-8", "surrogatepass")
        if is_copy or len(key) > KEY_BYTES_MAX:
            return found
        place = Emission(task=task, target_topic=topic, offset=Offset(record.offset)).position
        self._emissions_whole_from[topic] = min(self._emissions_whole_from[topic], max(0, place))
        fact = facts.RecordFact(
            offset=record.offset, at_ms=record.timestamp, value=record.value, topic=number, key=record.key
        )
        at = facts.timeline_key(self._partition, key, place, facts.EMISSION, number, record.offset)
        return [*found, (at, _packed(fact))]

    # -- task-events and task-progress -------------------------------------------------------------------------

    async def _read_events(self, bounds: LogBounds, now_ms: InstantMs) -> tuple[Offset, InstantMs]:
        """Keep the events; returns from which offset on none is missing, and when that one was appended.

        A hole is a marker, an aborted record, or what compaction removed; the latter only if it may be old enough.
        """
        base = self._generation_base()
        whole_from, unknown_until_ms = bounds.start, InstantMs(0)
        expected, before_ms = bounds.start, 0
        compacted_before_ms = now_ms - self._request.compaction_lag_ms
        async for records in self._chunks(self._topics.events, bounds.start, bounds.stable_end):
            batch = []
            for record in records:
                if record.offset > expected and before_ms < compacted_before_ms:
                    whole_from = Offset(record.offset)
                if record.offset == whole_from:
                    unknown_until_ms = InstantMs(record.timestamp)
                expected, before_ms = Offset(record.offset + 1), record.timestamp
                if record.key != FENCE_KEY:
                    batch.append(self._event_fact(record, base))
            self._facts.put(batch)
        if bounds.start > 0:
            self.notes.append(f"{self._topics.events} starts at {bounds.start}: events before that have expired")
        if whole_from > bounds.start:
            self.notes.append(
                f"{self._topics.events} may be compacted below {whole_from}: only the last event of a task is sure "
                "to be there"
            )
        return whole_from, unknown_until_ms

    def _generation_base(self) -> int:
        place = None if self._positions is None else self._positions.inputs.get(self._topics.events)
        if place is None:
            return 0
        is_same = place.topic_id == self._identity.topics[self._topics.events].topic_id
        return place.generation_base if is_same else place.generation_base + place.position

    def _event_fact(self, record: LogRecord, base: int) -> tuple[bytes, bytes]:
        refusal = self._refusal_of(record) if self._refusals else None
        fact = facts.RecordFact(
            offset=record.offset, at_ms=record.timestamp, value=record.value, refusal=refusal, key=record.key
        )
        place = base + record.offset
        at = facts.timeline_key(self._partition, _task_key(record.key), place, facts.EVENT, 0, record.offset)
        return at, _packed(fact)

    def _refusal_of(self, record: LogRecord) -> facts.RefusalFact | None:
        raw = self._facts.get(facts.refusal_key(self._partition, record.offset))
        if raw is None:
            return None
        refusal = msgspec.msgpack.decode(raw, type=facts.RefusalFact)
        return refusal if refusal.append_at_ms == record.timestamp else None

    async def _read_progress(self) -> None:
        topic = self._topics.progress
        if not self._has(topic):
            return
        bounds = await self._bounds(topic)
        async for records in self._chunks(topic, bounds.start, bounds.stable_end):
            for record in records:
                try:
                    self._outside.codec.check_progress(record.value or b"")
                except CorruptStateError as error:
                    self._violated(Code.UNDECODABLE, topic, record, str(error))

    # -- the log -----------------------------------------------------------------------------------------------

    def _has(self, topic: str) -> bool:
        known = self._identity.topics.get(topic)
        return known is not None and self._partition < known.partition_count

    async def _bounds(self, topic: str) -> LogBounds:
        return await self._outside.log.bounds(topic, self._partition)

    async def _chunks(self, topic: str, start: Offset, end: Offset) -> AsyncIterator[Sequence[LogRecord]]:
        self._on_progress(f"Reading {topic}, partition {self._partition}", 0, end - start)
        async with aclosing(self._outside.log.read(topic, self._partition, start, end)) as chunks:
            async for chunk in chunks:
                self.records[topic] = self.records.get(topic, 0) + len(chunk.records)
                yield chunk.records
                self._on_progress(f"Reading {topic}, partition {self._partition}", chunk.position - start, end - start)

    def _violated(self, code: Code, topic: str, record: LogRecord, detail: str) -> None:
        if self._request.from_ms <= record.timestamp < self._request.to_ms:
            self._tally.violated(
                Finding(
                    code=code,
                    topic=topic,
                    partition=self._partition,
                    offset=record.offset,
                    at_ms=InstantMs(record.timestamp),
                    detail=detail,
                    task_id=_text(record.key),
                )
            )


def _task_key(key: bytes | None) -> bytes:
    """The key if it can name a task; else the empty one, which stands for all of those."""
    if not key or len(key) > KEY_BYTES_MAX or key[:1] == b"\0":
        return b""
    try:
        key.decode()
    except UnicodeDecodeError:
        return b""
    return key


def _text(key: bytes | None) -> str:
    return "" if key is None else key[:KEY_BYTES_MAX].decode(errors="replace")


def _packed(fact: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode(fact)
