"""What follows when the broker has a record and does not say where: nothing may be reckoned from such an answer."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaError

from pipeline.adapters import kafka_offsets, kafka_transaction
from pipeline.adapters.kafka_ledger import KafkaLedgerTransaction
from pipeline.adapters.kafka_offsets import WriteFence
from pipeline.adapters.kafka_transaction import KafkaTransaction
from pipeline.core.tasks import Offset
from pipeline.errors import RetryableError, UnavailableError
from pipeline.ports import Commit, TopicIdentity
from pipeline.service.consumer.ports import LedgerBatch

pytestmark = pytest.mark.unit

Report = Callable[[KafkaError | None, SimpleNamespace], None]


class Broker:
    """A producer whose records are all acknowledged; those of `unplaced` topics without an offset."""

    def __init__(self, *unplaced: str) -> None:
        self._unplaced = unplaced
        self._reports: list[tuple[Report, SimpleNamespace]] = []
        self.ended: list[str] = []

    def produce(self, topic: str, *_record: object, on_delivery: Report, **_more: object) -> None:
        offset = None if topic in self._unplaced else 7
        message = SimpleNamespace(topic=lambda: topic, partition=lambda: 0, offset=lambda: offset)
        self._reports.append((on_delivery, message))

    def flush(self, _timeout_s: float) -> int:
        reports, self._reports = self._reports, []
        for report, message in reports:
            report(None, message)
        return 0

    def begin_transaction(self) -> None:
        """Nothing to do."""

    def send_offsets_to_transaction(self, *_arguments: object) -> None:
        """Nothing to do."""

    def commit_transaction(self, _timeout_s: float) -> None:
        self.ended.append("commit")

    def abort_transaction(self, _timeout_s: float) -> None:
        self.ended.append("abort")


async def committed(monkeypatch: pytest.MonkeyPatch, broker: Broker) -> Commit:
    """What an owner's transaction with an emission and a row of state gives."""
    monkeypatch.setattr(kafka_transaction, "Producer", lambda _options: broker)
    with ThreadPoolExecutor(1) as executor:
        transaction = KafkaTransaction(
            {},
            transactional_id="owner",
            partition=0,
            state_topic="state",
            own_topics=frozenset({"state", "due"}),
            transaction_timeout_ms=1_000,
            executor=executor,
            is_open=lambda _topic: asyncio.sleep(0, result=False),
        )
        transaction.begin()
        transaction.produce("due", b"k", b"v")
        transaction.produce_last(b"k", b"v")
        return await transaction.commit()


def test_an_owner_whose_records_are_placed_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ordinary way, for the tests that follow."""
    broker = Broker()

    commit = asyncio.run(committed(monkeypatch, broker))

    assert (commit.last_state_offset, commit.last_offsets, broker.ended) == (7, {"due": 7}, ["commit"])


@pytest.mark.parametrize("topic", ["due", "state"])
def test_an_owner_begins_anew_when_a_place_is_not_told(monkeypatch: pytest.MonkeyPatch, topic: str) -> None:
    """A task's place is its proof of emission, and the last row's place is where a restore goes on."""
    broker = Broker(topic)

    with pytest.raises(RetryableError, match="did not tell where"):
        asyncio.run(committed(monkeypatch, broker))

    assert broker.ended == ["abort"]


@pytest.mark.parametrize("topic", ["ledger", "dead"])
def test_a_ledger_begins_anew_when_a_place_is_not_told(topic: str) -> None:
    """A row without its place could not be told from a later one."""
    broker = Broker(topic)
    group = SimpleNamespace(group_metadata=object, stable_end=lambda *_place: Offset(7))
    transaction = KafkaLedgerTransaction(
        broker,
        partition=0,
        due_topic="due-tasks",
        ledger_topic="ledger",
        dead_topic="dead",
        group=group,  # type: ignore[arg-type]  # as far as it is asked
        timeout_ms=1_000,
    )

    with pytest.raises(RetryableError, match="did not tell where"):
        transaction.commit(LedgerBatch(rows=[(b"k", b"v")], dead=[(b"k", b"v")], outputs=[], position=Offset(1)))

    assert broker.ended == ["abort"]


def test_a_fence_that_is_not_told_where_it_stands_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """An owner that waited for its place for ever would fire nothing any more."""
    monkeypatch.setattr(kafka_offsets, "Producer", lambda _options: Broker("events"))
    known = TopicIdentity(topic_id="1", partition_count=1)
    offsets = SimpleNamespace(identity=lambda _topic: asyncio.sleep(0, result=known))
    fence = WriteFence(offsets, "events", {})  # type: ignore[arg-type]  # as far as it is asked

    with pytest.raises(UnavailableError, match="did not tell where"):
        asyncio.run(asyncio.wait_for(fence.target(0, known), 10))
