"""`duetasks demo`: a day of real flights, the agent killed in the middle of it, and a check against the data file."""

import signal
from contextlib import ExitStack
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import typer

from pipeline.cli.fresh_deployment import as_interrupt, fresh_deployment
from pipeline.cli.options import START, JsonFlag
from pipeline.cli.output import Output
from pipeline.core.durations import instant_ms, parse_instant_ms
from pipeline.core.tasks import InstantMs
from pipeline.errors import UsageError

if TYPE_CHECKING:
    from pipeline.cli.demo.play import Ending

__all__ = ["register"]

_SPEED_MAX: Final = 7_200


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command(rich_help_panel=START)(demo)


def _read_moment(text: str) -> InstantMs:
    """A date, which begins at midnight UTC, or an instant."""
    try:
        if "T" not in text.upper():
            day = date.fromisoformat(text)
            return instant_ms(datetime(day.year, day.month, day.day, tzinfo=UTC))
        return parse_instant_ms(text)
    except ValueError as error:
        raise typer.BadParameter(f"{error}; or write a date, like 2013-03-08") from error


def demo(
    *,
    data_file: Annotated[
        Path | None, typer.Option("--data", help="Flights in the same columns, .csv or .csv.gz; else: three days.")
    ] = None,
    from_ms: Annotated[
        InstantMs,
        typer.Option("--from", parser=_read_moment, metavar="DATE|INSTANT", help="Flights planned from here on"),
    ] = "2013-03-08T09:00:00Z",  # type: ignore[assignment]  # typer parses the default as it does the option
    to_ms: Annotated[
        InstantMs, typer.Option("--to", parser=_read_moment, metavar="DATE|INSTANT", help="and before this.")
    ] = "2013-03-09T09:00:00Z",  # type: ignore[assignment]  # the same
    speed: Annotated[
        float, typer.Option(min=1, max=_SPEED_MAX, help="How many times faster than real time the day goes by.")
    ] = 1_200,
    consumers: Annotated[int, typer.Option(min=1, max=4, help="Processes that make the boarding calls.")] = 2,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the folder with logs and data where it is.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Play a day of real flights, kill the agent in the middle, and check every boarding call against the data file.

    Each flight schedules its call 30 minutes before departure; delays move it, cancelled flights cancel it. Exit code 1
    if a call is missing, double, early, at another time than the last, or was made for a cancelled flight.
    """
    from pipeline.cli.demo.flights import PACKAGED_FILE, read_flights  # noqa: PLC0415  # slow imports, not for --help
    from pipeline.cli.demo.play import Play  # noqa: PLC0415  # the same
    from pipeline.cli.demo.screen import screen  # noqa: PLC0415  # the same

    output = Output(as_json=as_json)
    file = data_file or PACKAGED_FILE
    flights = read_flights(file, from_ms=from_ms, to_ms=to_ms)
    if all(flight.delay_ms is None for flight in flights):
        raise UsageError("Every flight of that time was cancelled: choose another --from and --to.")
    signal.signal(signal.SIGTERM, as_interrupt)
    with ExitStack() as stack:
        with output.working("Starting Kafka") as on_progress:
            settings = stack.enter_context(fresh_deployment("demo", on_progress, keep=keep))
            play = Play(settings, flights, speed=speed, consumers=consumers)
            stack.callback(play.stop)
            on_progress("Starting the agent and the consumers")
            play.prepare()
        with screen() as show:
            ending = play.perform(show)
    _report(output, ending, file.name)
    if ending.too_late:
        output.say(
            f"{ending.too_late} pieces of news reached Kafka only after the call was due: this machine is too slow "
            f"for --speed {speed:g}, or too busy. Choose a lower one."
        )
    if not ending.is_right:
        raise typer.Exit(1)


def _report(output: Output, ending: "Ending", file_name: str) -> None:
    from pipeline.cli.demo.checking import COLUMNS, rows  # noqa: PLC0415  # slow imports, as above

    if output.as_json:
        output.result({**msgspec.structs.asdict(ending), "is_right": ending.is_right}, "")
        return
    output.say(
        f"The agent was away for {ending.dead_s:.1f} s: {ending.due_meanwhile} calls became due meanwhile, and "
        f"{ending.news_meanwhile} pieces of news came.\n"
        f"Calls came {ending.late_ms_p50:.0f} ms after their time (median), {ending.late_ms_max:,.0f} ms at most.\n\n"
        f"What {file_name} says, beside the calls that consumers made:\n"
    )
    output.table(rows(ending.tallies), COLUMNS)
    output.say(
        "\nRight: every call was made exactly once, at its final time; none early, none for a cancelled flight."
        if ending.is_right
        else "\nWRONG: a promise was broken, see the columns from MISSING on."
    )
