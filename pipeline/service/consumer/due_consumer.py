"""The loop of a consumer: one thread that serves the group, fetches, and lets each partition's session work in turn."""

import threading
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import structlog

from pipeline.core.tasks import Offset
from pipeline.errors import UnavailableError
from pipeline.ports import Clock
from pipeline.service.consumer.counts import BatchRules, ConsumerCounts
from pipeline.service.consumer.partition_session import PartitionSession
from pipeline.service.consumer.ports import (
    ConsumerCodec,
    DueEnd,
    DueRecord,
    DueSubscription,
    Fetched,
    LedgerEnd,
    LedgerRecord,
    LedgerTables,
    LedgerTransactions,
    ReadFailed,
)
from pipeline.service.consumer.task_handling import ConsumerStopError, Handler, HandlingRules, TaskHandling

__all__ = ["FOREVER", "ConsumerPorts", "DueConsumer", "StopRules"]

log = structlog.get_logger(__name__)

_WAIT_MAX_MS: Final = 100
_SERVE_EVERY_MS: Final = 50


class ConsumerPorts(msgspec.Struct, frozen=True, kw_only=True):
    """The outside of a consumer."""

    subscription: DueSubscription
    transactions: LedgerTransactions
    tables: LedgerTables
    codec: ConsumerCodec
    clock: Clock


class StopRules(msgspec.Struct, frozen=True, kw_only=True):
    """When a consumer stops by itself: after so many applied tasks, or when it had nothing in hand for so long.

    `join_max_ms` bounds the wait for the first partitions; a member of a group larger than its topic never gets any,
    and counts as idle.
    """

    applied_max: int | None = None
    idle_exit_ms: int | None = None
    join_max_ms: int = 120_000


FOREVER: Final = StopRules()


