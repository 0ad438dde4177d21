"""`make chaos`: real processes under load and faults for as long as you like, judged by the promises' checkers."""

from __future__ import annotations

import secrets
import signal
import tempfile
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from pipeline.cli.fresh_deployment import as_interrupt
from pipeline.cli.options import read_duration
from pipeline.cli.output import Output
from pipeline.config import user_cache_dir
from pipeline.core.tasks import DurationMs  # noqa: TC001  # typer reads the annotations
from pipeline.embedded import KAFKA_VERSION
from tests.chaos.faults import Kind
from tests.chaos.report import rows, write_page
from tests.chaos.run import Plan, Run


def chaos(
    *,
    length_ms: Annotated[
        DurationMs,
        typer.Option("--for", parser=read_duration, metavar="DURATION", help="How long faults happen."),
    ] = "60s",  # type: ignore[assignment]  # typer parses the default as it does the option
    nodes: Annotated[int, typer.Option(min=1, max=5, help="Kafka nodes; three have min.insync.replicas=2.")] = 1,
    seed: Annotated[int | None, typer.Option(help="Gives the faults and the load; without it a new one.")] = None,
    rate: Annotated[float, typer.Option(min=1, help="New events a second, of all upstreams together.")] = 100.0,
    calm_ms: Annotated[
        DurationMs,
        typer.Option("--calm", parser=read_duration, metavar="DURATION", help="Load without faults at the end."),
    ] = "20s",  # type: ignore[assignment]  # the same
    report_file: Annotated[
        Path | None, typer.Option("--report", metavar="FILE", help="Put the figures into this Markdown page.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures here as JSON.")
    ] = None,
    only: Annotated[
        list[Kind] | None, typer.Option(help="Only this kind of fault; may be given several times.")
    ] = None,
    pause_ms: Annotated[
        DurationMs,
        typer.Option("--pause", parser=read_duration, metavar="DURATION", help="At most so long between two faults."),
    ] = "7s",  # type: ignore[assignment]  # the same
    keep: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Leave histories, logs and data in this folder.")
    ] = None,
    plan_only: Annotated[bool, typer.Option("--plan", help="Print the faults that the seed gives, and stop.")] = False,
) -> None:
    """Kill and freeze brokers, agents, consumers and upstreams at work; count what is lost, doubled, early or wrong.

    Exit code 1 if any promise was broken. The same seed gives the same faults at the same times; what the processes
    make of them depends on the machine.
    """
    output = Output(as_json=False)
    seed = secrets.randbelow(10**9) if seed is None else seed
    plan = Plan.of(
        seed=seed,
        nodes=nodes,
        faults_s=length_ms / 1000,
        calm_s=calm_ms / 1000,
        rate=rate,
        kinds=only or tuple(Kind),
        pause_s=pause_ms / 1000,
    )
    output.say(f"Seed {seed}: {len(plan.faults)} faults")
    for fault in plan.faults:
        output.say(str(fault))
    if plan_only:
        return
    signal.signal(signal.SIGTERM, as_interrupt)  # what was started must end with us
    cache_dir = user_cache_dir() / f"kafka-{KAFKA_VERSION}"
    with tempfile.TemporaryDirectory(prefix="duetasks-chaos-") as scratch, output.working("Starting") as on_progress:
        folder = keep if keep is not None else Path(scratch)
        report = Run(plan, folder, cache_dir=cache_dir, on_progress=on_progress).report()
    if json_file is not None:
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    if report_file is not None:
        write_page(report, report_file)
    output.table(rows(report), {"what": "CHAOS", "value": f"{nodes} NODE{'S' if nodes > 1 else ''}"})
    for sentence in report.sentences:
        output.say(sentence)
    if not report.is_right:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(chaos)
