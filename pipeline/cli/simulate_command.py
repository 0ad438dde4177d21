"""`duetasks simulate`: the production code on virtual time, with every fault at once, and the promises watched."""

import secrets
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import typer

from pipeline.cli.options import PROOF, JsonFlag, read_duration
from pipeline.cli.output import Output
from pipeline.core.tasks import DurationMs
from pipeline.errors import UsageError

if TYPE_CHECKING:
    from pipeline.testing.simulator.many import Tally
    from pipeline.testing.simulator.plan import Plan
    from pipeline.testing.simulator.simulation import Outcome

__all__ = ["register"]

_SEEDS: Final = 500
_SEED_END: Final = 10**9
_MS_A_SECOND: Final = 1_000
_SECONDS_A_MINUTE: Final = 60


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command(rich_help_panel=PROOF)(simulate)


def simulate(
    *,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Where the seeds begin; drawn anew each time unless given.")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="How many simulations, each of the next seed. 1 if --seed is given.")
    ] = None,
    for_ms: Annotated[
        DurationMs | None,
        typer.Option("--for", parser=read_duration, metavar="DURATION", help="Simulate so long instead."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, max=100_000, help="Steps of each simulation.")] = 80,
    only: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="Only these steps of the one seed: a shrunk failure.")
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes; one for each core unless given.")] = None,
    history: Annotated[bool, typer.Option("--history", help="Tell what happened, of a single seed.")] = False,
    plan_file: Annotated[
        Path | None, typer.Option("--plan", metavar="FILE", help="The one simulation that --save wrote.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the plan of a failure here, shrunk if it was.")
    ] = None,
    shrinks: Annotated[
        bool, typer.Option("--shrink/--no-shrink", help="Look for the fewest steps that still show a failure.")
    ] = True,
    as_json: JsonFlag = False,
) -> None:
    """Run the production code on virtual time, with crashes, partitions and lost disks, and watch every promise.

    The same seed does the same thing, everywhere. It ends at the first broken promise, with exit code 1: the failure is
    printed with the fewest steps that still show it, and with the command that repeats it.
    """
    output = Output(as_json=as_json)
    is_single = plan_file is not None or seeds == 1 or (seed is not None and seeds is None and for_ms is None)
    if (only or history) and not is_single:
        raise UsageError("--only and --history are for a single simulation: give --seed or --plan.")
    first = secrets.randbelow(_SEED_END) if seed is None else seed
    if is_single:
        plan = _plan_of(plan_file, first, steps, only)
        _simulate_one(output, plan, history=history, shrinks=shrinks and only is None, save=save)
    else:
        seeds = _SEEDS if seeds is None and for_ms is None else seeds
        _simulate_many(output, _Seeds(first, seeds, for_ms), steps, jobs, shrinks=shrinks, save=save)


def _simulate_one(output: Output, plan: "Plan", *, history: bool, shrinks: bool, save: Path | None) -> None:
    from pipeline.testing.simulator.simulation import simulate as run  # noqa: PLC0415  # slow imports stay out of --help
    from pipeline.testing.simulator.telling import tell  # noqa: PLC0415  # the same

    outcome = run(plan)
    if history and not output.as_json:
        for line in outcome.history:
            output.say(line)
    if outcome.failure is not None and shrinks:
        plan, outcome = _shrunk(output, plan, outcome)
    output.result(outcome, tell(plan, outcome))
    if outcome.failure is not None:
        _save(save, plan)
        raise typer.Exit(1)


class _Seeds:
    """Which seeds are to be run: so many from `first` on, or as many as there is time for."""

    def __init__(self, first: int, seeds: int | None, for_ms: DurationMs | None) -> None:
        self.first = first
        self.count = seeds
        self.began_s = time.monotonic()
        self._until_s = None if for_ms is None else self.began_s + for_ms / _MS_A_SECOND

    def __iter__(self) -> Iterator[int]:
        numbers = count(self.first) if self.count is None else range(self.first, self.first + self.count)
        for number in numbers:
            if self._until_s is not None and time.monotonic() >= self._until_s:
                return
            yield number

    def progress(self, tally: "Tally") -> str:
        of = f" of {self.count}" if self.count is not None else ""
        faults = tally.faults.total()
        return f"Simulating: {tally.simulations}{of} worlds, {tally.virtual_hours:.1f} hours, {faults} faults"


