"""One due record through the handler: applied, skipped, set aside, or to be tried again later.

A record's way:

1. It can't be decoded: `dead-tasks` MALFORMED.
2. Its row is in the ledger, or in the batch in hand: a duplicate, skipped.
3. The handler returns: applied. The records that it produced join the transaction of its row.
4. The handler raises: tried again after a pause that doubles; at `attempts_max` it goes to `dead-tasks` HANDLER_FAILED,
   with a row FAILED. `UnavailableError` (what the handler needs is down) is tried again for ever: it says nothing
   against the task. `ConsumerStopError` stops the consumer and leaves the task for the next one.
"""

from collections.abc import Callable, Mapping
from enum import StrEnum
from hashlib import sha256
from typing import Final

import msgspec
import structlog

from pipeline.core.applied import AppliedTask, Outcome, ledger_digest, ledger_key, retry_delay_ms
from pipeline.core.effects import DeadTask, DueTask
from pipeline.core.events import RESERVED_HEADER_PREFIX, Origin, Reason
from pipeline.core.tasks import NO_HEADERS, DurationMs, InstantMs, Offset
from pipeline.errors import CorruptStateError, UnavailableError, UsageError
from pipeline.ports import Clock
from pipeline.service.consumer.ports import ConsumerCodec, DueRecord, KeyValue, Output

__all__ = [
    "OUTPUTS_MAX",
    "REPLAY_HEADER",
    "ConsumerStopError",
    "Handled",
    "Handler",
    "HandlingRules",
    "Result",
    "TaskContext",
    "TaskHandling",
]

log = structlog.get_logger(__name__)

OUTPUTS_MAX: Final = 1_000
REPLAY_HEADER: Final = f"{RESERVED_HEADER_PREFIX}replay"
_MESSAGE_CHARACTERS_MAX: Final = 1_000


class ConsumerStopError(Exception):
    """Raised by a handler: stop the consumer now, and leave this task to the next one, as if it had not been read."""


class TaskContext:
    """What a handler may know beside the task, and the way to send records in the task's own transaction.

    `attempt` counts the calls of the handler for this record in this process, from 1. `replay` says that an operator
    emitted the task again. `headers` are those of the record itself, `task.headers` those that upstream gave.
    """

    __slots__ = ("append_at_ms", "attempt", "group", "headers", "offset", "outputs", "partition", "replay", "topic")

    def __init__(self, *, group: str, topic: str, record: DueRecord, attempt: int) -> None:
        self.group = group
        self.topic = topic
        self.partition = record.partition
        self.offset = record.offset
        self.append_at_ms = record.append_at_ms
        self.headers = record.headers
        self.replay = REPLAY_HEADER in record.headers
        self.attempt = attempt
        self.outputs: list[Output] = []

    def produce(
        self, topic: str, key: bytes | None, value: bytes | None, *, headers: Mapping[str, bytes] = NO_HEADERS
    ) -> None:
        """Send a record if and only if this task becomes applied: both are one Kafka transaction, so exactly once.

        It goes to the partition that Java's partitioner takes for `key`. Raises `UsageError` after 1,000 records.
        """
        if len(self.outputs) >= OUTPUTS_MAX:
            raise UsageError(f"A handler may produce {OUTPUTS_MAX} records for one task: spread the work over tasks.")
        self.outputs.append(Output(topic=topic, key=key, value=value, headers=headers))


Handler = Callable[[DueTask, TaskContext], object]


class HandlingRules(msgspec.Struct, frozen=True, kw_only=True):
    """How often a raising handler is called, and how long is waited between two calls."""

    group: str
    topic: str
    attempts_max: int = 5
    backoff_ms: DurationMs = DurationMs(200)
    backoff_max_ms: DurationMs = DurationMs(30_000)


class Result(StrEnum):
    """What became of a due record."""

    APPLIED = "APPLIED"
    DUPLICATE = "DUPLICATE"
    FAILED = "FAILED"
    MALFORMED = "MALFORMED"


