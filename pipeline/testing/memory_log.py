"""One partition of a topic in memory, with what makes Kafka's hard to read: markers, holes, undecided transactions."""

from bisect import bisect_left
from collections.abc import Mapping
from enum import StrEnum
from typing import Final

import msgspec

from pipeline.core.events import DAY_MS
from pipeline.core.tasks import NO_HEADERS, InstantMs, Offset

__all__ = ["EntryKind", "LogEntry", "MemoryLog", "RunState", "TransactionRun"]

_START_MS: Final = InstantMs(0)


class RunState(StrEnum):
    """How far one transaction is; between COMMITTING and COMMITTED it is decided, but readers don't know yet."""

    OPEN = "OPEN"
    COMMITTING = "COMMITTING"
    ABORTING = "ABORTING"
    COMMITTED = "COMMITTED"
    ABORTED = "ABORTED"


class TransactionRun:
    """One transaction, from its first record to its last marker; `by` names whose it is."""

    def __init__(self, transactional_id: str, started_at_ms: InstantMs, by: str = "") -> None:
        self.transactional_id = transactional_id
        self.by = by
        self.started_at_ms = started_at_ms
        self.state = RunState.OPEN
        self.logs: list[MemoryLog] = []

    @property
    def is_committed(self) -> bool:
        """Whether its records count."""
        return self.state in {RunState.COMMITTING, RunState.COMMITTED}


class EntryKind(StrEnum):
    """What takes an offset: records, and the control markers that end a transaction."""

    RECORD = "RECORD"
    COMMIT = "COMMIT"
    ABORT = "ABORT"


class LogEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One offset of a log; of a marker only kind and place mean anything."""

    offset: Offset
    timestamp: InstantMs
    kind: EntryKind = EntryKind.RECORD
    key: bytes | None = None
    value: bytes | None = None
    headers: Mapping[str, bytes] = NO_HEADERS
    transaction: TransactionRun | None = None


class MemoryLog:
    """Entries by offset. What is appended is acknowledged at once, unless replication is held up (`hold`)."""

    def __init__(self) -> None:
        self.entries: list[LogEntry] = []
        self.start_offset = Offset(0)
        self.log_end_offset = Offset(0)
        self._held_at: Offset | None = None
        self._undecided: dict[TransactionRun, Offset] = {}
        self._deleted_until_ms: dict[Offset, InstantMs] = {}

    @property
    def end_offset(self) -> Offset:
        """The high watermark: everything below is acknowledged, and survives a change of the leader."""
        return self.log_end_offset if self._held_at is None else self._held_at

    @property
    def last_stable_offset(self) -> Offset:
        """The first offset of an undecided transaction, or the end: `read_committed` readers come no further."""
        return min(self.end_offset, *self._undecided.values()) if self._undecided else self.end_offset

    def hold(self) -> None:
        """The in-sync replicas stop following: what is appended from now on is neither acknowledged nor read."""
        if self._held_at is None:
            self._held_at = self.log_end_offset

    def release(self) -> None:
        """They follow again: all that was appended is acknowledged now."""
        self._held_at = None

    def change_leader(self) -> int:
        """A replica leads that never got what was not acknowledged: that is gone, markers are written again.

        Returns how many records are gone.
        """
        lost = self.entries[bisect_left(self.entries, self.end_offset, key=_offset) :]
        self.entries = self.entries[: len(self.entries) - len(lost)]
        self.log_end_offset = self.end_offset
        self._held_at = None
        for transaction, first in list(self._undecided.items()):
            if first >= self.log_end_offset:
                del self._undecided[transaction]
                transaction.logs.remove(self)
        for entry in lost:
            if entry.kind is not EntryKind.RECORD:
                self._add(msgspec.structs.replace(entry, offset=self.log_end_offset))
        return sum(1 for entry in lost if entry.kind is EntryKind.RECORD)

    def entry(self, offset: Offset) -> LogEntry:
        """What stands at an offset that is neither compacted nor deleted."""
        found = self.entries[bisect_left(self.entries, offset, key=_offset)]
        assert found.offset == offset, f"there is nothing at {offset}"
        return found

    def holds(self, entry: LogEntry) -> bool:
        """Whether an entry that was appended once is still there (and not lost with its leader)."""
        at = bisect_left(self.entries, entry.offset, key=_offset)
        return at < len(self.entries) and self.entries[at] is entry

    def append(
        self,
        key: bytes | None,
        value: bytes | None,
        *,
        at_ms: InstantMs,
        headers: Mapping[str, bytes] = NO_HEADERS,
        transaction: TransactionRun | None = None,
    ) -> Offset:
        """Add a record; returns its offset."""
        if transaction is not None and transaction not in self._undecided:
            assert transaction.state is RunState.OPEN, f"a record for a transaction that is {transaction.state}"
            self._undecided[transaction] = self.log_end_offset
            transaction.logs.append(self)
        entry = LogEntry(
            offset=self.log_end_offset, timestamp=at_ms, key=key, value=value, headers=headers, transaction=transaction
        )
        return self._add(entry)

    def append_marker(self, transaction: TransactionRun, *, at_ms: InstantMs) -> Offset:
        """Add the control marker that ends `transaction` here; it takes an offset like a record."""
        assert transaction.state is not RunState.OPEN, "a marker for a transaction that is not decided"
        kind = EntryKind.COMMIT if transaction.is_committed else EntryKind.ABORT
        offset = self._add(LogEntry(offset=self.log_end_offset, timestamp=at_ms, kind=kind, transaction=transaction))
        del self._undecided[transaction]
        return offset

    def read_committed(self, start: Offset, limit: int) -> tuple[list[LogEntry], Offset]:
        """At most `limit` committed records from `start` on, and the position after them, also over markers."""
        stable = self.last_stable_offset
        found: list[LogEntry] = []
        for entry in self.entries[bisect_left(self.entries, start, key=_offset) :]:
            if entry.offset >= stable:
                break
            if entry.kind is EntryKind.RECORD and (entry.transaction is None or entry.transaction.is_committed):
                found.append(entry)
                if len(found) == limit:
                    return found, Offset(entry.offset + 1)
        return found, max(start, stable)

    def committed(self) -> list[LogEntry]:
        """All records that a `read_committed` reader sees now."""
        return self.read_committed(self.start_offset, len(self.entries) + 1)[0]

    def last_committed(self, key: bytes) -> LogEntry | None:
        """The last record of a key whose transaction was committed, also behind one that is open."""
        found = (entry for entry in reversed(self.entries) if entry.key == key and _counts(entry))
        return next(found, None)

    def compact(
        self, *, before: Offset | None = None, now_ms: InstantMs = _START_MS, delete_retention_ms: int = DAY_MS
    ) -> None:
        """Keep the last committed record of each key below `before`, as the log cleaner does; markers go too.

        A tombstone stays for `delete_retention_ms` after the first pass that met it (KIP-534): who has read what it
        deletes had read it before that pass.
        """
        stable = self.last_stable_offset
        limit = stable if before is None else min(before, stable)
        last: dict[bytes, Offset] = {}
        for entry in self.entries:
            if entry.offset < limit and _counts(entry) and entry.key is not None:
                last[entry.key] = entry.offset
        newest = set(last.values())
        until_ms = InstantMs(now_ms + delete_retention_ms)
        self.entries = [
            entry
            for entry in self.entries
            if entry.offset >= limit
            or (
                entry.offset in newest
                and (entry.value is not None or now_ms < self._deleted_until_ms.setdefault(entry.offset, until_ms))
            )
        ]

    def delete_before(self, offset: Offset) -> None:
        """Retention: everything below `offset` is gone, and the log starts there."""
        self.entries = [entry for entry in self.entries if entry.offset >= offset]
        self.start_offset = max(self.start_offset, offset)

    def _add(self, entry: LogEntry) -> Offset:
        self.entries.append(entry)
        self.log_end_offset = Offset(entry.offset + 1)
        return entry.offset


def _offset(entry: LogEntry) -> Offset:
    return entry.offset


def _counts(entry: LogEntry) -> bool:
    return entry.kind is EntryKind.RECORD and (entry.transaction is None or entry.transaction.is_committed)
