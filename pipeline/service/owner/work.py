"""One transaction's worth of work: inputs applied, timers fired, records to send, rows to write."""

from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import Final

import msgspec
import structlog

from pipeline.core.effects import DeadTask, DueTask, Evidence, due_task, emission_id
from pipeline.core.events import Event, Origin, Reason, Rejection
from pipeline.core.firing import plan_due
from pipeline.core.lifecycle import Transition, apply_event, apply_rejection, mark_dead, mark_emitted, mark_purged
from pipeline.core.partitioning import keys_of_other_partitions
from pipeline.core.positions import InputPosition, generation_of
from pipeline.core.tasks import IndexEntry, IndexKind, InstantMs, Offset, TaskId, TaskState, Verdict
from pipeline.ports import Codec, InputRecord, TimerTable
from pipeline.service.admission import stray_rejection
from pipeline.service.owner.fence import FENCE_KEY, FenceReading
from pipeline.service.owner.overlay import Overlay, RecentRows
from pipeline.service.owner.settings import OwnerSettings
from pipeline.service.owner.targets import UNKNOWN_OFFSET

__all__ = ["Admit", "Outgoing", "Quarantine", "Work"]

log = structlog.get_logger(__name__)

DEAD_KEY_BYTES_MAX: Final = 8_192
DEAD_ENVELOPE_BYTES: Final = 2_048
"""What a dead record needs besides key and value: reason, message, origin."""
LOADED_AT_ONCE: Final = 64
"""Rows that are read before their sizes are known: tasks may have a megabyte each."""

Admit = Callable[[InputRecord], Event | Rejection]
"""Decodes a record and checks it against the rules; never raises on bad input."""


class Outgoing(msgspec.Struct, frozen=True, gc=False):
    """A record to send to the owner's partition of a topic."""

    topic: str
    key: bytes | None
    value: bytes | None
    headers: Mapping[str, bytes] | None = None


class Quarantine(msgspec.Struct, kw_only=True):
    """What the broker refused when it was tried alone: it is set aside at the next attempt. Bounded by its use: one.

    `with_value`: whether its bytes are set aside too; if even those are refused, a hash has to do.
    """

    offset: Offset | None = None
    task_id: TaskId | None = None
    message: str = ""
    with_value: bool = True


