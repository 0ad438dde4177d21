"""What Kafka is told, as text that Kafka reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.embedded.java_command import broker_command
from pipeline.embedded.server_properties import (
    BrokerPorts,
    NodePlan,
    broker_settings,
    render_log4j,
    render_properties,
)

pytestmark = pytest.mark.unit

_PLAN = NodePlan(ports=BrokerPorts(client=20001, controller=20002), log_dir="/data/kafka")


def _read_properties(text: str) -> dict[str, str]:
    """Read as Java does: escapes of UTF-16 units, nothing but ASCII outside them."""
    assert text.isascii()
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line and not line.startswith("#"))
    unescape = "utf-16", "surrogatepass"
    return {
        key.strip(): value.strip().encode().decode("unicode_escape").encode(*unescape).decode("utf-16")
        for key, _, value in pairs
    }


def test_it_listens_and_advertises_on_loopback_only() -> None:
    """There is no authentication; what is advertised is what clients connect to after the first answer."""
    settings = broker_settings(_PLAN, overrides={})

    assert settings["listeners"] == "PLAINTEXT://127.0.0.1:20001,CONTROLLER://127.0.0.1:20002"
    assert settings["advertised.listeners"] == "PLAINTEXT://127.0.0.1:20001"
    assert settings["controller.quorum.voters"] == "1@127.0.0.1:20002"
    assert _PLAN.ports.bootstrap_servers == "127.0.0.1:20001"


def test_a_single_node_asks_for_one_copy_of_internal_topics() -> None:
    """The default of three would leave groups and transactions waiting for nodes that don't exist."""
    settings = broker_settings(_PLAN, overrides={})

    replicas = {value for name, value in settings.items() if name.endswith((".replication.factor", "min.isr"))}
    assert replicas == {"1"}
    assert settings["min.insync.replicas"] == "1"


def test_what_could_lose_data_is_off() -> None:
    """Promises G1 and G4 rest on these two."""
    settings = broker_settings(_PLAN, overrides={})

    assert settings["unclean.leader.election.enable"] == "false"
    assert settings["auto.create.topics.enable"] == "false"


def test_three_nodes_know_each_other_and_survive_one() -> None:
    """A cluster for chaos tests is the same settings three times."""
    plan = NodePlan(ports=_PLAN.ports, log_dir="/data/2", node_id=2, voters={1: 20001, 2: 20002, 3: 20003})

    settings = broker_settings(plan, overrides={})

    assert settings["node.id"] == "2"
    assert settings["controller.quorum.voters"] == "1@127.0.0.1:20001,2@127.0.0.1:20002,3@127.0.0.1:20003"
    assert (settings["default.replication.factor"], settings["min.insync.replicas"]) == ("3", "2")


def test_overrides_win() -> None:
    """Tests need other bounds now and then."""
    settings = broker_settings(_PLAN, overrides={"transaction.max.timeout.ms": "1000"})

    assert settings["transaction.max.timeout.ms"] == "1000"


@pytest.mark.parametrize("path", ["/plain", "/with space", "/Zoë", "/Ω🚀", "/back\\slash", "/a=b"])
def test_any_path_survives_the_properties_format(path: str) -> None:
    """Java reads these files as Latin-1 and takes a backslash for an escape."""
    written = render_properties(broker_settings(NodePlan(ports=_PLAN.ports, log_dir=path), overrides={}))

    assert _read_properties(written)["log.dirs"] == path
    assert _read_properties(render_log4j(Path(path)))["appender.file.fileName"] == path


def test_the_command_bounds_the_heap_and_loads_named_jars_only() -> None:
    """A folder on the class path would load whatever somebody put there."""
    command = broker_command(
        Path("/java"),
        [Path("/jars/a.jar"), Path("/jars/b.jar")],
        heap_mb=512,
        log4j_file=Path("/data/log4j2.properties"),
        properties_file=Path("/data/server.properties"),
    )

    assert command[:2] == ["/java", "-Xmx512m"]
    assert command[command.index("-cp") + 1] == "/jars/a.jar:/jars/b.jar"
    assert command[-2:] == ["kafka.Kafka", "/data/server.properties"]
