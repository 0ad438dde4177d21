"""The transactional producer of one partition, on librdkafka."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from threading import Lock
from typing import Final, TypeVar

import structlog
from confluent_kafka import KafkaError, KafkaException, Message, Producer

from pipeline.adapters.hanging_transactions import abort_hanging
from pipeline.core.tasks import Offset
from pipeline.errors import FencedError, PoisonedBatchError, RetryableError, UnavailableError, UnknownOutcomeError
from pipeline.ports import Commit, OffsetsMovedError

__all__ = ["KafkaTransaction", "producer_config"]

log = structlog.get_logger(__name__)

Result = TypeVar("Result")

_POISON: Final = frozenset(
    {
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.RECORD_LIST_TOO_LARGE,
        KafkaError.INVALID_MSG,
        KafkaError.INVALID_MSG_SIZE,
        KafkaError.INVALID_RECORD,
        KafkaError.INVALID_TIMESTAMP,
        KafkaError.POLICY_VIOLATION,
    }
)
"""What a broker says of a record that it will never take; anything else says something of the broker."""
_TOPIC_FAULTS: Final = frozenset(
    {
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.TOPIC_EXCEPTION,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._UNKNOWN_PARTITION,  # noqa: SLF001  # librdkafka's local codes are named so
        KafkaError._UNKNOWN_TOPIC,  # noqa: SLF001  # the same
    }
)
"""What it says of a topic: of a task's own target that is the task's fault, of our topics it is nobody's."""
_FENCED: Final = frozenset(
    {
        KafkaError._FENCED,  # noqa: SLF001  # the same
        KafkaError.INVALID_PRODUCER_EPOCH,
        KafkaError.INVALID_PRODUCER_ID_MAPPING,
        KafkaError.PRODUCER_FENCED,
        KafkaError.TRANSACTION_COORDINATOR_FENCED,
        KafkaError.UNKNOWN_PRODUCER_ID,
    }
)
_CAUSED_BY_ANOTHER: Final = frozenset(
    {
        KafkaError._PURGE_QUEUE,  # noqa: SLF001  # the same
        KafkaError._PURGE_INFLIGHT,  # noqa: SLF001  # the same
    }
)
"""What a record is told that went down with the transaction of another."""
LOCAL_BYTES_MAX: Final = 1_000_000_000


def producer_config(client: Mapping[str, str], transactional_id: str, transaction_timeout_ms: int) -> dict[str, object]:
    """The options of an owner's producer, each with its reason."""
    return {
        **client,
        "transactional.id": transactional_id,  # fences every earlier owner
        "transaction.timeout.ms": transaction_timeout_ms,  # how long a frozen owner can hold readers back
        "acks": "all",  # a record counts when the in-sync replicas have it
        "enable.idempotence": True,  # no record twice, none out of order
        "linger.ms": 0,  # a commit flushes anyway; lingering only adds to lateness (measured: 15 ms against 6)
        "compression.type": "lz4",  # cheap for both sides
        "batch.num.messages": 10_000,
        "batch.size": 1_000_000,
        "queue.buffering.max.messages": 1_000_000,  # one transaction is bounded by the owner, far below
        "queue.buffering.max.kbytes": 1_048_576,
        "message.max.bytes": LOCAL_BYTES_MAX,  # the topic decides what is too large
        "delivery.timeout.ms": transaction_timeout_ms,  # later than that the transaction is over anyway
    }


