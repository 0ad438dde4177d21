"""Reads any partition of any topic, `read_committed`, by position: what rebuild and replay look through."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Final

import structlog
from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, Message, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from pipeline.adapters.kafka_ledger import LibrdkafkaLog
from pipeline.core.tasks import InstantMs, Offset
from pipeline.errors import UnavailableError
from pipeline.service.recovery.ports import LogBounds, LogChunk, LogRecord

__all__ = ["KafkaPartitionLog"]

log = structlog.get_logger(__name__)

DEADLINE_S: Final = 10.0
CHUNK_RECORDS: Final = 2_000
POLL_S: Final = 0.2
STUCK_POLLS: Final = 25


class KafkaPartitionLog:
    """Implements `PartitionLog` with a consumer of its own for each read."""

    def __init__(self, client: Mapping[str, str]) -> None:
        self._client = {**client, "logger": LibrdkafkaLog()}
        self._admin = AdminClient(self._client)

    async def bounds(self, topic: str, partition: int) -> LogBounds:
        """As of now, from the partition's leader."""
        uncommitted, committed = IsolationLevel.READ_UNCOMMITTED, IsolationLevel.READ_COMMITTED
        start = await self._ask(topic, partition, OffsetSpec.earliest(), uncommitted)
        # In this order: an end that was asked for later lies no lower.
        stable_end = await self._ask(topic, partition, OffsetSpec.latest(), committed)
        end = await self._ask(topic, partition, OffsetSpec.latest(), uncommitted)
        if min(start, stable_end, end) < 0:  # what librdkafka says for "not known", while leaders change
            raise UnavailableError(f"The offsets of {topic}/{partition} are not known just now: try again.")
        return LogBounds(start=Offset(start), stable_end=Offset(stable_end), end=Offset(end))

    async def offset_at(self, topic: str, partition: int, at_ms: InstantMs) -> Offset | None:
        """The first offset that was appended at `at_ms` or later; None if there is none."""
        found = await self._ask(topic, partition, OffsetSpec.for_timestamp(at_ms), IsolationLevel.READ_UNCOMMITTED)
        return Offset(found) if found >= 0 else None

    async def read(self, topic: str, partition: int, start: Offset, end: Offset) -> AsyncGenerator[LogChunk]:
        """Chunks until the position reaches `end`; waits for open transactions, and says so."""
        if start >= end:
            return
        consumer = Consumer(
            {
                **self._client,
                "group.id": "duetasks-recovery",  # required by the client; nothing is ever committed under it
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "isolation.level": "read_committed",  # aborted records never happened
                "auto.offset.reset": "error",  # a position that is gone must be seen, not jumped over
                "enable.partition.eof": True,  # tells the position behind markers and aborted records
                "fetch.wait.max.ms": 100,
                "queued.min.messages": 20_000,
                "queued.max.messages.kbytes": 32_768,  # several topics are read side by side
                "fetch.message.max.bytes": 8_388_608,
            }
        )
        try:
            consumer.assign([TopicPartition(topic, partition, start)])
            position, silent = start, 0
            while position < end:
                messages = await asyncio.to_thread(consumer.consume, CHUNK_RECORDS, POLL_S)
                chunk = _chunk(messages, position, end)
                silent = silent + 1 if chunk.position == position else 0
                if silent and silent % STUCK_POLLS == 0:
                    log.warning("read_waits", topic=topic, partition=partition, position=position, end=end,
                                likely="a transaction is open")  # fmt: skip
                position = chunk.position
                if chunk.records or position >= end:
                    yield chunk
        except KafkaException as error:
            raise UnavailableError(f"{topic}/{partition} can't be read: {error.args[0].str()}") from error
        finally:
            await asyncio.to_thread(consumer.close)

    async def _ask(self, topic: str, partition: int, spec: OffsetSpec, isolation: IsolationLevel) -> int:
        place = TopicPartition(topic, partition)
        try:
            asked = self._admin.list_offsets({place: spec}, isolation_level=isolation, request_timeout=DEADLINE_S)
            answer = await asyncio.wrap_future(asked[place])
        except KafkaException as error:
            raise UnavailableError(
                f"The offsets of {topic}/{partition} can't be had: {error.args[0].str()}. Check that the brokers can "
                "be reached."
            ) from error
        return int(answer.offset)


def _chunk(messages: list[Message], position: Offset, end: Offset) -> LogChunk:
    records: list[LogRecord] = []
    for message in messages:
        error = message.error()
        if error is None:
            offset = message.offset()
            if offset < end:
                records.append(
                    LogRecord(
                        offset=offset,
                        timestamp=message.timestamp()[1],
                        key=message.key(),
                        value=message.value(),
                        headers=tuple(message.headers() or ()),
                    )
                )
            position = Offset(min(end, offset + 1))
        elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001  # librdkafka's local codes are named so
            position = Offset(min(end, max(position, message.offset())))
        elif not error.retriable() and error.code() not in {KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN}:  # noqa: SLF001  # the same
            raise KafkaException(error)
    return LogChunk(records=records, position=position)
