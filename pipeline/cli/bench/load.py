"""The upstream of the benchmark: schedules encoded beforehand, and made visible all at once."""

import time
from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING, Final

import msgspec
from confluent_kafka import KafkaException, Producer

from pipeline.adapters.avro_codec import AvroCodec
from pipeline.cli.bench.due_reader import CRITICAL_ONLY
from pipeline.core.events import Schedule
from pipeline.core.partitioning import partition_for_key
from pipeline.core.tasks import InstantMs, TaskId
from pipeline.errors import UnavailableError

if TYPE_CHECKING:
    from pipeline.config import Settings

__all__ = ["Load", "Upstream", "partition_sizes"]

_TIMEOUT_S: Final = 60.0
_FULL_QUEUE_WAIT_S: Final = 0.05


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Tasks to schedule: `prefix` begins their ids, `due_at_ms` has one instant for each."""

    prefix: str
    due_at_ms: Sequence[int]
    payload_bytes: int

    @property
    def task_ids(self) -> list[str]:
        """The ids, in the order of the due times."""
        return [f"{self.prefix}-{number:07d}" for number in range(len(self.due_at_ms))]

    def records(self) -> list[tuple[bytes, bytes]]:
        """Key and value of each event as the producer SDK would encode it; payloads are random text, seeded."""
        codec, random, now_ms = AvroCodec(), Random(self.prefix), InstantMs(int(time.time() * 1000))  # noqa: S311  # load
        made = []
        for task_id, due_at_ms in zip(self.task_ids, self.due_at_ms, strict=True):
            event = Schedule(
                task_id=TaskId(task_id),
                event_id=f"{random.getrandbits(80):020x}",
                due_at_ms=InstantMs(due_at_ms),
                payload=random.randbytes((self.payload_bytes + 1) // 2).hex().encode()[: self.payload_bytes],
                source="bench",
                created_at_ms=now_ms,
            )
            made.append((task_id.encode(), codec.encode_event(event)))
        return made


def partition_sizes(keys: Sequence[bytes], partition_count: int) -> list[int]:
    """How many of the keys each partition gets."""
    sizes = [0] * partition_count
    for key in keys:
        sizes[partition_for_key(key, partition_count)] += 1
    return sizes


class Upstream:
    """Sends a load in one transaction: nothing of it can be read before `send` commits, and then all of it."""

    def __init__(self, settings: "Settings") -> None:
        self._topic = settings.topics.events
        self._producer = Producer(
            {
                **settings.client_config(),
                "transactional.id": "duetasks-bench-upstream",
                "transaction.timeout.ms": int(_TIMEOUT_S * 1000),
                "acks": "all",
                "partitioner": "murmur2_random",  # as every upstream must
                "linger.ms": 5,
                "compression.type": "lz4",
                "queue.buffering.max.messages": 1_000_000,
                "log_level": CRITICAL_ONLY,
            }
        )
        self._producer.init_transactions(_TIMEOUT_S)

    def send(self, records: Sequence[tuple[bytes, bytes]]) -> float:
        """Write all records, then let them be read; returns the wall clock's seconds just before that."""
        producer, topic = self._producer, self._topic
        try:
            producer.begin_transaction()
            for key, value in records:
                while True:
                    try:
                        producer.produce(topic, key=key, value=value)
                        break
                    except BufferError:
                        producer.poll(_FULL_QUEUE_WAIT_S)
            producer.flush(_TIMEOUT_S)
            at_s = time.time()
            producer.commit_transaction(_TIMEOUT_S)
        except KafkaException as error:
            raise UnavailableError(f"the load could not be sent: {error}") from error
        return at_s
