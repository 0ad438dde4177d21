"""`duetasks import`: a file of JSON events, one a line, sent to the broker; an interrupted import goes on."""

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from pipeline.cli.options import TASKS, JsonFlag
from pipeline.cli.output import Output
from pipeline.cli.session import connected_settings
from pipeline.errors import EXIT_REFUSED, DuetasksError, RejectedTaskError

if TYPE_CHECKING:
    from pipeline.adapters.import_file import ImportedLine, ImportFile, ImportPlace
    from pipeline.service.receipts import Outcome

__all__ = ["register"]

_SAVE_EVERY_S: Final = 1.0
_REFUSALS_SHOWN_MAX: Final = 1_000
_JSON_GROWTH_MAX: Final = 6
"""A byte of an event takes at most so many characters in JSON: `\\u0000`."""


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("import", rich_help_panel=TASKS)(import_file)


def import_file(
    file: Annotated[Path, typer.Argument(metavar="FILE.jsonl", help="JSON events, one a line, as on task-events.")],
    *,
    again: Annotated[
        bool, typer.Option("--again", help="Send the whole file once more, as new events, though it was imported.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Send a file of JSON events. Refused lines are reported, the others go on; run it again after an interruption.

    Exit code 4 if a line was refused, 5 if the broker stopped answering: then the same command goes on from there.
    """
    from msgspec.structs import replace  # noqa: PLC0415  # slow imports stay out of --help

    from pipeline.adapters.import_file import ImportFile  # noqa: PLC0415  # as above
    from pipeline.producer import TaskProducer  # noqa: PLC0415  # as above

    output = Output(as_json=as_json)
    settings = connected_settings()
    source = ImportFile(file, settings.data_dir, line_bytes_max=_JSON_GROWTH_MAX * settings.event_bytes_max)
    start = source.place()
    if again:
        start = replace(start, lines=0, bytes=0, digest="", refused=0, run=start.run + 1)
    total = source.line_count()
    if start.lines and start.lines < total:
        output.say(f"Going on after line {start.lines}, where the last import of this file was.")
    work = _Import(source, start, output)
    with (
        TaskProducer(settings, source="import", deadline=timedelta(seconds=30)) as producer,
        output.progress() as bar,
    ):
        task = bar.add_task(file.name, total=total, completed=start.lines)
        work.run(producer.send_json, lambda lines: bar.update(task, completed=lines))
    output.result(work.summary(file), _sentence(work, start, total))
    if work.place.refused:
        raise typer.Exit(EXIT_REFUSED)


class _Import:
    """One run over a file: what was sent, what was refused, and the place up to which all is answered."""

    def __init__(self, source: "ImportFile", start: "ImportPlace", output: Output) -> None:
        self._source = source
        self._output = output
        self._under_way: deque[ImportedLine] = deque()
        self.start = start
        self.place = start
        self.sent = 0
        self.refusals: list[dict[str, object]] = []

    def run(self, send: Callable[..., "Generator[Outcome]"], on_progress: Callable[[int], None]) -> None:
        """Send the rest of the file; raises the first error that is no refusal, with the place saved."""
        saved_at_s = time.monotonic()
        try:
            with closing(send(self._values(), event_id=lambda _: self._source.event_id(self._under_way[-1]))) as found:
                for outcome in found:
                    self._take(outcome, self._under_way.popleft())
                    if time.monotonic() - saved_at_s >= _SAVE_EVERY_S:
                        self._source.save(self.place)
                        on_progress(self.place.lines)
                        saved_at_s = time.monotonic()
        finally:
            self._source.save(self.place)
            on_progress(self.place.lines)

    def _values(self) -> Iterator[bytes]:
        """The lines' values; each is under way before it is sent, so that its outcome finds it."""
        for line in self._source.lines(self.start):
            self._under_way.append(line)
            yield line.value

    def _take(self, outcome: "Outcome", line: "ImportedLine") -> None:
        from msgspec.structs import replace  # noqa: PLC0415  # slow imports stay out of --help

        refused = self.place.refused
        if isinstance(outcome.error, RejectedTaskError):
            refused += 1
            self._report(line.number, outcome.error)
        elif outcome.error is not None:
            raise _stopped(outcome.error, self.place.lines)
        else:
            self.sent += 1
        self.place = replace(line.place, refused=refused)

    def _report(self, number: int, error: RejectedTaskError) -> None:
        self._output.say(f"Line {number} is refused, {error.reason}: {error}")
        if len(self.refusals) < _REFUSALS_SHOWN_MAX:
            self.refusals.append({"line": number, "reason": error.reason, "message": str(error)})

    def summary(self, file: Path) -> dict[str, Any]:
        """The result for programs."""
        return {
            "file": str(file),
            "lines": self.place.lines,
            "resumed_after_line": self.start.lines,
            "sent": self.sent,
            "refused": self.place.refused,
            "refusals": self.refusals,
        }


def _stopped(error: DuetasksError, lines: int) -> DuetasksError:
    error.args = (f"Stopped after line {lines}: {error}. The same command goes on from there.",)
    return error


def _sentence(work: _Import, start: "ImportPlace", total: int) -> str:
    if start.lines >= total and not work.sent:
        return f"All {total} lines were imported before, {start.refused} refused. To send them again, add --again."
    return f"{work.sent} events sent, {work.place.refused} lines refused, of {total} lines."
