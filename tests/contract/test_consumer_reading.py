"""One suite for reading a ledger partition by position: the in-memory twin, and librdkafka on a real broker.

Whatever a log ends in (a record, a marker, aborted records, somebody's open transaction), the reader must come to say
that everything below the captured end was handed over, or wait as long as that is not true.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Protocol

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from pipeline.adapters.due_subscription import DueSubscription as KafkaSubscription
from pipeline.adapters.kafka_admin import KafkaAdmin
from pipeline.core.tasks import Offset
from pipeline.service.consumer.ports import DueSubscription, LedgerBounds, LedgerEnd, LedgerRecord
from pipeline.testing.memory_cluster import NewRecord
from pipeline.testing.memory_consumers import LEDGER, ConsumerGroupWorld, MemorySubscription
from pipeline.testing.simulated_process import SimulatedProcess

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.conftest import BrokerUnderTest

pytestmark = pytest.mark.contract

WITHIN_S = 30.0
QUIET_TAKES = 8


class Writer(Protocol):
    """A transactional producer that writes to the ledger partition."""

    def send(self, *keys: str) -> None:
        """Add records to its open transaction, on the broker when this returns."""

    def end(self, *, commit: bool) -> None:
        """End the transaction."""


class Log(Protocol):
    """A ledger partition under test."""

    @property
    def subscription(self) -> DueSubscription:
        """Who reads it."""
        ...

    def writer(self, name: str) -> Writer:
        """One more producer."""
        ...

    def delete_before(self, offset: int) -> None:
        """Retention."""
        ...


class _Nobody:
    """A listener for a subscription whose group is of no interest."""

    def on_assigned(self, partitions: Sequence[int]) -> None:
        """Nothing to do."""

    on_revoked = on_lost = on_assigned


class MemoryLedgerLog:
    """The twin's log."""

    def __init__(self) -> None:
        self._world = ConsumerGroupWorld()
        self.subscription = MemorySubscription(self._world, SimulatedProcess("reader"), fetch_max=2)
        self.subscription.open(_Nobody())

    def writer(self, name: str) -> Writer:
        """A producer on the twin."""
        producer = self._world.cluster.producer(name)
        producer.init()

        class MemoryWriter:
            def send(self, *keys: str) -> None:
                producer.send(*[NewRecord(topic=LEDGER, partition=0, key=key.encode(), value=b"v") for key in keys])

            def end(self, *, commit: bool) -> None:
                producer.commit() if commit else producer.abort()

        return MemoryWriter()

    def delete_before(self, offset: int) -> None:
        """Retention on the twin."""
        self._world.cluster.log(LEDGER, 0).delete_before(Offset(offset))


class KafkaLedgerLog:
    """A real topic."""

    def __init__(self, bootstrap_servers: str) -> None:
        self._client = {"bootstrap.servers": bootstrap_servers}
        self._prefix = f"reading-{secrets.token_hex(4)}-"
        self._topics = [f"{self._prefix}due", f"{self._prefix}ledger"]
        self._admin = AdminClient(self._client)
        for future in self._admin.create_topics([NewTopic(topic, 1, 1) for topic in self._topics]).values():
            future.result(20)
        admin, until_s = KafkaAdmin(self._client), time.monotonic() + WITHIN_S
        while len(admin.identity(self._topics).topics) < len(self._topics):
            assert time.monotonic() < until_s, "the broker doesn't know its new topics"
        self.subscription = KafkaSubscription(
            client=self._client,
            identity=lambda: admin.identity(self._topics),
            group=self._prefix,
            due_topic=self._topics[0],
            ledger_topic=self._topics[1],
            session_timeout_ms=6_000,
            max_poll_interval_ms=60_000,
        )
        self.subscription.open(_Nobody())

    def writer(self, name: str) -> Writer:
        """A real producer."""
        producer = Producer({**self._client, "transactional.id": f"{self._prefix}{name}"})
        producer.init_transactions(20)
        topic = self._topics[1]

        class KafkaWriter:
            def __init__(self) -> None:
                self._is_open = False

            def send(self, *keys: str) -> None:
                if not self._is_open:
                    producer.begin_transaction()
                self._is_open = True
                for key in keys:
                    producer.produce(topic, b"v", key.encode(), 0)
                producer.flush(20)

            def end(self, *, commit: bool) -> None:
                self._is_open = False
                producer.commit_transaction(20) if commit else producer.abort_transaction(20)

        return KafkaWriter()

    def delete_before(self, offset: int) -> None:
        """Retention, at once."""
        place = TopicPartition(self._topics[1], 0, offset)
        self._admin.delete_records([place])[place].result(20)

    def close(self) -> None:
        """Leave nothing behind."""
        self.subscription.close()
        for future in self._admin.delete_topics(self._topics).values():
            future.result(20)


