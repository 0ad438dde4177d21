"""The owner of one partition: acquires it, then turns events into timers and due timers into emissions, for ever.

A cycle is one transaction: apply a bounded batch of inputs in an overlay, fire what is due behind the fence, commit
state, emissions and positions together, then write the local table. A crash before the commit: nothing happened.
A crash between commit and table write: the table is behind its changelog, and restore repairs that.
"""

import asyncio
from typing import Final

import structlog

from pipeline.core.tasks import Offset, TaskId, TaskState, Verdict
from pipeline.errors import (
    CorruptStateError,
    FencedError,
    NotFoundError,
    RefusedError,
    RetryableError,
    UnavailableError,
    UnknownOutcomeError,
)
from pipeline.ports import EventSource
from pipeline.service.owner.acquisition import Acquisition, Outside, Owned
from pipeline.service.owner.clock_watch import ClockWatch
from pipeline.service.owner.settings import OwnerSettings
from pipeline.service.owner.status import OwnerStatus, PassingVerdicts, Phase
from pipeline.service.owner.tenure import FenceTarget, Tenure
from pipeline.service.owner.work import Admit

__all__ = ["PartitionOwner"]

log = structlog.get_logger(__name__)

BACKOFF_MS_FIRST: Final = 200
BACKOFF_MS_MAX: Final = 10_000
REFUSED_RETRY_MS: Final = 5_000


class PartitionOwner:
    """Runs one partition until it is stopped; everything it holds in memory can be lost at any moment.

    `fence_target` asks for the offset that the fence needs (see `fence.py`); `admit` decodes and checks a record.
    """

    def __init__(
        self,
        settings: OwnerSettings,
        outside: Outside,
        source: EventSource,
        *,
        admit: Admit,
        fence_target: FenceTarget,
    ) -> None:
        self._settings = settings
        self._outside = outside
        self._source = source
        self._admit = admit
        self._fence_target = fence_target
        self._stop = asyncio.Event()
        self._owned: Owned | None = None
        self._passing = PassingVerdicts()
        self._clock_watch = ClockWatch(outside.clock, settings.clock_jump_max_ms)
        self.status = OwnerStatus(partition=settings.partition)
        self._log = log.bind(partition=settings.partition)

    # -- what others may ask -----------------------------------------------------------------------------------

    def get(self, task_id: TaskId) -> TaskState | None:
        """The committed state of a task; raises `UnavailableError` while the partition is not active."""
        value = self._active().table.get_many([task_id])[0]
        return None if value is None else self._outside.codec.decode_state(value)

    def scan(self, after: TaskId | None, limit: int) -> list[TaskState]:
        """Committed states in id order after `after`; raises `UnavailableError` while not active."""
        decode = self._outside.codec.decode_state
        return [decode(value) for _, value in self._active().table.scan(after, limit)]

    def passing_verdict(self, offset: Offset) -> tuple[Verdict, str] | None:
        """The verdict on an event that left no row, while it is remembered."""
        return self._passing.get(offset)

    def _active(self) -> Owned:
        if self._owned is None or self.status.phase is not Phase.ACTIVE:
            raise UnavailableError(f"partition {self._settings.partition} is {self.status.phase.lower()}: try again")
        return self._owned

    # -- life --------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End after the transaction in hand; `run` returns."""
        self._stop.set()
        self._source.wake()

    async def run(self) -> None:
        """Own the partition until `stop`; whatever happens to it, acquire again while the group says it is ours."""
        backoff_ms = BACKOFF_MS_FIRST
        while not self._stop.is_set():
            before = self.status.transactions
            pause_ms = await self._own_until_lost() or backoff_ms
            backoff_ms = BACKOFF_MS_FIRST if self.status.transactions > before else min(2 * backoff_ms, BACKOFF_MS_MAX)
            try:
                await asyncio.wait_for(self._stop.wait(), pause_ms / 1000)
            except TimeoutError:
                continue
        self.status.phase = Phase.STOPPED

    async def _own_until_lost(self) -> int:
        """One tenure; returns how long to wait before the next (0: the usual backoff)."""
        try:
            await self._own()
        except RefusedError as error:
            if self.status.message != str(error):
                self._log.error("partition_refused", reason=str(error))
            self.status.phase, self.status.message = Phase.REFUSED, str(error)
            return REFUSED_RETRY_MS
        except CorruptStateError as error:
            self._put_aside(str(error))
        except (FencedError, UnknownOutcomeError, UnavailableError, RetryableError) as error:
            self._log.warning("partition_lost", reason=str(error), error=type(error).__name__)
        except Exception:  # noqa: BLE001  # what no rule foresees must not orphan the partition: all in memory is dropped
            self._log.exception("owner_raised")
        return 0

    def _put_aside(self, reason: str) -> None:
        try:
            place = self._outside.tables.put_aside(self._settings.partition, reason)
        except (NotFoundError, UnavailableError) as error:
            # The next attempt finds the same table and tries again: a disk that refuses must not end the owner.
            self._log.error("table_not_put_aside", reason=reason, error=str(error))
        else:
            self._log.error("table_put_aside", reason=reason, place=place)

    async def _own(self) -> None:
        if self.status.phase is not Phase.REFUSED:
            self.status.phase = Phase.ACQUIRING
        self.status.acquisitions += 1
        owned = await Acquisition(self._settings, self._outside, self._restoring).run()
        try:
            self._owned = owned
            self._passing.clear()
            tenure = Tenure(
                self._settings,
                self._outside,
                self._source,
                owned,
                admit=self._admit,
                fence_target=self._fence_target,
                status=self.status,
                passing=self._passing,
                clock_watch=self._clock_watch,
                stop=self._stop,
            )
            await tenure.serve()
        finally:
            self._owned = None
            self._source.pause()
            if self.status.phase is Phase.ACTIVE:
                self.status.phase = Phase.ACQUIRING
            owned.table.close()
            await owned.transaction.close()

    def _restoring(self, position: int, end: int) -> None:
        self.status.restored, self.status.restore_end = position, end