class DueConsumer:
    """Applies due tasks once per (task_id, generation, occurrence), as far as the handler's effects allow it.

    Use one object once, from one thread; only `stop` may be called from anywhere, signal handlers included.
    """

    def __init__(self, ports: ConsumerPorts, *, handler: Handler, handling: HandlingRules, batches: BatchRules) -> None:
        self.counts = ConsumerCounts()
        self._ports = ports
        self._handler = handler
        self._handling = handling
        self._batches = batches
        self._sessions: dict[int, PartitionSession] = {}
        self._stop = threading.Event()
        self._applied_max: int | None = None
        self._served_at_ms = 0
        self._opened_at_ms = self._busy_at_ms = ports.clock.monotonic_ms()
        self._done = 0
        self._has_joined = False

    @property
    def buffered(self) -> int:
        """Records that were fetched and not handled yet, of the partition that has most of them."""
        return max((session.buffered for session in self._all()), default=0)

    def stop(self) -> None:
        """Finish the task in hand, commit, leave the group; `run` returns then. Safe from threads and signals."""
        self._stop.set()

    def run(self, stop_rules: StopRules = FOREVER) -> ConsumerCounts:
        """Handle due tasks until `stop` is called or a stop rule applies; returns what was done.

        Raises what the subscription raises when it can't start (`NotFoundError`, `TopicMismatchError`,
        `UnavailableError`); trouble on the way is logged and tried again. Whatever ends it, finished work is committed.
        """
        try:
            self.open(stop_rules)
            while not self._is_over(stop_rules):
                self.step()
        except ConsumerStopError as reason:
            log.info("consumer_stopped_by_handler", why=str(reason))
        finally:
            self.close()
        return self.counts

    def open(self, stop_rules: StopRules = FOREVER) -> None:
        """Join the group."""
        self._applied_max = stop_rules.applied_max
        self._opened_at_ms = self._busy_at_ms = self._ports.clock.monotonic_ms()
        self._ports.subscription.open(self)

    def step(self) -> None:
        """One round: news of the group, what was fetched, one batch for each partition."""
        self._serve()
        for session in self._all():
            session.acquire()
        if not any(session.has_plenty for session in self._all()):
            for fetched in self._ports.subscription.take(self._wait_ms()):
                self._route(fetched)
        for session in self._all():
            session.work(self._guard(session))
        self._note_progress()

    def close(self) -> None:
        """Commit what is finished and leave the group."""
        for session in self._all():
            session.finish()
        self._sessions.clear()
        self._ports.subscription.close()
        log.info("consumer_closed", **msgspec.structs.asdict(self.counts))

    # -- the group's word --------------------------------------------------------------------------------------------

    def on_assigned(self, partitions: Sequence[int]) -> None:
        """Begin a session for each."""
        self._has_joined = True
        log.info("partitions_assigned", partitions=list(partitions))
        for partition in partitions:
            stale = self._sessions.pop(partition, None)
            if stale is not None:
                stale.drop()
            self._sessions[partition] = self._session(partition)

    def on_revoked(self, partitions: Sequence[int]) -> None:
        """Commit what is finished of each, in one try, and let go."""
        log.info("partitions_revoked", partitions=list(partitions))
        for partition in partitions:
            session = self._sessions.pop(partition, None)
            if session is not None:
                session.finish()

    def on_lost(self, partitions: Sequence[int]) -> None:
        """They are somebody else's already: write nothing."""
        log.warning("partitions_lost", partitions=list(partitions))
        for partition in partitions:
            session = self._sessions.pop(partition, None)
            if session is not None:
                session.drop()

    def _session(self, partition: int) -> PartitionSession:
        ports = self._ports
        return PartitionSession(
            partition,
            group=self._handling.group,
            rules=self._batches,
            handling=TaskHandling(handler=self._handler, rules=self._handling, codec=ports.codec, clock=ports.clock),
            subscription=ports.subscription,
            transactions=ports.transactions,
            tables=ports.tables,
            clock=ports.clock,
            counts=self.counts,
        )

    # -- one round ---------------------------------------------------------------------------------------------------

    def _all(self) -> list[PartitionSession]:
        return list(self._sessions.values())

    def _serve(self) -> None:
        self._served_at_ms = self._ports.clock.monotonic_ms()
        self._ports.subscription.serve()

    def _wait_ms(self) -> int:
        if self._stop.is_set():
            return 0
        return min([_WAIT_MAX_MS, *(session.wait_ms() for session in self._all())])

    def _route(self, fetched: Fetched) -> None:
        session = self._sessions.get(fetched.partition)
        if session is None:
            return
        match fetched:
            case DueRecord():
                session.on_due_record(fetched)
            case DueEnd():
                session.on_due_end(Offset(fetched.position))
            case LedgerRecord():
                session.on_ledger_record(fetched)
            case LedgerEnd():
                session.on_ledger_end(Offset(fetched.position))
            case ReadFailed():
                session.on_read_failed(fetched.why)

    def _guard(self, session: PartitionSession) -> Callable[[], bool]:
        """What a session asks before each task: the group is served on the way, however long its batch takes."""

        def may_go_on() -> bool:
            if self._ports.clock.monotonic_ms() - self._served_at_ms >= _SERVE_EVERY_MS:
                self._serve()
            return not self._stop.is_set() and self._has_budget() and self._sessions.get(session.partition) is session

        return may_go_on

    def _has_budget(self) -> bool:
        if self._applied_max is None:
            return True
        uncommitted = sum(session.applied_uncommitted for session in self._all())
        return self.counts.applied + uncommitted < self._applied_max

    def _note_progress(self) -> None:
        counts = self.counts
        done = counts.applied + counts.duplicates + counts.failed + counts.malformed
        if done != self._done or not self._has_joined or not all(session.is_idle for session in self._all()):
            self._busy_at_ms = self._ports.clock.monotonic_ms()
        self._done = done

    def _is_over(self, rules: StopRules) -> bool:
        if self._stop.is_set():
            return True
        if rules.applied_max is not None and self.counts.applied >= rules.applied_max:
            return True
        now_ms = self._ports.clock.monotonic_ms()
        if not self._has_joined and now_ms - self._opened_at_ms >= rules.join_max_ms:
            raise UnavailableError(
                f"Group {self._handling.group} gave this consumer no answer for {rules.join_max_ms // 1000} s: "
                "check that the brokers can be reached, then start again."
            )
        return rules.idle_exit_ms is not None and now_ms - self._busy_at_ms >= rules.idle_exit_ms
