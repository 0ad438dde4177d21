"""`duetasks agent`: keeps the timers of its share of the partitions, until it is stopped."""

from typing import Annotated

import typer

from pipeline.cli.options import OPERATION, JsonFlag
from pipeline.cli.session import connected_settings

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command(rich_help_panel=OPERATION)(agent)


def agent(
    *,
    accept_loss: Annotated[
        bool, typer.Option("--accept-loss", help="Go on where records that were needed are gone, instead of refusing.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Run an agent: several share the partitions, and take over from one that ends. Stop it with Ctrl-C or SIGTERM."""
    from pipeline.adapters.logging_setup import set_up_logging  # noqa: PLC0415  # slow imports stay out of --help
    from pipeline.wiring.agent import run_agent  # noqa: PLC0415  # the same

    settings = connected_settings()
    set_up_logging(log_format="json" if as_json else settings.log_format, log_level=settings.log_level)
    code = run_agent(settings, accept_loss=accept_loss)
    if code:
        raise typer.Exit(code)
