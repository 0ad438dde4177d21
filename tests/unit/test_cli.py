"""The command line's manners: exit codes, one sentence for an error, JSON where it was asked for, help for all."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import typer

from pipeline import errors
from pipeline.cli import app as cli_app
from pipeline.cli.app import COMMANDS, build_app, run
from pipeline.cli.options import JsonFlag, read_duration, read_instant
from pipeline.cli.output import Output

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty data folder, and no other settings."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("DUETASKS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("DUETASKS_DATA_DIR", str(tmp_path / "data"))
    return tmp_path / "data"


@pytest.fixture
def a_command_that(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], None]:
    """Replace the command line by one with the command `act`, which does what it is given."""

    def install(act: Callable[[], None]) -> None:
        def build() -> typer.Typer:
            app = typer.Typer()

            @app.callback()
            def _root() -> None:
                """Make `act` a command of its own name."""

            @app.command("act")
            def _act(*, as_json: JsonFlag = False) -> None:
                del as_json
                act()

            return app

        monkeypatch.setattr(cli_app, "build_app", build)

    return install


def _raiser(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.UsageError("No."), 2),
        (errors.ConfigurationError("No."), 2),
        (errors.NotFoundError("No."), 3),
        (errors.RefusedError("No."), 4),
        (errors.RejectedTaskError("No.", reason="TOO_LARGE"), 4),
        (errors.TopicMismatchError("No."), 4),
        (errors.DataLossError("No."), 4),
        (errors.UnavailableError("No."), 5),
        (errors.UnknownOutcomeError("No."), 5),
        (errors.FencedError("No."), 1),
    ],
)
def test_an_error_is_one_sentence_and_the_code_of_its_class(
    error: Exception,
    code: int,
    a_command_that: Callable[[Callable[[], None]], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Scripts branch on the code, people read the sentence; nobody reads a traceback."""
    a_command_that(_raiser(error))

    assert run(["act"]) == code

    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "Error: No.\n")