def _simulate_many(
    output: Output, seeds: _Seeds, steps: int, jobs: int | None, *, shrinks: bool, save: Path | None
) -> None:
    from pipeline.testing.simulator.many import Tally, outcomes  # noqa: PLC0415  # slow imports stay out of --help
    from pipeline.testing.simulator.plan import draw_plan  # noqa: PLC0415  # the same
    from pipeline.testing.simulator.telling import tell  # noqa: PLC0415  # the same

    tally, failed = Tally(), None
    output.say(f"Seeds from {seeds.first} on, {steps} steps each.")
    with output.working("Simulating") as on_progress, closing(outcomes(seeds, steps, jobs=jobs)) as running:
        for outcome in running:
            tally.add(outcome)
            on_progress(seeds.progress(tally))
            if outcome.failure is not None:
                failed = outcome
                break
    seconds = time.monotonic() - seeds.began_s
    figures = {"first_seed": seeds.first, "steps": steps, "seconds": seconds, **_figures(tally)}
    if failed is None:
        output.result(figures, f"{_summary(tally, seconds)}\nNo promise was broken.")
        return
    plan = draw_plan(failed.seed, steps)
    if shrinks:
        plan, failed = _shrunk(output, plan, failed)
    output.result({**figures, "failed": failed}, f"{_summary(tally, seconds)}\n\n{tell(plan, failed)}")
    _save(save, plan)
    raise typer.Exit(1)


def _save(file: Path | None, plan: "Plan") -> None:
    if file is not None:
        file.write_bytes(msgspec.json.format(msgspec.json.encode(plan)) + b"\n")


def _plan_of(file: Path | None, seed: int, steps: int, only: str | None) -> "Plan":
    from pipeline.testing.simulator.plan import Plan, draw_plan  # noqa: PLC0415  # slow imports stay out of --help

    if file is None:
        plan = draw_plan(seed, steps)
        return plan if only is None else plan.only(_numbers(only, steps))
    try:
        return msgspec.json.decode(file.read_bytes(), type=Plan)
    except OSError as error:
        raise UsageError(f"{file} can't be read: {error.strerror}.") from error
    except msgspec.DecodeError as error:
        raise UsageError(f"{file} is no plan of this version: {error}.") from error


def _numbers(text: str, steps: int) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"--only takes numbers of steps with commas between them, not {text!r}.") from error
    if not all(1 <= number <= steps for number in numbers):
        raise UsageError(f"--only takes numbers from 1 to {steps}, as many steps as there are.")
    return numbers


def _shrunk(output: Output, plan: "Plan", outcome: "Outcome") -> tuple["Plan", "Outcome"]:
    from pipeline.testing.simulator.shrink import shrink  # noqa: PLC0415  # slow imports stay out of --help

    with output.working("Shrinking the failure") as on_progress:
        return shrink(plan, outcome, on_try=lambda left: on_progress(f"Shrinking the failure: {left} steps left"))


def _figures(tally: "Tally") -> dict[str, object]:
    return {
        "simulations": tally.simulations,
        "virtual_hours": tally.virtual_hours,
        "events": tally.events,
        "emissions": tally.emissions,
        "applied": tally.applied,
        "faults": tally.faults.total(),
        "faults_by_kind": dict(tally.faults.most_common()),
    }


def _summary(tally: "Tally", seconds: float) -> str:
    minutes = seconds / _SECONDS_A_MINUTE
    faults = "\n".join(f"  {number:>8,}  {kind}" for kind, number in tally.faults.most_common())
    return (
        f"{tally.simulations:,} worlds, {tally.virtual_hours:.1f} simulated hours, {tally.events:,} events, "
        f"{tally.emissions:,} emissions, {tally.applied:,} applied.\n"
        f"{tally.faults.total():,} faults and interventions:\n{faults}\n"
        f"One minute here is {tally.virtual_hours / minutes:.1f} simulated hours and "
        f"{tally.faults.total() / minutes:,.0f} faults."
    )
