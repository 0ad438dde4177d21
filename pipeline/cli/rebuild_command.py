"""`duetasks rebuild`: local tables from `task-state`, or `task-state` from the events and what was emitted."""

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Final

import typer

from pipeline.cli.options import RECOVERY, JsonFlag
from pipeline.cli.output import Output
from pipeline.cli.recovery_session import ProgressBars, may_go_on
from pipeline.cli.session import connected_settings

if TYPE_CHECKING:
    from pipeline.config import Settings
    from pipeline.service.recovery.rebuilder import RebuildReport
    from pipeline.wiring.recovery import TableReport

__all__ = ["register"]

_TABLE_COLUMNS: Final = {
    "slot": "AGENT SLOT",
    "partition": "PARTITION",
    "rows": "TASKS",
    "position": "EVENTS APPLIED",
}
_STATE_COLUMNS: Final = {
    "partition": "PARTITION",
    "rows": "TASKS",
    "confirmed": "CONFIRMED",
    "corrected": "CORRECTED",
    "kept": "KEPT",
    "added": "ADDED",
    "removed": "REMOVED",
    "overdue": "OVERDUE",
    "presumed": "PRESUMED FIRED",
    "position": "EVENTS APPLIED",
}
_LEGEND: Final = """\
Confirmed: events and task-state agree. Corrected: they differ, the topics win. Kept: only task-state knows them.
Added: task-state did not know them. Removed: finished and forgotten. Overdue: they fire as soon as an agent starts.
Presumed fired: no emission is left, yet they must have fired or can't be told from such; they do not fire again."""


class Origin(StrEnum):
    """What to rebuild from."""

    STATE = "state"
    EVENTS = "events"


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command(rich_help_panel=RECOVERY)(rebuild)


def rebuild(
    *,
    origin: Annotated[
        Origin,
        typer.Option(
            "--from",
            help="state: the local tables of this data folder, from task-state. "
            "events: task-state itself, from task-events and due-tasks.",
        ),
    ],
    partition: Annotated[int | None, typer.Option("--partition", min=0, help="Only this one; else all.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and change nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do it without asking.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Rebuild tables after damage, with the agents stopped; says first what it will do. Nothing fires twice."""
    output = Output(as_json=as_json)
    settings = connected_settings()
    if origin is Origin.STATE:
        _from_state(output, settings, partition, dry_run=dry_run, yes=yes)
    else:
        _from_events(output, settings, partition, dry_run=dry_run, yes=yes)


def _from_state(output: Output, settings: "Settings", partition: int | None, *, dry_run: bool, yes: bool) -> None:
    from pipeline.wiring.recovery import rebuild_from_state  # noqa: PLC0415  # slow imports stay out of --help

    decided = False

    def confirm(reports: "list[TableReport]") -> bool:
        nonlocal decided
        bars.rest()
        output.say(
            f"This puts the local tables in {settings.data_dir} aside and restores them from {settings.topics.state}. "
            "Nothing in Kafka changes; the old tables stay until you delete them."
        )
        if not output.as_json:
            output.table([_table_row(report) for report in reports], _TABLE_COLUMNS)
        decided = may_go_on(output, "Go on?", dry_run=dry_run, yes=yes)
        return decided

    with ProgressBars(output) as bars:
        reports = rebuild_from_state(settings, partition=partition, confirm=confirm, on_progress=bars)
    if output.as_json:
        output.result({"from": "state", "dry_run": dry_run, "done": decided, "tables": reports}, "")
    elif decided:
        output.table([_table_row(report) for report in reports], _TABLE_COLUMNS | {"put_aside": "OLD TABLE"})
    rows = sum(report.rows for report in reports)
    output.say(f"Restored: tables {len(reports)}, tasks {rows}." if decided else "Nothing was changed.")


def _from_events(output: Output, settings: "Settings", partition: int | None, *, dry_run: bool, yes: bool) -> None:
    from pipeline.wiring.recovery import (  # noqa: PLC0415  # as above
        agents_in_the_way,
        rebuild_from_events,
        refuse_if_agents_run,
    )

    if not dry_run:
        refuse_if_agents_run(settings)
    decided = False

    def confirm(reports: "list[RebuildReport]") -> bool:
        nonlocal decided
        bars.rest()
        _announce(output, settings, reports)
        decided = may_go_on(output, "Replace them?", dry_run=dry_run, yes=yes)
        return decided

    with ProgressBars(output) as bars:
        reports = rebuild_from_events(settings, partition=partition, confirm=confirm, on_progress=bars)
    if output.as_json:
        output.result({"from": "events", "dry_run": dry_run, "done": decided, "partitions": reports}, "")
    if decided:
        output.say(f"Rebuilt {settings.topics.state}: partitions {len(reports)}. Start the agents again.")
        return
    output.say("Nothing was changed.")
    running = agents_in_the_way(settings)
    if running:
        output.say(f"Agents that run: {len(running)}. The figures are of this moment; stop them before you rebuild.")


def _announce(output: Output, settings: "Settings", reports: "list[RebuildReport]") -> None:
    """What a rebuild would do, before it does it."""
    topics = settings.topics
    events = sum(report.events for report in reports)
    emissions = sum(report.emissions for report in reports)
    rows = sum(report.rows + report.removed for report in reports)
    output.say(
        f"Read {events} events of {topics.events} and {emissions} emissions. A rebuild replaces {rows} rows of "
        f"{topics.state}, in one transaction for each partition. It emits nothing."
    )
    for report in reports:
        for note in report.notes:
            output.say(f"  partition {report.partition}: {note}")
    if not output.as_json:
        output.table([_state_row(report) for report in reports], _STATE_COLUMNS)
        output.say(_LEGEND)


def _table_row(report: "TableReport") -> dict[str, object]:
    return {name: getattr(report, name) for name in (*_TABLE_COLUMNS, "put_aside")}


def _state_row(report: "RebuildReport") -> dict[str, object]:
    return {name: getattr(report, name) for name in _STATE_COLUMNS}
