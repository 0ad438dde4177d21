"""Two real agents share the partitions: each answers for every task, on loopback, and shows nothing else."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

import httpx
import psutil
import pytest

from tests.acceptance.harness import Deployment, cancel, now_ms, schedule

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conftest import BrokerUnderTest

pytestmark = pytest.mark.integration

IDS = ["a/b", "100%", "what?", "a b", "Größe", "日本", "line\nbreak", "..", "#1", *(f"t{n}" for n in range(20))]


@pytest.fixture(scope="module")
def shared(broker: BrokerUnderTest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Two agents that have applied a few tasks."""
    folder: Path = tmp_path_factory.mktemp("status")
    with Deployment(broker.bootstrap_servers, folder) as deployment:
        deployment.start_agent("a")
        deployment.start_agent("b", ready=False)
        deployment.until(
            lambda: all(len(agent.partitions()) == 1 for agent in deployment.running()),
            within_s=60,
            what="each agent has a partition",
        )
        deployment.await_ready()
        due_at_ms = now_ms() + 3_600_000
        deployment.send(*(schedule(task_id, due_at_ms, version=1) for task_id in IDS), cancel("t0"))
        deployment.await_status("t0", "CANCELLED")
        deployment.until(lambda: len(deployment.agents[0].tasks()) == len(IDS), within_s=30, what="all are applied")
        yield deployment


def test_each_agent_tells_every_task(shared: Deployment) -> None:
    """Nobody needs to know which agent owns a task."""
    for agent in shared.agents:
        assert set(agent.tasks()) == set(IDS)
        for task_id in IDS:
            answer = agent.get("/v1/tasks/" + quote(task_id, safe="").replace(".", "%2E"))
            assert answer is not None
            assert answer.json()["task_id"] == task_id


def test_the_command_line_asks_an_agent_of_the_data_folder(shared: Deployment) -> None:
    """`status` and `list` find the agent by themselves; exit codes tell the rest."""
    for task_id in ["a/b", "100%", "..", "日本"]:
        code, told = _duetasks(shared, "a", "status", task_id, "--json")
        assert (code, told["task_id"], told["status"]) == (0, task_id, "SCHEDULED")

    assert _duetasks(shared, "a", "status", "nobody", "--json")[0] == 3
    assert _duetasks(shared, "nothing runs here", "status", "t1", "--json")[0] == 5
    assert _duetasks(shared, "nothing runs here", "list", "--json")[0] == 5

    code, listed = _duetasks(shared, "b", "list", "--json")
    assert (code, sorted(task["task_id"] for task in listed)) == (0, sorted(IDS))
    assert [task["task_id"] for task in _duetasks(shared, "a", "list", "--status", "cancelled", "--json")[1]] == ["t0"]
    listed = _duetasks(shared, "b", "list", "--prefix", "t1", "--json")[1]
    assert sorted(task["task_id"] for task in listed) == sorted(task_id for task_id in IDS if task_id.startswith("t1"))
    assert len(_duetasks(shared, "b", "list", "--limit", "3", "--json")[1]) == 3
    assert _duetasks(shared, "b", "list", "--due-before", "2020-01-01T00:00:00Z", "--json")[1] == []
    assert _duetasks(shared, "b", "list", "--due-before", "noon", "--json")[0] == 2


def test_agents_listen_on_loopback_only(shared: Deployment) -> None:
    """There is no authentication: nobody outside of the machine may reach it unless a setting says so."""
    for agent in shared.agents:
        assert agent.url is not None
        port = urlsplit(agent.url).port
        listening = {
            connection.laddr.ip
            for connection in psutil.Process(agent.process.pid).net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        }
        assert listening == {"127.0.0.1"}, f"{agent.url} listens on {listening}"
        for address in _other_addresses():
            with socket.socket() as probe:
                probe.settimeout(1)
                assert probe.connect_ex((address, port)) != 0


@pytest.mark.parametrize("path", ["/table", "/router", "/graph", "/stats", "/metrics/", "/assignment"])
def test_agents_do_not_show_fausts_own_pages(shared: Deployment, path: str) -> None:
    """What Faust would serve by default tells hosts and tables to whoever asks."""
    for agent in shared.agents:
        answer = agent.get(path)
        assert answer is not None
        assert answer.status_code == httpx.codes.NOT_FOUND


def test_health_and_readiness_are_told_apart(shared: Deployment) -> None:
    """A supervisor restarts on the one, a load balancer waits for the other."""
    for agent in shared.agents:
        health, ready = agent.get("/healthz"), agent.get("/readyz")
        assert health is not None
        assert ready is not None
        assert (health.status_code, ready.status_code) == (200, 200)
        assert [part["phase"] for part in ready.json()["partitions"]] == ["ACTIVE"]


def _duetasks(deployment: Deployment, name: str, *arguments: str) -> tuple[int, Any]:
    """Run a command on the data folder `name`; its exit code and what it printed as JSON, if it did."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("DUETASKS_")}
    environment["DUETASKS_DATA_DIR"] = str(deployment.folder / name)
    ended = subprocess.run(
        [sys.executable, "-m", "pipeline.cli", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return ended.returncode, json.loads(ended.stdout) if ended.stdout.startswith(("{", "[")) else None


def _other_addresses() -> list[str]:
    return [
        address.address
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family == socket.AF_INET and not address.address.startswith("127.")
    ]
