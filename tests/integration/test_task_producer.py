"""The producer SDK on a real broker: receipts that are true, refusals, back-pressure, and outages told honestly."""

from __future__ import annotations

import asyncio
import socket
import time
import uuid
from concurrent.futures import wait
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from pipeline import AsyncTaskProducer, CancelRequest, Receipt, ScheduleRequest, TaskProducer
from pipeline.adapters import event_sender
from pipeline.adapters.avro_codec import AvroCodec
from pipeline.config import Settings
from pipeline.core.events import Cancel, Reason, Schedule
from pipeline.core.partitioning import partition_for_key
from pipeline.errors import (
    RejectedTaskError,
    UnavailableError,
    UndeliveredError,
    UnknownOutcomeError,
    UnsentError,
    UsageError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pipeline.embedded import EmbeddedBroker
    from tests.conftest import BrokerUnderTest

pytestmark = pytest.mark.integration

_TIMEOUT_S = 20
_PARTITIONS = 3
_HOUR = timedelta(hours=1)
_SHORT = timedelta(seconds=4)


def _make_topic(bootstrap_servers: str, **config: str) -> Settings:
    settings = Settings(bootstrap_servers=bootstrap_servers, topic_prefix=f"producer-{uuid.uuid4().hex[:8]}-")
    topic = NewTopic(
        settings.topics.events,
        num_partitions=_PARTITIONS,
        replication_factor=1,
        config={"message.timestamp.type": "LogAppendTime", **config},
    )
    admin = AdminClient(settings.client_config())  # kept: a client that is collected takes its answers with it
    admin.create_topics([topic])[settings.topics.events].result(_TIMEOUT_S)
    while len(_partitions(admin, settings)) < _PARTITIONS:
        time.sleep(0.02)  # the controller answers before the broker knows
    return settings


def _partitions(admin: AdminClient, settings: Settings) -> dict[int, Any]:
    found = admin.list_topics(timeout=_TIMEOUT_S).topics.get(settings.topics.events)
    return {} if found is None else found.partitions


@pytest.fixture
def settings(broker: BrokerUnderTest) -> Iterator[Settings]:
    """A topic of one's own on the shared broker."""
    made = _make_topic(broker.bootstrap_servers)
    yield made
    admin = AdminClient(made.client_config())
    admin.delete_topics([made.topics.events])[made.topics.events].result(_TIMEOUT_S)


def _records(settings: Settings) -> dict[tuple[int, int], Any]:
    """All records of the topic by partition and offset."""
    consumer = Consumer({**settings.client_config(), "group.id": "reader", "enable.auto.commit": False})
    topic, found = settings.topics.events, {}
    try:
        consumer.list_topics(topic, timeout=_TIMEOUT_S)
        for partition in range(_PARTITIONS):
            place = TopicPartition(topic, partition, 0)
            _, end = consumer.get_watermark_offsets(place, timeout=_TIMEOUT_S)
            consumer.assign([place])
            for offset in range(end):
                message = consumer.poll(_TIMEOUT_S)
                assert message is not None, f"no record at {offset} of {end}"
                assert message.error() is None
                found[partition, message.offset()] = message
    finally:
        consumer.close()
    return found


# -- when all is well ------------------------------------------------------------------------------------------------


def test_a_receipt_names_where_the_event_stands(settings: Settings) -> None:
    """Whoever holds one can find the event, and the verdict on it."""
    due_at = datetime.now(UTC) + _HOUR

    with TaskProducer(settings, source="orders") as producer:
        first = producer.schedule("ordre-é", due_at=due_at, payload="p", headers={"a": "b"}, version=3, event_id="e1")
        second = producer.cancel("ordre-é", version=4)

    records = _records(settings)
    message = records[first.partition, first.offset]
    assert (first.topic, first.event_id) == (settings.topics.events, "e1")
    assert message.key() == "ordre-é".encode()
    assert message.timestamp()[1] == first.timestamp_ms
    event = AvroCodec().decode_event(message.value())
    assert isinstance(event, Schedule)
    assert (event.due_at_ms, event.payload, event.source) == (int(due_at.timestamp() * 1000 + 0.999), b"p", "orders")
    cancel = AvroCodec().decode_event(records[second.partition, second.offset].value())
    assert isinstance(cancel, Cancel)
    assert (cancel.task_id, cancel.version, cancel.event_id) == ("ordre-é", 4, second.event_id)


def test_partitions_are_those_that_the_owners_expect(settings: Settings) -> None:
    """A cancel that lands in another partition than its schedule is lost: librdkafka must hash as Java does."""
    task_ids = ["", "a", "ab", "abc", "abcd", "order-17", "ordre-é", "📦" * 50, *(uuid.uuid4().hex for _ in range(200))]
    requests = [ScheduleRequest(task_id=task_id, delay=_HOUR) for task_id in task_ids[1:]]

    with TaskProducer(settings) as producer:
        receipts = [outcome.unwrap() for outcome in producer.schedule_many(requests)]

    expected = [partition_for_key(task_id.encode(), _PARTITIONS) for task_id in task_ids[1:]]
    assert [receipt.partition for receipt in receipts] == expected
    assert set(expected) == set(range(_PARTITIONS))


def test_a_bulk_send_loses_neither_an_event_nor_an_error(settings: Settings) -> None:
    """One bad record among thousands must be told, in its place, and must not stop the others."""
    count, wrong = 5_000, {0: None, 2_500: timedelta(days=9_999), 4_999: None}
    requests = [ScheduleRequest(task_id=f"t{n}", delay=wrong.get(n, _HOUR), payload=bytes(100)) for n in range(count)]

    with TaskProducer(settings) as producer:
        outcomes = list(producer.schedule_many(requests))

    assert [outcome.index for outcome in outcomes] == list(range(count))
    failed = {outcome.index: outcome.error for outcome in outcomes if outcome.receipt is None}
    assert {index: getattr(error, "reason", error) for index, error in failed.items()} == {
        0: Reason.MISSING_TIME,
        2_500: Reason.BEYOND_HORIZON,
        4_999: Reason.MISSING_TIME,
    }
    places = {(o.receipt.partition, o.receipt.offset): f"t{o.index}" for o in outcomes if o.receipt is not None}
    assert {place: message.key().decode() for place, message in _records(settings).items()} == places


def test_events_of_one_task_keep_their_order(settings: Settings) -> None:
    """A cancel that overtakes its schedule would cancel nothing."""
    requests = [
        request
        for n in range(300)
        for request in (ScheduleRequest(task_id="t", delay=_HOUR, event_id=f"s{n}"), CancelRequest(task_id="t"))
    ]

    with TaskProducer(settings) as producer:
        offsets = [outcome.unwrap().offset for outcome in producer.schedule_many(requests)]

    assert offsets == sorted(offsets)


def test_futures_are_answered_without_being_waited_for(settings: Settings) -> None:
    """A web server submits and goes on; the sender's own thread serves the broker."""
    with TaskProducer(settings) as producer:
        futures = [producer.submit_schedule(f"t{n}", delay=_HOUR) for n in range(100)]
        futures.append(producer.submit_cancel("t1"))
        done, pending = wait(futures, timeout=_TIMEOUT_S)

    assert not pending
    assert all(isinstance(future.result(), Receipt) for future in done)
    assert not futures[0].cancel(), "what was handed over can't be taken back"


def test_a_full_queue_makes_the_caller_wait(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded whatever the caller does; and nothing is dropped for it."""
    monkeypatch.setattr(event_sender, "QUEUE_MESSAGES_MAX", 50)

    with TaskProducer(settings, linger=timedelta(milliseconds=20)) as producer:
        outcomes = list(producer.schedule_many(ScheduleRequest(task_id=f"t{n}", delay=_HOUR) for n in range(1_000)))

    assert all(outcome.error is None for outcome in outcomes)
    assert len(_records(settings)) == 1_000


def test_json_events_are_sent_as_what_they_say(settings: Settings) -> None:
    """`import` sends lines; what is refused is told with the reason that the agent would give."""
    values = [b'{"task_id": "t", "type": "SCHEDULE", "delay": "30m"}', b'{"task_id": "t", "typ": "CANCEL"}', b"{"]

    with TaskProducer(settings) as producer:
        outcomes = list(producer.send_json(values, event_id=lambda value: f"id-{len(value)}"))

    assert outcomes[0].unwrap().event_id == f"id-{len(values[0])}"
    errors = [outcome.error for outcome in outcomes[1:]]
    assert [getattr(error, "reason", None) for error in errors] == [Reason.UNKNOWN_FIELD, Reason.MALFORMED]


def test_an_event_is_sent_as_it_is(settings: Settings) -> None:
    """An event that failed once is repeated with the id that it had."""
    event = Schedule(task_id="t", event_id="mine", delay_ms=1, created_at_ms=5)

    with TaskProducer(settings) as producer:
        receipt = producer.send_event(event)

    assert AvroCodec().decode_event(_records(settings)[receipt.partition, receipt.offset].value()) == event


# -- refusals --------------------------------------------------------------------------------------------------------


def test_a_refused_request_is_not_sent(settings: Settings) -> None:
    """Nothing on the topic, nothing on `dead-tasks`: the caller alone is told."""
    with TaskProducer(settings) as producer, pytest.raises(RejectedTaskError) as caught:
        producer.schedule("t", delay=_HOUR, target_topic="nowhere")

    assert caught.value.reason == Reason.UNKNOWN_TARGET
    assert _records(settings) == {}


def test_an_event_that_the_topic_does_not_take_is_refused_with_a_reason(broker: BrokerUnderTest) -> None:
    """The topic's own limit may be lower than ours; the caller must not send it again and again."""
    settings = _make_topic(broker.bootstrap_servers, **{"max.message.bytes": "2000"})
    noise = bytes(uuid.uuid4().bytes[n % 16] ^ n % 251 for n in range(50_000)) + uuid.uuid4().bytes * 100

    with TaskProducer(settings) as producer:
        with pytest.raises(RejectedTaskError) as caught:
            producer.schedule("t", delay=_HOUR, payload=noise)
        assert producer.schedule("t", delay=_HOUR).offset == 0

    assert caught.value.reason == Reason.TOO_LARGE
    assert "max.message.bytes" in str(caught.value)


def test_a_missing_topic_is_told_at_the_start(broker: BrokerUnderTest) -> None:
    """And is not created by asking for it: it would get the broker's settings, which can lose data."""
    settings = Settings(bootstrap_servers=broker.bootstrap_servers, topic_prefix=f"missing-{uuid.uuid4().hex[:8]}-")

    with pytest.raises(UnavailableError, match="duetasks topics apply"):
        TaskProducer(settings)

    assert settings.topics.events not in AdminClient(settings.client_config()).list_topics(timeout=_TIMEOUT_S).topics


def test_brokers_that_do_not_answer_are_told_at_the_start() -> None:
    """Within the deadline, with the address to look at."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        address = f"127.0.0.1:{listener.getsockname()[1]}"

        with pytest.raises(UnavailableError, match="No broker answered"):
            TaskProducer(Settings(bootstrap_servers=address), deadline=timedelta(seconds=1))


def test_a_closed_producer_sends_nothing(settings: Settings) -> None:
    """And says so, with the event."""
    producer = TaskProducer(settings)
    producer.close()
    producer.close()

    with pytest.raises(UnsentError, match="closed"):
        producer.schedule("t", delay=_HOUR)


def test_a_bulk_send_that_nobody_reads_is_told_at_the_end(settings: Settings) -> None:
    """The generator sends as it is read: forgetting the loop must not pass for success."""
    producer = TaskProducer(settings)
    unread = producer.schedule_many([ScheduleRequest(task_id="t", delay=_HOUR)])

    with pytest.raises(UsageError, match="loop over them"):
        producer.close()

    unread.close()
    assert _records(settings) == {}


# -- outages ---------------------------------------------------------------------------------------------------------


@contextmanager
def _paused(broker: EmbeddedBroker) -> Iterator[None]:
    broker.pause()
    try:
        yield
    finally:
        broker.resume()


def test_outages_are_told_as_what_they_are(private_broker: Callable[..., EmbeddedBroker]) -> None:
    """A frozen broker may have the event: unknown. One that is gone can't: unsent. Both carry the event to repeat.

    One test for all, as a broker of one's own takes seconds to start.
    """
    broker = private_broker()
    info = broker.status()
    assert info is not None
    settings = _make_topic(info.bootstrap_servers)
    producer = TaskProducer(settings, deadline=_SHORT)
    before = producer.schedule("before", delay=_HOUR)

    with _paused(broker):
        started_s = time.monotonic()
        with pytest.raises(UnknownOutcomeError) as unknown:
            producer.schedule("frozen", delay=_HOUR, payload="p")
        assert time.monotonic() - started_s < _SHORT.total_seconds() + 1
        with pytest.raises(UnknownOutcomeError) as hasty:
            producer.schedule("hasty", delay=_HOUR, deadline=timedelta(milliseconds=100))

    for caught, task_id in ((unknown, "frozen"), (hasty, "hasty")):
        assert isinstance(caught.value.event, Schedule)
        assert (caught.value.event.task_id, len(caught.value.event.event_id)) == (task_id, 24)
        assert caught.value.event.event_id in str(caught.value)
    repeated = producer.send_event(unknown.value.event, deadline=_SHORT)
    assert repeated.event_id == unknown.value.event.event_id
    producer.close()
    ids = [AvroCodec().decode_event(m.value()).event_id for m in _records(settings).values()]
    assert ids.count(repeated.event_id) in {1, 2}, "it may have arrived before, too"
    assert before.event_id in ids

    producer = TaskProducer(settings, deadline=_SHORT)
    producer.schedule("connected", delay=_HOUR)
    broker.kill()
    with pytest.raises(UnsentError) as unsent:
        producer.schedule("gone", delay=_HOUR)
    assert isinstance(unsent.value.event, Schedule)
    assert unsent.value.event.task_id == "gone"
    outcomes = list(producer.schedule_many([ScheduleRequest(task_id=f"gone-{n}", delay=_HOUR) for n in range(20)]))
    assert [type(outcome.error) for outcome in outcomes] == [UnsentError] * 20

    future = producer.submit_schedule("nobody looks", delay=_HOUR)
    with pytest.raises(UndeliveredError) as undelivered:
        producer.close(timedelta(seconds=1))
    assert [event.task_id for event, _ in undelivered.value.failures] == ["nobody looks"]
    assert isinstance(future.exception(), UnsentError | UnknownOutcomeError)


def test_the_block_s_own_error_is_told_before_what_was_not_delivered(
    private_broker: Callable[..., EmbeddedBroker],
) -> None:
    """What ended the block is the cause; the rest is added to it."""
    broker = private_broker()
    info = broker.status()
    assert info is not None
    settings = _make_topic(info.bootstrap_servers)

    with (  # noqa: PT012  # the block is what is tested
        pytest.raises(ZeroDivisionError) as caught,
        TaskProducer(settings, deadline=timedelta(seconds=2)) as producer,
    ):
        broker.kill()
        producer.submit_schedule("t", delay=_HOUR)
        raise ZeroDivisionError

    assert "were not delivered" in caught.value.__notes__[0]


# -- asyncio ---------------------------------------------------------------------------------------------------------


def test_the_asyncio_twin_does_the_same(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same calls, awaited, many at once, without blocking the loop while the queue is full."""
    monkeypatch.setattr(event_sender, "QUEUE_MESSAGES_MAX", 20)

    async def work() -> list[Receipt]:
        async with AsyncTaskProducer(settings, source="web") as producer:
            with pytest.raises(RejectedTaskError):
                await producer.schedule("t")
            receipts = await asyncio.gather(*(producer.schedule(f"t{n}", delay=_HOUR) for n in range(100)))
            receipts.append(await producer.cancel("t1", version=1))
            receipts.append(await producer.send_event(Cancel(task_id="t2", event_id="mine")))
            requests = [ScheduleRequest(task_id=f"b{n}", delay=_HOUR) for n in range(1_200)]
            outcomes = [outcome async for outcome in producer.schedule_many(requests)]
            assert [outcome.index for outcome in outcomes] == list(range(1_200))
            return [*receipts, *(outcome.unwrap() for outcome in outcomes)]

    receipts = asyncio.run(work())

    records = _records(settings)
    assert {(receipt.partition, receipt.offset) for receipt in receipts} == set(records)
    assert len(records) == 1_302


def test_the_asyncio_twin_must_be_opened(settings: Settings) -> None:
    """A sentence instead of an attribute error."""
    with pytest.raises(UsageError, match="async with"):
        asyncio.run(AsyncTaskProducer(settings).cancel("t"))
