"""Reads one partition of all topics into facts, in an order that makes a snapshot of a running system.

An owner writes everything of one transaction to several topics, the positions record of `task-state` last, and Kafka
commits it as a whole; but each partition gets its marker in its own time, and nothing can be read at one moment. So:

1. **First the stable ends of `due-tasks` and `dead-tasks`.** What is below is decided and marked: *settled*.
2. **Then the end (high watermark) of `task-state`.** A settled emission's transaction had written all its rows before
   it was decided, so they lie below this end. Reading `read_committed` up to it, by position, waits for every
   transaction that is open there, and leaves out aborted ones.
3. **The last positions record below it is the moment that rows are judged at.** It is the last record of its
   transaction, so all rows before it belong to whole transactions, and no row after it is looked at.
4. **Only then the ends of `due-tasks` and `dead-tasks` to read to.** Every transaction of that moment was decided, so
   all of its emissions and dead tasks are below. Those between 1 and 4 may be of a later transaction: they are judged
   on their own evidence, and the fold allows for both.
5. **Last the stable end of `task-events`.** Whatever any of those emissions had applied was committed before it fired,
   so it is below; an open upstream transaction is not waited for, nobody has applied it.
6. **Then what came to `task-state` since**: compaction may have removed the row of a task that has a newer one, so a
   row of such a task that does not fit proves nothing.
7. **Last, where each topic starts now**, and whether it is still the same topic: what expired while it was read is a
   hole like any other, and of topics created anew nothing can be said.

The ledger is read before all that (`ledger.py`): what it speaks of had been emitted by then.
"""

from pipeline.core.audit import Code, Tally
from pipeline.core.audit_view import PartitionView
from pipeline.core.tasks import Offset
from pipeline.errors import CorruptStateError
from pipeline.ports import ClusterIdentity
from pipeline.service.audit.events import EventReading
from pipeline.service.audit.log import AuditLog, Progress
from pipeline.service.audit.ports import AuditOutside, AuditRequest, FactStore
from pipeline.service.audit.sent import SentReading
from pipeline.service.audit.state import StateReading

__all__ = ["PartitionReading"]


class PartitionReading:
    """Reads one partition into `store`; `log` has counted what was read, and notes what is out of reach."""

    def __init__(
        self,
        partition: int,
        request: AuditRequest,
        outside: AuditOutside,
        store: FactStore,
        identity: ClusterIdentity,
        tally: Tally,
        *,
        on_progress: Progress,
    ) -> None:
        topics = request.topics
        self._request = request
        self._topics = topics
        self._codec = outside.codec
        self._clock = outside.clock
        self._store = store
        self._identity = identity
        self.log = log = AuditLog(partition, request, outside.log, tally, on_progress=on_progress)
        self._emitted_to = [name for name in topics.emitted_to if self._has(name)]
        self._state = StateReading(log, topics, outside.codec, store, identity)
        self._sent = SentReading(log, topics, outside.codec, store, self._emitted_to)

    async def read(self) -> PartitionView:
        """All of it, in the order of the module's docstring; raises `UnavailableError`."""
        topics, log, sent = self._topics, self.log, self._sent
        settled = {name: (await log.bounds(name)).stable_end for name in [*self._emitted_to, topics.dead]}
        now_ms = self._clock.now_ms()
        state, cut = await self._state.find_cut()
        await self._state.read(state, cut)
        await sent.read_dead(await log.bounds(topics.dead))
        ends = {name: await log.bounds(name) for name in self._emitted_to}
        events = await log.bounds(topics.events)
        place = self._state.place(events)
        for name in self._emitted_to:
            number = topics.emitted_to.index(name)
            await sent.read_due(number, name, ends[name], generation_base=place.generation_base)
        reading = EventReading(
            log,
            topics,
            self._store,
            generation_base=place.generation_base,
            compaction_lag_ms=self._request.compaction_lag_ms,
            has_refusals=sent.refusals > 0,
        )
        whole_from, unknown_until_ms = await reading.read(events, self._clock)
        await self._state.read_changed(cut)
        await self._read_progress()
        whole = sent.emissions_whole_from
        return PartitionView(
            partition=log.partition,
            events_topic=topics.events,
            state_topic=topics.state,
            dead_topic=topics.dead,
            generation_base=place.generation_base,
            applied=place.applied,
            stamp_ms=place.stamp_ms,
            now_ms=now_ms,
            overdue_ms=self._request.overdue_ms,
            retention_ms=self._request.retention_ms,
            events_whole_from=whole_from,
            events_unknown_until_ms=unknown_until_ms,
            emissions_whole_from={**whole, "": max(whole.values(), default=0)},
            emissions_settled=settled,
            dead_whole_from=Offset(sent.dead_whole_from),
            dead_settled=settled[topics.dead],
            from_ms=self._request.from_ms,
            to_ms=self._request.to_ms,
        )

    async def _read_progress(self) -> None:
        topic = self._topics.progress
        if not self._has(topic):
            return
        bounds = await self.log.bounds(topic)
        async for records in self.log.chunks(topic, bounds.start, bounds.stable_end):
            for record in records:
                try:
                    self._codec.check_progress(record.value or b"")
                except CorruptStateError as error:
                    self.log.violated(Code.UNDECODABLE, topic, record, str(error))

    def _has(self, topic: str) -> bool:
        known = self._identity.topics.get(topic)
        return known is not None and self.log.partition < known.partition_count