class KafkaTransaction:
    """Implements the `Transaction` port; blocking calls run in `executor`, one at a time.

    `is_open` tells whether a transaction is open on the owner's partition of a topic.
    """

    def __init__(
        self,
        client: Mapping[str, str],
        *,
        transactional_id: str,
        partition: int,
        state_topic: str,
        own_topics: frozenset[str],
        transaction_timeout_ms: int,
        executor: Executor,
        is_open: Callable[[str], Awaitable[bool]],
    ) -> None:
        self._producer = Producer(
            {**producer_config(client, transactional_id, transaction_timeout_ms), "logger": _QuietLogger()}
        )
        self._transactional_id = transactional_id
        self._partition = partition
        self._state_topic = state_topic
        self._own_topics = own_topics
        self._timeout_s = transaction_timeout_ms / 1000
        self._executor = executor
        self._is_open = is_open
        self._one_call = Lock()  # a cancelled call goes on in its thread
        self._careful = False
        self._poison: set[str] = set()
        self._other_faults: set[str] = set()
        self._last_offsets: dict[str, Offset] = {}
        self._moved = False
        self._unplaced = False
        self._last_state_offset: Offset | None = None

    async def acquire(self) -> None:
        """Fence every earlier owner and settle its open transaction."""
        try:
            await self._run(lambda: self._producer.init_transactions(2 * self._timeout_s))
        except KafkaException as error:
            raise _translate(error, f"acquiring {self._transactional_id}") from error
        await self._end_hanging()

    async def _end_hanging(self) -> None:
        """End what an earlier owner's transaction left open: see `hanging_transactions`."""
        hanging = [topic for topic in sorted(self._own_topics) if await self._is_open(topic)]
        if not hanging:
            return
        try:
            await self._run(
                lambda: abort_hanging(self._producer, hanging, partition=self._partition, timeout_s=self._timeout_s)
            )
        except KafkaException as error:
            raise _translate(error, "ending a hanging transaction", unknown=True) from error

    def begin(self) -> None:
        """Open a transaction."""
        self._poison.clear()
        self._other_faults.clear()
        self._last_offsets = {}
        self._moved = False
        self._unplaced = False
        self._last_state_offset = None
        try:
            self._producer.begin_transaction()
        except KafkaException as error:
            raise _translate(error, "beginning a transaction") from error

    def produce(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        headers: Mapping[str, bytes] | None = None,
        *,
        expected: Offset | None = None,
    ) -> None:
        """Add a record for the owner's partition of `topic`."""

        def report(error: KafkaError | None, message: Message) -> None:
            self._note_offset(error, message, expected)

        self._produce(topic, key, value, headers, report)

    def produce_last(self, key: bytes, value: bytes) -> None:
        """Add the transaction's last record, to `task-state`; its offset is learned."""
        self._produce(self._state_topic, key, value, None, self._note_last)

    def produce_many(self, topic: str, records: Sequence[tuple[bytes | None, bytes | None]]) -> None:
        """Add records without headers, cheaper than one by one."""
        batch = [{"key": key, "value": value} for key, value in records]
        report = self._note_refusal if self._careful else None
        try:
            queued = self._producer.produce_batch(topic, batch, partition=self._partition, on_delivery=report)
        except (KafkaException, BufferError) as error:
            raise PoisonedBatchError(f"records for {topic} can't be queued: {error}") from error
        if queued != len(batch):
            faults = {str(item["_error"]) for item in batch if item.get("_error") is not None}
            raise PoisonedBatchError(f"{len(batch) - queued} records for {topic} can't be queued: {', '.join(faults)}")

    async def commit(self) -> Commit:
        """Flush, look at what the broker answered, then commit: all or nothing."""
        try:
            await self._run(self._flush_and_commit)
        except KafkaException as error:
            await self._after_failed_commit(error)
        except SystemError as error:
            # A producer that is fenced while it serves reports: confluent-kafka raises on top of its own exception.
            raise UnknownOutcomeError(f"the client failed while the broker answered: {error}") from error
        if self._moved:
            await self.abort()
            raise OffsetsMovedError("somebody else wrote to a topic that tasks are emitted to")
        if self._unplaced:
            await self.abort()
            raise RetryableError("the transaction was aborted: the broker did not tell where its records stand")
        self._careful = False
        assert self._last_state_offset is not None, "a committed transaction without its positions record"
        return Commit(last_state_offset=self._last_state_offset, last_offsets=self._last_offsets)

    async def abort(self) -> None:
        """Give the open transaction up."""
        try:
            await self._run(lambda: self._producer.abort_transaction(self._timeout_s))
        except KafkaException as error:
            raise _translate(error, "aborting a transaction", unknown=True) from error

    async def close(self) -> None:
        """Let go without waiting; an open transaction is left to the next owner or the broker's time-out."""
        self._producer.purge()  # ends a call that is under way

        def close() -> None:
            with self._one_call:
                self._producer.close()

        self._executor.submit(close)

    def _flush_and_commit(self) -> None:
        self._producer.flush(self._timeout_s)
        if self._moved or self._unplaced:
            return  # the caller aborts
        self._producer.commit_transaction(self._timeout_s)

    async def _after_failed_commit(self, error: KafkaException) -> None:
        fault = error.args[0]
        if not fault.txn_requires_abort():
            raise _translate(error, "committing a transaction", unknown=True) from error
        await self.abort()
        if not self._careful:
            # Which record was refused, and why, is asked for only when something failed: reports cost time.
            self._careful = True
            raise RetryableError(f"the transaction was aborted: {fault.str()}") from error
        if self._poison and not self._other_faults:
            raise PoisonedBatchError(f"the broker refuses a record: {', '.join(sorted(self._poison))}") from error
        raise RetryableError(f"the transaction was aborted: {fault.str()}") from error

    def _produce(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        headers: Mapping[str, bytes] | None,
        report: Callable[[KafkaError | None, Message], None] | None,
    ) -> None:
        try:
            self._producer.produce(
                topic,
                key=key,
                value=value,
                partition=self._partition,
                headers=list(headers.items()) if headers else None,
                on_delivery=report,
            )
        except (KafkaException, BufferError) as error:
            raise PoisonedBatchError(f"a record for {topic} can't be queued: {error}") from error

    def _note_refusal(self, error: KafkaError | None, message: Message) -> None:
        if error is None or error.code() in _CAUSED_BY_ANOTHER:
            return
        of_the_task = error.code() in _TOPIC_FAULTS and message.topic() not in self._own_topics
        if of_the_task or error.code() in _POISON:
            self._poison.add(f"{error.name()} on {message.topic()}")
        else:
            self._other_faults.add(error.name())

    def _placed(self, error: KafkaError | None, message: Message) -> Offset | None:
        """Where a record stands; None if that is not told, and a note of why."""
        if error is not None:
            self._note_refusal(error, message)
            return None
        offset = message.offset()
        if offset is None:  # "I had that already", after a leader change: acknowledged, but nobody tells where
            self._unplaced = True
            return None
        return Offset(offset)

    def _note_offset(self, error: KafkaError | None, message: Message, expected: Offset | None) -> None:
        offset = self._placed(error, message)
        if offset is None:
            return
        self._last_offsets[message.topic()] = offset
        if expected is not None and offset != expected:
            self._moved = True

    def _note_last(self, error: KafkaError | None, message: Message) -> None:
        offset = self._placed(error, message)
        if offset is not None:
            self._last_state_offset = offset

    async def _run(self, call: Callable[[], Result]) -> Result:
        def alone() -> Result:
            with self._one_call:
                return call()

        return await asyncio.get_running_loop().run_in_executor(self._executor, alone)


def _translate(error: KafkaException, doing: str, *, unknown: bool = False) -> Exception:
    """The error by what is to be done about it; `unknown`: the call may have had its effect."""
    fault = error.args[0]
    message = f"{doing}: {fault.str()}"
    if fault.code() in _FENCED or fault.fatal():
        return FencedError(message)
    if unknown:
        return UnknownOutcomeError(message)
    return UnavailableError(message)


class _QuietLogger:
    """librdkafka's own log lines, as debug events: what matters comes back as an error."""

    def log(self, _level: int, message: str, *args: object) -> None:
        """Called by confluent-kafka."""
        log.debug("librdkafka", message=message % args if args else message)
