"""A cluster of three real nodes: what was acknowledged is there, whichever node is killed."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from pipeline.adapters.topic_setup import apply_topics, verify_topics
from pipeline.config import Settings
from pipeline.embedded import EmbeddedCluster

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.integration

RECORDS = 200


@pytest.fixture
def cluster(tmp_path: Path, kafka_cache_dir: Path) -> Iterator[EmbeddedCluster]:
    """Three nodes of this test's own."""
    made = EmbeddedCluster(tmp_path / "cluster", cache_dir=kafka_cache_dir)
    yield made
    made.kill()


def write(servers: str, topic: str, values: list[bytes]) -> None:
    """Send values, and return when all are acknowledged."""
    producer = Producer({"bootstrap.servers": servers, "acks": "all", "enable.idempotence": True, "log_level": 0})
    errors: list[object] = []
    for value in values:
        producer.produce(topic, value, value, on_delivery=lambda error, _: errors.append(error))
    assert producer.flush(60) == 0
    assert errors == [None] * len(values)


def read(servers: str, topic: str, partition_count: int, count: int) -> set[bytes]:
    """The first `count` values that come, however long a leader takes."""
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": secrets.token_hex(4),
            "auto.offset.reset": "earliest",
            "log_level": 0,
        }
    )
    consumer.assign([TopicPartition(topic, partition, 0) for partition in range(partition_count)])
    found: set[bytes] = set()
    try:
        for _ in range(600):
            found |= {message.value() for message in consumer.consume(1_000, 0.1) if message.error() is None}
            if len(found) >= count:
                break
    finally:
        consumer.close()
    return found


def test_what_was_acknowledged_outlives_the_kill_of_each_node_in_turn(cluster: EmbeddedCluster, tmp_path: Path) -> None:
    """Chaos on three nodes means something only if the cluster itself keeps what it acknowledged."""
    info = cluster.start()
    settings = Settings(bootstrap_servers=info.bootstrap_servers, data_dir=tmp_path / "data", partitions=2)
    apply_topics(settings)
    topic = settings.topics.events
    assert verify_topics(settings) == []
    internal = AdminClient({"bootstrap.servers": info.bootstrap_servers}).list_topics(timeout=10).topics
    copies = {len(partition.replicas) for each in internal.values() for partition in each.partitions.values()}
    assert copies == {3}

    written: list[bytes] = []
    for node_id in cluster.node_ids:
        cluster.await_in_sync()
        batch = [f"{node_id}-{number}".encode() for number in range(RECORDS)]
        write(info.bootstrap_servers, topic, batch)
        written += batch
        cluster.node(node_id).kill()
        write(info.bootstrap_servers, topic, [b"while it was gone %d" % node_id])
        written.append(b"while it was gone %d" % node_id)
        assert read(info.bootstrap_servers, topic, 2, len(written)) == set(written)
        cluster.node(node_id).start()

    cluster.await_in_sync()
    assert read(info.bootstrap_servers, topic, 2, len(written)) == set(written)


def test_cluster_is_found_again_by_its_folder(cluster: EmbeddedCluster, tmp_path: Path, kafka_cache_dir: Path) -> None:
    """A second holder of the same folder gets the nodes that run, and a bounced node comes back as itself."""
    before = cluster.start()

    cluster.bounce(2)
    again = EmbeddedCluster(tmp_path / "cluster", cache_dir=kafka_cache_dir).start()

    assert again.bootstrap_servers == before.bootstrap_servers
    assert again.cluster_id == before.cluster_id
    pids = [node.pid for node in before.nodes]
    assert [node.pid == pid for node, pid in zip(again.nodes, pids, strict=True)] == [True, False, True]
