"""One test's due topics on a real broker: their owner, consumers in threads and as processes, and what they left."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from pipeline.adapters.avro_codec import AvroCodec
from pipeline.adapters.consumer_codec import AvroConsumerCodec
from pipeline.adapters.kafka_admin import KafkaAdmin
from pipeline.adapters.topic_setup import apply_topics
from pipeline.consumer import DueTaskConsumer
from pipeline.core.applied import AppliedTask, belongs_to
from pipeline.core.effects import DueTask
from pipeline.core.tasks import InstantMs

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pipeline.config import Settings
    from pipeline.service.consumer.task_handling import Handler, TaskContext

PARTITIONS = 2
IDLE_MS = 1_500
WITHIN_S = 60.0
_PASSING = {KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.LEADER_NOT_AVAILABLE, KafkaError._TRANSPORT}


def due(task_id: str, *, payload: bytes = b"") -> DueTask:
    """An emission; its id is the same whenever it is emitted again."""
    return DueTask(
        task_id=task_id,
        generation=1,
        occurrence=0,
        attempt=0,
        emission_id=f"e-{task_id}",
        due_at_ms=InstantMs(1),
        fired_at_ms=InstantMs(2),
        payload=payload,
    )


def tasks(count: int, *, start: int = 0) -> list[DueTask]:
    """Tasks t0, t1, ..."""
    return [due(f"t{number}") for number in range(start, start + count)]


class DueTopics:
    """One test's topics, and the owner of its due tasks."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.names = settings.topics
        self.outputs = f"{settings.topic_prefix}outputs"
        self.codec = AvroConsumerCodec(AvroCodec())
        self._admin = AdminClient(settings.client_config())
        self.at_end: list[Callable[[], object]] = []
        apply_topics(settings)
        self.create(self.outputs, PARTITIONS)
        self._owner = self.producer("owner")
        self._owner.init_transactions(20)

    def create(self, topic: str, partition_count: int) -> None:
        """One more topic."""
        self._admin.create_topics([NewTopic(topic, partition_count, 1)])[topic].result(20)
        # The controller answers before the broker knows.
        asker, until_s = KafkaAdmin(self.settings.client_config()), time.monotonic() + WITHIN_S
        while topic not in asker.identity([topic]).topics:
            assert time.monotonic() < until_s, f"{topic} did not show"

    def producer(self, name: str) -> Producer:
        """A transactional producer of this test."""
        return Producer(
            {
                **self.settings.client_config(),
                "transactional.id": f"{self.settings.topic_prefix}{name}",
                "partitioner": "murmur2_random",
                "transaction.timeout.ms": 60_000,
            }
        )

    def fence_consumer(self, group: str, partition: int) -> None:
        """What a newer owner of the group's partition does to the present one."""
        topic_id = KafkaAdmin(self.settings.client_config()).identity([self.names.applied]).topics[self.names.applied]
        name = f"duetasks-ledger-{topic_id.topic_id}-{group}-{partition}"
        Producer({**self.settings.client_config(), "transactional.id": name}).init_transactions(20)

    @contextmanager
    def transaction(self, *, commit: bool = True) -> Iterator[Callable[..., None]]:
        """The owner's transaction: yields `emit(task, headers=...)`; committed or aborted at the end."""
        self._owner.begin_transaction()

        def emit(task: DueTask, headers: list[tuple[str, bytes]] | None = None) -> None:
            value = AvroCodec().encode_due(task)
            self._owner.produce(self.names.due, value, task.task_id.encode(), headers=headers)

        yield emit
        self._owner.flush(20)
        if commit:
            self._owner.commit_transaction(20)
        else:
            self._owner.abort_transaction(20)

    def emit(self, *emitted: DueTask, headers: list[tuple[str, bytes]] | None = None) -> None:
        """Due tasks in one committed transaction."""
        with self.transaction() as emit:
            for task in emitted:
                emit(task, headers)

    def read(self, topic: str) -> list[Any]:
        """All committed records of a topic below its present end, as `read_committed` sees them.

        A commit that was answered may still lack its markers, so the end asked for is the high watermark.
        """
        ends = self.ends(topic)
        consumer = Consumer(
            {
                **self.settings.client_config(),
                "group.id": f"reader-{secrets.token_hex(4)}",
                "isolation.level": "read_committed",
                "enable.partition.eof": True,
                "auto.offset.reset": "earliest",
                "fetch.wait.max.ms": 50,
            }
        )
        consumer.assign([TopicPartition(topic, partition, 0) for partition in range(PARTITIONS)])
        records, open_partitions, until_s = [], set(range(PARTITIONS)), time.monotonic() + WITHIN_S
        while open_partitions:
            assert time.monotonic() < until_s, f"{topic} has no end"
            message = consumer.poll(1)
            if message is None:
                continue
            if message.error() is None:
                records.append(message)
            else:
                assert message.error().code() == KafkaError._PARTITION_EOF, message.error()
                if message.offset() >= ends[message.partition()]:
                    open_partitions.discard(message.partition())
        consumer.close()
        return records

    def rows(self) -> list[AppliedTask]:
        """The group's committed ledger."""
        found = self.read(self.names.applied)
        return [self.codec.decode_applied(record.value()) for record in found if belongs_to("group", record.key())]

    def row_counts(self) -> Counter[str]:
        """How many rows each task has."""
        return Counter(row.task_id for row in self.rows())

    def lag(self, group: str) -> int:
        """How many offsets the group has not gone past, markers included."""
        request = ConsumerGroupTopicPartitions(
            group, [TopicPartition(self.names.due, partition) for partition in range(PARTITIONS)]
        )
        found = self._admin.list_consumer_group_offsets([request])[group].result().topic_partitions
        ends = self.ends(self.names.due)
        return sum(ends[place.partition] - max(0, place.offset) for place in found)

    def ends(self, topic: str) -> dict[int, int]:
        """The high watermarks; a broker that has just started may not lead its partitions yet."""
        asker = Consumer({**self.settings.client_config(), "group.id": "asker", "isolation.level": "read_uncommitted"})
        found: dict[int, int] = {}
        until_s = time.monotonic() + WITHIN_S
        while len(found) < PARTITIONS:
            try:
                found[len(found)] = asker.get_watermark_offsets(TopicPartition(topic, len(found)), timeout=20)[1]
            except KafkaException as error:
                if error.args[0].code() not in _PASSING or time.monotonic() >= until_s:
                    raise
        asker.close()
        return found

    def clean_up(self) -> None:
        """End what still runs, and delete the topics."""
        for end in self.at_end:
            end()
        mine = [
            name for name in self._admin.list_topics(timeout=20).topics if name.startswith(self.settings.topic_prefix)
        ]
        for future in self._admin.delete_topics(mine).values():
            future.result(20)


