"""Upstream services: what they send, late or twice or in a transaction, and what they were told of it."""

import asyncio
from collections import defaultdict
from typing import Final

import msgspec

from pipeline.core.events import Cancel, Event, Schedule
from pipeline.core.partitioning import partition_for_key
from pipeline.core.tasks import InstantMs, TaskId
from pipeline.testing.memory_cluster import MemoryCluster, NewRecord
from pipeline.testing.memory_log import LogEntry, MemoryLog
from pipeline.testing.plain_codec import PlainCodec
from pipeline.testing.promises import Acknowledged, TaskHistory

__all__ = ["NEVER_MS", "Sent", "Upstream", "describe"]

EVENTS: Final = "task-events"
NEVER_MS: Final = InstantMs(2**62)
"""When an event was acknowledged that is in the topic, and whose author never got an answer."""
_LOOK_AGAIN_MS: Final = 100
_RESEND_AFTER_MS: Final = 300


class Sent(msgspec.Struct, kw_only=True, eq=False):
    """One record of an event. `is_kept`: None while nobody knows whether it survives."""

    event: Event | None
    partition: int
    log: MemoryLog
    entry: LogEntry
    generation_base: int
    is_refused: bool = False
    is_kept: bool | None = None
    acknowledged_at_ms: InstantMs = NEVER_MS

    def settle(self) -> None:
        """See whether it is below the high watermark, or went with its leader."""
        if self.is_kept is None and self.entry.transaction is None:
            if not self.log.holds(self.entry):
                self.is_kept = False
            elif self.log.end_offset > self.entry.offset:
                self.is_kept = True

    def as_acknowledged(self) -> Acknowledged:
        """For the rules of `promises`."""
        assert self.event is not None, "rubbish is judged by its dead record"
        return Acknowledged(
            event=self.event,
            offset=self.entry.offset,
            acknowledged_at_ms=self.acknowledged_at_ms,
            append_at_ms=self.entry.timestamp,
            generation_base=self.generation_base,
            is_refused=self.is_refused,
        )


