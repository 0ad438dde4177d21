"""The due topic and the ledger topic of a consumer group, by two librdkafka consumers.

- The *member* is in the group and fetches nothing: its partitions are paused. Because no data passes through it, it
  may run `read_uncommitted`, and so its watermark query gives the high watermark (with `read_committed` librdkafka
  answers the last stable offset), and its `committed()` doesn't wait for the transaction of an owner that is gone.
- The *reader* is in no group: it is told partitions and positions, `read_committed`. Its end-of-partition events carry
  its position, also where the log ends in markers or aborted records.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import structlog
from confluent_kafka import (
    OFFSET_END,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)

from pipeline.adapters.kafka_ledger import LibrdkafkaLog, translated
from pipeline.core.tasks import Offset
from pipeline.errors import FencedError, NotFoundError, TopicMismatchError, UnavailableError
from pipeline.ports import ClusterIdentity
from pipeline.service.consumer.ports import (
    DueEnd,
    DueRecord,
    Fetched,
    LedgerBounds,
    LedgerEnd,
    LedgerRecord,
    PartitionListener,
    ReadFailed,
)

__all__ = ["DueSubscription"]

log = structlog.get_logger(__name__)

_CALL_TIMEOUT_S: Final = 10.0
_LEAVE_POLLS_MAX: Final = 50
_LEAVE_POLL_S: Final = 0.02
_PENDING_TIMEOUT_S: Final = 2.0
_PENDING: Final = (KafkaError._TIMED_OUT, KafkaError.UNSTABLE_OFFSET_COMMIT)  # noqa: SLF001  # a public code
_TAKE_MAX: Final = 1_000
_TAKE_CHUNK: Final = 100
_TAKE_BYTES_MAX: Final = 8_388_608
_STALE_METADATA: Final = (
    KafkaError._UNKNOWN_PARTITION,  # noqa: SLF001  # the public name of the code
    KafkaError._UNKNOWN_TOPIC,  # noqa: SLF001  # the same
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
)
_STALE_MEMBER: Final = (
    KafkaError.ILLEGAL_GENERATION,
    KafkaError.UNKNOWN_MEMBER_ID,
    KafkaError.FENCED_INSTANCE_ID,
    KafkaError.REBALANCE_IN_PROGRESS,
)


class DueSubscription:
    """The port over Kafka. `max_poll_interval_ms` is how long one handler call may take before the group moves on."""

    def __init__(
        self,
        *,
        client: Mapping[str, str],
        identity: Callable[[], ClusterIdentity],
        group: str,
        due_topic: str,
        ledger_topic: str,
        session_timeout_ms: int,
        max_poll_interval_ms: int,
        instance_id: str | None = None,
    ) -> None:
        self._identity = identity
        self._due = due_topic
        self._ledger = ledger_topic
        self._listener: PartitionListener | None = None
        self._reading: dict[int, str] = {}
        self._paused: set[int] = set()
        common: dict[str, Any] = {
            **client,
            "group.id": group,
            "enable.auto.commit": False,  # offsets travel in the ledger's transactions
            "enable.auto.offset.store": False,
            # Where a group begins is decided in `start_position`, loudly; a position that is out of range later on is
            # an error that acquires the partition again, never a silent jump.
            "auto.offset.reset": "error",
            "allow.auto.create.topics": False,
            "logger": LibrdkafkaLog(),
        }
        self._member_config = {
            **common,
            "isolation.level": "read_uncommitted",  # it reads no data: see the module's docstring
            # Partitions that stay with this member go on while others move.
            "partition.assignment.strategy": "cooperative-sticky",
            "session.timeout.ms": session_timeout_ms,
            "heartbeat.interval.ms": max(300, session_timeout_ms // 4),
            "max.poll.interval.ms": max(max_poll_interval_ms, session_timeout_ms),
        }
        if instance_id is not None:
            self._member_config["group.instance.id"] = instance_id
        self._reader_config = {
            **common,
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            # The end-of-partition event comes with the first empty answer, so this is how long a restore waits for it.
            "fetch.wait.max.ms": 100,
            "queued.min.messages": 2_000,
            "queued.max.messages.kbytes": 16_384,
        }
        self._member: Any = None
        self._reader: Any = None

    # -- the group ---------------------------------------------------------------------------------------------------

    def open(self, listener: PartitionListener) -> None:
        """Join the group.

        Raises `NotFoundError` without the topics, `TopicMismatchError` if their partition counts differ (the ledger row
        of a task would have no partition of the same number), `UnavailableError`.
        """
        topics = self._identity().topics
        absent = [name for name in (self._due, self._ledger) if name not in topics]
        if absent:
            raise NotFoundError(
                f"There is no topic {' and no topic '.join(absent)}: create the topics with `duetasks topics apply`."
            )
        due, ledger = topics[self._due], topics[self._ledger]
        if due.partition_count != ledger.partition_count:
            raise TopicMismatchError(
                f"{self._due} has {due.partition_count} partitions and {self._ledger} {ledger.partition_count}; they "
                "must have the same number: run `duetasks topics verify`."
            )
        self._listener = listener
        with translated("create the group's consumers"):
            self._member = Consumer(self._member_config)
            self._reader = Consumer(self._reader_config)
            self._member.subscribe(
                [self._due], on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost
            )

    def group_metadata(self) -> Any:  # noqa: ANN401  # librdkafka's own opaque object
        """The present generation, for `send_offsets_to_transaction`."""
        return self._member.consumer_group_metadata()

    def serve(self) -> None:
        """Tell the listener what has changed; never waits."""
        # One call serves one event; there are never many, as the member fetches nothing.
        for _ in range(16):
            with translated("go on as a member of the group"):
                message = self._member.poll(0)
            if message is None:
                return
            error = message.error()
            if error is not None:
                log.warning("group_event", error=error.str())

    def prove(self, partition: int) -> None:
        """Commit what is committed already, under the present generation.

        Raises `FencedError` if the group has given the partition away, `UnavailableError`.
        """
        place = TopicPartition(self._due, partition)
        with translated(f"prove membership for {self._due}-{partition}"):
            known = self._member.committed([place], timeout=_CALL_TIMEOUT_S)[0]
            if known.error is not None:
                raise UnavailableError(f"The group's offset of {self._due}-{partition} can't be read: {known.error}")
            # A new group commits where it would begin anyway.
            offset = known.offset if known.offset >= 0 else self._bounds(self._due, partition)[0]
            try:
                self._member.commit(offsets=[TopicPartition(self._due, partition, offset)], asynchronous=False)
            except KafkaException as error:
                if error.args[0].code() in _STALE_MEMBER:
                    raise FencedError(f"The group doesn't count this consumer as owner of {partition} now.") from error
                raise

    def start_position(self, partition: int) -> Offset:
        """The group's committed offset, kept within what the topic still has; what is gone by retention is told."""
        place = TopicPartition(self._due, partition)
        with translated(f"read the group's offset of {self._due}-{partition}"):
            # The reader asks for stable offsets only: one that an open transaction may still change is waited for.
            known = self._reader.committed([place], timeout=_CALL_TIMEOUT_S)[0]
            if known.error is not None:
                raise UnavailableError(f"The group's offset of {self._due}-{partition} can't be read: {known.error}")
            start, end = self._bounds(self._due, partition)
        if start <= known.offset <= end:
            return Offset(known.offset)
        if known.offset >= 0:
            log.error(
                "due_records_gone",
                partition=partition,
                committed=known.offset,
                start=start,
                end=end,
                why="retention has passed the group, or the topic was created anew; going on from its start",
            )
        return Offset(start)

    # -- reading -----------------------------------------------------------------------------------------------------

    def ledger_bounds(self, partition: int) -> LedgerBounds:
        """First offset and high watermark of the ledger partition, asked for now."""
        with translated(f"ask for the end of {self._ledger}-{partition}"):
            start, end = self._bounds(self._ledger, partition)
        return LedgerBounds(start=Offset(start), end=Offset(end))

    def stable_end(self, topic: str, partition: int) -> Offset:
        """Below it no transaction is open; raises `UnavailableError`."""
        with translated(f"ask for the stable end of {topic}-{partition}"):
            # The reader is `read_committed`: its high watermark is the last stable offset.
            return Offset(_bounds(self._reader, topic, partition)[1])

    def is_open(self, topic: str, partition: int) -> bool:
        """Whether a transaction is open there; raises `UnavailableError`."""
        stable = self.stable_end(topic, partition)
        with translated(f"ask for the end of {topic}-{partition}"):
            return stable < self._bounds(topic, partition)[1]

    def has_pending_offset(self, partition: int) -> bool:
        """Whether a transaction may still change the group's offset, and goes on for longer than any should."""
        place = TopicPartition(self._due, partition)
        try:
            return self._reader.committed([place], timeout=_PENDING_TIMEOUT_S)[0].error is not None
        except KafkaException as error:
            if error.args[0].code() in _PENDING:
                return True  # so it may be; if it is the brokers that don't answer, whatever follows says so
            with translated(f"read the group's offset of {self._due}-{partition}"):
                raise

    def read_ledger(self, partition: int, position: Offset) -> None:
        """Begin to hand over the ledger partition from `position` on."""
        self._read(self._ledger, partition, position)

    def read_due(self, partition: int, position: Offset) -> None:
        """Begin to hand over the due partition from `position` on."""
        self._read(self._due, partition, position)

    def pause(self, partition: int) -> None:
        """Fetch no more of the due partition for now."""
        self._reader.pause([TopicPartition(self._due, partition)])
        self._paused.add(partition)

    def resume(self, partition: int) -> None:
        """Undo `pause`."""
        self._reader.resume([TopicPartition(self._due, partition)])
        self._paused.discard(partition)

    def stop(self, partition: int) -> None:
        """Hand over nothing more of this partition."""
        topic = self._reading.pop(partition, None)
        if partition in self._paused:
            # librdkafka remembers a pause beyond the end of an assignment: the partition would stand still for ever.
            self.resume(partition)
        if topic is not None:
            with translated(f"stop reading {topic}-{partition}"):
                self._reader.incremental_unassign([TopicPartition(topic, partition)])

    def take(self, timeout_ms: int) -> Sequence[Fetched]:
        """What was fetched; waits up to `timeout_ms` until there is something. Raises `UnavailableError` and others."""
        with translated("fetch"):
            # `consume` alone would wait until it has all it was asked for.
            first = self._reader.poll(timeout_ms / 1000)
            messages = [] if first is None else [first, *self._buffered(len(first))]
            fetched = [self._fetched(message) for message in messages]
        return [one for one in fetched if one is not None]

    def close(self) -> None:
        """Leave the group. Closing twice does no harm."""
        if self._member is not None:
            self._leave(self._member)
        for consumer in (self._member, self._reader):
            if consumer is not None:
                consumer.close()
        self._member = self._reader = None
        self._reading.clear()

    def _leave(self, member: Any) -> None:  # noqa: ANN401  # librdkafka's
        """End a rebalance that is under way, within a bound, while its callbacks can still be answered.

        A `close` that meets one may wait for ever for librdkafka (2.16) to take its answer to it, and confluent-kafka
        holds the interpreter's lock meanwhile: the whole process would stand still.
        """
        try:
            member.unsubscribe()
            for _ in range(_LEAVE_POLLS_MAX):
                if member.poll(_LEAVE_POLL_S) is None and not member.assignment():
                    return
        except KafkaException as error:
            log.info("group_not_left", error=str(error))  # its session ends by itself

    def _buffered(self, size: int) -> list[Message]:
        """What the client has already, up to a bound of records and of bytes."""
        messages: list[Message] = []
        while len(messages) < _TAKE_MAX and size < _TAKE_BYTES_MAX:
            more = self._reader.consume(_TAKE_CHUNK, 0)
            messages += more
            size += sum(len(message) for message in more)
            if len(more) < _TAKE_CHUNK:
                break
        return messages

    # -- steps -------------------------------------------------------------------------------------------------------

    def _on_assign(self, consumer: Any, places: list[Any]) -> None:  # noqa: ANN401  # librdkafka's
        # At the end and paused: whatever slips through before the pause is no data, and `serve` drops it.
        consumer.incremental_assign([TopicPartition(self._due, place.partition, OFFSET_END) for place in places])
        consumer.pause([TopicPartition(self._due, place.partition) for place in places])
        self._tell(lambda listener: listener.on_assigned([place.partition for place in places]))

    def _on_revoke(self, consumer: Any, places: list[Any]) -> None:  # noqa: ANN401  # librdkafka's
        del consumer  # the client unassigns by itself when this returns
        self._tell(lambda listener: listener.on_revoked([place.partition for place in places]))

    def _on_lost(self, consumer: Any, places: list[Any]) -> None:  # noqa: ANN401  # librdkafka's
        del consumer
        self._tell(lambda listener: listener.on_lost([place.partition for place in places]))

    def _tell(self, say: Callable[[PartitionListener], None]) -> None:
        assert self._listener is not None, "callbacks come after open"
        say(self._listener)

    def _bounds(self, topic: str, partition: int) -> tuple[int, int]:
        return _bounds(self._member, topic, partition)

    def _read(self, topic: str, partition: int, position: Offset) -> None:
        self.stop(partition)
        with translated(f"read {topic}-{partition}"):
            self._reader.incremental_assign([TopicPartition(topic, partition, position)])
        self._reading[partition] = topic

    def _fetched(self, message: Message) -> Fetched | None:
        error = message.error()
        if error is not None:
            return self._event(message, error)
        partition = message.partition()
        offset = Offset(message.offset())
        if message.topic() == self._ledger:
            return LedgerRecord(
                partition=partition, offset=offset, key=message.key(), has_value=message.value() is not None
            )
        return DueRecord(
            partition=partition,
            offset=offset,
            append_at_ms=message.timestamp()[1],
            key=message.key(),
            value=message.value(),
            headers={name: value or b"" for name, value in message.headers() or ()},
        )

    def _event(self, message: Message, error: KafkaError) -> Fetched | None:
        partition = message.partition()
        if error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001  # the public name of the code
            position = Offset(message.offset())
            if message.topic() == self._due:
                return DueEnd(partition=partition, position=position)
            return LedgerEnd(partition=partition, position=position)
        if message.topic() and partition >= 0:
            return ReadFailed(partition=partition, why=f"{message.topic()}-{partition}: {error.str()}")
        if error.fatal():
            raise KafkaException(error)
        log.warning("fetch_event", error=error.str())
        return None


def _bounds(consumer: Any, topic: str, partition: int) -> tuple[int, int]:  # noqa: ANN401  # librdkafka's
    """First offset and end, as the consumer's isolation level has it."""
    place = TopicPartition(topic, partition)
    try:
        bounds = consumer.get_watermark_offsets(place, timeout=_CALL_TIMEOUT_S, cached=False)
    except KafkaException as error:
        if error.args[0].code() not in _STALE_METADATA:
            raise
        # A broker that has just started may not know a partition, or not its leader, and librdkafka goes on believing
        # it for minutes: asked for the topic by name, it learns.
        consumer.list_topics(topic, timeout=_CALL_TIMEOUT_S)
        bounds = consumer.get_watermark_offsets(place, timeout=_CALL_TIMEOUT_S, cached=False)
    if bounds is None or min(bounds) < 0:  # -1001 stands for "not known", while leaders change
        raise UnavailableError(f"The bounds of {topic}-{partition} did not come within {_CALL_TIMEOUT_S:g} s.")
    return int(bounds[0]), int(bounds[1])
