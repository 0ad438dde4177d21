"""The embedded broker with the real Kafka in it: found again, restarted and killed without losing data or address."""

from __future__ import annotations

import socket
import subprocess
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import psutil
import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from pipeline.embedded import BrokerStartError, EmbeddedBroker

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.conftest import BrokerUnderTest

pytestmark = pytest.mark.integration

_API_TIMEOUT_S = 20


def _create_topic(bootstrap_servers: str, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    admin.create_topics([NewTopic(topic, num_partitions=1)])[topic].result(_API_TIMEOUT_S)


def _produce(bootstrap_servers: str, topic: str, value: bytes) -> None:
    producer = Producer({"bootstrap.servers": bootstrap_servers, "acks": "all", "enable.idempotence": True})
    errors = []
    producer.produce(topic, value, on_delivery=lambda error, _: errors.append(error))
    assert producer.flush(_API_TIMEOUT_S) == 0
    assert errors == [None]


def _read_all(bootstrap_servers: str, topic: str) -> list[bytes]:
    config = {"bootstrap.servers": bootstrap_servers, "group.id": f"test-{uuid.uuid4()}", "enable.auto.commit": False}
    consumer = Consumer(config)
    try:
        first, end = consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=_API_TIMEOUT_S)
        consumer.assign([TopicPartition(topic, 0, first)])
        messages = consumer.consume(end - first, timeout=_API_TIMEOUT_S)
        return [message.value() for message in messages]
    finally:
        consumer.close()


def test_the_shared_broker_answers_and_keeps_records(broker: BrokerUnderTest) -> None:
    """Every other integration test stands on this fixture, whichever kind of broker it found."""
    topic = f"kept-{uuid.uuid4()}"

    _create_topic(broker.bootstrap_servers, topic)
    _produce(broker.bootstrap_servers, topic, b"first")

    assert _read_all(broker.bootstrap_servers, topic) == [b"first"]


def test_an_unknown_topic_is_not_created_by_asking_for_it(private_broker: Callable[..., EmbeddedBroker]) -> None:
    """A topic made by a typo would have none of the settings that keep its data."""
    info = private_broker().status()
    assert info is not None

    with pytest.raises(KafkaException):
        _read_all(info.bootstrap_servers, "never-created")

    assert "never-created" not in AdminClient({"bootstrap.servers": info.bootstrap_servers}).list_topics().topics


def test_stop_is_clean_and_a_restart_has_the_same_data_and_address(
    private_broker: Callable[..., EmbeddedBroker],
) -> None:
    """A laptop that is shut down in the evening goes on in the morning, with clients that know the old address."""
    broker = private_broker()
    before = broker.start()
    _create_topic(before.bootstrap_servers, "kept")
    _produce(before.bootstrap_servers, "kept", b"first")

    assert broker.stop() is True

    # Kafka writes this file as the last step of a clean shutdown, and removes it when it starts.
    assert (before.data_dir / "broker" / "kafka" / ".kafka_cleanshutdown").exists()
    assert broker.status() is None
    assert not psutil.pid_exists(before.pid)
    after = broker.start()
    assert (after.bootstrap_servers, after.cluster_id) == (before.bootstrap_servers, before.cluster_id)
    assert after.pid != before.pid
    assert _read_all(after.bootstrap_servers, "kept") == [b"first"]


def test_a_killed_broker_comes_back_with_what_it_acknowledged(private_broker: Callable[..., EmbeddedBroker]) -> None:
    """SIGKILL is what acceptance tests do to it, and what a machine short of memory does."""
    broker = private_broker()
    before = broker.start()
    _create_topic(before.bootstrap_servers, "kept")
    _produce(before.bootstrap_servers, "kept", b"first")

    broker.kill()

    assert broker.status() is None
    after = broker.start()
    assert after.bootstrap_servers == before.bootstrap_servers
    assert _read_all(after.bootstrap_servers, "kept") == [b"first"]


def test_starting_twice_gives_one_broker(private_broker: Callable[..., EmbeddedBroker]) -> None:
    """Two terminals typing `duetasks up` must not fight over one data folder."""
    running = private_broker()
    first = running.status()
    assert first is not None
    running.stop()
    same = [EmbeddedBroker(first.data_dir, cache_dir=running._cache_dir) for _ in range(3)]

    with ThreadPoolExecutor(len(same)) as pool:
        started = list(pool.map(lambda broker: broker.start(), same))

    assert len({info.pid for info in started}) == 1
    assert running.start() == started[0]


