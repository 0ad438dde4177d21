"""What `rebuild` and `replay` share: progress bars, and the question before something is changed."""

import sys
from typing import TYPE_CHECKING, Self

import typer

from pipeline.cli.output import Output
from pipeline.errors import UsageError

if TYPE_CHECKING:
    from types import TracebackType

    from rich.progress import TaskID


__all__ = ["ProgressBars", "may_go_on"]


class ProgressBars:
    """A bar on stderr for each piece of work; call it with what is being done, how far it is, and how much it is."""

    def __init__(self, output: Output) -> None:
        self._progress = output.progress()
        self._bars: dict[str, TaskID] = {}
        self._is_shown = False

    def __call__(self, what: str, done: int, total: int) -> None:
        """Show how far a piece of work is."""
        if not self._is_shown:
            self._progress.start()
            self._is_shown = True
        if what not in self._bars:
            self._bars[what] = self._progress.add_task(what, total=total)
        self._progress.update(self._bars[what], completed=done, total=max(total, done))

    def rest(self) -> None:
        """Leave the terminal to messages and questions, until there is progress again."""
        if self._is_shown:
            self._progress.stop()
            self._is_shown = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: "TracebackType | None"
    ) -> None:
        self.rest()


def may_go_on(output: Output, question: str, *, dry_run: bool, yes: bool) -> bool:
    """Whether to change something: never in a dry run, else with `--yes` or a person's word.

    Raises `UsageError` where nobody can be asked.
    """
    if dry_run or yes:
        return not dry_run
    if output.as_json or not sys.stdin.isatty():
        raise UsageError("Nobody can be asked here: add --yes to do it, or --dry-run to look only.")
    return typer.confirm(question, err=True)
