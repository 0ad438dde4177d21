"""`duetasks broker`: a real Kafka on this machine, for development, demonstrations and tests."""

from typing import TYPE_CHECKING

import typer

from pipeline.cli.options import OPERATION, JsonFlag
from pipeline.cli.output import Output
from pipeline.cli.session import embedded_broker, load_settings
from pipeline.errors import NotFoundError

if TYPE_CHECKING:
    from pipeline.config import Settings

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the group to the command line."""
    group = typer.Typer(no_args_is_help=True, help="Start, stop and find the embedded Kafka broker of the data folder.")
    group.command()(start)
    group.command()(stop)
    group.command()(status)
    app.add_typer(group, name="broker", rich_help_panel=OPERATION)


def start(*, as_json: JsonFlag = False) -> None:
    """Start the broker unless it runs, and wait until it answers. The first start fetches Kafka."""
    output = Output(as_json=as_json)
    with output.working("Looking for a broker") as on_progress:
        info = embedded_broker(load_settings(), on_progress).start()
    output.result(
        info,
        f"Kafka answers at {info.bootstrap_servers} (process {info.pid}, log {info.log_file}).\n"
        "Commands with the same data folder find it by themselves. Next: duetasks topics apply",
    )


def stop(*, as_json: JsonFlag = False) -> None:
    """Stop the broker; its data stays. Exit code 3 if none runs."""
    output = Output(as_json=as_json)
    settings = load_settings()
    with output.working() as on_progress:
        stopped = embedded_broker(settings, on_progress).stop()
    if not stopped:
        raise _none_runs(settings)
    output.result({"stopped": True, "data_dir": settings.data_dir}, f"Stopped. Its data stays in {settings.data_dir}.")


def status(*, as_json: JsonFlag = False) -> None:
    """Tell where the broker of the data folder answers. Exit code 3 if none runs."""
    output = Output(as_json=as_json)
    settings = load_settings()
    info = embedded_broker(settings).status()
    if info is None:
        raise _none_runs(settings)
    output.result(
        info,
        f"Kafka runs at {info.bootstrap_servers} (process {info.pid}, cluster {info.cluster_id}, log {info.log_file}).",
    )


def _none_runs(settings: "Settings") -> NotFoundError:
    return NotFoundError(f"No broker runs in {settings.data_dir}. Start one: duetasks broker start")
