"""Folds what a partition's topics still hold into a timer table: `core/rebuild.py` has the rules."""

from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Final

import msgspec

from pipeline.core.events import Event, Rejection
from pipeline.core.positions import InputPosition, generation_of
from pipeline.core.rebuild import (
    Overtaking,
    Source,
    forgotten_by,
    presume_emitted,
    reconcile,
    with_burial,
    with_emission,
)
from pipeline.core.tasks import InstantMs, Offset, Status, TaskId, TaskState, index_entry
from pipeline.errors import CorruptStateError
from pipeline.ports import InputRecord, TableRow, TimerTable
from pipeline.service.owner.overlay import RecentRows
from pipeline.service.owner.settings import OwnerSettings
from pipeline.service.owner.work import Admit, Quarantine, Work
from pipeline.service.recovery.emission_queue import EmissionQueue
from pipeline.service.recovery.ports import LogChunk, LogRecord, RecoveryCodec
from pipeline.service.recovery.set_aside_log import SetAside

__all__ = ["SCAN_ROWS", "FoldCounts", "Known", "RebuildFold"]

SCAN_ROWS: Final = 256
"""Rows read at once: tasks may have a megabyte each."""
ALL: Final = 1 << 62
"""A position above all others."""
_RESERVED: Final = b"\x00"


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """The rows of `task-state`, which reflect the events up to `position`; if that is not exact: at least so far."""

    table: TimerTable
    position: Offset
    is_exact: bool


class FoldCounts(msgspec.Struct, kw_only=True):
    """What a fold met and left: `sources` counts the rows of `task-state` by what became of them.

    `presumed` timers are taken for fired without their emission; `overdue` ones fire as soon as an agent starts.
    """

    events: int = 0
    emissions: int = 0
    presumed: int = 0
    overdue: int = 0
    unreadable: int = 0
    rows: int = 0
    statuses: dict[str, int] = {}
    sources: dict[str, int] = {}


class _Offsets:
    """A set of offsets, a bit for each: there may be millions."""

    def __init__(self, start: Offset) -> None:
        self._start = start
        self._bits = bytearray()

    def add(self, offset: int) -> None:
        at = offset - self._start
        missing = (at >> 3) + 1 - len(self._bits)
        if missing > 0:
            self._bits.extend(bytes(max(missing, len(self._bits))))
        self._bits[at >> 3] |= 1 << (at & 7)

    def __contains__(self, offset: int) -> bool:
        at = offset - self._start
        return 0 <= at < 8 * len(self._bits) and bool(self._bits[at >> 3] >> (at & 7) & 1)


