"""The two handlers of `duetasks consume`, without a broker."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from pipeline import DueTaskConsumer
from pipeline.adapters.command_handler import CommandFailedError, CommandHandler, task_variables
from pipeline.cli.app import run
from pipeline.cli.consume_command import _Printer
from pipeline.cli.output import Output
from pipeline.config import TASK_VARIABLE_PREFIX, load_settings, process_environment
from pipeline.core.effects import DueTask
from pipeline.core.tasks import InstantMs, Offset
from pipeline.service.consumer.ports import DueRecord
from pipeline.service.consumer.task_handling import ConsumerStopError, TaskContext

pytestmark = pytest.mark.unit

TASK = DueTask(
    task_id="order-1",
    generation=7,
    occurrence=0,
    attempt=0,
    emission_id="0:7:0:0",
    due_at_ms=InstantMs(1_000),
    fired_at_ms=InstantMs(1_250),
    payload=b"call \xff",
    headers={"trace": b"abc"},
)
CONTEXT = TaskContext(
    group="calls",
    topic="due-tasks",
    record=DueRecord(partition=3, offset=Offset(42), append_at_ms=0, key=b"order-1", value=b"", headers={}),
    attempt=2,
)


def command(*arguments: str, timeout_ms: int = 30_000) -> CommandHandler:
    """A handler that runs these arguments."""
    return CommandHandler(arguments, environment=process_environment(), timeout_ms=timeout_ms)


def test_a_command_gets_the_payload_on_standard_input_and_the_rest_as_variables(tmp_path: Path) -> None:
    """Bytes stay bytes, and a shell script needs no JSON for the usual."""
    out = tmp_path / "out"
    script = f'cat > {out}; echo "|$DUETASKS_TASK_ID|$DUETASKS_TASK_LATENESS_MS|$DUETASKS_TASK_REPLAY" >> {out}'

    command("sh", "-c", script)(TASK, CONTEXT)

    assert out.read_bytes() == b"call \xff|order-1|250|false\n"


def test_the_variables_say_all_that_a_json_line_says() -> None:
    """Documented in the how-to: scripts rely on the names."""
    assert task_variables(TASK, CONTEXT) == {
        "DUETASKS_TASK_ID": "order-1",
        "DUETASKS_TASK_GENERATION": "7",
        "DUETASKS_TASK_OCCURRENCE": "0",
        "DUETASKS_TASK_ATTEMPT": "0",
        "DUETASKS_TASK_EMISSION_ID": "0:7:0:0",
        "DUETASKS_TASK_DUE_AT_MS": "1000",
        "DUETASKS_TASK_FIRED_AT_MS": "1250",
        "DUETASKS_TASK_LATENESS_MS": "250",
        "DUETASKS_TASK_HEADERS": '{"trace":"abc"}',
        "DUETASKS_TASK_PARTITION": "3",
        "DUETASKS_TASK_OFFSET": "42",
        "DUETASKS_TASK_REPLAY": "false",
        "DUETASKS_TASK_GROUP": "calls",
        "DUETASKS_TASK_HANDLER_ATTEMPT": "2",
    }


def test_what_no_variable_can_hold_does_not_fail_the_task(tmp_path: Path) -> None:
    """A zero byte in an id and a megabyte of headers are allowed in Kafka; the command must still run."""
    task = msgspec.structs.replace(TASK, task_id="a\0b", headers={"big": b"x" * 1_000_000})
    out = tmp_path / "out"

    command("sh", "-c", f'echo "$DUETASKS_TASK_ID$DUETASKS_TASK_HEADERS" > {out}')(task, CONTEXT)

    assert out.read_text() == "a\ufffdb\n"


def test_a_payload_that_the_command_does_not_read_is_no_failure() -> None:
    """`true` applies a task; that it closes its standard input says nothing."""
    command("true")(msgspec.structs.replace(TASK, payload=b"x" * 5_000_000), CONTEXT)


@pytest.mark.parametrize("arguments", [("false",), ("sh", "-c", "kill -9 $$")])
def test_a_command_that_ends_badly_has_failed(arguments: tuple[str, ...]) -> None:
    """Any code but 0, and any signal."""
    with pytest.raises(CommandFailedError):
        command(*arguments)(TASK, CONTEXT)


def test_a_command_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    """What goes on in the background would act for a task that is tried again."""
    pid_file = tmp_path / "pid"
    hanging = f"{sys.executable} -c 'import time; time.sleep(60)' & echo $! > {pid_file}; wait"

    with pytest.raises(CommandFailedError, match="longer than 1 s"):
        command("sh", "-c", hanging, timeout_ms=1_000)(TASK, CONTEXT)

    child = int(pid_file.read_text())
    gone_by_s = time.monotonic() + 10
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < gone_by_s, "the child still runs"
        time.sleep(0.01)


def test_a_command_may_call_duetasks_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its variables look like settings, and unknown settings are refused."""
    monkeypatch.chdir(tmp_path)
    for name, value in task_variables(TASK, CONTEXT).items():
        assert name.startswith(TASK_VARIABLE_PREFIX)
        monkeypatch.setenv(name, value)

    assert load_settings().partitions > 0


def test_the_how_tos_python_is_what_the_package_offers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The example is run up to the point at which it needs a broker."""
    monkeypatch.setenv("DUETASKS_BOOTSTRAP_SERVERS", "127.0.0.1:1")
    monkeypatch.setenv("DUETASKS_DATA_DIR", str(tmp_path))
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "consume-due-tasks.md").read_text("utf-8")
    snippet = page.split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {}

    exec(snippet.split("consumer.run()")[0], names)  # noqa: S102  # our own document
    names["remind"](msgspec.structs.replace(TASK, payload=b"call"), CONTEXT)

    assert isinstance(names["consumer"], DueTaskConsumer)
    assert CONTEXT.outputs.pop().topic == "reminders-sent"


def test_the_how_to_names_every_variable_of_a_command() -> None:
    """Scripts are written from that list."""
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "consume-due-tasks.md").read_text("utf-8")
    task = msgspec.structs.replace(TASK, content_type="text/plain")

    assert [name for name in task_variables(task, CONTEXT) if f"`{name}`" not in page] == []


def test_a_reader_that_went_away_stops_the_consumer_and_keeps_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """`duetasks consume | head` must not send the next tasks to dead-tasks."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w") as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        printer = _Printer(Output(as_json=False))

        with pytest.raises(ConsumerStopError):
            printer(TASK, CONTEXT)

        assert printer.reader_gone
        monkeypatch.undo()
        with pytest.raises(BrokenPipeError):
            gone.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), gone.fileno())


@pytest.mark.parametrize(
    "arguments",
    [
        ("consume",),
        ("consume", "--group", "g", "--exec", "no-such-command"),
        ("consume", "--group", "g", "--exec", "sh 'unclosed"),
        ("consume", "--group", "g", "--exec", ""),
        ("consume", "--group", "g", "--max", "0"),
        ("consume", "--group", "g", "--idle-exit", "5"),
        ("consume", "--group", "g", "--attempts", "0"),
        ("consume", "--group", ""),
    ],
)
def test_a_wrong_call_is_told_so_before_anything_is_consumed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    """Exit code 2, a sentence on stderr, nothing on stdout."""
    monkeypatch.setenv("DUETASKS_BOOTSTRAP_SERVERS", "127.0.0.1:1")

    assert run(arguments) == 2

    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("Error: ")
