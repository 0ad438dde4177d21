"""`duetasks status` and `list`: what the agents know of tasks."""

import time
from contextlib import closing
from typing import Annotated, Any, Final

import typer

from pipeline.cli.options import TASKS, JsonFlag, read_instant
from pipeline.cli.output import Output
from pipeline.cli.session import load_settings
from pipeline.core.durations import format_duration, format_instant
from pipeline.core.tasks import DurationMs, InstantMs, Status, TaskId
from pipeline.errors import NotFoundError

__all__ = ["register"]

_COLUMNS: Final = {
    "task_id": "TASK",
    "status": "STATUS",
    "due_at": "DUE",
    "in": "IN",
    "fired_at": "FIRED",
    "version": "VERSION",
    "partition": "PARTITION",
}
_SECOND_MS: Final = 1_000


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command(rich_help_panel=TASKS)(status)
    app.command("list", rich_help_panel=TASKS)(list_tasks)


def status(
    task_id: Annotated[str, typer.Argument(metavar="ID", help="The task's id.")],
    *,
    as_json: JsonFlag = False,
) -> None:
    """Show where a task is in its life, and what became of the last requests for it. Exit code 3 if there is none."""
    from pipeline.adapters.agent_client import AgentClient  # noqa: PLC0415  # slow imports stay out of --help

    output = Output(as_json=as_json)
    with closing(AgentClient(load_settings())) as agent:
        task = agent.get_task(TaskId(task_id))
    if task is None:
        raise NotFoundError(f"There is no task {task_id!r}: it was never scheduled, or is finished and forgotten.")
    output.result(task, "\n".join(_task_lines(task)))


def list_tasks(
    *,
    status: Annotated[  # the option's name
        Status | None, typer.Option("--status", "-s", case_sensitive=False, help="Only tasks in this status.")
    ] = None,
    prefix: Annotated[str, typer.Option("--prefix", "-p", help="Only tasks whose id begins so.")] = "",
    due_before_ms: Annotated[
        InstantMs | None,
        typer.Option("--due-before", parser=read_instant, metavar="INSTANT", help="Only tasks due before then."),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="At most so many.")] = 100,
    as_json: JsonFlag = False,
) -> None:
    """List tasks, partition by partition in the order of their ids; finished ones stay for a week."""
    from pipeline.adapters.agent_client import AgentClient  # noqa: PLC0415  # slow imports stay out of --help

    output = Output(as_json=as_json)
    with closing(AgentClient(load_settings())) as agent:
        found = list(agent.list_tasks(status=status, prefix=prefix, due_before_ms=due_before_ms, limit=limit + 1))
    rows = found[:limit]
    if as_json:
        output.table(rows, _COLUMNS)
        return
    now_ms = _now_ms()
    output.table([_row(task, now_ms) for task in rows], _COLUMNS, empty="No such tasks.")
    if len(found) > limit:
        output.say(f"There are more: --limit is {limit}.")


def _row(task: dict[str, Any], now_ms: int) -> dict[str, object]:
    emission = task["emission"]
    return {
        **task,
        "task_id": _printable(task["task_id"]),
        "due_at": _instant(task["due_at_ms"]),
        "in": _distance(task["due_at_ms"], now_ms) if task["status"] == Status.SCHEDULED else None,
        "fired_at": _instant(emission["fired_at_ms"]) if emission else None,
    }


def _task_lines(task: dict[str, Any]) -> list[str]:
    """The task for people: one fact a line, those that it has."""
    facts: dict[str, object] = {
        "Task": _printable(task["task_id"]),
        "Status": task["status"],
        "Due": _instant(task["due_at_ms"]),
        "Changed": _instant(task["changed_at_ms"]),
        "Version": task["version"],
        "Generation": task["generation"],
        "Partition": task["partition"],
        "Source": task["source"],
        "Content type": task["content_type"],
    }
    if task["status"] == Status.SCHEDULED:
        facts["Due"] = f"{facts['Due']} ({_distance(task['due_at_ms'], _now_ms())})"
        facts["Payload"] = f"{task['payload_size']} bytes"
    emission = task["emission"]
    if emission:
        late = format_duration(DurationMs(emission["lateness_ms"]))
        offset = "unknown" if emission["offset"] is None else emission["offset"]
        facts["Fired"] = f"{_instant(emission['fired_at_ms'])}, {late} late"
        facts["Emission"] = f"{emission['topic']}, partition {emission['partition']}, offset {offset}"
    lines = [f"{name:13} {value}" for name, value in facts.items() if value is not None]
    requests = [
        f"  offset {entry['offset']}: {entry['verdict']}"
        + (f" ({entry['reason']})" if entry["reason"] else "")
        + (f", event {_printable(entry['event_id'])}" if entry["event_id"] else "")
        for entry in task["verdicts"]
    ]
    return [*lines, "Requests, oldest first:", *requests] if requests else lines


def _instant(at_ms: int) -> str | None:
    return format_instant(InstantMs(at_ms)) if at_ms else None


def _distance(at_ms: int, now_ms: int) -> str:
    """How far off an instant is, in seconds where that is enough."""
    away_ms = at_ms - now_ms
    rounded = away_ms if abs(away_ms) < _SECOND_MS else away_ms // _SECOND_MS * _SECOND_MS
    length = format_duration(DurationMs(abs(rounded)))
    return f"in {length}" if away_ms >= 0 else f"overdue by {length}"


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _printable(text: str) -> str:
    """Ids as they are, but for characters that would disturb a terminal."""
    return text if text.isprintable() else repr(text)
