"""One partition in the hands of one consumer: acquired, its ledger restored, its tasks handled, its batches committed.

Stages, in prose; anything that goes wrong leads back to the first one, with a growing pause:

- ACQUIRE: prove membership, fence the previous owner, open the local table. Nothing is read yet.
- RESTORE: read the ledger partition from the table's position to the high watermark that was captured after fencing.
- HANDLE: read the due partition from the group's committed offset, handle, commit.
- CLOSED: given to somebody else; nothing is done any more.

A batch is committed after its handlers ran: a crash in between repeats at most that batch, and only effects outside
Kafka notice. Memory and the local table follow the commit, and are dropped whenever its outcome is not certain.
"""

from collections import deque
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Final

import structlog

from pipeline.core.applied import retry_delay_ms
from pipeline.core.tasks import DurationMs, Offset
from pipeline.errors import (
    CorruptStateError,
    DuetasksError,
    FencedError,
    PoisonedBatchError,
    RetryableError,
    UnavailableError,
    UnknownOutcomeError,
)
from pipeline.ports import Clock
from pipeline.service.consumer.batch import ConsumerBatch, record_size
from pipeline.service.consumer.counts import BatchRules, ConsumerCounts
from pipeline.service.consumer.ledger_restore import LedgerRestore
from pipeline.service.consumer.ports import (
    DueRecord,
    DueSubscription,
    LedgerBatch,
    LedgerRecord,
    LedgerTable,
    LedgerTables,
    LedgerTransaction,
    LedgerTransactions,
    TableRows,
)
from pipeline.service.consumer.task_handling import TaskHandling

__all__ = ["PartitionSession", "Stage"]

log = structlog.get_logger(__name__)

_COMMIT_TRIES_MAX: Final = 5
_BACKOFF_MS: Final = DurationMs(250)
_BACKOFF_MAX_MS: Final = DurationMs(15_000)


class Stage(StrEnum):
    """Where a session is; the module's docstring tells the moves."""

    ACQUIRE = "ACQUIRE"
    RESTORE = "RESTORE"
    HANDLE = "HANDLE"
    CLOSED = "CLOSED"


