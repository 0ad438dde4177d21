"""The ledger of a consumer group on Kafka: rows, dead tasks, outputs and offsets, one transaction a batch.

`transactional.id` is derived from the ledger's own topic id, the group and the partition: whoever acquires a partition
fences everybody who had it, whatever they are called.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NoReturn, Protocol

import structlog
from confluent_kafka import KafkaError, KafkaException, Producer, TopicPartition

from pipeline.adapters.bounded_call import bounded
from pipeline.adapters.hanging_transactions import abort_hanging
from pipeline.core.tasks import Offset
from pipeline.errors import (
    DuetasksError,
    FencedError,
    PoisonedBatchError,
    RefusedError,
    RetryableError,
    UnavailableError,
    UnknownOutcomeError,
)
from pipeline.service.consumer.ports import LedgerBatch

__all__ = ["GroupView", "KafkaLedgerTransaction", "KafkaLedgerTransactions", "LibrdkafkaLog", "translated"]

log = structlog.get_logger(__name__)

_FENCED: Final = frozenset(
    {KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH}  # noqa: SLF001  # public codes
)
_POISON: Final = frozenset(
    {
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.RECORD_LIST_TOO_LARGE,
        KafkaError.INVALID_RECORD,
        KafkaError.INVALID_MSG,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.TOPIC_EXCEPTION,
        KafkaError._UNKNOWN_TOPIC,  # noqa: SLF001  # a public code
        KafkaError._UNKNOWN_PARTITION,  # noqa: SLF001  # a public code
    }
)
_FORBIDDEN: Final = frozenset(
    {
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    }
)
_ABSENT: Final = frozenset({KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC})  # noqa: SLF001  # codes


@contextmanager
def translated(what: str) -> Iterator[None]:
    """What librdkafka raises within becomes one of our errors; `what` completes "could not ..."."""
    try:
        yield
    except KafkaException as error:
        raise _translate(error, what) from error


def _translate(error: KafkaException, what: str) -> DuetasksError:
    cause: KafkaError = error.args[0]
    message = f"Could not {what}: {cause.str()}"
    if cause.code() in _FENCED:
        return FencedError(f"{message}. Somebody else owns the partition now.")
    if cause.code() in _FORBIDDEN:
        return RefusedError(f"{message}. Ask for the permission, see the consumer's how-to.")
    if cause.code() in _ABSENT:
        # Brokers that have just started, or not heard of a new topic yet, say so too: it may pass.
        return UnavailableError(f"{message}. If it stays so, create the topics with `duetasks topics apply`.")
    return UnavailableError(f"{message}. Check that the brokers can be reached.")


class GroupView(Protocol):
    """What a transaction asks about its group and its topics; `DueSubscription` answers."""

    def group_metadata(self) -> object:
        """The present generation, for `send_offsets_to_transaction`."""
        ...

    def stable_end(self, topic: str, partition: int) -> Offset:
        """Below it no transaction is open; raises `UnavailableError`."""
        ...

    def is_open(self, topic: str, partition: int) -> bool:
        """Whether a transaction is open there; raises `UnavailableError`."""
        ...

    def has_pending_offset(self, partition: int) -> bool:
        """Whether a transaction may still change the group's offset; raises `UnavailableError`."""
        ...


