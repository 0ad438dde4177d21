"""One tenure of a partition: cycles of apply, fence, fire and commit, until ownership ends or is in doubt."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final

import msgspec
import structlog

from pipeline.core.positions import POSITIONS_KEY, Positions
from pipeline.core.tasks import Offset
from pipeline.errors import PoisonedBatchError, RetryableError, UnavailableError
from pipeline.ports import EventSource, OffsetsMovedError, TableMeta, TopicIdentity
from pipeline.service.owner.acquisition import Outside, Owned, encode_meta
from pipeline.service.owner.clock_watch import ClockWatch
from pipeline.service.owner.fence import Fence
from pipeline.service.owner.input_cursor import InputCursor, InputSlice
from pipeline.service.owner.overlay import RecentRows
from pipeline.service.owner.settings import OwnerSettings
from pipeline.service.owner.status import OwnerStatus, PassingVerdicts, Phase
from pipeline.service.owner.targets import Targets
from pipeline.service.owner.turns import Turn, Turns
from pipeline.service.owner.work import Admit, Outgoing, Quarantine, Work

__all__ = ["FenceTarget", "Tenure"]

log = structlog.get_logger(__name__)

IDLE_WAIT_MS_MAX: Final = 1_000
FENCE_PATIENCE_MS: Final = 2_000
FAILURES_MAX: Final = 4

FenceTarget = Callable[[TopicIdentity], Awaitable[Offset]]
"""Asks for an offset above all that was acknowledged before the call. Raises `TopicMismatchError` if the input has
another partition count than the identity says, `RetryableError` if it is another topic, `UnavailableError`."""


class Tenure:
    """One acquisition's time in office; thrown away whole when anything about ownership is in doubt."""

    def __init__(
        self,
        settings: OwnerSettings,
        outside: Outside,
        source: EventSource,
        owned: Owned,
        *,
        admit: Admit,
        fence_target: FenceTarget,
        status: OwnerStatus,
        passing: PassingVerdicts,
        clock_watch: ClockWatch,
        stop: asyncio.Event,
    ) -> None:
        self._settings = settings
        self._outside = outside
        self._source = source
        self._owned = owned
        self._admit = admit
        self._status = status
        self._passing = passing
        self._clock_watch = clock_watch
        self._stop = stop
        self._place = owned.positions.inputs[settings.events_topic]
        self._cursor = InputCursor(source, self._place.position)
        events = owned.identity.topics[settings.events_topic]
        self._fence = Fence(outside.clock, partial(fence_target, events))
        self._fence_since_ms: int | None = None
        self._recent = RecentRows()
        self._quarantine = Quarantine()
        self._turns = Turns(settings.batch_records_max, settings.fire_max)
        self._targets = Targets(settings, outside.end_offsets, owned.identity)
        self._failures = 0
        self._is_restore_proven = False
        self._written_ms = self._checked_ms = outside.clock.monotonic_ms()
        self._told_ms = self._written_ms
        self._told_position = Offset(-1)
        self._log = log.bind(partition=settings.partition)

    async def serve(self) -> None:
        """Cycles until the owner stops; raises what ends the tenure."""
        await self._targets.learn()
        # The first transaction proves the claim and records the positions, before the partition counts as ready.
        await self._commit(self._new_work(), InputSlice(records=(), end_position=self._cursor.position))
        self._status.phase, self._status.message = Phase.ACTIVE, ""
        self._log.info("partition_active", position=self._cursor.position)
        while not self._stop.is_set():
            busy = await self._cycle()
            if not self._stop.is_set():
                await self._keep_up()
            if not busy:
                await self._source.wait(self._idle_ms())

    async def _cycle(self) -> bool:
        """One transaction; False if there was nothing to do."""
        turn = self._turns.next()
        work = self._new_work()
        inputs = self._cursor.peek(records_max=turn.inputs_max, bytes_max=self._settings.batch_bytes_max)
        work.apply(inputs.records, self._admit)
        if turn.timers_max:
            await self._fire(work, inputs.end_position, turn.timers_max)
        idle = not work.overlay.changed and not work.refusals
        silent_ms = self._outside.clock.monotonic_ms() - self._written_ms
        if idle and silent_ms < self._settings.heartbeat_interval_ms:
            # A position that moved over records without effect travels with the next transaction.
            moved = inputs.end_position != self._cursor.position
            self._pass_over(work, inputs)
            other_kind = self._turns.idle(turn)
            return moved or other_kind
        items = len(inputs.records) + work.fired + work.purged + work.buried
        try:
            await self._commit(work, inputs)
        except PoisonedBatchError as error:
            self._narrow(turn, items, inputs, work, error)
        except OffsetsMovedError:
            self._targets.forget()
        except RetryableError as error:
            self._try_again(error)
        else:
            self._failures = 0
            self._turns.widen(turn)
            if work.quarantined:
                self._quarantine = Quarantine()
        return True

    def _try_again(self, error: RetryableError) -> None:
        """The transaction was aborted cleanly: the same again, a few times before the claim itself is renewed."""
        self._failures += 1
        self._log.warning("transaction_aborted", failures=self._failures, reason=str(error))
        if self._failures >= FAILURES_MAX:
            raise error
        self._targets.forget()

    def _narrow(self, turn: Turn, items: int, inputs: InputSlice, work: Work, error: PoisonedBatchError) -> None:
        """Halve what the next transaction takes; a single record that is refused alone is set aside."""
        self._log.warning("transaction_refused", items=items, reason=str(error))
        self._targets.forget()
        if items > 1:
            self._turns.narrow(turn, items)
            return
        if work.quarantined and self._quarantine.with_value:
            self._quarantine.with_value = False
            return
        if work.quarantined or not items:
            raise UnavailableError(f"even setting one record aside is refused: {error}") from error
        if inputs.records:
            self._quarantine = Quarantine(offset=Offset(inputs.records[0].offset), message=str(error))
        else:
            self._quarantine = Quarantine(task_id=next(iter(work.overlay.changed)), message=str(error))

    def _new_work(self) -> Work:
        topic = self._settings.events_topic
        return Work(
            settings=self._settings,
            codec=self._outside.codec,
            table=self._owned.table,
            recent=self._recent,
            place=self._place,
            partition_count=self._owned.identity.topics[topic].partition_count,
            quarantine=self._quarantine,
            now_ms=self._outside.clock.now_ms(),
        )

    async def _fire(self, work: Work, position: Offset, room: int) -> None:
        """Fire what is due, if anything is, behind the fence."""
        if self._fence.pending is None and (not self._is_due(work) or self._clock_is_doubtful()):
            return
        reading = await self._fence.passed(position)
        if reading is None:
            self._note_fence_wait(position)
            return
        self._fence_since_ms, self._status.fence_waiting_ms = None, 0
        if work.fire(reading, position, self._targets.next_offsets, room):
            self._fence.drop()

    def _is_due(self, work: Work) -> bool:
        now_ms = self._outside.clock.now_ms()
        next_at_ms = self._owned.table.next_at_ms()
        if next_at_ms is not None and next_at_ms <= now_ms:
            return True
        return any(state is not None and state.wake_at_ms <= now_ms for state in work.overlay.changed.values())

    def _clock_is_doubtful(self) -> bool:
        """Whether firing is paused because the clock jumped ahead."""
        jumped_ms = self._clock_watch.jumped_ms()
        if jumped_ms and not self._status.clock_jumped_ms:
            self._log.error(
                "clock_jumped", ahead_ms=jumped_ms, now="firing is paused: set the clock back, or start the agent again"
            )
        self._status.clock_jumped_ms = jumped_ms
        return jumped_ms > 0

    def _note_fence_wait(self, position: Offset) -> None:
        """Say it when firing waits long: most often an upstream transaction stays open. Late, never wrong."""
        now_ms = self._outside.clock.monotonic_ms()
        pending = self._fence.pending
        if self._fence_since_ms is None or pending is None:
            self._fence_since_ms = now_ms
            return
        waited_ms = now_ms - self._fence_since_ms
        if waited_ms >= FENCE_PATIENCE_MS > self._status.fence_waiting_ms:
            self._log.warning(
                "firing_waits_for_input",
                position=position,
                target=pending.target,
                waited_ms=waited_ms,
                likely="an upstream transaction is open",
            )
        self._status.fence_waiting_ms = waited_ms

    async def _commit(self, work: Work, inputs: InputSlice) -> None:
        """Commit first, then write the table: the other order would leave rows that no transaction ever committed."""
        settings, transaction = self._settings, self._owned.transaction
        rows = work.overlay.rows()
        positions = self._positions(inputs.end_position)
        raw = self._outside.codec.encode_positions(positions)
        transaction.begin()
        try:
            if not self._is_restore_proven:
                self._prove_restore(raw)
            self._produce_emissions(work.emissions)
            for out in work.refusals:
                transaction.produce(out.topic, out.key, out.value)
            if rows:
                transaction.produce_many(settings.state_topic, [(row.task_id.encode(), row.value) for row in rows])
            transaction.produce_last(POSITIONS_KEY, raw)
        except PoisonedBatchError:
            await transaction.abort()
            raise
        committed = await transaction.commit()
        self._is_restore_proven = True
        self._targets.committed(committed.last_offsets)
        meta = TableMeta(positions=positions, state_position=Offset(committed.last_state_offset + 1))
        self._owned.table.write(rows, encode_meta(meta, self._outside.codec))
        self._recent.note(work.overlay.changed, self._outside.clock.now_ms())
        self._owned.positions = positions
        self._written_ms = self._outside.clock.monotonic_ms()
        self._pass_over(work, inputs)
        self._count(work)

    def _prove_restore(self, positions: bytes) -> None:
        """The first own record stands where the restore ended, or the commit fails: the table lacks what lies between.

        A deposed leader that did not know it yet may have told an end that was too low; it can't have taken our record.
        Proven before the commit, for the positions that such a table knows would lead the next owner back in its input.
        """
        self._owned.transaction.produce(
            self._settings.state_topic, POSITIONS_KEY, positions, expected=self._owned.state_position
        )

    def _produce_emissions(self, emissions: Sequence[Outgoing]) -> None:
        """Send what fired; the offsets of the first and last record on a topic prove those of all between."""
        transaction = self._owned.transaction
        by_topic: dict[str, list[Outgoing]] = {}
        for out in emissions:
            by_topic.setdefault(out.topic, []).append(out)
        for topic, outs in by_topic.items():
            first, last = self._targets.expect(topic, len(outs))
            middle = outs[1:-1]
            transaction.produce(topic, outs[0].key, outs[0].value, outs[0].headers, expected=first)
            if any(out.headers for out in middle):
                for out in middle:
                    transaction.produce(topic, out.key, out.value, out.headers)
            elif middle:
                transaction.produce_many(topic, [(out.key, out.value) for out in middle])
            if len(outs) > 1:
                transaction.produce(topic, outs[-1].key, outs[-1].value, outs[-1].headers, expected=last)

    def _positions(self, end_position: Offset) -> Positions:
        place = msgspec.structs.replace(self._place, position=end_position)
        return msgspec.structs.replace(
            self._owned.positions,
            inputs={**self._owned.positions.inputs, self._settings.events_topic: place},
            stamp_ms=self._outside.clock.now_ms(),
            owner=self._settings.owner,
        )

    def _pass_over(self, work: Work, inputs: InputSlice) -> None:
        self._cursor.advance(inputs)
        if inputs.end_position != self._status.position:
            self._status.position = inputs.end_position
            self._status.moved_at_ms = self._outside.clock.now_ms()
        for offset, verdict, reason in work.passing:
            self._passing.add(offset, verdict, reason)

    def _count(self, work: Work) -> None:
        status = self._status
        status.transactions += 1
        status.applied += work.applied
        status.fired += work.fired
        status.purged += work.purged
        status.refused += len(work.refusals)
        status.lateness_ms_max = max(status.lateness_ms_max, work.lateness_ms_max)
        if work.fired or work.refusals:
            self._log.debug(
                "batch_committed",
                applied=work.applied,
                fired=work.fired,
                refused=len(work.refusals),
                lateness_ms_max=work.lateness_ms_max,
            )

    async def _keep_up(self) -> None:
        """What is done now and then: make sure of the topics' identity, tell the group how far the table is."""
        settings, now_ms = self._settings, self._outside.clock.monotonic_ms()
        if now_ms - self._checked_ms >= settings.heartbeat_interval_ms:
            known = self._owned.identity
            if await self._outside.cluster.describe(sorted(known.topics)) != known:
                raise RetryableError("a topic was created anew or changed its partition count: acquiring again")
            self._checked_ms = now_ms
        # Never past the table, and never read back as a position: the group's offsets are for observers.
        position = self._owned.positions.inputs[settings.events_topic].position
        if position != self._told_position and now_ms - self._told_ms >= settings.group_commit_interval_ms:
            self._told_ms = now_ms
            try:
                await self._outside.membership.commit(settings.partition, position)
                self._told_position = position
            except UnavailableError as error:
                self._log.info("group_not_told", position=position, reason=str(error))

    def _idle_ms(self) -> int:
        """How long to sleep: until the next timer or heartbeat, and never long, for clocks may step."""
        if self._fence.pending is not None:
            return IDLE_WAIT_MS_MAX
        heartbeat = self._written_ms + self._settings.heartbeat_interval_ms - self._outside.clock.monotonic_ms()
        wait_ms = min(IDLE_WAIT_MS_MAX, max(0, heartbeat))
        next_at_ms = self._owned.table.next_at_ms()
        if next_at_ms is not None and not self._status.clock_jumped_ms:
            wait_ms = min(wait_ms, max(0, next_at_ms - self._outside.clock.now_ms()))
        return wait_ms
