"""`duetasks bench`: how fast this machine is with a real broker, a real agent and every promise kept."""

import signal
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from pipeline.cli.fresh_deployment import as_interrupt, fresh_deployment
from pipeline.cli.options import OPERATION
from pipeline.cli.output import Output

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command(rich_help_panel=OPERATION)(bench)


def bench(
    *,
    pending: Annotated[int, typer.Option(min=1, help="Tasks to schedule far ahead; they stay pending.")] = 200_000,
    drain: Annotated[int, typer.Option(min=1, help="Tasks that are due at one instant.")] = 100_000,
    lateness_rate: Annotated[int, typer.Option(min=1, help="Tasks due in each second of the lateness phase.")] = 1_000,
    lateness_s: Annotated[int, typer.Option(min=1, help="Seconds of the lateness phase.")] = 30,
    payload_bytes: Annotated[int, typer.Option(min=0, max=100_000, help="Payload of each task.")] = 100,
    agents: Annotated[int, typer.Option(min=1, max=4, help="Agent processes; each uses about one core.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of ingest and drain; the middle one is told.")] = 3,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures here too.")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the data folder, with the logs, where it is.")] = False,
) -> None:
    """Measure ingest, drain, lateness and restarts on a broker and agents of its own; about four minutes.

    Exit code 1 if a task was early, lost or doubled.
    """
    from pipeline.cli.bench.figures import Sizes, rows  # noqa: PLC0415  # slow imports stay out of --help
    from pipeline.cli.bench.run import Run  # noqa: PLC0415  # the same

    output = Output(as_json=False)
    sizes = Sizes(
        pending=pending,
        drain=drain,
        lateness_per_s=lateness_rate,
        lateness_s=lateness_s,
        payload_bytes=payload_bytes,
        agents=agents,
        rounds=min(rounds, pending, drain),
    )
    signal.signal(signal.SIGTERM, as_interrupt)
    with output.working("Starting Kafka") as on_progress, fresh_deployment("bench", on_progress, keep=keep) as settings:
        if keep:
            output.say(f"Logs and data: {settings.data_dir}")
        figures = Run(settings, sizes, on_progress).measure()
    if json_file is not None:
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(figures)) + b"\n")
    output.table(
        rows(figures, sizes), {"what": "MEASURED", "value": "DUETASKS", "ceiling": "PLAIN LOOP", "ratio": "RATIO"}
    )
    if not figures.is_right:
        raise typer.Exit(1)