class Work:
    """Collects one transaction. Nothing outside is touched until the owner commits it."""

    def __init__(
        self,
        *,
        settings: OwnerSettings,
        codec: Codec,
        table: TimerTable,
        recent: RecentRows,
        place: InputPosition,
        partition_count: int,
        quarantine: Quarantine,
        now_ms: InstantMs,
    ) -> None:
        self._settings = settings
        self._codec = codec
        self._table = table
        self._place = place
        self._partition_count = partition_count
        self._quarantine = quarantine
        self._now_ms = now_ms
        self.overlay = Overlay(table, codec, recent)
        self.emissions: list[Outgoing] = []
        self.refusals: list[Outgoing] = []
        self.passing: list[tuple[Offset, Verdict, str]] = []
        """Verdicts that leave no row: kept in memory for who waits for them."""
        self.applied = 0
        self.fired = 0
        self.purged = 0
        self.buried = 0
        self.quarantined = False
        self.lateness_ms_max = 0
        self._emitted_bytes = 0

    # -- inputs ------------------------------------------------------------------------------------------------

    def apply(self, records: Sequence[InputRecord], admit: Admit) -> None:
        """Apply input records in order; what breaks a rule is set aside with its reason and delays nothing."""
        admitted = self._admit_all(records, admit)
        self.overlay.load([event.task_id for event in admitted if event is not None and event.task_id is not None])
        strays = self._stray_keys(records, admitted)
        for record, event in zip(records, admitted, strict=True):
            if event is None:
                continue
            if isinstance(event, Rejection):
                self._refuse(record, event)
            elif record.key in strays:
                self._refuse(record, stray_rejection(event, self._settings.partition, self._partition_count))
            else:
                self._apply_one(record, event)
        self.applied += len(records)

    def _admit_all(self, records: Sequence[InputRecord], admit: Admit) -> list[Event | Rejection | None]:
        """What each record says; None for those that only mark a place in the log."""
        quarantined = self._quarantine.offset
        admitted: list[Event | Rejection | None] = []
        for record in records:
            if record.key == FENCE_KEY:
                admitted.append(None)
            elif record.offset == quarantined:
                self.quarantined = True
                admitted.append(Rejection(reason=Reason.UNDELIVERABLE, message=self._quarantine.message))
            else:
                try:
                    admitted.append(admit(record))
                except Exception:  # noqa: BLE001  # whatever a record makes the decoder do, the next ones must go on
                    admitted.append(self._admit_again(record, admit))
        return admitted

    def _admit_again(self, record: InputRecord, admit: Admit) -> Event | Rejection:
        try:
            return admit(record)
        except Exception as error:
            log.exception("decoding_raised", partition=self._settings.partition, offset=record.offset)
            return Rejection(reason=Reason.INTERNAL_ERROR, message=f"decoding raised {error!r}")

    def _stray_keys(
        self, records: Sequence[InputRecord], admitted: Sequence[Event | Rejection | None]
    ) -> frozenset[bytes]:
        """Keys that do not belong here; of a task that has a row that was found out before."""
        is_new = self.overlay.is_new
        new = []
        for record, event in zip(records, admitted, strict=True):
            if event is not None and not isinstance(event, Rejection) and is_new(event.task_id):
                assert record.key is not None, "admission lets no event without a key pass"
                new.append(record.key)
        return keys_of_other_partitions(new, self._settings.partition, self._partition_count)

    def _apply_one(self, record: InputRecord, event: Event) -> None:
        before = self.overlay.get(event.task_id)
        try:
            result = self._transition(before, event, record)
        except Exception:  # noqa: BLE001  # a bug met by one event must not stop the others; it is tried once more alone
            try:
                result = self._transition(before, event, record)
            except Exception as error:
                log.exception("core_raised", partition=self._settings.partition, offset=record.offset)
                self._refuse(record, Rejection(reason=Reason.INTERNAL_ERROR, message=f"applying raised {error!r}"))
                return
        after = result.state
        if after is not before:
            self.overlay.put(event.task_id, after)
        if after is None or result.verdict is Verdict.DUPLICATE:
            self.passing.append((Offset(record.offset), result.verdict, ""))

    def _transition(self, before: TaskState | None, event: Event, record: InputRecord) -> Transition:
        origin = self._origin(record)
        generation = generation_of(self._place, origin.offset)
        return apply_event(before, event, origin, generation=generation, retention_ms=self._settings.retention_ms)

    def _refuse(self, record: InputRecord, rejection: Rejection) -> None:
        """Set an event aside: a dead record, and the verdict in the task's row where it has one."""
        key, value = record.key, record.value
        self._set_aside(rejection.reason, rejection.message, self._origin(record), key, value, rejection.task_id or "")
        if rejection.task_id is not None:
            before = self.overlay.get(rejection.task_id)
            after = apply_rejection(before, rejection, self._origin(record), retention_ms=self._settings.retention_ms)
            if after is not None:
                self.overlay.put(rejection.task_id, after)
                return
        self.passing.append((Offset(record.offset), Verdict.REJECTED, rejection.reason))

    def _origin(self, record: InputRecord) -> Origin:
        return Origin(
            topic=self._settings.events_topic,
            partition=self._settings.partition,
            offset=Offset(record.offset),
            append_at_ms=InstantMs(record.timestamp),
        )

    def _set_aside(
        self,
        reason: Reason,
        message: str,
        origin: Origin,
        key: bytes | None,
        value: bytes | None,
        task_id: str,
        generation: int = 0,
    ) -> None:
        size = 0 if value is None else len(value)
        if key is not None and len(key) > DEAD_KEY_BYTES_MAX:
            message = f"{message} (its key of {len(key)} bytes is not kept)"
            key = None
        room = self._settings.emit_bytes_max - DEAD_ENVELOPE_BYTES - 2 * len(key or b"")
        refused_before = reason is Reason.UNDELIVERABLE and not self._quarantine.with_value
        keep = value is not None and size <= room and not refused_before
        dead = DeadTask(
            reason=reason,
            message=message,
            origin=origin,
            key=key,
            value=value if keep else None,
            value_size=-1 if value is None else size,
            value_sha256=b"" if value is None or keep else sha256(value).digest(),
            task_id=task_id,
            generation=generation,
            dead_at_ms=self._now_ms,
        )
        self.refusals.append(Outgoing(self._settings.dead_topic, key, self._codec.encode_dead(dead)))

    # -- timers ------------------------------------------------------------------------------------------------

    def fire(self, reading: FenceReading, position: Offset, next_offsets: Mapping[str, Offset], limit: int) -> bool:
        """Fire what is due at the reading's clock, earliest first, at most `limit` and about `batch_bytes_max` bytes.

        Returns whether that was all of it.

        `next_offsets`: where the next record of each target topic will stand; an absent topic can't be emitted to.
        """
        changed = self.overlay.changed
        indexed = self._table.due(reading.clock_ms, limit + 1 + len(changed))
        planned = plan_due(indexed, changed, reading.clock_ms, limit + 1)
        offsets = dict(next_offsets)
        evidence = Evidence(
            fence_clock_ms=reading.clock_ms,
            fence_offset=reading.target,
            applied_offset=position,
            generation_base=self._place.generation_base,
        )
        for start in range(0, min(limit, len(planned)), LOADED_AT_ONCE):
            entries = planned[start : min(start + LOADED_AT_ONCE, limit)]
            self.overlay.load(entry.task_id for entry in entries)
            for entry in entries:
                self._fire_one(entry, evidence, offsets)
            if self._emitted_bytes >= self._settings.batch_bytes_max:
                return start + len(entries) == len(planned)
        return len(planned) <= limit

    def _fire_one(self, entry: IndexEntry, evidence: Evidence, offsets: dict[str, Offset]) -> None:
        state = self.overlay.get(entry.task_id)
        assert state is not None, f"an index entry without a row: {entry}"
        if entry.kind is IndexKind.PURGE:
            mark_purged(state, now_ms=evidence.fence_clock_ms)
            self.overlay.put(entry.task_id, None)
            self.purged += 1
        else:
            self._emit(state, evidence, offsets)

    def _emit(self, state: TaskState, evidence: Evidence, offsets: dict[str, Offset]) -> None:
        settings = self._settings
        topic = settings.target(state.target_topic)
        task = due_task(state, settings.partition, evidence)
        value = self._codec.encode_due(task)
        self._emitted_bytes += len(value)
        fault = self._undeliverable(state, topic, value, offsets)
        if fault:
            self._bury(state, task, value, fault)
            return
        at = offsets[topic]
        offsets[topic] = at if at == UNKNOWN_OFFSET else Offset(at + 1)
        self.emissions.append(Outgoing(topic, state.task_id.encode(), value, state.headers or None))
        after = mark_emitted(
            state, fired_at_ms=evidence.fence_clock_ms, emitted_offset=at, retention_ms=settings.retention_ms
        )
        self.overlay.put(state.task_id, after)
        self.fired += 1
        self.lateness_ms_max = max(self.lateness_ms_max, evidence.fence_clock_ms - state.due_at_ms)

    def _undeliverable(self, state: TaskState, topic: str, value: bytes, offsets: Mapping[str, Offset]) -> str:
        if state.task_id == self._quarantine.task_id:
            return self._quarantine.message
        if topic not in offsets:
            return f"topic {topic!r} does not exist, or has no partition {self._settings.partition}"
        if len(value) > self._settings.emit_bytes_max:
            return f"the due task has {len(value)} bytes, the topic takes {self._settings.emit_bytes_max}"
        return ""

    def _bury(self, state: TaskState, task: DueTask, value: bytes, message: str) -> None:
        """A due task that can't be emitted goes to `dead-tasks`, and never blocks the ones behind it."""
        origin = Origin(
            topic=self._settings.events_topic,
            partition=self._settings.partition,
            offset=task.scheduled_offset,
            append_at_ms=state.changed_at_ms,
        )
        name = emission_id(state, self._settings.partition)
        self.buried += 1
        self.quarantined = self.quarantined or state.task_id == self._quarantine.task_id
        log.error("task_undeliverable", partition=self._settings.partition, emission_id=name, reason=message)
        self._set_aside(
            Reason.UNDELIVERABLE, message, origin, state.task_id.encode(), value, state.task_id, state.generation
        )
        after = mark_dead(state, now_ms=task.fired_at_ms, retention_ms=self._settings.retention_ms)
        self.overlay.put(state.task_id, after)