class Handled(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One record that is done with but for the commit, and what the commit must write for it."""

    result: Result
    record: DueRecord
    task: DueTask | None = None
    digest: bytes | None = None
    row: tuple[bytes, bytes] | None = None
    dead: KeyValue | None = None
    outputs: tuple[Output, ...] = ()
    is_cut: bool = False

    @property
    def next_offset(self) -> Offset:
        """Where the group goes on after this record."""
        return Offset(self.record.offset + 1)


class TaskHandling:
    """Takes the records of one partition through the handler, in order; remembers how often the first one failed."""

    def __init__(self, *, handler: Handler, rules: HandlingRules, codec: ConsumerCodec, clock: Clock) -> None:
        self._handler = handler
        self._rules = rules
        self._codec = codec
        self._clock = clock
        self._calls = 0
        self._failures = 0
        self._retry_at_ms = 0

    @property
    def retry_in_ms(self) -> int:
        """How long the record in hand still has to wait; 0 if it may be tried."""
        return max(0, self._retry_at_ms - self._clock.monotonic_ms()) if self._calls else 0

    def handle(self, record: DueRecord, is_known: Callable[[bytes], bool]) -> Handled | None:
        """The record done with, or None if it must be tried again after `retry_in_ms`.

        `is_known` answers for the ledger and the batch in hand. Raises `ConsumerStopError` if the handler does.
        """
        try:
            task = self._codec.decode_due(record.value or b"")
        except CorruptStateError as error:
            return self._malformed(record, str(error))
        key = ledger_key(self._rules.group, task)
        digest = ledger_digest(key)
        if is_known(digest):
            return Handled(result=Result.DUPLICATE, record=record, task=task)
        context = TaskContext(group=self._rules.group, topic=self._rules.topic, record=record, attempt=self._calls + 1)
        failure = self._call(task, context)
        if failure is None:
            handled = Handled(
                result=Result.APPLIED,
                record=record,
                task=task,
                digest=digest,
                row=(key, self._row(task, record, Outcome.APPLIED)),
                outputs=tuple(context.outputs),
            )
        elif self._failures >= self._rules.attempts_max:
            handled = self.failed(record, task, f"{type(failure).__name__}: {failure}")
        else:
            return None
        self._calls = self._failures = 0
        return handled

    def failed(self, record: DueRecord, task: DueTask, why: str) -> Handled:
        """A task given up: on `dead-tasks` with the sentence `why`, its row FAILED, so that no replay applies it."""
        key = ledger_key(self._rules.group, task)
        return Handled(
            result=Result.FAILED,
            record=record,
            task=task,
            digest=ledger_digest(key),
            row=(key, self._row(task, record, Outcome.FAILED)),
            dead=self._dead(record, Reason.HANDLER_FAILED, why, task),
        )

    def cut(self, handled: Handled) -> Handled:
        """The same dead record with only size and hash of its value, for a topic that refuses it as too large."""
        reason = Reason.MALFORMED if handled.task is None else Reason.HANDLER_FAILED
        why = "the record is too large for dead-tasks: read its value where it came from"
        dead = self._dead(handled.record, reason, why, handled.task, with_value=False)
        return msgspec.structs.replace(handled, dead=dead, is_cut=True)

    def _call(self, task: DueTask, context: TaskContext) -> Exception | None:
        self._calls += 1
        try:
            self._handler(task, context)
        except ConsumerStopError:
            raise
        except Exception as error:  # noqa: BLE001  # whatever user code raises is this task's failure
            counted = not isinstance(error, UnavailableError)
            self._failures += counted
            delay_ms = retry_delay_ms(self._calls, first_ms=self._rules.backoff_ms, max_ms=self._rules.backoff_max_ms)
            self._retry_at_ms = self._clock.monotonic_ms() + delay_ms
            log.warning(
                "handler_failed",
                task_id=task.task_id,
                emission_id=task.emission_id,
                partition=context.partition,
                offset=context.offset,
                attempt=self._calls,
                attempts_left=self._rules.attempts_max - self._failures,
                error=f"{type(error).__name__}: {error}",
            )
            return error
        return None

    def _malformed(self, record: DueRecord, why: str) -> Handled:
        log.warning("due_record_malformed", partition=record.partition, offset=record.offset, error=why)
        return Handled(result=Result.MALFORMED, record=record, dead=self._dead(record, Reason.MALFORMED, why, None))

    def _row(self, task: DueTask, record: DueRecord, outcome: Outcome) -> bytes:
        return self._codec.encode_applied(
            AppliedTask(
                group=self._rules.group,
                task_id=task.task_id,
                generation=task.generation,
                occurrence=task.occurrence,
                attempt=task.attempt,
                due_partition=record.partition,
                due_offset=record.offset,
                applied_at_ms=self._clock.now_ms(),
                outcome=outcome,
            )
        )

    def _dead(
        self, record: DueRecord, reason: Reason, why: str, task: DueTask | None, *, with_value: bool = True
    ) -> KeyValue:
        value = record.value
        kept = value if with_value else None
        dead = DeadTask(
            reason=reason,
            message=f"group {self._rules.group}: {why[:_MESSAGE_CHARACTERS_MAX]}",
            origin=Origin(
                topic=self._rules.topic,
                partition=record.partition,
                offset=record.offset,
                append_at_ms=InstantMs(record.append_at_ms),
            ),
            key=record.key,
            value=kept,
            value_size=len(value) if value is not None else -1,
            value_sha256=sha256(value).digest() if value is not None and kept is None else b"",
            task_id=task.task_id if task is not None else "",
            generation=task.generation if task is not None else 0,
            dead_at_ms=self._clock.now_ms(),
        )
        return record.key, self._codec.encode_dead(dead)
