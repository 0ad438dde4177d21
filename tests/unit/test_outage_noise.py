"""A broker that does not answer is told in a sentence, not in a thousand log lines."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest
import structlog

from pipeline import DueTaskConsumer
from pipeline.adapters.event_sender import EventSender, QuietLogger
from pipeline.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.unit


@pytest.fixture
def dead_broker() -> Iterator[str]:
    """An address that refuses connections: bound, and not listening."""
    with socket.socket() as refusing:
        refusing.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{refusing.getsockname()[1]}"


def test_each_kind_of_trouble_is_logged_once(dead_broker: str) -> None:
    """A client says it again with each attempt to connect: somebody who waits for a broker must not drown in it."""
    with structlog.testing.capture_logs() as logs, pytest.raises(UnavailableError, match="No broker answered"):
        EventSender({"bootstrap.servers": dead_broker}, "task-events", deadline_ms=2_000, linger_ms=0, bytes_max=1_000)

    codes = [entry["code"] for entry in logs if entry["event"] == "producer_trouble"]

    assert codes
    assert sorted(set(codes)) == sorted(codes)


def test_the_client_library_is_silent_in_an_application_without_structlog(capsys: pytest.CaptureFixture[str]) -> None:
    """Unconfigured, structlog prints everything to standard output, where the application's own results belong."""
    configured = structlog.get_config() if structlog.is_configured() else None
    structlog.reset_defaults()
    try:
        QuietLogger().log(7, "connect to %s failed", "127.0.0.1")
    finally:
        if configured is not None:
            structlog.configure(**configured)

    assert capsys.readouterr().out == ""


def test_a_consumer_looks_for_the_embedded_broker_as_a_producer_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The example of the README runs after `duetasks up`, without a setting."""
    monkeypatch.delenv("DUETASKS_BOOTSTRAP_SERVERS", raising=False)
    monkeypatch.setenv("DUETASKS_DATA_DIR", str(tmp_path))

    with pytest.raises(UnavailableError, match=r"no embedded broker runs in .*duetasks up"):
        DueTaskConsumer("billing", lambda task, context: None)  # noqa: ARG005  # a handler has both
