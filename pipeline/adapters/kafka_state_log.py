"""Reads one partition of `task-state` from a position to an end, `read_committed`, by position."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from concurrent.futures import Executor
from typing import Final

import structlog
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from pipeline.core.tasks import Offset
from pipeline.errors import UnavailableError
from pipeline.ports import StateChunk

__all__ = ["KafkaStateLog"]

log = structlog.get_logger(__name__)

CHUNK_RECORDS: Final = 5_000
POLL_S: Final = 0.2
STUCK_POLLS: Final = 25


class KafkaStateLog:
    """Implements `StateLog` with a consumer of its own for each read."""

    def __init__(self, client: Mapping[str, str], topic: str, executor: Executor) -> None:
        self._client = client
        self._topic = topic
        self._executor = executor

    async def read(self, partition: int, start: Offset, end: Offset) -> AsyncGenerator[StateChunk]:
        """Chunks until the position reaches `end`; waits for open transactions, and says so."""
        consumer = Consumer(
            {
                **self._client,
                "group.id": "duetasks-restore",  # required by the client; nothing is ever committed under it
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "isolation.level": "read_committed",  # aborted emissions never happened
                "auto.offset.reset": "error",  # a position that is gone must be seen, not jumped over
                "enable.partition.eof": True,  # tells the position behind markers and aborted records
                "fetch.wait.max.ms": 100,
                "queued.min.messages": 50_000,
                "queued.max.messages.kbytes": 65_536,  # bounds the memory of a restore
                "fetch.message.max.bytes": 8_388_608,
            }
        )
        loop = asyncio.get_running_loop()
        try:
            consumer.assign([TopicPartition(self._topic, partition, start)])
            position, silent = start, 0
            while position < end:
                messages = await loop.run_in_executor(self._executor, consumer.consume, CHUNK_RECORDS, POLL_S)
                chunk = _chunk(messages, position)
                silent = silent + 1 if chunk.position == position else 0
                if silent and silent % STUCK_POLLS == 0:
                    log.warning("restore_waits", partition=partition, position=position, end=end,
                                likely="a transaction on task-state is open")  # fmt: skip
                position = chunk.position
                if chunk.records or position >= end:
                    yield chunk
        except KafkaException as error:
            raise UnavailableError(f"{self._topic}/{partition} can't be read: {error}") from error
        finally:
            await asyncio.shield(loop.run_in_executor(self._executor, consumer.close))


def _chunk(messages: list[Message], position: Offset) -> StateChunk:
    records: list[tuple[bytes, bytes | None]] = []
    for message in messages:
        error = message.error()
        if error is None:
            records.append((message.key(), message.value()))
            position = Offset(message.offset() + 1)
        elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001  # librdkafka's local codes are named so
            position = max(position, Offset(message.offset()))
        elif not error.retriable() and error.code() not in {KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN}:  # noqa: SLF001  # the same
            raise KafkaException(error)
    return StateChunk(records=records, position=position)
