"""Options that several commands share, and how their texts are read."""

from typing import Annotated, Final

import typer

from pipeline.core.durations import parse_duration_ms, parse_instant_ms
from pipeline.core.tasks import DurationMs, InstantMs

__all__ = ["CONSUMERS", "OPERATION", "PROOF", "RECOVERY", "START", "TASKS", "JsonFlag", "read_duration", "read_instant"]

# The groups of `duetasks --help` (`rich_help_panel`).
START: Final = "Start here"
TASKS: Final = "Tasks"
CONSUMERS: Final = "Consumers"
OPERATION: Final = "Operation"
RECOVERY: Final = "Recovery"
PROOF: Final = "Proof"

JsonFlag = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout, for programs.")]
"""Every command takes it: `as_json: JsonFlag = False`."""


def read_duration(text: str) -> DurationMs:
    """Parse an option's `30m`: `Annotated[DurationMs, typer.Option("--in", parser=read_duration, metavar="DURATION")]`.

    Raises:
        typer.BadParameter: it is no duration; typer prints the sentence with the option's name.

    """
    try:
        return parse_duration_ms(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def read_instant(text: str) -> InstantMs:
    """Parse an option's RFC 3339 instant, as `read_duration` does a duration (metavar `INSTANT`).

    Raises:
        typer.BadParameter: it is no instant, or has no offset; typer prints the sentence with the option's name.

    """
    try:
        return parse_instant_ms(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
