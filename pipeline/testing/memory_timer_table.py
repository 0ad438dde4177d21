"""The timer table in memory: the twin that simulations and the contract suite run on.

Its disk is a value that outlives the process: it can be copied, put back, lost or spoiled while nobody has it open.
"""

import asyncio
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

from pipeline.core.tasks import IndexEntry, InstantMs, TaskId
from pipeline.errors import CorruptStateError, NotFoundError, UnavailableError, UsageError
from pipeline.ports import TableRow
from pipeline.testing.simulated_process import SimulatedProcess

__all__ = ["DiskTable", "MemoryDisk", "MemoryTableStore", "MemoryTimerTable"]

_LOOK_AGAIN_S: Final = 0.05
_UNSYNCED_MAX: Final = 4


class DiskTable:
    """What stands on the disk for one partition. `spoiled` is why it can't be opened; `held_by` has it open."""

    def __init__(self) -> None:
        self.rows: dict[TaskId, bytes] = {}
        self.index: list[IndexEntry] = []
        self.meta: bytes | None = None
        self.spoiled: str | None = None
        self.held_by: SimulatedProcess | None = None
        self.before: deque[DiskTable] = deque(maxlen=_UNSYNCED_MAX)
        """What it was before its last writes, if the power can fail."""

    def copy(self) -> "DiskTable":
        """The same content, held by nobody."""
        twin = DiskTable()
        twin.rows, twin.index = dict(self.rows), list(self.index)
        twin.meta, twin.spoiled = self.meta, self.spoiled
        return twin


class MemoryDisk:
    """The disk of one machine: tables by partition, and what was put aside by the name that it got.

    A killed process loses none of its writes; with `power_can_fail`, a machine may lose the last few.
    """

    def __init__(self, *, power_can_fail: bool = False) -> None:
        self.tables: dict[int, DiskTable] = {}
        self.aside: dict[str, DiskTable] = {}
        self.refuses_renames = False
        self.is_full = False
        self.power_can_fail = power_can_fail

    def copy(self, partition: int) -> DiskTable:
        """A backup of the table as it is now, also while it is open."""
        return self.tables[partition].copy()

    def put_back(self, partition: int, backup: DiskTable) -> None:
        """Replace the table by an older copy, while no process has it open."""
        self._closed(partition)
        self.tables[partition] = backup.copy()

    def lose(self, partition: int) -> None:
        """The table is gone."""
        self._closed(partition)
        self.tables.pop(partition, None)

    def lose_power(self, partition: int, writes: int) -> None:
        """The machine went down: the last `writes` of the table were not on the disk yet, as far as it still can."""
        self._closed(partition)
        before = self.tables[partition].before if partition in self.tables else ()
        if before and writes:
            self.tables[partition] = list(before)[-min(writes, len(before))]

    def spoil(self, partition: int, why: str = "block checksum mismatch") -> None:
        """The table can't be read any more, nor opened again."""
        self.tables[partition].spoiled = why

    def _closed(self, partition: int) -> None:
        table = self.tables.get(partition)
        assert table is None or table.held_by is None or not table.held_by.alive, "the table is open"