class RebuildFold:
    """One fold into `table`, which is empty and nobody else's.

    `have_expired`: retention has removed emissions. If none is left at all, nothing tells what has fired.
    """

    def __init__(
        self,
        *,
        settings: OwnerSettings,
        codec: RecoveryCodec,
        table: TimerTable,
        place: InputPosition,
        start: Offset,
        partition_count: int,
        known: Known | None,
        set_aside: SetAside,
        emissions: EmissionQueue,
        admit: Admit,
        now_ms: InstantMs,
        have_expired: bool,
    ) -> None:
        self._settings = settings
        self._codec = codec
        self._table = table
        self._place = place
        self._partition_count = partition_count
        self._known = known
        self._reflected = None
        if known is not None and known.is_exact:
            self._reflected = place.generation_base + known.position
        self._refusals = set_aside.refusals
        self._burials = list(reversed(set_aside.burials))  # the next one last
        self._emissions = emissions
        self._admit_now = admit
        self._now_ms = now_ms
        self._have_expired = have_expired
        self._overtaking = Overtaking()
        self._accepted = _Offsets(start)
        self._vouched: set[int] = set()
        self._work = self._new_work()
        self.counts = FoldCounts(sources={source.value: 0 for source in Source})

    async def run(self, events: AsyncIterator[LogChunk]) -> FoldCounts:
        """Fold all events, then settle what is left; afterwards `table` is what `task-state` should hold."""
        async for chunk in events:
            self._load(chunk.records)
            for record in chunk.records:
                await self._one(record)
            self._flush()
            self.counts.events += len(chunk.records)
        await self._settle(ALL)
        self._bury(None)
        self._flush()
        await self._merge_known()
        self._finish()
        self.counts.emissions = self._emissions.taken
        return self.counts

    # -- events ------------------------------------------------------------------------------------------------

    async def _one(self, record: LogRecord) -> None:
        place = self._place.generation_base + record.offset
        if self._emissions.next_position <= place:
            await self._settle(place)
        if self._known is not None and record.offset >= self._known.position:
            self._flush()
            await self._merge_known()
        self._bury(InstantMs(record.timestamp))
        task_id = _task_id(record.key)
        if task_id is None:
            self._work.apply([record], self._admit)
            return
        self._work.overlay.load([task_id])
        self._prepare(task_id, InstantMs(record.timestamp))
        self._work.apply([record], self._admit)
        state = self._work.overlay.get(task_id)
        if state is not None and state.generation == generation_of(self._place, Offset(record.offset)):
            self._accepted.add(record.offset)

    def _prepare(self, task_id: TaskId, at_ms: InstantMs) -> None:
        """What the timers did to the task before this event came."""
        before = state = self._work.overlay.get(task_id)
        if state is not None and state.status is Status.SCHEDULED and self._overtaking.has_overtaken(state):
            state = self._presumed(state)
        if state is not None and forgotten_by(state, at_ms):
            state = None
        if state is not before:
            self._put(task_id, state)

    def _admit(self, record: InputRecord) -> Event | Rejection:
        """As the owner judges it; but what was refused then stays refused, whatever the limits say now."""
        event = self._admit_now(record)
        refusal = self._refusals.get(record.offset)
        if refusal is None or refusal.append_at_ms != record.timestamp or isinstance(event, Rejection):
            return event
        return Rejection(
            reason=refusal.reason,
            message=refusal.message,
            task_id=event.task_id if refusal.task_id == event.task_id else None,
            event_id=event.event_id,
            version=event.version,
        )

    # -- timers ------------------------------------------------------------------------------------------------

    async def _settle(self, place: int) -> None:
        """Apply the emissions that were made before the event at `place` was applied."""
        for emission in await self._emissions.take(place):
            self._overtaking.add(emission)
            task_id = TaskId(emission.task.task_id)
            self._work.overlay.load([task_id])
            state = self._work.overlay.get(task_id)
            self._put(task_id, with_emission(state, emission, retention_ms=self._settings.retention_ms))

    def _bury(self, before_ms: InstantMs | None) -> None:
        while self._burials and (before_ms is None or self._burials[-1].append_at_ms < before_ms):
            burial = self._burials.pop()
            self._work.overlay.load([burial.task_id])
            state = self._work.overlay.get(burial.task_id)
            self._put(burial.task_id, with_burial(state, burial, retention_ms=self._settings.retention_ms))

    def _presumed(self, state: TaskState) -> TaskState:
        self.counts.presumed += 1
        return presume_emitted(state, retention_ms=self._settings.retention_ms)

    # -- what task-state knows ---------------------------------------------------------------------------------

    async def _merge_known(self) -> None:
        """Lay the rows of `task-state` beside the fold, once it is where they are."""
        known, self._known = self._known, None
        if known is None:
            return
        # Emissions up to that position are settled; the table's own are, in the same transaction as its rows.
        await self._settle(self._place.generation_base + known.position)
        self._flush()
        after: TaskId | None = None
        while page := known.table.scan(after, SCAN_ROWS):
            after = page[-1][0]
            folded = self._table.get_many([task_id for task_id, _ in page])
            differ = [row for row, value in zip(page, folded, strict=True) if row[1] != value]
            self.counts.sources[Source.CONFIRMED] += len(page) - len(differ)
            if self._have_expired:
                self._vouch(page)
            self._work.overlay.load([task_id for task_id, _ in differ])
            for task_id, value in differ:
                state = self._decoded(task_id, value)
                if state is None:
                    self.counts.unreadable += 1
                else:
                    self._merge(task_id, state)
            self._flush()

    def _decoded(self, task_id: TaskId, value: bytes) -> TaskState | None:
        """A row of `task-state`; None if it can't be read, or is another task's."""
        try:
            state = self._codec.decode_state(value)
        except CorruptStateError:
            return None
        return state if state.task_id == task_id else None

    def _vouch(self, rows: Iterable[tuple[TaskId, bytes]]) -> None:
        """Note which overdue timers `task-state` says have not fired."""
        for task_id, value in rows:
            state = self._decoded(task_id, value)
            if state is not None and state.status is Status.SCHEDULED and state.due_at_ms <= self._now_ms:
                self._vouched.add(state.generation)

    def _merge(self, task_id: TaskId, known: TaskState) -> None:
        base = self._place.generation_base
        row, source = reconcile(
            self._work.overlay.get(task_id),
            known,
            accepted=known.generation - 1 - base in self._accepted,
            generation_base=base,
        )
        self.counts.sources[source] += 1
        self._put(task_id, row)

    # -- the end -----------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Look at every row once more: what must not fire, and what would be forgotten at once."""
        after: TaskId | None = None
        statuses: dict[str, int] = {}
        while page := self._table.scan(after, SCAN_ROWS):
            after = page[-1][0]
            rows = []
            for _, value in page:
                before = self._codec.decode_state(value)
                state = self._finished(before)
                if state is not before:
                    rows.append(_row(before, state, self._codec))
                if state is not None:
                    statuses[state.status] = statuses.get(state.status, 0) + 1
                    self.counts.rows += 1
                    self.counts.overdue += state.status is Status.SCHEDULED and state.due_at_ms <= self._now_ms
            self._table.write(rows, b"")
        self.counts.statuses = statuses

    def _finished(self, state: TaskState) -> TaskState | None:
        after = state
        if state.status is Status.SCHEDULED and (self._overtaking.has_overtaken(state) or self._is_doubtful(state)):
            after = self._presumed(state)
        return None if forgotten_by(after, self._now_ms) else after

    def _is_doubtful(self, state: TaskState) -> bool:
        """Whether it may have fired: nothing tells, and it is neither a timer in `task-state` nor new to it."""
        if not self._have_expired or self._emissions.taken or state.due_at_ms > self._now_ms:
            return False
        is_new = self._reflected is not None and state.generation > self._reflected
        return not is_new and state.generation not in self._vouched

    # -- the table ---------------------------------------------------------------------------------------------

    def _load(self, records: Sequence[LogRecord]) -> None:
        ids = (_task_id(record.key) for record in records)
        self._work.overlay.load([task_id for task_id in ids if task_id is not None])

    def _put(self, task_id: TaskId, state: TaskState | None) -> None:
        self._work.overlay.put(task_id, state)

    def _flush(self) -> None:
        """Write what has changed. What the work would have sent out stands on its topics already."""
        rows = self._work.overlay.rows()
        if rows:
            self._table.write(rows, b"")
        self._work = self._new_work()

    def _new_work(self) -> Work:
        return Work(
            settings=self._settings,
            codec=self._codec,
            table=self._table,
            recent=RecentRows(),
            place=self._place,
            partition_count=self._partition_count,
            quarantine=Quarantine(),
            now_ms=self._now_ms,
        )


def _task_id(key: bytes | None) -> TaskId | None:
    """The task that a key names, if it can name one."""
    if not key or key[:1] == _RESERVED:
        return None
    try:
        return TaskId(key.decode())
    except UnicodeDecodeError:
        return None


def _row(before: TaskState, after: TaskState | None, codec: RecoveryCodec) -> TableRow:
    value = None if after is None else codec.encode_state(after)
    return TableRow(before.task_id, value, index_entry(before), None if after is None else index_entry(after))
