"""A transaction that its coordinator takes for ended, and that is still open where its records are."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from pipeline.adapters.kafka_offsets import KafkaOffsets
from pipeline.adapters.kafka_transaction import KafkaTransaction

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipeline.embedded import EmbeddedBroker

pytestmark = pytest.mark.integration

TOPICS = frozenset({"state", "due", "dead"})
TIMEOUT_MS = 1_000


def leave_hanging(broker: EmbeddedBroker, offsets: KafkaOffsets) -> None:
    """Kill the broker with a transaction open; the time-out passes before it has a leader for its partitions again."""
    producer = Producer(
        {
            "bootstrap.servers": broker.start().bootstrap_servers,
            "transactional.id": "owner",
            "transaction.timeout.ms": TIMEOUT_MS,
            "log_level": 0,
        }
    )
    producer.init_transactions(10)
    producer.begin_transaction()
    for topic in ("state", "due"):
        producer.produce(topic, b"value", b"key", partition=0)
    producer.flush(10)
    broker.kill()
    broker.start()
    assert asyncio.run(is_open_for_good(offsets, "state")), "this Kafka ended it by itself: nothing to show"


async def is_open_for_good(offsets: KafkaOffsets, topic: str) -> bool:
    """Whether a transaction is open long after every time-out."""
    until_s = time.monotonic() + 10
    while time.monotonic() < until_s:
        if not await offsets.is_open(topic, 0):
            return False
        await asyncio.sleep(0.1)
    return True


def test_owner_ends_what_hangs_of_an_earlier_one(private_broker: Callable[..., EmbeddedBroker]) -> None:
    """Readers would wait for ever, and the next commit of the same id would commit what had been given up."""
    # Looks for them so soon after its start that it has no leader yet for the partitions.
    broker = private_broker(settings={"transaction.abort.timed.out.transaction.cleanup.interval.ms": "1000"})
    servers = broker.start().bootstrap_servers
    admin = AdminClient({"bootstrap.servers": servers, "log_level": 0})
    for future in admin.create_topics([NewTopic(topic, 1, 1) for topic in TOPICS]).values():
        future.result(10)
    offsets = KafkaOffsets(admin)
    leave_hanging(broker, offsets)

    async def acquire() -> set[bool]:
        with ThreadPoolExecutor(2) as executor:
            transaction = KafkaTransaction(
                {"bootstrap.servers": servers},
                transactional_id="owner",
                partition=0,
                state_topic="state",
                own_topics=TOPICS,
                transaction_timeout_ms=5_000,
                executor=executor,
                is_open=lambda topic: offsets.is_open(topic, 0),
            )
            await transaction.acquire()
            found = {await is_open_for_good(offsets, topic) for topic in TOPICS}
            await transaction.close()
            return found

    assert asyncio.run(acquire()) == {False}
