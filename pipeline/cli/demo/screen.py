"""What a person sees while the demonstration runs: a few lines that change in place, or few lines in a log."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Final, Protocol

import msgspec
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

__all__ = ["Scene", "Screen", "screen"]

_LOG_PAUSE_S: Final = 10.0
_BAR_WIDTH: Final = 40


class Scene(msgspec.Struct, frozen=True, kw_only=True):
    """One moment of the play."""

    played_ms: int
    done: float
    scheduled: int
    moved: int
    cancelled: int
    flights: int
    made: int
    calls: int
    late_ms: float
    agent: str
    agent_is_well: bool


class Screen(Protocol):
    """Shows scenes."""

    def __call__(self, scene: Scene) -> None:
        """Show this one."""


@contextmanager
def screen() -> Iterator[Screen]:
    """Yields what shows scenes on standard error: a terminal changes in place, a log gets a line now and then."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Log(console)
        return
    with Live(console=console, refresh_per_second=10, transient=False) as live:
        yield lambda scene: live.update(_picture(scene))


def _picture(scene: Scene) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", min_width=15)
    table.add_column()
    table.add_row(_clock(scene), ProgressBar(total=1.0, completed=scene.done, width=_BAR_WIDTH))
    table.add_row("Upstream", _upstream(scene))
    table.add_row("Boarding calls", _calls(scene))
    table.add_row("Agent", Text(scene.agent, style="green" if scene.agent_is_well else "bold red"))
    return table


def _clock(scene: Scene) -> str:
    return f"{datetime.fromtimestamp(scene.played_ms / 1000, UTC):%b %d %H:%M} UTC"


def _upstream(scene: Scene) -> str:
    return (
        f"{scene.scheduled:,} of {scene.flights:,} flights scheduled, {scene.moved:,} times moved, "
        f"{scene.cancelled:,} cancelled"
    )


def _calls(scene: Scene) -> str:
    late = f"; the last one {scene.late_ms:,.0f} ms after its time" if scene.made else ""
    return f"{scene.made:,} of {scene.calls:,} made{late}"


class _Log:
    """A line when the agent's condition changes, and every ten seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._told_s = 0.0
        self._agent = ""

    def __call__(self, scene: Scene) -> None:
        now_s = time.monotonic()
        if scene.agent == self._agent and now_s - self._told_s < _LOG_PAUSE_S:
            return
        self._told_s, self._agent = now_s, scene.agent
        line = f"{_clock(scene)}  {_upstream(scene)}. Calls: {_calls(scene)}. Agent: {scene.agent}"
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