class MemoryTimerTable:
    """The timer table port over a `DiskTable`."""

    def __init__(self, disk: MemoryDisk, table: DiskTable, partition: int, process: SimulatedProcess) -> None:
        self._disk = disk
        self._table: DiskTable | None = table
        self._partition = partition
        self._process = process

    def meta(self) -> bytes | None:
        """The meta bytes of the last write, or None for a new table."""
        return self._open().meta

    def get_many(self, task_ids: Sequence[TaskId]) -> list[bytes | None]:
        """Rows in the order asked for; None where there is none."""
        rows = self._open().rows
        return [rows.get(task_id) for task_id in task_ids]

    def due(self, until_ms: InstantMs, limit: int) -> list[IndexEntry]:
        """The first `limit` index entries with `at_ms <= until_ms`, in order."""
        index = self._open().index
        return index[: min(max(limit, 0), bisect_right(index, until_ms, key=_at_ms))]

    def next_at_ms(self) -> InstantMs | None:
        """The instant of the first index entry, or None if there is no timer."""
        index = self._open().index
        return index[0].at_ms if index else None

    def scan(self, after: TaskId | None, limit: int) -> list[tuple[TaskId, bytes]]:
        """Rows in id order, after `after` (None: from the first), at most `limit`."""
        rows = self._open().rows
        ids = sorted(task_id for task_id in rows if after is None or task_id > after)
        return [(task_id, rows[task_id]) for task_id in ids[: max(limit, 0)]]

    def write(self, rows: Sequence[TableRow], meta: bytes) -> None:
        """Apply all of it, or nothing if the process dies before; raises `UnavailableError` if the disk is full."""
        table = self._open()
        self._process.step("table.write")
        if self._disk.is_full:
            raise UnavailableError(f"The simulated disk has no room for the timer table of {self._partition}.")
        if self._disk.power_can_fail:
            table.before.append(table.copy())
        for row in [*rows]:  # taken whole first: what fails to come leaves the table untouched
            if row.value is None:
                table.rows.pop(row.task_id, None)
            else:
                table.rows[row.task_id] = row.value
            if row.drop is not None:
                _discard(table.index, row.drop)
            if row.add is not None:
                _discard(table.index, row.add)
                insort(table.index, row.add)
        table.meta = meta

    def close(self) -> None:
        """Release the lock; further calls raise. Closing twice does no harm."""
        if self._table is not None and self._table.held_by is self._process:
            self._table.held_by = None
        self._table = None

    def _open(self) -> DiskTable:
        self._process.check()
        if self._table is None:
            raise UsageError(f"The timer table of partition {self._partition} is closed: open it again.")
        if self._table.spoiled is not None:
            raise CorruptStateError(f"Can't read the timer table of partition {self._partition}: {self._table.spoiled}")
        return self._table


class MemoryTableStore:
    """The table store port of one process on a `MemoryDisk`. A killed process holds no lock any more."""

    def __init__(self, disk: MemoryDisk, process: SimulatedProcess, *, lock_wait_ms: int = 1_000) -> None:
        self._disk = disk
        self._process = process
        self._lock_wait_ms = lock_wait_ms

    async def open(self, partition: int) -> MemoryTimerTable:
        """The table as it was left; raises `UnavailableError` while held, `CorruptStateError` if spoiled."""
        await self._process.reach("table.open")
        for _ in self._attempts():
            table = self._disk.tables.setdefault(partition, DiskTable())
            if table.held_by is None or not table.held_by.alive:
                break
            await asyncio.sleep(_LOOK_AGAIN_S)
        else:
            assert table.held_by is not None, "the loop ends only while somebody holds it"
            raise UnavailableError(
                f"The timer table of partition {partition} is held by {table.held_by.name}: stop it."
            )
        if table.spoiled is not None:
            raise CorruptStateError(f"Can't open the timer table of partition {partition}: {table.spoiled}")
        table.held_by = self._process
        return MemoryTimerTable(self._disk, table, partition, self._process)

    def put_aside(self, partition: int, reason: str) -> str:
        """Move the (closed) table out of the way; returns its new name. Raises `NotFoundError`, `UnavailableError`."""
        self._process.step("table.put_aside")
        if partition not in self._disk.tables:
            raise NotFoundError(f"There is no timer table of partition {partition} to put aside ({reason}).")
        if self._disk.refuses_renames:
            raise UnavailableError("The simulated disk refuses to rename.")
        name = f"{partition}.aside-{len(self._disk.aside) + 1}"
        self._disk.aside[name] = self._disk.tables.pop(partition)
        return name

    def _attempts(self) -> Iterator[None]:
        until_s = asyncio.get_running_loop().time() + self._lock_wait_ms / 1_000
        yield
        while asyncio.get_running_loop().time() < until_s:
            yield


def _at_ms(entry: IndexEntry) -> InstantMs:
    return entry.at_ms


def _discard(index: list[IndexEntry], entry: IndexEntry) -> None:
    at = bisect_left(index, entry)
    if at < len(index) and index[at] == entry:
        del index[at]
