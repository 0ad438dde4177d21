"""A transaction that its coordinator takes for ended, and that is still open where its records are."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from pipeline.adapters.kafka_admin import KafkaAdmin
from pipeline.adapters.kafka_offsets import KafkaOffsets
from pipeline.adapters.kafka_transaction import KafkaTransaction
from pipeline.config import Settings
from pipeline.embedded import EmbeddedBroker
from tests.integration.due_topics import PARTITIONS, DueTopics, run_until_idle, tasks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pipeline.core.effects import DueTask
    from pipeline.service.consumer.task_handling import TaskContext

pytestmark = pytest.mark.integration

TOPICS = ("state", "due", "dead")
TIMEOUT_MS = 1_000
ATTEMPTS = 5


class Hanging(msgspec.Struct, frozen=True, kw_only=True):
    """A broker with two transactions that hang: of an owner on `state` and `due`, and of a group of `tasks`."""

    servers: str
    offsets: KafkaOffsets
    tasks: DueTopics


@pytest.fixture(scope="module")
def hanging(tmp_path_factory: pytest.TempPathFactory, kafka_cache_dir: Path) -> Iterator[Hanging]:
    """Killed with transactions open, it looks for late ones before it has a leader for their partitions again.

    Whether it does is a matter of luck on a busy machine: it is tried a few times.
    """
    folder = tmp_path_factory.mktemp("hanging")
    settings = {
        "transaction.abort.timed.out.transaction.cleanup.interval.ms": "1000",
        # So long it leads nothing after a kill: longer than a start takes on a busy machine.
        "broker.session.timeout.ms": "12000",
    }
    broker = EmbeddedBroker(folder / "broker", cache_dir=kafka_cache_dir, settings=settings)
    try:
        servers = broker.start().bootstrap_servers
        admin = AdminClient({"bootstrap.servers": servers, "log_level": 0})
        for future in admin.create_topics([NewTopic(topic, 1, 1) for topic in TOPICS]).values():
            future.result(10)
        due_topics = DueTopics(
            Settings(
                bootstrap_servers=servers,
                data_dir=folder / "data",
                partitions=PARTITIONS,
                session_timeout_ms=3_000,
                transaction_timeout_ms=5_000,
            )
        )
        due_topics.emit(*tasks(20))
        made = Hanging(servers=servers, offsets=KafkaOffsets(admin), tasks=due_topics)
        leave_hanging(broker, made)
        yield made
    finally:
        broker.kill()


def leave_hanging(broker: EmbeddedBroker, made: Hanging) -> None:
    """Kill the broker with both transactions open, until both stay so."""
    names = made.tasks.names
    topic_id = KafkaAdmin(made.tasks.settings.client_config()).identity([names.applied]).topics[names.applied].topic_id
    place = TopicPartition(names.due, 0, 5)
    owners, consumers = ("state", "due"), (names.applied, made.tasks.outputs)
    for _ in range(ATTEMPTS):
        begin_transaction(made.servers, "owner", owners, None)
        begin_transaction(made.servers, f"duetasks-ledger-{topic_id}-group-0", consumers, ("group", place))
        broker.kill()
        broker.start()
        if asyncio.run(are_open_for_good(made.offsets, (*owners, *consumers))):
            return
    raise AssertionError(f"this Kafka ended one of them by itself, {ATTEMPTS} times: nothing to show")


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


def test_owner_ends_what_hangs_of_an_earlier_one(hanging: Hanging) -> None:
    """Readers would wait for ever, and the next commit of the same id would commit what had been given up."""
    offsets = hanging.offsets

    async def acquire() -> list[bool]:
        with ThreadPoolExecutor(2) as executor:
            transaction = KafkaTransaction(
                {"bootstrap.servers": hanging.servers},
                transactional_id="owner",
                partition=0,
                state_topic="state",
                own_topics=frozenset(TOPICS),
                transaction_timeout_ms=5_000,
                executor=executor,
                is_open=lambda topic: offsets.is_open(topic, 0),
            )
            await transaction.acquire()
            found = await asyncio.gather(*(is_open_for_good(offsets, topic) for topic in TOPICS))
            await transaction.close()
            return found

    assert asyncio.run(acquire()) == [False] * len(TOPICS)


def test_consumer_ends_what_hangs_of_an_earlier_one(hanging: Hanging) -> None:
    """It would wait for ever for its ledger and its offset, and its next commit would let what was given up happen."""
    topics = hanging.tasks

    def produce(task: DueTask, context: TaskContext) -> None:
        context.produce(topics.outputs, task.task_id.encode(), b"out")

    applied = run_until_idle(topics, handler=produce)

    expected = sorted(task.task_id for task in tasks(20))
    assert sorted(applied) == expected
    assert sorted(row.task_id for row in topics.rows()) == expected
    assert sorted(record.key().decode() for record in topics.read(topics.outputs)) == expected