def test_the_broker_outlives_the_process_that_started_it(tmp_path: Path, kafka_cache_dir: Path) -> None:
    """`duetasks broker start` returns, and the broker runs; whoever comes later finds and stops it."""
    broker = EmbeddedBroker(tmp_path, cache_dir=kafka_cache_dir)
    script = (
        "import pathlib, sys; from pipeline.embedded import EmbeddedBroker; "
        "print(EmbeddedBroker(pathlib.Path(sys.argv[1]), cache_dir=pathlib.Path(sys.argv[2])).start().pid)"
    )
    arguments = [sys.executable, "-c", script, str(tmp_path), str(kafka_cache_dir)]
    try:
        starter = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=120)

        info = broker.status()

        assert info is not None
        assert info.pid == int(starter.stdout)
        assert AdminClient({"bootstrap.servers": info.bootstrap_servers}).list_topics(timeout=_API_TIMEOUT_S).brokers
    finally:
        assert broker.stop() is True


def test_a_paused_broker_does_not_answer_until_resumed(private_broker: Callable[..., EmbeddedBroker]) -> None:
    """Chaos tests freeze brokers this way; a stop must work on a frozen one too."""
    broker = private_broker()
    info = broker.start()
    admin = AdminClient({"bootstrap.servers": info.bootstrap_servers})
    admin.list_topics(timeout=_API_TIMEOUT_S)

    broker.pause()

    with pytest.raises(KafkaException):
        admin.list_topics(timeout=1)
    broker.resume()
    assert admin.list_topics(timeout=_API_TIMEOUT_S).cluster_id == info.cluster_id
    broker.pause()
    assert broker.stop() is True
    assert not psutil.pid_exists(info.pid)


def test_it_listens_on_loopback_only(private_broker: Callable[..., EmbeddedBroker]) -> None:
    """There is no authentication: nobody on the same network may reach it."""
    info = private_broker().status()
    assert info is not None

    listening = [c.laddr.ip for c in psutil.Process(info.pid).net_connections("tcp") if c.status == psutil.CONN_LISTEN]

    assert {ip.removeprefix("::ffff:") for ip in listening} == {"127.0.0.1"}


def test_a_folder_with_spaces_and_other_letters_works(tmp_path: Path, kafka_cache_dir: Path) -> None:
    """Home folders carry people's names; Java reads its settings files as Latin-1."""
    broker = EmbeddedBroker(tmp_path / "Zoë Ω 🚀 data", cache_dir=kafka_cache_dir)
    try:
        info = broker.start()

        assert info.log_file.stat().st_size > 0
        assert (info.data_dir / "broker" / "kafka" / "meta.properties").exists()
    finally:
        broker.stop()


def test_a_start_that_fails_quotes_the_log(private_broker: Callable[..., EmbeddedBroker]) -> None:
    """Without the reason in the message everybody would have to know where the log is."""
    broker = private_broker()
    info = broker.start()
    broker.stop()
    broken = EmbeddedBroker(info.data_dir, cache_dir=broker._cache_dir, settings={"message.max.bytes": "-1"})

    with pytest.raises(BrokerStartError, match=r"ended while it was starting[\s\S]*-1 for .*message\.max\.bytes"):
        broken.start()

    assert broken.status() is None


def test_a_first_start_that_fails_says_why(private_broker: Callable[..., EmbeddedBroker]) -> None:
    """The same for the tool that prepares the data folder, without its stack trace."""
    with pytest.raises(BrokerStartError, match=r"could not prepare its data folder: .*message\.max\.bytes.*\Z"):
        private_broker(settings={"message.max.bytes": "-1"})


def test_a_port_taken_meanwhile_is_replaced_and_told(private_broker: Callable[..., EmbeddedBroker]) -> None:
    """Another program may have taken the port: the broker comes up elsewhere rather than not at all."""
    broker = private_broker()
    before = broker.start()
    broker.stop()
    told: list[str] = []
    port = int(before.bootstrap_servers.rpartition(":")[2])
    again = EmbeddedBroker(before.data_dir, cache_dir=broker._cache_dir, on_progress=told.append)

    with socket.create_server(("127.0.0.1", port)):
        after = again.start()

    assert after.bootstrap_servers != before.bootstrap_servers
    assert after.cluster_id == before.cluster_id
    assert any(str(port) in sentence for sentence in told)