class Upstream:
    """All upstreams of a world. Instants of acknowledgement are moments of virtual time, not of anybody's clock."""

    def __init__(self, cluster: MemoryCluster, partition_count: int) -> None:
        self._cluster = cluster
        self._partition_count = partition_count
        self._codec = PlainCodec()
        self._sending: set[asyncio.Task[None]] = set()
        self._producer = cluster.producer("upstream")
        self._producer.init()
        self._open: list[Sent] = []
        self.generation_bases = [0] * partition_count
        self.sent: list[Sent] = []
        self.rubbish: list[Sent] = []
        self._by_task: defaultdict[TaskId, list[Sent]] = defaultdict(list)

    # -- sending -----------------------------------------------------------------------------------------------------

    def send(self, event: Event, *, after_ms: int = 0, answer_ms: int = 0, is_answered: bool = True) -> None:
        """Send in a while, be answered in a while; who is not answered sends the same event again."""
        task = asyncio.create_task(self._send(event, after_ms, answer_ms, is_answered=is_answered))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _send(self, event: Event, after_ms: int, answer_ms: int, *, is_answered: bool) -> None:
        if after_ms:
            await asyncio.sleep(after_ms / 1_000)
        sent = self._append(event)
        while sent.is_kept is None:
            await self._cluster.change(_LOOK_AGAIN_MS)
            sent.settle()
        if answer_ms:
            await asyncio.sleep(answer_ms / 1_000)
        if sent.is_kept and is_answered:
            sent.acknowledged_at_ms = self._now_ms()
        elif event.event_id:
            await asyncio.sleep(_RESEND_AFTER_MS / 1_000)
            await self._send(event, 0, answer_ms, is_answered=True)

    def _append(self, event: Event) -> Sent:
        key = event.task_id.encode()
        partition = self.partition_of(event.task_id)
        entry = self._cluster.send(EVENTS, key, self._codec.encode_event(event), partition=partition)
        return self._note(event, partition, entry)

    def _note(self, event: Event, partition: int, entry: LogEntry) -> Sent:
        sent = Sent(
            event=event,
            partition=partition,
            log=self._cluster.log(EVENTS, partition),
            entry=entry,
            generation_base=self.generation_bases[partition],
        )
        self.sent.append(sent)
        self._by_task[event.task_id].append(sent)
        sent.settle()
        return sent

    def send_rubbish(self, key: bytes | None, value: bytes | None, partition: int) -> None:
        """A record that is no event."""
        entry = self._cluster.send(EVENTS, key, value, partition=partition)
        log = self._cluster.log(EVENTS, partition)
        self.rubbish.append(
            Sent(event=None, partition=partition, log=log, entry=entry, generation_base=0),
        )

    def send_refused(self, event: Event) -> None:
        """A record that is an event, and breaks a rule of admission: it needs a dead record, and its version counts."""
        self.rubbish.append(sent := self._append(event))
        sent.is_refused = True

    async def idle(self) -> None:
        """Wait until everything under way was sent and answered."""
        while self._sending:
            await asyncio.wait(list(self._sending))

    def cancel_sending(self) -> None:
        """The world ends."""
        for task in self._sending:
            task.cancel()

    # -- transactions ------------------------------------------------------------------------------------------------

    @property
    def has_open_transaction(self) -> bool:
        """Whether something was sent in a transaction that nobody ended."""
        self._drop_expired()
        return bool(self._open)

    def send_in_transaction(self, event: Event) -> None:
        """Add to the open transaction, or open one."""
        self._drop_expired()
        if self._producer.is_fenced:
            self._producer.init()
        partition = self.partition_of(event.task_id)
        record = NewRecord(
            topic=EVENTS, partition=partition, key=event.task_id.encode(), value=self._codec.encode_event(event)
        )
        [offset] = self._producer.send(record)
        self._open.append(self._note(event, partition, self._cluster.log(EVENTS, partition).entry(offset)))

    def end_transaction(self, *, commit: bool) -> None:
        """Commit, and be told so; or give it up. A commit that the replicas do not have yet is given up too."""
        self._drop_expired()
        if not self._open:
            return
        commit = commit and all(sent.log.end_offset > sent.entry.offset for sent in self._open)
        if commit:
            self._producer.commit()
        else:
            self._producer.abort()
        self._close(is_kept=commit)

    def _drop_expired(self) -> None:
        if self._open and (self._producer.is_fenced or self._producer.run is None):
            self._close(is_kept=False)

    def _close(self, *, is_kept: bool) -> None:
        for sent in self._open:
            sent.is_kept = is_kept
            if is_kept:
                sent.acknowledged_at_ms = self._now_ms()
        self._open = []

    # -- what became of it -------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Learn of everything undecided what became of it; to be called whenever a leader changed."""
        self._drop_expired()
        for sent in [*self.sent, *self.rubbish]:
            sent.settle()

    def forget_unread(self, partition: int, position: int) -> None:
        """The topic is deleted: what was not read of it is lost by the operator's own hand."""
        log = self._cluster.log(EVENTS, partition)
        for sent in [*self.sent, *self.rubbish]:
            if sent.log is log and (sent.is_kept is None or sent.entry.offset >= position):
                sent.is_kept = False

    def kept(self) -> list[Sent]:
        """What is in the topic, answered or not."""
        return [sent for sent in self.sent if sent.is_kept]

    def history(self, task_id: TaskId) -> TaskHistory:
        """What is in the topic of one task."""
        return TaskHistory([sent.as_acknowledged() for sent in self._by_task[task_id] if sent.is_kept])

    def last_events(self, count: int) -> list[Event]:
        """What was sent last."""
        return [sent.event for sent in self.sent[-count:] if sent.event is not None and not sent.is_refused]

    def last_due_ms(self) -> int:
        """When the last of it is due."""
        schedules = [sent for sent in self.kept() if isinstance(sent.event, Schedule)]
        return max((sent.as_acknowledged().due_at_ms for sent in schedules), default=0)

    def partition_of(self, task_id: str) -> int:
        """Where Java's partitioner puts a task."""
        return partition_for_key(task_id.encode(), self._partition_count)

    def _now_ms(self) -> InstantMs:
        return InstantMs(self._cluster.clock.monotonic_ms())


def describe(event: Event) -> str:
    """An event in a few words."""
    version = f" v{event.version}" if event.version else ""
    if isinstance(event, Cancel):
        return f"cancel {event.task_id}{version} ({event.event_id})"
    when = f"at {event.due_at_ms}" if event.due_at_ms is not None else f"in {event.delay_ms} ms"
    return f"schedule {event.task_id}{version} {when} ({event.event_id})"
