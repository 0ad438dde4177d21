"""`duetasks up` as a person types it: one command starts all, one key stops exactly what it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from typing import TYPE_CHECKING, Any

import msgspec
import psutil
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conftest import BrokerUnderTest

pytestmark = pytest.mark.acceptance

_TIMEOUT_S = 120

Environment = dict[str, str]


def _duetasks(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pipeline.cli", *arguments]


@pytest.fixture
def environment(tmp_path: Path, kafka_cache_dir: Path) -> Iterator[Environment]:
    """A data folder of its own and no Kafka; whatever a failed test left running is stopped."""
    found = {name: value for name, value in os.environ.items() if not name.startswith("DUETASKS_")}
    found |= {
        "DUETASKS_DATA_DIR": str(tmp_path / "data"),
        "DUETASKS_CACHE_DIR": str(kafka_cache_dir),
        "DUETASKS_HTTP_PORT": "0",
        "DUETASKS_PARTITIONS": "1",
    }
    yield found
    subprocess.run(_duetasks("down"), env=found, capture_output=True, check=False, timeout=_TIMEOUT_S)


def _run(environment: Environment, *arguments: str) -> tuple[int, Any, str]:
    """Exit code, what stdout says as JSON, and stderr of a command."""
    command = _duetasks(*arguments, "--json")
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    return ran.returncode, msgspec.json.decode(ran.stdout), ran.stderr


def _up(environment: Environment, log: Path, *under: str) -> tuple[subprocess.Popen[str], Any]:
    """`duetasks up` in the foreground, and what it says it started."""
    command = [*under, *_duetasks("up", "--json")]
    with log.open("w") as stderr:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()  # ends at the latest when `up` gives up by itself
    assert line, log.read_text()
    return process, msgspec.json.decode(line)


def test_ctrl_c_stops_all_that_up_started(environment: Environment, tmp_path: Path) -> None:
    """A broker left behind would keep its memory and its port; under nohup a closed terminal stops nothing."""
    process, started = _up(environment, tmp_path / "up.log", "nohup")
    process.send_signal(signal.SIGHUP)
    code, broker, _ = _run(environment, "broker", "status")
    assert (code, broker["bootstrap_servers"]) == (0, started["bootstrap_servers"])
    assert len(started["topics_created"]) == 6
    assert psutil.pid_exists(started["agent_pid"])
    assert "Stopping" not in (tmp_path / "up.log").read_text()

    process.send_signal(signal.SIGINT)

    assert process.wait(_TIMEOUT_S) == 0
    assert not psutil.pid_exists(started["agent_pid"])
    assert not psutil.pid_exists(broker["pid"])
    assert process.stdout is not None
    assert process.stdout.read() == "", "only the result belongs on stdout"
    process.stdout.close()


def test_a_detached_up_stays_until_down(environment: Environment) -> None:
    """For a demonstration or a test script; a second `up` does not start a second agent by accident."""
    code, started, _ = _run(environment, "up", "--detach")
    assert code == 0
    assert _run(environment, "topics", "verify")[:2] == (0, {"safe": True, "findings": []})

    code, refused, _ = _run(environment, "up")
    assert (code, refused["type"]) == (4, "RefusedError")
    assert str(started["agent_pid"]) in refused["error"]
    assert psutil.pid_exists(started["agent_pid"])

    assert _run(environment, "down")[:2] == (0, {"agent_stopped": True, "broker_stopped": True})
    assert not psutil.pid_exists(started["agent_pid"])
    assert _run(environment, "broker", "status")[0] == 3
    assert _run(environment, "down")[0] == 3


def test_up_ends_when_its_agent_dies_and_leaves_a_configured_broker_alone(
    environment: Environment, tmp_path: Path, broker: BrokerUnderTest
) -> None:
    """A terminal that goes on as if all were well would hide that nothing fires any more."""
    environment |= {
        "DUETASKS_BOOTSTRAP_SERVERS": broker.bootstrap_servers,
        "DUETASKS_TOPIC_PREFIX": f"up-{uuid.uuid4().hex[:8]}-",
    }
    process, started = _up(environment, tmp_path / "up.log")
    assert (started["bootstrap_servers"], started["broker"]) == (broker.bootstrap_servers, "as configured")

    psutil.Process(started["agent_pid"]).kill()

    assert process.wait(_TIMEOUT_S) == 1
    assert "The agent ended by itself with code -9" in (tmp_path / "up.log").read_text()
    assert process.stdout is not None
    process.stdout.close()
    assert not (tmp_path / "data" / "broker").exists()
    assert _run(environment, "topics", "verify")[0] == 0
