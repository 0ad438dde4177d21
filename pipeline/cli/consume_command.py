"""`duetasks consume`: due tasks as JSON lines, or one run of a command for each."""

import shlex
import shutil
import signal
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Final

import typer

from pipeline.cli.options import CONSUMERS, JsonFlag, read_duration
from pipeline.cli.output import Output
from pipeline.cli.session import connected_settings
from pipeline.core.effects import DueTask
from pipeline.core.task_fields import task_fields
from pipeline.core.tasks import DurationMs
from pipeline.errors import UsageError

if TYPE_CHECKING:
    from pipeline.consumer import DueTaskConsumer
    from pipeline.service.consumer.counts import ConsumerCounts
    from pipeline.service.consumer.task_handling import Handler, TaskContext

__all__ = ["register"]

_POLL_INTERVAL_MS: Final = 300_000
_EXIT_READER_GONE: Final = 141  # 128 + SIGPIPE, as a shell reports it


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command(rich_help_panel=CONSUMERS)(consume)


def consume(
    *,
    group: Annotated[str, typer.Option("--group", "-g", help="Consumer group; its members share the tasks.")],
    command: Annotated[
        str | None,
        typer.Option("--exec", metavar="CMD", help="Run CMD for each task, payload on its standard input; no shell."),
    ] = None,
    applied_max: Annotated[int | None, typer.Option("--max", min=1, help="Stop after so many applied tasks.")] = None,
    idle_exit_ms: Annotated[
        DurationMs | None,
        typer.Option(
            "--idle-exit", parser=read_duration, metavar="DURATION", help="Stop when no task came for that long."
        ),
    ] = None,
    batch_max: Annotated[
        int, typer.Option("--batch", min=1, max=100_000, help="Tasks of one transaction: what a crash may repeat.")
    ] = 100,
    attempts_max: Annotated[
        int, typer.Option("--attempts", min=1, max=1_000, help="How often a failing task is tried; then: dead-tasks.")
    ] = 5,
    exec_timeout_ms: Annotated[
        DurationMs,
        typer.Option("--exec-timeout", parser=read_duration, metavar="DURATION", help="CMD is killed after that long."),
    ] = "60s",  # type: ignore[assignment]  # typer parses the default as it does the option
    topic: Annotated[
        str | None, typer.Option("--topic", help="A target topic that tasks are emitted to, instead of due-tasks.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Apply due tasks: print each as a JSON line, or run a command for it. Ends after SIGTERM or Ctrl-C, cleanly.

    A task counts as applied when its line is written, or when CMD ends with code 0; the group's ledger then keeps it
    from being applied again. A crash may repeat up to --batch tasks of each partition, with the same emission_id.
    """
    from pipeline.adapters.logging_setup import set_up_logging  # noqa: PLC0415  # slow imports stay out of --help
    from pipeline.consumer import DueTaskConsumer  # noqa: PLC0415  # the same

    output = Output(as_json=as_json)
    printer = _Printer(output)
    handler = printer if command is None else _command_handler(command, exec_timeout_ms)
    settings = connected_settings()
    set_up_logging(log_format=settings.log_format, log_level=settings.log_level)
    consumer = DueTaskConsumer(
        group,
        handler,
        settings=settings,
        topic=topic,
        batch_max=batch_max,
        attempts_max=attempts_max,
        max_poll_interval_ms=max(_POLL_INTERVAL_MS, 2 * exec_timeout_ms),
    )
    _stop_on_signals(consumer)
    counts = consumer.run(applied_max=applied_max, idle_exit_ms=idle_exit_ms)
    output.say(_summary(counts))
    if printer.reader_gone:
        raise typer.Exit(_EXIT_READER_GONE)


class _Printer:
    """One JSON line for each task. A reader that went away is no fault of the task: it stays for the next consumer."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self.reader_gone = False

    def __call__(self, task: DueTask, context: "TaskContext") -> None:
        from pipeline.service.consumer.task_handling import ConsumerStopError  # noqa: PLC0415  # slow imports, as above

        try:
            self._output.line(
                task_fields(task, partition=context.partition, offset=context.offset, replay=context.replay)
            )
        except BrokenPipeError as error:
            self.reader_gone = True
            raise ConsumerStopError("nobody reads standard output any more") from error


def _command_handler(command: str, timeout_ms: int) -> "Handler":
    from pipeline.adapters.command_handler import CommandHandler  # noqa: PLC0415  # slow imports, as above
    from pipeline.config import process_environment  # noqa: PLC0415  # the same

    try:
        arguments = shlex.split(command)
    except ValueError as error:
        raise UsageError(f"--exec can't be read: {error}. Close the quotes.") from error
    if not arguments or shutil.which(arguments[0]) is None:
        raise UsageError(f"--exec names no command that can be run: {command!r}. Give the path of one.")
    return CommandHandler(arguments, environment=process_environment(), timeout_ms=timeout_ms)


def _stop_on_signals(consumer: "DueTaskConsumer") -> None:
    """The first signal lets the task in hand finish; a second Ctrl-C is for those who can't wait."""

    def stop(number: int, frame: FrameType | None) -> None:
        del number, frame
        signal.signal(signal.SIGINT, signal.default_int_handler)
        consumer.stop()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)


def _summary(counts: "ConsumerCounts") -> str:
    parts = [f"Applied {counts.applied}"]
    if counts.duplicates:
        parts.append(f"skipped {counts.duplicates} that were applied before")
    if counts.failed:
        parts.append(f"gave up {counts.failed} (now on dead-tasks)")
    if counts.malformed:
        parts.append(f"set aside {counts.malformed} unreadable (now on dead-tasks)")
    return ", ".join(parts) + "."
