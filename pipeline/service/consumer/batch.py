"""What one partition has handled and not committed yet, cut into transactions that the brokers take."""

from collections.abc import Sequence

import structlog

from pipeline.core.tasks import Offset
from pipeline.errors import PoisonedBatchError
from pipeline.service.consumer.counts import BatchRules
from pipeline.service.consumer.ports import DueRecord, LedgerBatch
from pipeline.service.consumer.task_handling import Handled, Result, TaskHandling

__all__ = ["ConsumerBatch", "record_size"]

log = structlog.get_logger(__name__)


def record_size(record: DueRecord) -> int:
    """What counts against the bounds of bytes."""
    return len(record.value or b"")


class ConsumerBatch:
    """Handled records in order; `part` is the next transaction's share, all of them unless something was refused."""

    def __init__(self, rules: BatchRules, handling: TaskHandling) -> None:
        self._rules = rules
        self._handling = handling
        self._handled: list[Handled] = []
        self._digests: set[bytes] = set()
        self._bytes = 0
        self._part_max = rules.batch_max
        self.applied = 0

    def __len__(self) -> int:
        return len(self._handled)

    @property
    def has_room(self) -> bool:
        """Whether the bounds allow one more."""
        return len(self._handled) < self._rules.batch_max and self._bytes < self._rules.batch_bytes_max

    def holds(self, digest: bytes) -> bool:
        """Whether a row of that name will be written with this batch."""
        return digest in self._digests

    def add(self, handled: Handled) -> None:
        """One more, after those before."""
        self._handled.append(handled)
        self._bytes += record_size(handled.record)
        self.applied += handled.result is Result.APPLIED
        if handled.digest is not None:
            self._digests.add(handled.digest)

    def part(self) -> Sequence[Handled]:
        """The share of the next transaction; empty if there is nothing, or only a position to move."""
        return self._handled[: self._part_max]

    def transaction(self, position: Offset | None) -> LedgerBatch:
        """What the next transaction writes; `position` is where the group goes on if nothing is left after it."""
        part = self.part()
        is_all = len(part) == len(self._handled)
        return LedgerBatch(
            rows=[handled.row for handled in part if handled.row is not None],
            dead=[handled.dead for handled in part if handled.dead is not None],
            outputs=[output for handled in part for output in handled.outputs],
            position=position if position is not None and is_all else part[-1].next_offset,
        )

    def commit_part(self) -> Sequence[Handled]:
        """Let the share go, once it is certainly committed; returns it."""
        part = self.part()
        del self._handled[: len(part)]
        for handled in part:
            self._bytes -= record_size(handled.record)
            self.applied -= handled.result is Result.APPLIED
            if handled.digest is not None:
                self._digests.discard(handled.digest)
        self._part_max = self._rules.batch_max
        return part

    def shrink(self, error: PoisonedBatchError) -> None:
        """Halve the share that holds a record which can't be sent; at one task, set that task aside.

        Raises `error` if nothing is left to set aside: then it is the ledger or `dead-tasks` that takes nothing.
        """
        part = self.part()
        if len(part) > 1:
            self._part_max = len(part) // 2
            return
        if not part:
            raise error
        first = part[0]
        if first.outputs and first.task is not None:
            why = f"what the handler produced can't be sent: {error}"
            self._handled[0] = self._handling.failed(first.record, first.task, why)
            self.applied -= 1
        elif first.dead is not None and not first.is_cut:
            self._handled[0] = self._handling.cut(first)
        else:
            raise error
        log.warning("record_refused", partition=first.record.partition, offset=first.record.offset, error=str(error))