@pytest.fixture(params=["memory", "kafka"])
def log(request: pytest.FixtureRequest) -> Iterator[Log]:
    """Both implementations."""
    if request.param == "memory":
        yield MemoryLedgerLog()
        return
    broker: BrokerUnderTest = request.getfixturevalue("broker")
    made = KafkaLedgerLog(broker.bootstrap_servers)
    yield made
    made.close()


def bounds_at(log: Log, end: int) -> LedgerBounds:
    """The bounds once the end is there: a broker answers a commit before it has written the markers."""
    until_s = time.monotonic() + WITHIN_S
    while (bounds := log.subscription.ledger_bounds(0)).end < end:
        assert time.monotonic() < until_s, f"the log ends at {bounds.end}, not at {end}"
    assert bounds.end == end
    return bounds


def read_to(log: Log, bounds: LedgerBounds, *, start: int | None = None) -> list[str]:
    """The keys of `[start, end)`; fails if the reader never says that it is through."""
    log.subscription.read_ledger(0, Offset(bounds.start if start is None else start))
    keys: list[str] = []
    until_s = time.monotonic() + WITHIN_S
    while time.monotonic() < until_s:
        for fetched in log.subscription.take(200):
            if isinstance(fetched, LedgerRecord):
                keys.append((fetched.key or b"").decode())
                if fetched.offset + 1 >= bounds.end:
                    return keys
            if isinstance(fetched, LedgerEnd) and fetched.position >= bounds.end:
                return keys
    raise AssertionError(f"the reader never reached {bounds.end}; it read {keys}")


def test_an_empty_log_ends_at_once(log: Log) -> None:
    """A new deployment must not wait for a first row."""
    bounds = log.subscription.ledger_bounds(0)

    assert (bounds.start, bounds.end) == (0, 0)
    assert read_to(log, bounds) == []


def test_a_log_that_ends_in_a_commit_marker_ends(log: Log) -> None:
    """The usual case: the end lies one above the last record."""
    writer = log.writer("a")
    writer.send("k1", "k2")
    writer.end(commit=True)
    bounds = bounds_at(log, 3)

    assert read_to(log, bounds) == ["k1", "k2"]


@pytest.mark.parametrize("aborted", [1, 3])
def test_a_log_that_ends_in_aborted_records_and_their_markers_ends(log: Log, aborted: int) -> None:
    """What a fenced owner leaves behind is never handed over, and takes offsets all the same."""
    writer = log.writer("a")
    writer.send("k1")
    writer.end(commit=True)
    for number in range(aborted):
        writer.send(f"x{number}", f"y{number}")
        writer.end(commit=False)
    bounds = bounds_at(log, 2 + 3 * aborted)

    assert read_to(log, bounds) == ["k1"]


def test_a_log_of_nothing_but_aborted_records_ends(log: Log) -> None:
    """The very first owner may have died in its first transaction."""
    writer = log.writer("a")
    writer.send("x")
    writer.end(commit=False)

    assert read_to(log, bounds_at(log, 2)) == []


def test_reading_on_from_any_position_ends_also_from_a_marker(log: Log) -> None:
    """A local table's position is the offset behind its last own row: a marker, or another group's record."""
    writer = log.writer("a")
    for key in ("k1", "k2"):
        writer.send(key)
        writer.end(commit=True)
    writer.send("x")
    writer.end(commit=False)
    bounds = bounds_at(log, 6)

    found = [read_to(log, bounds, start=start) for start in range(bounds.end)]

    assert found == [["k1", "k2"], ["k2"], ["k2"], [], [], []]


@pytest.mark.parametrize("commit", [True, False])
def test_an_open_transaction_is_waited_for_and_the_end_counts_it(log: Log, commit: bool) -> None:  # noqa: FBT001  # a parameter
    """The high watermark counts what is open; the last stable offset would end here, before the group's own rows."""
    stranger, owner = log.writer("stranger"), log.writer("owner")
    stranger.send("open")
    owner.send("own")
    owner.end(commit=True)
    bounds = bounds_at(log, 3)
    log.subscription.read_ledger(0, bounds.start)
    early = [fetched for _ in range(QUIET_TAKES) for fetched in log.subscription.take(50)]
    assert [fetched for fetched in early if isinstance(fetched, LedgerRecord)] == []
    assert all(isinstance(fetched, LedgerEnd) and fetched.position < bounds.end for fetched in early)

    stranger.end(commit=commit)

    assert read_to(log, bounds) == (["open", "own"] if commit else ["own"])


def test_a_log_whose_beginning_is_gone_starts_where_it_starts(log: Log) -> None:
    """Case 18: retention or an operator removed the first segment; a restore must not wait for it."""
    writer = log.writer("a")
    for key in ("k1", "k2"):
        writer.send(key)
        writer.end(commit=True)
    bounds_at(log, 4)
    log.delete_before(2)
    bounds = bounds_at(log, 4)

    assert bounds.start == 2
    assert read_to(log, bounds) == ["k2"]
