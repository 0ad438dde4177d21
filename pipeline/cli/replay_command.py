"""`duetasks replay`: emits again what was emitted, for a consumer that lost its effects."""

from typing import TYPE_CHECKING, Annotated, Final

import typer

from pipeline.cli.options import RECOVERY, JsonFlag, read_instant
from pipeline.cli.output import Output
from pipeline.cli.recovery_session import ProgressBars, may_go_on
from pipeline.cli.session import connected_settings
from pipeline.core.durations import format_instant
from pipeline.core.tasks import InstantMs, TaskId

if TYPE_CHECKING:
    from pipeline.service.recovery.replayer import ReplayPlan

__all__ = ["register"]

_COLUMNS: Final = {
    "partition": "PARTITION",
    "start": "FROM OFFSET",
    "end": "TO OFFSET",
    "records": "TASKS",
    "copies_left_out": "COPIES LEFT OUT",
}


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command(rich_help_panel=RECOVERY)(replay)


def replay(
    *,
    from_ms: Annotated[
        InstantMs,
        typer.Option("--from", parser=read_instant, metavar="INSTANT", help="What was emitted then or later."),
    ],
    to_ms: Annotated[
        InstantMs, typer.Option("--to", parser=read_instant, metavar="INSTANT", help="What was emitted before then.")
    ],
    task_id: Annotated[
        str | None, typer.Option("--task", metavar="ID", help="Only the emissions of this task.")
    ] = None,
    to_topic: Annotated[
        str | None, typer.Option("--to-topic", help="Where to; else due-tasks, where every consumer meets them.")
    ] = None,
    group: Annotated[
        str | None,
        typer.Option(
            "--group",
            help="Make this consumer group's ledger forget the tasks, so that it applies them again. It must be "
            "stopped.",
        ),
    ] = None,
    include_replays: Annotated[
        bool, typer.Option("--include-replays", help="Also what an earlier replay emitted.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and change nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do it without asking.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Emit again, unchanged and marked as a replay, what was emitted in a stretch of time. Ledgers make it harmless."""
    from pipeline.wiring.replay import ReplayChoice  # noqa: PLC0415  # slow imports stay out of --help
    from pipeline.wiring.replay import replay as run_replay  # noqa: PLC0415  # the same

    output = Output(as_json=as_json)
    settings = connected_settings()
    choice = ReplayChoice(
        from_ms=from_ms,
        to_ms=to_ms,
        task_id=None if task_id is None else TaskId(task_id),
        to_topic=to_topic,
        forget_for=group,
        include_replays=include_replays,
    )
    decided = False

    def confirm(plan: "ReplayPlan") -> bool:
        nonlocal decided
        bars.rest()
        output.say(
            f"This emits again to {plan.target_topic} what {plan.source_topic} got from {format_instant(from_ms)} "
            f"until {format_instant(to_ms)}"
            + (f", of task {task_id!r}" if task_id is not None else "")
            + f". Due tasks: {plan.records}."
        )
        for note in plan.notes:
            output.say(f"  {note}")
        if group is not None:
            output.say(f"  The ledger of group {group} forgets them, so that it applies them again.")
        if not output.as_json:
            output.table([{name: getattr(part, name) for name in _COLUMNS} for part in plan.partitions], _COLUMNS)
        decided = may_go_on(output, "Emit them again?", dry_run=dry_run, yes=yes)
        return decided

    with ProgressBars(output) as bars:
        plan = run_replay(
            settings,
            choice,
            confirm=confirm,
            on_progress=lambda done, total: bars("Emitting again", done, total),
        )
    _tell(output, plan, done=decided, dry_run=dry_run)


def _tell(output: Output, plan: "ReplayPlan", *, done: bool, dry_run: bool) -> None:
    if output.as_json:
        output.result({"dry_run": dry_run, "done": done, "replay": plan}, "")
    if done:
        output.say(f"Emitted again: {plan.records}, marked with the header duetasks-replay: {plan.replay_id}.")
    else:
        output.say("Nothing was changed.")
