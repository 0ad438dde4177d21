"""`duetasks agent`: keeps the timers of its share of the partitions, until it is stopped."""

import os
import threading
from concurrent.futures import thread as pool_threads
from typing import Annotated, Final

import structlog
import typer

from pipeline.cli.options import OPERATION, JsonFlag
from pipeline.cli.session import connected_settings

__all__ = ["register"]

_LINGER_S: Final = 5.0


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
    _end_threads(code)
    if code:
        raise typer.Exit(code)


def _end_threads(code: int) -> None:
    """End the threads of all pools, or after five seconds the process with them.

    A call of librdkafka that waits for a broker that is away can't be interrupted, and the interpreter would wait for
    it. Nothing is lost: owners have let go by now, and what they had not committed never happened.
    """
    # What the interpreter itself would call on its way out, without a bound.
    ending = threading.Thread(target=pool_threads._python_exit, daemon=True)  # noqa: SLF001  # there is no other
    ending.start()
    ending.join(_LINGER_S)
    if ending.is_alive():
        structlog.get_logger(__name__).warning("threads_left_behind", after_s=_LINGER_S)
        os._exit(code)
