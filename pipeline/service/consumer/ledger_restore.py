"""Brings a local ledger table up to the end of its topic that was captured after fencing, by position.

By position, because a log may end in a transaction marker or in aborted records, which nobody is handed; and up to the
high watermark, because the last stable offset would let somebody's open transaction end the restore too early.
"""

from typing import Final

import structlog

from pipeline.core.applied import belongs_to, ledger_digest
from pipeline.core.tasks import Offset
from pipeline.errors import CorruptStateError
from pipeline.service.consumer.ports import LedgerBounds, LedgerRecord, LedgerTable, TableRows

__all__ = ["LedgerRestore"]

log = structlog.get_logger(__name__)

_CHUNK: Final = 1_000


class LedgerRestore:
    """One restore; `position` says where to read on, `is_done` when it is over. The table's errors pass through."""

    def __init__(self, *, group: str, partition: int, table: LedgerTable, bounds: LedgerBounds) -> None:
        """Prepare the table; raises `CorruptStateError` if it is ahead of the topic."""
        if table.position() > bounds.end:
            raise CorruptStateError(
                f"The local ledger of partition {partition} is at {table.position()}, beyond the topic's end "
                f"{bounds.end}: the topic has lost records, or is another one."
            )
        self._group = group
        self._partition = partition
        self._table = table
        self._end = bounds.end
        self._chunk: list[LedgerRecord] = []
        self.position = Offset(max(table.position(), bounds.start))
        if self.is_done:
            self._write(self.position)  # renews the table's stamp

    @property
    def is_done(self) -> bool:
        """Whether everything below the captured end is in the table."""
        return self.position >= self._end

    def add(self, record: LedgerRecord) -> None:
        """One more record, of whatever group; written in chunks."""
        self._chunk.append(record)
        position = Offset(record.offset + 1)
        if position >= self._end or len(self._chunk) >= _CHUNK:
            self._write(position)

    def reach(self, position: Offset) -> None:
        """All below `position` came; less than the captured end means that somebody's transaction is still open."""
        self._write(position)
        if not self.is_done:
            log.warning(
                "ledger_restore_waits",
                partition=self._partition,
                position=position,
                end=self._end,
                why="a transaction of another group or client is open on the ledger partition",
            )

    def _write(self, position: Offset) -> None:
        added: set[bytes] = set()
        removed: set[bytes] = set()
        for record in self._chunk:
            if record.key is None or not belongs_to(self._group, record.key):
                continue
            digest = ledger_digest(record.key)
            if record.has_value:
                added.add(digest)
                removed.discard(digest)
            else:
                added.discard(digest)
                removed.add(digest)
        self._chunk.clear()
        self._table.write(TableRows(added=sorted(added), removed=sorted(removed)), position)
        self.position = position