def test_with_json_an_error_is_an_object_where_the_result_would_be(
    a_command_that: Callable[[Callable[[], None]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """A program reads one JSON document from stdout, whatever happened."""
    a_command_that(_raiser(errors.RejectedTaskError("The payload is too large.", reason="TOO_LARGE")))

    assert run(["act", "--json"]) == 4

    printed = capsys.readouterr()
    expected = {"error": "The payload is too large.", "type": "RejectedTaskError", "reason": "TOO_LARGE"}
    assert msgspec.json.decode(printed.out) == expected
    assert printed.err == "Error: The payload is too large.\n"


def test_a_long_sentence_is_not_folded_and_brackets_are_text(
    a_command_that: Callable[[Callable[[], None]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """`grep` works on one line, and `pip install 'duetasks[embedded]'` must survive the markup."""
    sentence = "pip install 'duetasks[embedded]' " + "and more " * 30
    a_command_that(_raiser(errors.UsageError(sentence)))

    run(["act"])

    assert capsys.readouterr().err == f"Error: {sentence}\n"


def test_a_bug_is_a_sentence_too(
    a_command_that: Callable[[Callable[[], None]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """It says where and how to see more, and has a code that no documented outcome has."""
    a_command_that(_raiser(ZeroDivisionError("division by zero")))

    assert run(["act"]) == 1

    printed = capsys.readouterr().err
    assert printed.startswith("Error: Unexpected ZeroDivisionError: division by zero (")
    assert "test_cli.py:" in printed
    assert printed.count("\n") == 1


def test_ctrl_c_ends_without_a_word(
    a_command_that: Callable[[Callable[[], None]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever pressed it knows; 130 is what shells expect."""
    a_command_that(_raiser(KeyboardInterrupt()))

    assert run(["act"]) == 130
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nope"], "No such command 'nope'. See `duetasks --help`."),
        (["config", "--nope"], "No such option: --nope. See `duetasks config --help`."),
        (["broker", "nope"], "No such command 'nope'. See `duetasks broker --help`."),
    ],
)
def test_a_mistyped_command_line_is_usage(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Code 2, and the command that would have helped."""
    assert run(arguments) == 2
    assert capsys.readouterr().err == f"Error: {said}\n"
    assert run([*arguments, "--json"]) == 2
    assert msgspec.json.decode(capsys.readouterr().out) == {"error": said, "type": "UsageError"}


def test_a_wrong_setting_is_usage(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is started."""
    monkeypatch.setenv("DUETASKS_PARTITIONS", "zero")

    assert run(["config"]) == 2
    assert "Setting partitions is wrong" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["status", "stop"])
def test_no_broker_is_not_found(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Scripts start one on code 3."""
    assert run(["broker", command, "--json"]) == 3
    assert "duetasks broker start" in msgspec.json.decode(capsys.readouterr().out)["error"]


def test_without_any_kafka_a_command_says_what_to_type(capsys: pytest.CaptureFixture[str]) -> None:
    """The first thing that somebody new may see."""
    assert run(["topics", "verify"]) == 5
    assert "start one with `duetasks up`" in capsys.readouterr().err


def test_config_shows_values_sources_and_no_secrets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is in force, and why."""
    monkeypatch.setenv("DUETASKS_SASL_PASSWORD", "hunter2")

    assert run(["config"]) == 0
    printed = capsys.readouterr().out
    assert "hunter2" not in printed
    assert "sasl_password            **********" in printed
    assert run(["config", "--json"]) == 0
    rows = {row["name"]: row for row in msgspec.json.decode(capsys.readouterr().out)}
    assert (rows["sasl_password"]["value"], rows["sasl_password"]["from"]) == ("**********", "DUETASKS_SASL_PASSWORD")
    assert rows["partitions"] == {
        "name": "partitions",
        "value": 4,
        "from": "default",
        "meaning": "Partitions of every topic when they are created",
    }


def _commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:  # noqa: ANN401  # typer's own tree
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, (*path, name))
        else:
            yield (*path, name), command


def test_every_command_takes_json_and_says_what_it_does() -> None:
    """Promised for all; a new command that forgets it fails here."""
    found = dict(_commands(typer.main.get_command(build_app())))

    assert ("broker", "start") in found
    for path, command in found.items():
        options = {option for parameter in command.params for option in parameter.opts}
        assert "--json" in options, path
        assert command.help, path


def test_every_command_file_is_assembled() -> None:
    """A file that nobody registered would be a command that nobody can call."""
    folder = os.path.dirname(cli_app.__file__)  # noqa: PTH120  # a name is all that is wanted
    files = {name.removesuffix(".py") for name in os.listdir(folder) if name.endswith("_command.py")}  # noqa: PTH208  # as above

    assert files == set(COMMANDS)


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_lists_the_commands_in_groups(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """No argument at all is a question, too."""
    assert run(arguments) == 0

    printed = capsys.readouterr().out
    for word in ("Start here", "Operation", "up", "broker", "topics", "config"):
        assert word in printed


def test_a_group_without_a_command_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    """It did nothing, so it is no success either."""
    assert run(["broker"]) == 2
    printed = capsys.readouterr()
    assert "status" in printed.out + printed.err
    assert "Error" not in printed.out + printed.err


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    """The first line of every bug report."""
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("duetasks 0.")


def test_help_loads_nothing_heavy() -> None:
    """It must answer at once; Kafka's client and the settings alone take longer than that."""
    script = (
        "import sys; from pipeline.cli.app import run; run(['--help']); "
        "print([m for m in ('confluent_kafka', 'faust', 'pydantic', 'rocksdict', 'psutil') if m in sys.modules])"
    )

    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)

    assert ran.stdout.splitlines()[-1] == "[]"


def test_a_reader_that_leaves_early_is_no_error() -> None:
    """`duetasks config | head -1`."""
    command = f"{sys.executable} -m pipeline.cli config | head -c 1"
    ran = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, timeout=60)  # noqa: S607  # whichever bash

    assert (ran.stdout, ran.stderr) == ("S", "")


def test_options_read_durations_and_instants() -> None:
    """Typer adds the option's name to the sentence."""
    assert (read_duration("30m"), read_instant("1970-01-01T00:00:01Z")) == (1_800_000, 1_000)
    with pytest.raises(typer.BadParameter, match="is not a duration"):
        read_duration("soon")
    with pytest.raises(typer.BadParameter, match="has no offset"):
        read_instant("2026-04-01T14:30:00")


def test_a_table_is_for_grep_and_its_json_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    """In a pipe a row is a line, however long."""
    rows = [{"id": "a" * 200, "due": None}, {"id": "[b]", "due": 3}]
    columns = {"id": "ID", "due": "DUE"}

    Output(as_json=False).table(rows, columns)
    for_people = capsys.readouterr().out
    Output(as_json=True).table(rows, columns)
    for_programs = capsys.readouterr().out
    Output(as_json=False).table([], columns, empty="No tasks.")

    assert [line.split() for line in for_people.splitlines()] == [["ID", "DUE"], ["a" * 200], ["[b]", "3"]]
    assert msgspec.json.decode(for_programs) == rows
    assert capsys.readouterr().out == "No tasks.\n"


def test_progress_in_a_log_is_a_line_for_each_piece_of_work(capsys: pytest.CaptureFixture[str]) -> None:
    """Forty-four jars are not forty-four lines."""
    with Output(as_json=False).working() as on_progress:
        for done in range(44):
            on_progress(f"Fetching Kafka: {done} of 44 files")
        on_progress("Starting Kafka")

    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == "Fetching Kafka: 0 of 44 files\nStarting Kafka\n"


def test_a_mistyped_command_gets_one_sentence_that_ends_once(capsys: pytest.CaptureFixture[str]) -> None:
    """The guess is a question, and a question has its own mark."""
    code = run(["schedul", "x"])

    assert code == errors.EXIT_USAGE
    assert "Did you mean 'schedule'? See `duetasks --help`." in capsys.readouterr().err
