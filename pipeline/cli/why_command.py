"""`duetasks why`: the story of one task, from the topics."""

from typing import TYPE_CHECKING, Annotated, Final

import typer

from pipeline.cli.options import PROOF, JsonFlag, read_instant
from pipeline.cli.output import Output
from pipeline.cli.recovery_session import ProgressBars
from pipeline.cli.session import connected_settings
from pipeline.core.durations import format_instant
from pipeline.core.tasks import InstantMs, TaskId

if TYPE_CHECKING:
    from pipeline.core.story import Chapter
    from pipeline.service.audit.storyteller import Story

__all__ = ["register"]

_COLUMNS: Final = {"at": "AT", "what": "WHAT", "verdict": "VERDICT", "record": "RECORD", "why": "WHY"}


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command(rich_help_panel=PROOF)(why)


def why(
    task_id: Annotated[str, typer.Argument(metavar="ID", help="The task's id.")],
    *,
    from_ms: Annotated[
        InstantMs | None,
        typer.Option(
            "--from", parser=read_instant, metavar="INSTANT", help="Only what was appended then or later; faster."
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Tell the story of one task from the topics: each request, emission and application, and why it ended so.

    Needs no agent. Exit code 3 if no topic knows the task.
    """
    from pipeline.wiring.audit import tell_story  # noqa: PLC0415  # slow imports stay out of --help

    output = Output(as_json=as_json)
    settings = connected_settings()
    with ProgressBars(output) as bars:
        story = tell_story(settings, TaskId(task_id), from_ms=from_ms, on_progress=bars)
    if as_json:
        output.result(_document(story), "")
        return
    output.say(_headline(story))
    output.table([_row(chapter) for chapter in story.chapters], _COLUMNS, empty="Only its row is left.")
    if any(chapter.is_derived for chapter in story.chapters):
        output.say("* derived from the events that are left: task-state keeps the last four verdicts of a task.")
    for note in story.notes:
        output.say(f"Note: {note}.")


def _document(story: "Story") -> dict[str, object]:
    state = story.state
    return {
        "task_id": story.task_id,
        "partition": story.partition,
        "status": None if state is None else state.status,
        "due_at_ms": None if state is None else state.due_at_ms,
        "generation": None if state is None else state.generation,
        "version": None if state is None else state.version,
        "chapters": story.chapters,
        "notes": story.notes,
    }


def _headline(story: "Story") -> str:
    name = story.task_id if story.task_id.isprintable() else repr(story.task_id)
    state = story.state
    if state is None:
        return f"Task {name}, partition {story.partition}: no agent knows it now."
    due = f", due at {format_instant(state.due_at_ms)}" if state.due_at_ms else ""
    return f"Task {name}, partition {story.partition}: {state.status}{due}, generation {state.generation}."


def _row(chapter: "Chapter") -> dict[str, object]:
    return {
        "at": format_instant(chapter.at_ms),
        "what": chapter.what,
        "verdict": chapter.verdict + ("*" if chapter.is_derived else ""),
        "record": f"{chapter.topic}-{chapter.partition}@{chapter.offset}",
        "why": chapter.why,
    }
