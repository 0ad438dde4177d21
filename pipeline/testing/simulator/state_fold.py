"""What one partition of `task-state` said at any position, kept aside: compaction can't change it any more."""

from pipeline.core.positions import POSITIONS_KEY
from pipeline.core.tasks import Offset, TaskId
from pipeline.testing.memory_log import LogEntry, MemoryLog

__all__ = ["StateFold"]


class StateFold:
    """Every committed record so far, and the rows that they fold to."""

    def __init__(self) -> None:
        self._position = Offset(0)
        self._entries: list[LogEntry] = []
        self._done = 0
        self._rows: dict[TaskId, bytes] = {}

    def read(self, log: MemoryLog) -> None:
        """Take what was committed since; to be called before each compaction."""
        found, self._position = log.read_committed(self._position, len(log.entries) + 1)
        self._entries += found

    def at(self, position: Offset) -> dict[TaskId, bytes] | None:
        """The rows of everything below `position`; None while that can't be read yet."""
        if position > self._position:
            return None
        if self._done and self._entries[self._done - 1].offset >= position:
            self._done, self._rows = 0, {}  # an older table: rare, so done again from the beginning
        while self._done < len(self._entries) and self._entries[self._done].offset < position:
            self._apply(self._entries[self._done])
            self._done += 1
        return self._rows

    def _apply(self, entry: LogEntry) -> None:
        assert entry.key is not None, "a task-state record without a key"
        if entry.key == POSITIONS_KEY:
            return
        if entry.value is None:
            self._rows.pop(TaskId(entry.key.decode()), None)
        else:
            self._rows[TaskId(entry.key.decode())] = entry.value
