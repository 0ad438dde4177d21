"""Logs are events with fields on stderr; stdout stays free for results."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec
import pytest
import structlog

from pipeline.adapters.logging_setup import set_up_logging

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def test_json_lines_carry_name_level_instant_and_fields(capsys: pytest.CaptureFixture[str]) -> None:
    """What a log store indexes."""
    set_up_logging(log_format="json", log_level="info")

    structlog.get_logger().info("batch_fired", partition=3, fired=128)
    structlog.get_logger().debug("too_fine")

    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = map(msgspec.json.decode, printed.err.splitlines())
    assert {"event": "batch_fired", "partition": 3, "fired": 128, "level": "info"}.items() <= line.items()
    assert line["timestamp"].endswith("Z")


def test_libraries_speak_in_the_same_format_and_less(capsys: pytest.CaptureFixture[str]) -> None:
    """Faust tells each assignment at INFO; ours say it once, with fields."""
    set_up_logging(log_format="json", log_level="info")

    logging.getLogger("faust.app").info("chatter")
    logging.getLogger("faust.app").warning("lost %s", "contact")

    (line,) = map(msgspec.json.decode, capsys.readouterr().err.splitlines())
    assert (line["event"], line["logger"], line["level"]) == ("lost contact", "faust.app", "warning")


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_a_traceback_shows_no_local_variables(log_format: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Those hold payloads and passwords."""
    set_up_logging(log_format=log_format, log_level="info")
    password = "hunter" + "2" * 3

    try:
        assert not password
    except AssertionError:
        structlog.get_logger().exception("it_broke")

    printed = capsys.readouterr().err
    assert "AssertionError" in printed
    assert "hunter222" not in printed.replace("assert not 'hunter222'", "")


def test_a_second_set_up_replaces_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    """One line a line."""
    log = structlog.get_logger()
    set_up_logging(log_format="console", log_level="info")
    log.info("first")
    set_up_logging(log_format="json", log_level="error")
    log.info("hidden")
    log.error("second")

    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert msgspec.json.decode(lines[1])["event"] == "second"