class Running:
    """A consumer in a thread; `ids` are the tasks that its handler saw."""

    def __init__(self, topics: DueTopics, *, handler: Handler | None = None, **options: Any) -> None:  # noqa: ANN401  # the SDK's
        self.ids: list[str] = []
        self._topics = topics
        self._handler = handler
        self._changed = threading.Condition()
        self.consumer = DueTaskConsumer("group", self._handle, settings=topics.settings, **options)
        self._thread = threading.Thread(target=self.consumer.run)

    def _handle(self, task: DueTask, context: TaskContext) -> None:
        if self._handler is not None:
            self._handler(task, context)
        with self._changed:
            self.ids.append(task.task_id)
            self._changed.notify_all()

    def start(self) -> Running:
        """Begin."""
        self._thread.start()
        self._topics.at_end.append(self.stop)
        return self

    def await_count(self, count: int) -> None:
        """Return when so many tasks were handled."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.ids) >= count, WITHIN_S), f"only {len(self.ids)} came"

    def stop(self) -> None:
        """End it cleanly."""
        self.consumer.stop()
        self._thread.join(WITHIN_S)
        assert not self._thread.is_alive()


def run_until_idle(topics: DueTopics, **options: Any) -> list[str]:  # noqa: ANN401  # the SDK's
    """The tasks that one more consumer of the group applies."""
    running = Running(topics, **options)
    running.consumer.run(idle_exit_ms=IDLE_MS)
    return running.ids


class Process:
    """`duetasks consume`, to be killed and frozen; `lines` are the tasks that it printed so far."""

    def __init__(self, topics: DueTopics, *options: str, data_dir: Path) -> None:
        settings = topics.settings
        environment = {
            "DUETASKS_BOOTSTRAP_SERVERS": settings.bootstrap_servers or "",
            "DUETASKS_TOPIC_PREFIX": settings.topic_prefix,
            "DUETASKS_DATA_DIR": str(data_dir),
            "DUETASKS_SESSION_TIMEOUT_MS": str(settings.session_timeout_ms),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pipeline.cli", "consume", "--group", "group", *options],
            stdout=subprocess.PIPE,
            env={name: value for name, value in os.environ.items() if not name.startswith("DUETASKS_")} | environment,
            text=True,
        )
        self.lines: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        topics.at_end.append(self._end)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                with self._changed:
                    self.lines.append(json.loads(line))
                    self._changed.notify_all()

    @property
    def ids(self) -> list[str]:
        """The printed tasks."""
        return [line["task_id"] for line in self.lines]

    def await_lines(self, count: int) -> None:
        """Return when so many tasks are printed."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.lines) >= count, WITHIN_S), f"only {len(self.lines)} came"

    def _end(self) -> None:
        self._process.kill()
        self.wait()

    def send(self, number: signal.Signals) -> None:
        """A signal to this process alone."""
        self._process.send_signal(number)

    def wait(self) -> int:
        """Its exit code, when it has ended."""
        code = self._process.wait(WITHIN_S)
        self._reader.join(WITHIN_S)
        return code