class KafkaLedgerTransaction:
    """One partition's transactional producer; after `FencedError` or `UnknownOutcomeError` it is of no more use."""

    def __init__(
        self,
        producer: Any,  # noqa: ANN401  # librdkafka's, untyped
        *,
        partition: int,
        due_topic: str,
        ledger_topic: str,
        dead_topic: str,
        group: GroupView,
        timeout_ms: int,
    ) -> None:
        self._producer = producer
        self._partition = partition
        self._due = due_topic
        self._ledger = ledger_topic
        self._dead = dead_topic
        self._group = group
        self._timeout_ms = timeout_ms
        self._settled: set[tuple[str, int]] = set()

    def acquire(self) -> None:
        """Fence every earlier owner and settle its open transaction; raises `FencedError`, `UnavailableError`."""
        with translated(f"acquire the ledger of partition {self._partition}"):
            self._producer.init_transactions(self._timeout_ms / 1000)
            self._end_hanging()

    def commit(self, batch: LedgerBatch) -> Sequence[Offset]:
        """Rows, dead tasks, outputs and the group's offset: all or nothing. Returns the offsets of the rows.

        Raises `PoisonedBatchError` (aborted; fewer records may do), `RetryableError` (aborted cleanly), `FencedError`,
        `UnknownOutcomeError` (it may have committed: forget everything and acquire again).
        """
        deadline_s = time.monotonic() + self._timeout_ms / 1000
        try:
            report = self._fill(batch, deadline_s)
            if self._stands_behind_open(report):
                # Perhaps what an earlier owner gave up, and our commit would commit: an abort ends it. If it is some
                # other producer's, the abort costs a round.
                self._producer.abort_transaction(_left_s(deadline_s))
                report = self._fill(batch, deadline_s)
            self._send_offset(batch.position, deadline_s)
        except (KafkaException, BufferError, RuntimeError, UnavailableError) as error:
            self._give_up(error)
        except SystemError as error:
            # confluent-kafka raises a fatal error (fenced) while it serves reports: with the next report already on its
            # way that comes out as a SystemError, with or without a cause. Aborting tells which it was.
            self._give_up(error.__cause__ if isinstance(error.__cause__, KafkaException) else error)
        self._end(deadline_s)
        assert all(offset >= 0 for offset in report.offsets), f"a committed row without offset: {report.offsets}"
        return report.offsets

    def close(self) -> None:
        """Let go without waiting: a transaction that is open is settled by the next owner, or by its time-out."""
        self._producer.purge(in_queue=True, in_flight=True, blocking=False)

    # -- steps -------------------------------------------------------------------------------------------------------

    def _end_hanging(self) -> None:
        """End what an earlier owner's transaction left open, where the restore and the group would wait for it."""
        is_pending = self._group.has_pending_offset(self._partition)
        if is_pending or self._group.is_open(self._ledger, self._partition):
            # The offset is aborted, whichever it is.
            offsets = [TopicPartition(self._due, self._partition, 0)], self._group.group_metadata()
            timeout_s = self._timeout_ms / 1000
            bounded(
                lambda: abort_hanging(
                    self._producer, [self._ledger], partition=self._partition, timeout_s=timeout_s, offsets=offsets
                ),
                3 * timeout_s,  # it flushes, sends and aborts
                f"end what hangs on partition {self._partition}",
            )
        self._settled.add((self._ledger, self._partition))

    def _fill(self, batch: LedgerBatch, deadline_s: float) -> "_Report":
        report = _Report(len(batch.rows))
        self._producer.begin_transaction()
        self._produce(batch, report)
        self._flush(report, deadline_s)
        return report

    def _send_offset(self, position: Offset, deadline_s: float) -> None:
        """Add the group's offset; bounded, for librdkafka (2.16) may wait for ever for a coordinator that is gone."""
        place, metadata = TopicPartition(self._due, self._partition, position), self._group.group_metadata()
        left_s = _left_s(deadline_s)
        bounded(
            lambda: self._producer.send_offsets_to_transaction([place], metadata, left_s),
            left_s,
            f"add the offset of partition {self._partition} to its transaction",
        )

    def _stands_behind_open(self, report: "_Report") -> bool:
        """Whether something was open where we now write for the first time: dead tasks and outputs."""
        fresh = report.first_offsets.keys() - self._settled
        self._settled |= fresh
        return any(self._group.stable_end(*place) < report.first_offsets[place] for place in fresh)

    def _produce(self, batch: LedgerBatch, report: "_Report") -> None:
        produce = self._producer.produce
        for number, (key, value) in enumerate(batch.rows):
            produce(self._ledger, value, key, self._partition, on_delivery=report.row(number))
        for dead_key, dead_value in batch.dead:
            produce(self._dead, dead_value, dead_key, self._partition, on_delivery=report.other)
        for output in batch.outputs:
            headers = list(output.headers.items()) or None
            produce(output.topic, output.value, output.key, on_delivery=report.other, headers=headers)

    def _flush(self, report: "_Report", deadline_s: float) -> None:
        """Wait until each record is answered for; the commit itself would leave the reports to another thread."""
        if self._producer.flush(_left_s(deadline_s)):
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "the records did not arrive in time"))  # noqa: SLF001  # a public code
        if report.error is not None:
            raise KafkaException(report.error)

    def _give_up(self, error: Exception) -> NoReturn:
        """Abort and raise what the caller should do; an abort that fails leaves nothing committed either."""
        cause = error.args[0] if isinstance(error, KafkaException) else None
        code = cause.code() if cause is not None else None
        message = f"The ledger transaction of partition {self._partition} failed: {cause.str() if cause else error}"
        if code in _FENCED or (cause is not None and cause.fatal()):
            raise FencedError(message) from error
        try:
            self._producer.abort_transaction(self._timeout_ms / 1000)
        except KafkaException as abort_error:
            # Nothing was committed, yet this producer can't be used again.
            raise FencedError(f"{message}, and aborting it too: {abort_error.args[0].str()}") from error
        if code in _POISON:
            raise PoisonedBatchError(message) from error
        raise RetryableError(message) from error

    def _end(self, deadline_s: float) -> None:
        while True:
            try:
                self._producer.commit_transaction(_left_s(deadline_s))
            except KafkaException as error:
                cause: KafkaError = error.args[0]
                if cause.code() in _FENCED or cause.fatal():
                    # The coordinator may have written the commit before another owner came.
                    raise UnknownOutcomeError(f"Fenced while committing partition {self._partition}") from error
                if cause.txn_requires_abort():
                    self._give_up(error)
                if cause.retriable() and time.monotonic() < deadline_s:
                    continue
                message = f"The commit of partition {self._partition} has no known outcome: {cause.str()}"
                raise UnknownOutcomeError(message) from error
            else:
                return


