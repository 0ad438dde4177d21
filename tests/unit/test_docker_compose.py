"""`docker-compose.yml` can't be run everywhere; what it says is compared with the embedded broker instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.embedded import KAFKA_VERSION
from pipeline.embedded.server_properties import BrokerPorts, NodePlan, broker_settings

pytestmark = pytest.mark.unit

_ROOT = Path(__file__).parents[2]
# Where a container has to differ: its listeners, and where its data is.
_OF_THE_PLACE = (
    "listeners",
    "advertised.listeners",
    "listener.security.protocol.map",
    "inter.broker.listener.name",
    "controller.quorum.voters",
    "log.dirs",
)


@pytest.fixture
def services() -> dict[str, Any]:
    """The services of the file."""
    return yaml.safe_load((_ROOT / "docker-compose.yml").read_text("utf-8"))["services"]


def test_both_brokers_have_the_same_settings(services: dict[str, Any]) -> None:
    """Whoever changes from one to the other must not find another behaviour."""
    plan = NodePlan(ports=BrokerPorts(client=9092, controller=9093), log_dir="/var/lib/kafka/data")
    expected = {name: value for name, value in broker_settings(plan, overrides={}).items() if name not in _OF_THE_PLACE}

    environment = services["broker"]["environment"]

    found = {name.removeprefix("KAFKA_").lower().replace("_", "."): value for name, value in environment.items()}
    assert {name: found.get(name) for name in expected} == expected
    assert set(found) - set(expected) == {*_OF_THE_PLACE, "heap.opts"}


def test_both_brokers_are_the_same_kafka(services: dict[str, Any]) -> None:
    """The version is written in two files."""
    assert services["broker"]["image"] == f"apache/kafka:{KAFKA_VERSION}"


def test_ports_are_published_on_loopback_only(services: dict[str, Any]) -> None:
    """Neither the broker nor the agent asks who is calling."""
    published = [port for service in services.values() for port in service.get("ports", [])]

    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_files_that_the_image_is_built_from_are_not_ignored(services: dict[str, Any]) -> None:
    """`.dockerignore` lets in only what it names: a file that the Dockerfile copies must be among them."""
    build = services["agent"]["build"]
    dockerfile = (_ROOT / build["context"] / build["dockerfile"]).read_text("utf-8")
    let_in = {line[1:] for line in (_ROOT / ".dockerignore").read_text("utf-8").splitlines() if line.startswith("!")}

    copied = [line.split()[1] for line in dockerfile.splitlines() if line.startswith("COPY") and "--from" not in line]

    assert set(copied) - {"."} <= let_in
    assert {"pyproject.toml", "README.md", "LICENSE", "pipeline", "schemas", "topics"} <= let_in