class PartitionSession:
    """The consumer of one partition. Used by one thread; every method returns within the bounds of the ports."""

    def __init__(
        self,
        partition: int,
        *,
        group: str,
        rules: BatchRules,
        handling: TaskHandling,
        subscription: DueSubscription,
        transactions: LedgerTransactions,
        tables: LedgerTables,
        clock: Clock,
        counts: ConsumerCounts,
    ) -> None:
        self.partition = partition
        self.stage = Stage.ACQUIRE
        self._group = group
        self._rules = rules
        self._handling = handling
        self._subscription = subscription
        self._transactions = transactions
        self._tables = tables
        self._clock = clock
        self._counts = counts
        self._losses = 0
        self._wake_at_ms = 0
        self._forget()

    def _forget(self) -> None:
        """Nothing in memory survives an uncertain outcome."""
        self._transaction: LedgerTransaction | None = None
        self._table: LedgerTable | None = None
        self._restore: LedgerRestore | None = None
        self._queue: deque[DueRecord] = deque()
        self._queue_bytes = 0
        self._paused = False
        self._batch = ConsumerBatch(self._rules, self._handling)
        self._commit_tries = 0
        self._has_seen_end = False
        self._position = Offset(0)
        self._committed = Offset(0)
        self._committed_at_ms = self._clock.monotonic_ms()

    # -- what the loop asks ----------------------------------------------------------------------------------------

    @property
    def applied_uncommitted(self) -> int:
        """Applied tasks of the batch in hand."""
        return self._batch.applied

    @property
    def buffered(self) -> int:
        """Records that were fetched and not handled yet."""
        return len(self._queue)

    @property
    def is_idle(self) -> bool:
        """Restored, everything read that there was, and nothing in hand."""
        return self.stage is Stage.HANDLE and self._has_seen_end and not self._queue and not self._batch

    @property
    def has_plenty(self) -> bool:
        """Whether there is so much at hand that fetching can wait; not if what is at hand must wait itself."""
        return self._is_filled(4) and self.wait_ms() == 0

    def wait_ms(self) -> int:
        """How long there is nothing to do unless something is fetched."""
        left_ms = max(0, self._wake_at_ms - self._clock.monotonic_ms())
        if self.stage is Stage.ACQUIRE or (self.stage is Stage.HANDLE and self._batch):
            return left_ms
        if self.stage is Stage.HANDLE and self._queue:
            return max(left_ms, self._handling.retry_in_ms)
        return self._rules.idle_commit_ms

    # -- ACQUIRE and RESTORE -----------------------------------------------------------------------------------------

    def acquire(self) -> None:
        """Take the first step if it is time for it; a failure is logged and tried again later."""
        if self.stage is Stage.ACQUIRE and self._clock.monotonic_ms() >= self._wake_at_ms:
            self._guarded("acquire_failed", self._acquire)

    def _acquire(self) -> None:
        # A thawed zombie must not fence the right owner: the group's word first.
        self._subscription.prove(self.partition)
        self._transaction = self._transactions.open(self.partition)
        self._transaction.acquire()
        self._counts.acquisitions += 1
        # Asked for after fencing: whatever the previous owner committed lies below this end, its marker included.
        bounds = self._subscription.ledger_bounds(self.partition)
        self._table = self._tables.open(self.partition)
        self._restore = LedgerRestore(group=self._group, partition=self.partition, table=self._table, bounds=bounds)
        self.stage = Stage.RESTORE
        if self._restore.is_done:
            self._start_handling()
            return
        self._subscription.read_ledger(self.partition, self._restore.position)
        log.info("ledger_restoring", partition=self.partition, position=self._restore.position, end=bounds.end)

    def on_ledger_record(self, record: LedgerRecord) -> None:
        """One more row, ours or another group's."""
        self._restoring(lambda restore: restore.add(record))

    def on_ledger_end(self, position: Offset) -> None:
        """All of the ledger partition below `position` came."""
        self._restoring(lambda restore: restore.reach(position))

    def _restoring(self, step: Callable[[LedgerRestore], None]) -> None:
        restore = self._restore
        if self.stage is not Stage.RESTORE or restore is None:
            return

        def do() -> None:
            step(restore)
            if restore.is_done:
                self._start_handling()

        self._guarded("ledger_restore_failed", do)

    def _start_handling(self) -> None:
        # After fencing too: an offset that the previous owner's transaction was still committing is settled by now.
        self._position = self._committed = self._subscription.start_position(self.partition)
        self._subscription.read_due(self.partition, self._position)
        self.stage = Stage.HANDLE
        self._committed_at_ms = self._clock.monotonic_ms()
        log.info("partition_acquired", partition=self.partition, position=self._position)

    # -- HANDLE ------------------------------------------------------------------------------------------------------

    def on_due_record(self, record: DueRecord) -> None:
        """Buffer a record; a full buffer stops the fetching."""
        if self.stage is not Stage.HANDLE:
            return
        self._queue.append(record)
        self._queue_bytes += record_size(record)
        self._position = Offset(record.offset + 1)
        # Rare: the loop fetches only when little is buffered. This bounds a partition that waits for a retry.
        if self._is_filled(1) and not self._paused:
            self._subscription.pause(self.partition)
            self._paused = True

    def on_due_end(self, position: Offset) -> None:
        """All below `position` came, markers included."""
        if self.stage is Stage.HANDLE:
            self._has_seen_end = True
            self._position = Offset(max(position, self._position))

    def on_read_failed(self, why: str) -> None:
        """The partition can't be read on: what is in hand is committed if it can be, then all is acquired again."""
        if self.stage in {Stage.RESTORE, Stage.HANDLE}:
            self._lose("read_failed", UnavailableError(why))

    def work(self, may_go_on: Callable[[], bool]) -> None:
        """Handle what is buffered up to one batch, then commit it.

        `may_go_on` is asked before each task; it may end this very session (a revoke), or say that the budget is used
        up. Raises `ConsumerStopError` if a handler does.
        """
        if not self._is_handling() or self._clock.monotonic_ms() < self._wake_at_ms:
            return
        # A batch whose commit failed is tried again as it is; where only a position was to be committed, work goes on.
        if self._commit_tries == 0 or not self._batch:
            self._guarded("ledger_table_failed", lambda: self._handle_batch(may_go_on))
        if self._is_handling() and (self._batch or self._is_idle_commit_due()):
            self.commit()
        if self._paused and not self._is_filled(2) and self._is_handling():
            self._subscription.resume(self.partition)
            self._paused = False

    def _is_filled(self, divisor: int) -> bool:
        """Whether the buffer holds its bound, or that part of it, in records or bytes."""
        records_max, bytes_max = self._rules.buffer_max // divisor, self._rules.buffer_bytes_max // divisor
        return len(self._queue) >= records_max or self._queue_bytes >= bytes_max

    def _is_handling(self) -> bool:
        """Asked again after calls that may have ended the session."""
        return self.stage is Stage.HANDLE

    def _handle_batch(self, may_go_on: Callable[[], bool]) -> None:
        until_ms = self._clock.monotonic_ms() + self._rules.batch_time_max_ms
        while self._batch.has_room and may_go_on():
            if not self._is_handling() or not self._queue or self._handling.retry_in_ms:
                return
            handled = self._handling.handle(self._queue[0], self._is_known)
            if handled is None:
                return  # this partition waits, the others go on
            self._queue_bytes -= record_size(self._queue.popleft())
            self._batch.add(handled)
            if self._clock.monotonic_ms() >= until_ms:
                return

    def _is_known(self, digest: bytes) -> bool:
        assert self._table is not None, "a session that handles has a table"
        return self._batch.holds(digest) or self._table.contains(digest)

    def _is_idle_commit_due(self) -> bool:
        waited_ms = self._clock.monotonic_ms() - self._committed_at_ms
        return not self._queue and self._position > self._committed and waited_ms >= self._rules.idle_commit_ms

    # -- commits -----------------------------------------------------------------------------------------------------

    def commit(self) -> None:
        """Commit what was handled, in as many transactions as it takes; what stays uncertain is forgotten."""
        self._guarded("commit_lost", self._commit_all)

    def _commit_all(self) -> None:
        try:
            self._commit_part()
            while self._batch:
                self._commit_part()
        except RetryableError as error:
            self._commit_tries += 1
            if self._commit_tries >= _COMMIT_TRIES_MAX:
                raise
            pause_ms = retry_delay_ms(self._commit_tries, first_ms=_BACKOFF_MS, max_ms=_BACKOFF_MAX_MS)
            self._wake_at_ms = self._clock.monotonic_ms() + pause_ms
            log.warning("commit_failed", partition=self.partition, tries=self._commit_tries, error=str(error))

    def _commit_part(self) -> None:
        assert self._transaction is not None, "a session that handles has a producer"
        # Over markers and aborted records the position moves with nothing to handle; never over a buffered record.
        batch = self._batch.transaction(None if self._queue else self._position)
        try:
            row_offsets = self._transaction.commit(batch)
        except PoisonedBatchError as error:
            self._batch.shrink(error)
        else:
            self._note(batch, row_offsets)

    def _note(self, batch: LedgerBatch, row_offsets: Sequence[Offset]) -> None:
        """Let memory and the local table follow a transaction that is certainly committed."""
        assert self._table is not None, "a session that handles has a table"
        assert len(row_offsets) == len(batch.rows), f"{len(row_offsets)} offsets for {len(batch.rows)} rows"
        part = self._batch.commit_part()
        digests = [handled.digest for handled in part if handled.digest is not None]
        if digests:
            # A crash before this write leaves the table behind its topic, and the next restore repairs that.
            self._table.write(TableRows(added=digests), Offset(row_offsets[-1] + 1))
        for handled in part:
            self._counts.add(handled.result)
        self._counts.batches += 1
        self._committed = batch.position
        self._committed_at_ms = self._clock.monotonic_ms()
        self._commit_tries = self._losses = 0
        if part:
            log.debug("batch_applied", partition=self.partition, position=batch.position, records=len(part))

    # -- the end -----------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Commit what is handled, once, and let go: the partition is being given away, or the consumer stops."""
        if self._batch and self._is_handling():
            self.commit()
        self.drop()

    def drop(self) -> None:
        """Let go without writing anything: the partition is somebody else's."""
        self._release()
        self.stage = Stage.CLOSED

    def _guarded(self, event: str, step: Callable[[], None]) -> None:
        """Do a step; if it fails, drop everything and acquire again later.

        Errors that time does not cure (a topic is missing or forbidden, a setting is wrong) end the consumer.
        """
        try:
            step()
        except CorruptStateError as error:
            self._lose(event, error)
            self._tables.put_aside(self.partition, str(error))
        except (FencedError, RetryableError, UnavailableError, UnknownOutcomeError) as error:
            self._lose(event, error)

    def _lose(self, event: str, error: DuetasksError) -> None:
        self._losses += 1
        pause_ms = retry_delay_ms(self._losses, first_ms=_BACKOFF_MS, max_ms=_BACKOFF_MAX_MS)
        log.warning(event, partition=self.partition, error=str(error), given_up=len(self._batch), retry_ms=pause_ms)
        self._release()
        self.stage = Stage.ACQUIRE
        self._wake_at_ms = self._clock.monotonic_ms() + pause_ms

    def _release(self) -> None:
        self._counts.given_up += len(self._batch)
        self._subscription.stop(self.partition)
        if self._transaction is not None:
            self._transaction.close()
        if self._table is not None:
            self._table.close()
        self._forget()
