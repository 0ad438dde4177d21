"""A transaction that its coordinator takes for ended, and that is still open where its records are."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from pipeline.adapters.kafka_admin import KafkaAdmin
from pipeline.adapters.kafka_offsets import KafkaOffsets
from pipeline.adapters.kafka_transaction import KafkaTransaction
from pipeline.config import Settings
from tests.integration.due_topics import PARTITIONS, DueTopics, run_until_idle, tasks

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pipeline.core.effects import DueTask
    from pipeline.embedded import EmbeddedBroker
    from pipeline.service.consumer.task_handling import TaskContext

pytestmark = pytest.mark.integration

TOPICS = frozenset({"state", "due", "dead"})
TIMEOUT_MS = 1_000
ATTEMPTS = 5


def leave_hanging(
    broker: EmbeddedBroker,
    transactional_id: str,
    topics: tuple[str, ...],
    *,
    group_offset: tuple[str, TopicPartition] | None = None,
) -> None:
    """Kill the broker with a transaction open; the time-out passes before it has a leader for its partitions again.

    Whether it looks for late transactions just then is a matter of luck on a busy machine: it is tried a few times.
    `group_offset`: a group and a place that the transaction would let it commit.
    """
    servers = broker.start().bootstrap_servers
    offsets = KafkaOffsets(AdminClient({"bootstrap.servers": servers, "log_level": 0}))
    for _ in range(ATTEMPTS):
        begin_transaction(servers, transactional_id, topics, group_offset)
        broker.kill()
        broker.start()
        if asyncio.run(are_open_for_good(offsets, topics)):
            return
    raise AssertionError(f"this Kafka ended it by itself, {ATTEMPTS} times: nothing to show")


def begin_transaction(
    servers: str,
    transactional_id: str,
    topics: tuple[str, ...],
    group_offset: tuple[str, TopicPartition] | None,
) -> None:
    """Write to each topic, and to the group's offset, in a transaction that nobody will end."""
    producer = Producer(
        {
            "bootstrap.servers": servers,
            "transactional.id": transactional_id,
            "transaction.timeout.ms": TIMEOUT_MS,
            "log_level": 0,
        }
    )
    producer.init_transactions(20)
    producer.begin_transaction()
    for topic in topics:
        producer.produce(topic, b"given up", b"key", partition=0)
    producer.flush(20)
    if group_offset is not None:
        group, place = group_offset
        member = Consumer({"bootstrap.servers": servers, "group.id": group, "log_level": 0})
        producer.send_offsets_to_transaction([place], member.consumer_group_metadata(), 20)
        member.close()


def broker_that_leaves_ends_out(private_broker: Callable[..., EmbeddedBroker]) -> EmbeddedBroker:
    """One that looks for late transactions so soon after its start that it has no leader yet for the partitions."""
    return private_broker(
        settings={
            "transaction.abort.timed.out.transaction.cleanup.interval.ms": "1000",
            # So long it leads nothing after a kill: longer than a start takes on a busy machine.
            "broker.session.timeout.ms": "12000",
        }
    )


async def are_open_for_good(offsets: KafkaOffsets, topics: tuple[str, ...]) -> bool:
    """Whether a transaction is open in each of them long after every time-out."""
    return all(await asyncio.gather(*(is_open_for_good(offsets, topic) for topic in topics)))


async def is_open_for_good(offsets: KafkaOffsets, topic: str) -> bool:
    """Whether a transaction is open when every time-out has long passed; a broker that recovers may hide it briefly."""
    until_s = time.monotonic() + 20
    closed_s: float | None = None
    while time.monotonic() < until_s:
        if await offsets.is_open(topic, 0):
            closed_s = None
        else:
            closed_s = closed_s or time.monotonic()
            if time.monotonic() - closed_s > 3:
                return False
        await asyncio.sleep(0.1)
    return closed_s is None


def test_owner_ends_what_hangs_of_an_earlier_one(private_broker: Callable[..., EmbeddedBroker]) -> None:
    """Readers would wait for ever, and the next commit of the same id would commit what had been given up."""
    broker = broker_that_leaves_ends_out(private_broker)
    servers = broker.start().bootstrap_servers
    admin = AdminClient({"bootstrap.servers": servers, "log_level": 0})
    for future in admin.create_topics([NewTopic(topic, 1, 1) for topic in TOPICS]).values():
        future.result(10)
    offsets = KafkaOffsets(admin)
    leave_hanging(broker, "owner", ("state", "due"))

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


def test_consumer_ends_what_hangs_of_an_earlier_one(
    private_broker: Callable[..., EmbeddedBroker], tmp_path: Path
) -> None:
    """It would wait for ever for its ledger and its offset, and its next commit would let what was given up happen."""
    broker = broker_that_leaves_ends_out(private_broker)
    servers = broker.start().bootstrap_servers
    topics = DueTopics(
        Settings(
            bootstrap_servers=servers,
            data_dir=tmp_path / "data",
            partitions=PARTITIONS,
            session_timeout_ms=3_000,
            transaction_timeout_ms=5_000,
        )
    )
    topics.emit(*tasks(20))
    ledger, due = topics.names.applied, topics.names.due
    topic_id = KafkaAdmin(topics.settings.client_config()).identity([ledger]).topics[ledger].topic_id
    leave_hanging(
        broker,
        f"duetasks-ledger-{topic_id}-group-0",
        (ledger, topics.outputs),
        group_offset=("group", TopicPartition(due, 0, 5)),
    )

    def produce(task: DueTask, context: TaskContext) -> None:
        context.produce(topics.outputs, task.task_id.encode(), b"out")

    applied = run_until_idle(topics, handler=produce)

    expected = sorted(task.task_id for task in tasks(20))
    assert sorted(applied) == expected
    assert sorted(row.task_id for row in topics.rows()) == expected
    assert sorted(record.key().decode() for record in topics.read(topics.outputs)) == expected