class LibrdkafkaLog:
    """librdkafka's own log lines, as debug events: what matters comes back as an error."""

    def log(self, _level: int, message: str, *args: object) -> None:
        """Called by confluent-kafka."""
        if not structlog.is_configured():
            return  # an application that does not use structlog would find them on its standard output
        log.debug("librdkafka", message=message % args if args else message)


class _Report:
    """What the brokers say of each record of a transaction."""

    def __init__(self, rows: int) -> None:
        self.offsets = [Offset(-1)] * rows
        self.first_offsets: dict[tuple[str, int], int] = {}
        self.error: KafkaError | None = None

    def row(self, number: int) -> Callable[[KafkaError | None, Any], None]:
        """Notes where the row `number` stands."""

        def delivered(error: KafkaError | None, message: Any) -> None:  # noqa: ANN401  # librdkafka's
            self.other(error, message)
            if error is None and message.offset() is not None:
                self.offsets[number] = Offset(message.offset())

        return delivered

    def other(self, error: KafkaError | None, message: Any) -> None:  # noqa: ANN401  # librdkafka's
        """Notes where it stands, or the first error; a purge that follows it is not the cause."""
        offset = message.offset()
        if error is None and offset is None:
            # "I had that already", after a leader change. Without the place, the transaction is better begun anew.
            error = KafkaError(KafkaError.OFFSET_NOT_AVAILABLE, "the broker did not tell where a record stands")
        elif error is None:
            place = (message.topic(), message.partition())
            self.first_offsets[place] = min(offset, self.first_offsets.get(place, offset))
        purged = {KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT}  # noqa: SLF001  # public codes
        if error is not None and (self.error is None or self.error.code() in purged):
            self.error = error


class KafkaLedgerTransactions:
    """Makes the producers; `ledger_topic_id` is asked each time, as the topic may have been created anew."""

    def __init__(
        self,
        *,
        client: Mapping[str, str],
        group: str,
        due_topic: str,
        ledger_topic: str,
        dead_topic: str,
        ledger_topic_id: Callable[[], str],
        group_view: GroupView,
        transaction_timeout_ms: int,
    ) -> None:
        self._client = dict(client)
        self._group = group
        self._due = due_topic
        self._ledger = ledger_topic
        self._dead = dead_topic
        self._ledger_topic_id = ledger_topic_id
        self._group_view = group_view
        self._timeout_ms = transaction_timeout_ms

    def open(self, partition: int) -> KafkaLedgerTransaction:
        """A new producer, not acquired yet; raises `NotFoundError`, `UnavailableError`."""
        topic_id = self._ledger_topic_id()
        with translated(f"create the producer of partition {partition}"):
            producer = Producer(
                {
                    **self._client,
                    "transactional.id": f"duetasks-ledger-{topic_id}-{self._group}-{partition}",
                    "transaction.timeout.ms": self._timeout_ms,
                    "message.timeout.ms": self._timeout_ms,  # no record may outlive its transaction
                    "enable.idempotence": True,
                    "acks": "all",
                    "linger.ms": 5,  # a batch is produced at once and flushed: the wait only costs latency
                    "compression.type": "lz4",
                    "partitioner": "murmur2_random",  # outputs go where Java's clients look for their keys
                    "message.max.bytes": 67_108_864,  # the topics decide what is too large, not this client
                    "queue.buffering.max.messages": 1_000_000,
                    "allow.auto.create.topics": False,
                    "topic.metadata.propagation.max.ms": 3_000,  # an output to a topic that isn't there fails in time
                    "logger": LibrdkafkaLog(),
                }
            )
        return KafkaLedgerTransaction(
            producer,
            partition=partition,
            due_topic=self._due,
            ledger_topic=self._ledger,
            dead_topic=self._dead,
            group=self._group_view,
            timeout_ms=self._timeout_ms,
        )


def _left_s(deadline_s: float) -> float:
    return max(0.1, deadline_s - time.monotonic())
