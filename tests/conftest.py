"""Fixtures for every suite: one real broker for the whole run, and brokers of one's own for tests that break them."""

from __future__ import annotations

import os
import secrets
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from confluent_kafka.admin import AdminClient

from pipeline.embedded import KAFKA_VERSION, EmbeddedBroker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# A shell that starts the tests in the background lets them ignore Ctrl-C, and with them all that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

_DOCKER_SOCKET = Path("/var/run/docker.sock")
_DOCKER_START_TIMEOUT_S = 120


class BrokerUnderTest(msgspec.Struct, frozen=True, kw_only=True):
    """A broker that tests may share: they make topics with names of their own, and never stop it."""

    bootstrap_servers: str


@pytest.fixture(scope="session")
def kafka_cache_dir() -> Path:
    """Where Kafka's jars are kept: not a temporary folder, so that they are fetched once and not at each run."""
    configured = os.environ.get("DUETASKS_CACHE_DIR")
    cache_home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(configured) if configured else Path(cache_home) / "duetasks" / f"kafka-{KAFKA_VERSION}"


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory, kafka_cache_dir: Path) -> Iterator[BrokerUnderTest]:
    """One real broker for all tests of the run.

    The one of `DUETASKS_TEST_BOOTSTRAP_SERVERS` if that is set; else a container where a Docker engine answers; else
    the embedded broker.
    """
    configured = os.environ.get("DUETASKS_TEST_BOOTSTRAP_SERVERS")
    if configured:
        yield BrokerUnderTest(bootstrap_servers=configured)
    elif _docker_answers():
        yield from _docker_broker()
    else:
        # Nobody kills this one, so transactions that are over may be ended at once.
        settings = {"transaction.abort.timed.out.transaction.cleanup.interval.ms": "1000"}
        embedded = EmbeddedBroker(tmp_path_factory.mktemp("broker"), cache_dir=kafka_cache_dir, settings=settings)
        try:
            yield BrokerUnderTest(bootstrap_servers=embedded.start().bootstrap_servers)
        finally:
            embedded.stop()


@pytest.fixture
def private_broker(tmp_path: Path, kafka_cache_dir: Path) -> Iterator[Callable[..., EmbeddedBroker]]:
    """Make embedded brokers that a test may kill, pause and restart: `private_broker()` gives one that runs.

    Keyword arguments go to `EmbeddedBroker`, so `settings={...}` overrides Kafka's. Each call is another cluster.
    """
    made: list[EmbeddedBroker] = []

    def make(**options: Any) -> EmbeddedBroker:  # noqa: ANN401 - handed on as they are
        embedded = EmbeddedBroker(tmp_path / f"private-broker-{len(made)}", cache_dir=kafka_cache_dir, **options)
        made.append(embedded)
        embedded.start()
        return embedded

    yield make
    for embedded in made:
        if embedded.status() is not None:
            embedded.kill()  # nobody needs its data again


def _docker_answers() -> bool:
    if not (_DOCKER_SOCKET.exists() or os.environ.get("DOCKER_HOST")):
        return False
    import docker  # noqa: PLC0415 - a heavy import that most runs don't need

    try:
        client = docker.from_env(timeout=5)
    except docker.errors.DockerException:
        return False
    try:
        return bool(client.ping())
    except docker.errors.DockerException:
        return False
    finally:
        client.close()


def _docker_broker() -> Iterator[BrokerUnderTest]:
    from testcontainers.core.container import DockerContainer  # noqa: PLC0415 - only where an engine answers

    # The broker must advertise the port that clients use, so the port is chosen before the container exists.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    container = DockerContainer(f"apache/kafka:{KAFKA_VERSION}")
    container.ports[f"{port}/tcp"] = ("127.0.0.1", port)  # with_bind_ports would publish it on every interface
    settings = {
        "KAFKA_NODE_ID": "1",
        "KAFKA_PROCESS_ROLES": "broker,controller",
        "KAFKA_CONTROLLER_QUORUM_VOTERS": "1@localhost:9093",
        "KAFKA_LISTENERS": f"PLAINTEXT://:{port},CONTROLLER://:9093",
        "KAFKA_ADVERTISED_LISTENERS": f"PLAINTEXT://127.0.0.1:{port}",
        "KAFKA_LISTENER_SECURITY_PROTOCOL_MAP": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "KAFKA_CONTROLLER_LISTENER_NAMES": "CONTROLLER",
        "KAFKA_INTER_BROKER_LISTENER_NAME": "PLAINTEXT",
        "KAFKA_OFFSETS_TOPIC_REPLICATION_FACTOR": "1",
        "KAFKA_OFFSETS_TOPIC_NUM_PARTITIONS": "4",
        "KAFKA_TRANSACTION_STATE_LOG_REPLICATION_FACTOR": "1",
        "KAFKA_TRANSACTION_STATE_LOG_MIN_ISR": "1",
        "KAFKA_TRANSACTION_STATE_LOG_NUM_PARTITIONS": "4",
        "KAFKA_TRANSACTION_ABORT_TIMED_OUT_TRANSACTION_CLEANUP_INTERVAL_MS": "1000",
        "KAFKA_GROUP_INITIAL_REBALANCE_DELAY_MS": "0",
        "KAFKA_GROUP_MIN_SESSION_TIMEOUT_MS": "1000",
        "KAFKA_AUTO_CREATE_TOPICS_ENABLE": "false",
        "CLUSTER_ID": secrets.token_urlsafe(16).replace("-", "_"),
    }
    for name, value in settings.items():
        container.with_env(name, value)
    with container:
        bootstrap_servers = f"127.0.0.1:{port}"
        AdminClient({"bootstrap.servers": bootstrap_servers}).list_topics(timeout=_DOCKER_START_TIMEOUT_S)
        yield BrokerUnderTest(bootstrap_servers=bootstrap_servers)
