"""Assembles the commands and turns what they raise into one sentence and an exit code.

To add a command: write `<name>_command.py` beside this file with `register(app: typer.Typer) -> None`, and add its
line to `COMMANDS`. Commands load settings, Kafka clients and everything else that is slow to import inside their
functions, so that `duetasks --help` answers at once.
"""

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Final

import typer

from pipeline.cli.output import print_error
from pipeline.errors import EXIT_DONE, EXIT_USAGE, DuetasksError

__all__ = ["COMMANDS", "build_app", "run"]

# The order of the help text.
COMMANDS: Final = (
    "up_command",
    "demo_command",
    "schedule_command",
    "status_command",
    "import_command",
    "agent_command",
    "consume_command",
    "broker_command",
    "topics_command",
    "config_command",
    "rebuild_command",
    "replay_command",
    "verify_command",
    "why_command",
    "bench_command",
    "simulate_command",
)

_EXIT_BUG: Final = 1
_EXIT_READER_GONE: Final = 141  # 128 + SIGPIPE, as a shell reports it


def build_app() -> typer.Typer:
    """The whole command line; a new object at each call."""
    app = typer.Typer(
        name="duetasks",
        help="A reliable delay queue on Kafka: due tasks come out once, never early, and a recorded cancel counts.",
        add_completion=False,
        pretty_exceptions_enable=False,  # a traceback is no sentence
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_global_options)
    for name in COMMANDS:
        import_module(f"pipeline.cli.{name}").register(app)
    return app


def _print_version(wanted: bool) -> None:  # noqa: FBT001  # typer passes the option's value so
    if wanted:
        typer.echo(f"duetasks {version('duetasks')}")
        raise typer.Exit


def _global_options(
    *,
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Hold the options that stand before any command."""
    del show_version  # its callback has done the work


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code.

    0 done, 1 a promise was found broken (or a bug met), 2 usage, 3 not found, 4 refused, 5 unavailable.
    An error is one sentence on stderr; with `--json` it is an object on stdout too, where the result would have been.
    """
    command_line = list(arguments) or ["--help"]
    try:
        code = _invoke(command_line)
        sys.stdout.flush()
    except BrokenPipeError:
        # `duetasks list | head` is no error; without this the interpreter would complain when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _EXIT_READER_GONE
    return code


def _invoke(command_line: list[str]) -> int:
    as_json = "--json" in command_line  # also where parsing the options is what failed
    try:
        # A number is the code of a `typer.Exit`; commands themselves return nothing.
        code = typer.main.get_command(build_app())(command_line, prog_name="duetasks", standalone_mode=False)
    except DuetasksError as error:
        # What a class of errors tells beside its sentence (a reason code, the findings) are its attributes.
        details = {name: value for name, value in vars(error).items() if not name.startswith("_")}
        print_error(str(error), kind=type(error).__name__, details=details, as_json=as_json)
        return error.exit_code
    except typer.TyperException as error:
        # A group without a command has printed its help, and has nothing more to say.
        if error.format_message():
            print_error(_usage_sentence(error), kind="UsageError", details={}, as_json=as_json)
        return EXIT_USAGE
    except BrokenPipeError:
        raise
    except Exception as error:  # noqa: BLE001  # a person at a terminal gets a sentence whatever went wrong
        return _report_bug(error, as_json=as_json)
    return code if isinstance(code, int) else EXIT_DONE


def _usage_sentence(error: typer.TyperException) -> str:
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "duetasks"
    sentence = error.format_message().strip()
    return f"{sentence}{'' if sentence.endswith(('.', '?')) else '.'} See `{command} --help`."


def _report_bug(error: Exception, *, as_json: bool) -> int:
    if sys.flags.dev_mode:
        raise error
    where = error.__traceback__
    while where is not None and where.tb_next is not None:
        where = where.tb_next
    place = f" ({where.tb_frame.f_code.co_filename}:{where.tb_lineno})" if where is not None else ""
    print_error(
        f"Unexpected {type(error).__name__}: {error}{place}. This is a bug in duetasks: please report it, "
        "with the traceback that PYTHONDEVMODE=1 shows.",
        kind=type(error).__name__,
        details={},
        as_json=as_json,
    )
    return _EXIT_BUG
