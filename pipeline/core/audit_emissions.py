"""Judges all that bears one generation: its emissions, their replays, and what consumers' ledgers say of it (G5, G6).

A generation is the place of one accepted schedule, so all of this belongs to one task. It comes sorted: emissions and
replayed copies by topic and offset, then the rows of each group by offset.
"""

from collections.abc import Mapping
from typing import Final

import msgspec

from pipeline.core.audit import Code, Promise, Tally, Unprovable
from pipeline.core.audit_view import PartitionView
from pipeline.core.tasks import InstantMs, Offset

__all__ = ["DueSeen", "GenerationAudit", "LedgerSeen", "LedgerView"]

COPIES_MAX: Final = 10_000
"""Copies of one emission that are kept: a person replays by hand."""


class DueSeen(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An emission, or a replayed copy of one; `set_aside`: a consumer gave it up, and it is on `dead-tasks`."""

    task_id: str
    occurrence: int
    attempt: int
    topic: str
    offset: Offset
    at_ms: InstantMs
    is_copy: bool
    set_aside: bool


class LedgerSeen(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A record of a group's ledger; a tombstone makes the group forget the row."""

    group: str
    task_id: str
    occurrence: int
    offset: Offset
    at_ms: InstantMs
    is_tombstone: bool


class LedgerView(msgspec.Struct, frozen=True, kw_only=True):
    """The ledger of one partition: `committed` has how far each group has read each topic.

    `is_whole`: no row was ever removed but by compaction.
    """

    topic: str
    committed: Mapping[tuple[str, str], Offset]
    is_whole: bool = True


class GenerationAudit:
    """One generation of one partition; feed it in order, then `finish`."""

    def __init__(self, generation: int, view: PartitionView, ledger: LedgerView, tally: Tally) -> None:
        self._generation = generation
        self._view = view
        self._ledger = ledger
        self._tally = tally
        self._firsts: dict[tuple[int, int], DueSeen] = {}
        self._task_id: str | None = None
        self._dues: dict[int, list[DueSeen]] = {}
        self._held = 0
        self._rows: dict[tuple[str, int], LedgerSeen] = {}

    def due(self, seen: DueSeen) -> None:
        """A record of a target topic."""
        if self._held < COPIES_MAX:
            self._held += 1
            self._dues.setdefault(seen.occurrence, []).append(seen)
        if seen.is_copy:
            return
        if self._view.covers(seen.at_ms):
            self._tally.checked[Promise.G5] += 1
        if self._task_id is None:
            self._task_id = seen.task_id
        elif self._task_id != seen.task_id:
            self._violated_due(
                Code.GENERATION_REUSED, seen, f"generation {self._generation} is that of {self._task_id!r} already"
            )
            return
        first = self._firsts.setdefault((seen.occurrence, seen.attempt), seen)
        if first is not seen:
            self._violated_due(
                Code.EMITTED_TWICE,
                seen,
                f"generation {self._generation} was emitted at {first.topic}-{self._view.partition}@{first.offset} "
                "already",
            )

    def row(self, seen: LedgerSeen) -> None:
        """A record of the ledger."""
        name = (seen.group, seen.occurrence)
        if seen.is_tombstone:
            self._rows.pop(name, None)
            return
        if self._view.covers(seen.at_ms):
            self._tally.checked[Promise.G6] += 1
        before = self._rows.get(name)
        self._rows[name] = seen
        if before is not None:
            self._violated_row(
                Code.APPLIED_TWICE,
                seen,
                f"group {seen.group!r} has a row for generation {self._generation} at offset {before.offset} already",
            )
        dues = self._dues.get(seen.occurrence, ())
        if any(due.task_id == seen.task_id for due in dues):
            return
        if self._view.keeps_emission_of(self._generation - 1, ""):
            self._violated_row(
                Code.APPLIED_UNKNOWN, seen, f"group {seen.group!r}: generation {self._generation} was never emitted"
            )
        else:
            self._tally.doubt(Promise.G6, Unprovable.EMISSIONS_GONE)

    def finish(self) -> None:
        """All came: whether each group that has passed it has a row."""
        for occurrence, dues in self._dues.items():
            last: dict[str, DueSeen] = {due.topic: due for due in dues}
            for (group, topic), committed in self._ledger.committed.items():
                due = last.get(topic)
                if due is None or due.offset >= committed:
                    continue
                if not self._view.covers(due.at_ms):
                    continue
                self._tally.checked[Promise.G6] += 1
                if (group, occurrence) in self._rows or due.set_aside:
                    continue
                if self._ledger.is_whole:
                    self._violated_due(
                        Code.APPLY_MISSED, due, f"group {group!r} has read up to {committed}, and has no row for it"
                    )
                else:
                    self._tally.doubt(Promise.G6, Unprovable.LEDGER_GONE)

    def _violated_due(self, code: Code, seen: DueSeen, detail: str) -> None:
        self._violated(code, seen.topic, seen.offset, seen.at_ms, seen.task_id, detail)

    def _violated_row(self, code: Code, seen: LedgerSeen, detail: str) -> None:
        self._violated(code, self._ledger.topic, seen.offset, seen.at_ms, seen.task_id, detail)

    def _violated(self, code: Code, topic: str, offset: int, at_ms: InstantMs, task_id: str, detail: str) -> None:
        if self._view.covers(at_ms):
            self._tally.violated(self._view.finding(code, topic, offset, at_ms, detail, task_id))
