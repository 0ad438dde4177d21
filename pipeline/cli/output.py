"""The one place that prints: results on stdout, for people or as JSON; messages, progress and errors on stderr."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

__all__ = ["Output", "print_error"]

# A log file gets a line of progress this often, and whenever a new piece of work begins.
_PROGRESS_PAUSE_S: Final = 5.0
_PIPE_WIDTH: Final = 10_000


class Output:
    """What one command says: `Output(as_json=as_json)` at its top, then `result`, `table` or `line`."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json

    def result(self, value: object, text: str) -> None:
        """The one result of a command: `value` (a struct or mapping) as JSON, or `text` for people."""
        _write_line(_json(value) if self.as_json else text)

    def table(
        self, rows: Sequence[Mapping[str, object]], columns: Mapping[str, str], *, empty: str = "Nothing there."
    ) -> None:
        """Rows as a JSON array, or as a table of `columns` (key of a row -> title); `empty` stands for no rows."""
        if self.as_json:
            _write_line(_json(rows))
        elif not rows:
            _write_line(empty)
        else:
            _print_table(rows, columns)

    def line(self, value: object) -> None:
        """One JSON line, at once and in both modes: for commands whose output is a stream for programs."""
        _write_line(_json(value))

    def say(self, text: str) -> None:
        """A message to the person who watches; never part of the result."""
        _stderr().print(text, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def working(self, start: str = "") -> Iterator[Callable[[str], None]]:
        """Say what is being waited for: yields a function that takes the next sentence.

        On a terminal one line changes in place; elsewhere lines are kept few.
        """
        console = _stderr()
        if not console.is_terminal:
            yield _sparse_progress(self.say)
            return
        with console.status(_escaped(start or "Working")) as status:
            yield lambda text: status.update(_escaped(text))

    def progress(self) -> "Progress":
        """A progress bar with count, rate and time left, to be used as a context manager; on stderr."""
        from rich.progress import (  # noqa: PLC0415  # slow to import, and few commands draw bars
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        return Progress(*columns, console=_stderr(), disable=not _stderr().is_terminal)


def print_error(text: str, *, kind: str, details: Mapping[str, object], as_json: bool) -> None:
    """One sentence on stderr; with `as_json` also `{"error": ..., "type": ...}` and the details on stdout."""
    _stderr().print(f"[bold red]Error:[/] {_escaped(text)}", highlight=False, soft_wrap=True)
    if as_json:
        _write_line(_json({"error": text, "type": kind, **details}))


def _stderr() -> "Console":
    from rich.console import Console  # noqa: PLC0415  # slow to import; `--help` needs none of it

    return Console(stderr=True)


def _escaped(text: str) -> str:
    from rich.markup import escape  # noqa: PLC0415  # as above

    return escape(text)


def _json(value: object) -> str:
    return msgspec.json.encode(value, enc_hook=str).decode()


def _write_line(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()  # whoever reads a pipe must not wait for a buffer to fill


def _print_table(rows: Sequence[Mapping[str, object]], columns: Mapping[str, str]) -> None:
    from rich.console import Console  # noqa: PLC0415  # slow to import; `--json` needs none of it
    from rich.table import Table  # noqa: PLC0415  # as above
    from rich.text import Text  # noqa: PLC0415  # as above

    # Without lines round it, and never folded in a pipe: then `grep` and `awk` work on it as on any other command's.
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    for title in columns.values():
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(*(Text("" if row.get(key) is None else str(row[key])) for key in columns))
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    with console.capture() as printed:
        console.print(table)
    for line in printed.get().splitlines():
        _write_line(line.rstrip())


def _sparse_progress(say: Callable[[str], None]) -> Callable[[str], None]:
    said, said_at_s = "", 0.0

    def on_progress(text: str) -> None:
        nonlocal said, said_at_s
        work, now_s = text.partition(":")[0], time.monotonic()
        if work != said or now_s - said_at_s >= _PROGRESS_PAUSE_S:
            said, said_at_s = work, now_s
            say(text)

    return on_progress
