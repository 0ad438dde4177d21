"""The timer table as it will be once the work in hand is committed, and the rows that were just written."""

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Final

from pipeline.core.tasks import IndexEntry, InstantMs, Status, TaskId, TaskState, index_entry
from pipeline.ports import Codec, TableRow, TimerTable

__all__ = ["Overlay", "RecentRows"]

RECENT_ROWS_MAX: Final = 8_000
RECENT_AHEAD_MS: Final = 300_000
RECENT_PAYLOAD_BYTES_MAX: Final = 1_024


class RecentRows:
    """The rows that a tenure wrote last, decoded: a task that is due soon is fired without reading it back.

    At most eight thousand of a partition, small ones only, due within five minutes. Only what is committed and in the
    table may be put here.
    """

    def __init__(self) -> None:
        self._rows: dict[TaskId, TaskState] = {}

    def get(self, task_id: TaskId) -> TaskState | None:
        """The row as the table has it, or None if it is not remembered."""
        return self._rows.get(task_id)

    def note(self, changed: Mapping[TaskId, TaskState | None], now_ms: InstantMs) -> None:
        """These rows were written; what will not be looked at soon, or only to be forgotten, is not kept."""
        rows, soon_ms = self._rows, now_ms + RECENT_AHEAD_MS
        for task_id, state in changed.items():
            rows.pop(task_id, None)
            if (
                state is not None
                and state.wake_at_ms <= soon_ms
                and state.status is Status.SCHEDULED
                and len(state.payload) <= RECENT_PAYLOAD_BYTES_MAX
                and not state.headers
            ):
                rows[task_id] = state
        for task_id in list(islice(rows, max(0, len(rows) - RECENT_ROWS_MAX))):
            del rows[task_id]


class Overlay:
    """Changes over a table, kept in memory until their transaction has committed; dropping it undoes them all."""

    def __init__(self, table: TimerTable, codec: Codec, recent: RecentRows) -> None:
        self._table = table
        self._codec = codec
        self._recent = recent
        self._before: dict[TaskId, TaskState | None] = {}
        self._changed: dict[TaskId, TaskState | None] = {}

    @property
    def changed(self) -> Mapping[TaskId, TaskState | None]:
        """The rows that differ from the table, None where the row is to go."""
        return self._changed

    def load(self, task_ids: Iterable[TaskId]) -> None:
        """Read those rows from the table that were not read yet, in one go."""
        before, recent = self._before, self._recent.get
        missing = []
        for task_id in task_ids:
            if task_id not in before:
                before[task_id] = known = recent(task_id)
                if known is None:
                    missing.append(task_id)
        decode = self._codec.decode_state
        for task_id, value in zip(missing, self._table.get_many(missing), strict=True):
            if value is not None:
                before[task_id] = decode(value)

    def is_new(self, task_id: TaskId) -> bool:
        """Whether the table has no row of that task; it must have been loaded."""
        return self._before[task_id] is None

    def get(self, task_id: TaskId) -> TaskState | None:
        """The row as it stands with the changes; it must have been loaded."""
        if task_id in self._changed:
            return self._changed[task_id]
        return self._before[task_id]

    def put(self, task_id: TaskId, state: TaskState | None) -> None:
        """Change a loaded row; None removes it."""
        assert task_id in self._before, f"{task_id!r} was changed without having been loaded"
        self._changed[task_id] = state

    def rows(self) -> list[TableRow]:
        """The changes as the table takes them: each drops the index entry that it makes wrong, adds the right one."""
        encode = self._codec.encode_state
        rows = []
        for task_id, after in self._changed.items():
            before = self._before[task_id]
            drop: IndexEntry | None = None if before is None else index_entry(before)
            add: IndexEntry | None = None if after is None else index_entry(after)
            if drop is not None and drop == add:
                drop = add = None
            rows.append(TableRow(task_id, None if after is None else encode(after), drop, add))
        return rows
