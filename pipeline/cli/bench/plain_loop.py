"""The ceiling: consume in batches, produce in transactions the bytes that the agent wrote, and nothing else.

One process like the agent, a thread for each partition with a consumer and a transactional producer of its own, the
agent's producer options, as many records in a transaction as the agent takes. It keeps no table, decodes nothing,
decides nothing: what the agent's rate lacks to this one is the price of the promises.
"""

import multiprocessing
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, Final

import msgspec
from confluent_kafka import Consumer, Producer, TopicPartition

from pipeline.adapters.kafka_transaction import producer_config
from pipeline.cli.bench.due_reader import CRITICAL_ONLY, reader_config
from pipeline.errors import UnavailableError

__all__ = ["WARM_UP_KEY", "PlainLoop", "Stretch"]

_TIMEOUT_S: Final = 60.0
_TRANSACTION_TIMEOUT_MS: Final = 10_000
_CONSUME_S: Final = 1.0
WARM_UP_KEY: Final = b"warm-up"
"""Key of the one record that each partition of each output gets before the clock starts."""


class Stretch(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of `task-events`: `counts` records from `starts` on, by partition; `outputs` are the topics to write.

    Each output has the values to write by the key of the input record.
    """

    topic: str
    starts: Sequence[int]
    counts: Sequence[int]
    transaction_records: int
    outputs: Mapping[str, Mapping[bytes, bytes]]


class PlainLoop:
    """Runs the loop once over a stretch."""

    def __init__(self, client: Mapping[str, str], stretch: Stretch, name: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_loop, args=(dict(client), stretch, name, theirs), daemon=True)

    def run(self) -> tuple[float, float]:
        """The wall clock's seconds at the start and after the last commit; raises `UnavailableError`."""
        try:
            self._process.start()
            self._hear()  # all threads are ready
            self._ours.send("go")
            started_s, ended_s = self._hear()
            return started_s, ended_s
        finally:
            self._process.kill()
            self._process.join()

    def _hear(self) -> Any:  # noqa: ANN401  # what the process sends
        if not self._ours.poll(2 * _TIMEOUT_S):
            raise UnavailableError("the plain loop of the benchmark did not answer")
        return self._ours.recv()


def _loop(client: dict[str, str], stretch: Stretch, name: str, parent: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches all; the parent ends us
    partitions = range(len(stretch.counts))
    ready, go = threading.Barrier(len(partitions) + 1), threading.Barrier(len(partitions) + 1)
    threads = [
        threading.Thread(target=_copy_partition, args=(client, stretch, name, partition, ready, go))
        for partition in partitions
    ]
    for thread in threads:
        thread.start()
    ready.wait(_TIMEOUT_S)
    parent.send("ready")
    parent.recv()
    started_s = time.time()
    go.wait(_TIMEOUT_S)
    for thread in threads:
        thread.join()
    parent.send((started_s, time.time()))
    parent.recv()  # until we are killed: closing clients takes time that nobody needs


def _copy_partition(
    client: dict[str, str],
    stretch: Stretch,
    name: str,
    partition: int,
    ready: threading.Barrier,
    go: threading.Barrier,
) -> None:
    consumer = Consumer(reader_config(client))
    # Connects to the partition's leader, which would take a good part of a second once the clock runs.
    consumer.get_watermark_offsets(TopicPartition(stretch.topic, partition), timeout=_TIMEOUT_S)
    options = producer_config(client, f"duetasks-bench-{name}-{partition}", _TRANSACTION_TIMEOUT_MS)
    producer = Producer({**options, "log_level": CRITICAL_ONLY})
    producer.init_transactions(_TIMEOUT_S)
    _produce(producer, {topic: {WARM_UP_KEY: b""} for topic in stretch.outputs}, [WARM_UP_KEY], partition)
    ready.wait(_TIMEOUT_S)
    go.wait(_TIMEOUT_S)
    # Only now: what was fetched before the start would come for nothing.
    consumer.assign([TopicPartition(stretch.topic, partition, stretch.starts[partition])])
    left = stretch.counts[partition]
    while left:
        messages = consumer.consume(min(left, stretch.transaction_records), _CONSUME_S)
        keys = [message.key() for message in messages if message.error() is None]
        if not keys:
            continue
        _produce(producer, stretch.outputs, keys, partition)
        left -= len(keys)


def _produce(
    producer: Producer, outputs: Mapping[str, Mapping[bytes, bytes]], keys: Sequence[bytes], partition: int
) -> None:
    """One transaction."""
    producer.begin_transaction()
    for topic, values in outputs.items():
        producer.produce_batch(
            topic, [{"key": key, "value": values.get(key, b"")} for key in keys], partition=partition
        )
    producer.commit_transaction(_TIMEOUT_S)
