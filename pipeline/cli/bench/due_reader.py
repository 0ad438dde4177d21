"""The receiving end of the benchmark: a `read_committed` reader of a topic, in a process of its own."""

import multiprocessing
import signal
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, Final

import msgspec
from confluent_kafka import Consumer, KafkaError, TopicPartition

from pipeline.errors import UnavailableError

__all__ = ["CRITICAL_ONLY", "DueReader", "Received", "reader_config", "values_since"]

CRITICAL_ONLY: Final = 2
"""What librdkafka may print by itself: what matters comes back as an error, or as a time-out of the phase."""
_BATCH_MAX: Final = 5_000
_POLL_S: Final = 0.05
_START_TIMEOUT_S: Final = 30.0
_PAUSE_S: Final = 0.02


class Received(msgspec.Struct, frozen=True, gc=False):
    """One record and when it was in the reader's hands, by the wall clock."""

    key: bytes
    value: bytes
    at_ms: float


def reader_config(client: Mapping[str, str]) -> dict[str, Any]:
    """The options of every reader of the benchmark."""
    return {
        **client,
        "group.id": "duetasks-bench",  # required, never used: partitions are assigned by hand
        "isolation.level": "read_committed",  # what was aborted was never emitted
        "enable.auto.commit": False,
        "auto.offset.reset": "earliest",
        "fetch.error.backoff.ms": 5,
        "log_level": CRITICAL_ONLY,
    }


def values_since(client: Mapping[str, str], topic: str, starts: Sequence[int], timeout_s: float) -> dict[bytes, bytes]:
    """The last committed value of each key from those offsets on; raises `UnavailableError` after `timeout_s`."""
    consumer = Consumer({**reader_config(client), "enable.partition.eof": True})
    values: dict[bytes, bytes] = {}
    unfinished = set(range(len(starts)))
    until_s = time.monotonic() + timeout_s
    try:
        consumer.assign([TopicPartition(topic, partition, start) for partition, start in enumerate(starts)])
        while unfinished:
            if time.monotonic() > until_s:
                raise UnavailableError(f"{topic} could not be read within {timeout_s:g} s")
            for message in consumer.consume(_BATCH_MAX, _POLL_S):
                if (error := message.error()) is None:
                    values[message.key()] = message.value()
                elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001  # librdkafka's local codes are named so
                    unfinished.discard(message.partition())
    finally:
        consumer.close()
    return values


class DueReader:
    """Reads every partition of `topic` from its offset in `starts` on, from `start` until `stop`."""

    def __init__(self, client: Mapping[str, str], topic: str, starts: Sequence[int]) -> None:
        context = multiprocessing.get_context("spawn")  # librdkafka does not survive a fork
        self._ours, theirs = context.Pipe()
        self._count = context.Value("Q", 0)
        self._process = context.Process(
            target=_read, args=(dict(client), topic, list(starts), theirs, self._count), daemon=True
        )

    def start(self) -> None:
        """Start reading; returns once the partitions are assigned."""
        self._process.start()
        if not self._ours.poll(_START_TIMEOUT_S):
            raise UnavailableError("the reader of the benchmark did not start")
        self._ours.recv()

    @property
    def count(self) -> int:
        """How many records were received so far."""
        return int(self._count.value)

    def await_count(self, count: int, timeout_s: float) -> bool:
        """Wait until `count` records were received in all; False if the time ran out first."""
        until_s = time.monotonic() + timeout_s
        while self.count < count:
            if time.monotonic() > until_s:
                return False
            time.sleep(_PAUSE_S)
        return True

    def take(self) -> list[Received]:
        """What was received since the last call."""
        self._ours.send("take")
        found: list[Received] = self._ours.recv()
        return found

    def stop(self) -> None:
        """End the process."""
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _read(client: dict[str, str], topic: str, starts: list[int], parent: Connection, count: Any) -> None:  # noqa: ANN401  # a shared value of multiprocessing
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches all; the parent ends us
    consumer = Consumer(reader_config(client))
    consumer.assign([TopicPartition(topic, partition, start) for partition, start in enumerate(starts)])
    parent.send("reading")
    received: list[Received] = []
    while True:
        # `consume` alone waits until it has all it was asked for, which would count as lateness.
        first = consumer.poll(_POLL_S)
        if first is not None:
            messages = [first, *consumer.consume(_BATCH_MAX, 0)]
            at_ms = time.time() * 1000
            received += [Received(m.key(), m.value(), at_ms) for m in messages if m.error() is None]
            count.value += sum(m.error() is None for m in messages)
        if parent.poll():
            parent.recv()
            parent.send(received)
            received = []
