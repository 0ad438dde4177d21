"""What consumers applied, held against what the data file says must have been: no other source is believed."""

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from pipeline.cli.demo.story import Kind

__all__ = ["COLUMNS", "Applied", "Expected", "Tally", "compare", "rows"]

# Flights in the file and the calls that follow from it; calls made exactly once at their final time; what was wrong.
COLUMNS: Final = {
    "kind": "FLIGHTS",
    "flights": "FILE",
    "calls": "CALLS",
    "right": "RIGHT",
    "missing": "MISSING",
    "doubled": "TWICE",
    "early": "EARLY",
    "wrong_time": "MISTIMED",
    "unwanted": "UNWANTED",
}


class Expected(msgspec.Struct, frozen=True, kw_only=True):
    """What must become of one flight's call, in real time: made once at `due_at_ms`, or never (None)."""

    kind: Kind
    due_at_ms: int | None


class Applied(msgspec.Struct, frozen=True, kw_only=True):
    """One call that a consumer made: what it was told, and when the call was seen to be made."""

    task_id: str
    due_at_ms: int
    fired_at_ms: int
    seen_at_ms: float


class Tally(msgspec.Struct, kw_only=True):
    """The count of flights of one kind, and of everything that can be wrong with their calls."""

    flights: int = 0
    calls: int = 0
    right: int = 0
    missing: int = 0
    doubled: int = 0
    early: int = 0
    wrong_time: int = 0
    unwanted: int = 0

    @property
    def is_right(self) -> bool:
        """Whether every call was made once at its time, and no other."""
        wrong = self.missing + self.doubled + self.early + self.wrong_time + self.unwanted
        return self.right == self.calls and not wrong

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(**{name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__})


def compare(expected: Mapping[str, Expected], applied: Iterable[Applied]) -> dict[Kind, Tally]:
    """The tally of each kind of flight. A call for a flight that is not in the file is an unwanted one."""
    made: dict[str, list[Applied]] = {task_id: [] for task_id in expected}
    tallies = {kind: Tally() for kind in Kind}
    for call in applied:
        if call.task_id in made:
            made[call.task_id].append(call)
        else:
            tallies[Kind.CANCELLED].unwanted += 1
    for task_id, wanted in expected.items():
        _count(tallies[wanted.kind], wanted, made[task_id])
    return tallies


def _count(tally: Tally, wanted: Expected, calls: list[Applied]) -> None:
    tally.flights += 1
    if wanted.due_at_ms is None:
        tally.unwanted += len(calls)
        return
    due_at_ms = wanted.due_at_ms
    early = sum(min(call.fired_at_ms, call.seen_at_ms) < due_at_ms for call in calls)
    wrong_time = sum(call.due_at_ms != due_at_ms for call in calls)
    tally.calls += 1
    tally.missing += not calls
    tally.doubled += max(0, len(calls) - 1)
    tally.early += early
    tally.wrong_time += wrong_time
    tally.right += len(calls) == 1 and not early and not wrong_time


def rows(tallies: Mapping[Kind, Tally]) -> list[dict[str, object]]:
    """The table for people: a row for each kind, and the sum."""
    total = sum(tallies.values(), Tally())
    named = [*((str(kind), tally) for kind, tally in tallies.items()), ("all", total)]
    return [{"kind": kind, **msgspec.structs.asdict(tally)} for kind, tally in named]
