"""The consumers of a world: one group, each member a process that may die in the middle of applying."""

import asyncio
from collections.abc import Sequence
from typing import Final

from pipeline.core.effects import DueTask
from pipeline.core.tasks import DurationMs, InstantMs
from pipeline.service.consumer.counts import BatchRules
from pipeline.service.consumer.due_consumer import ConsumerPorts, DueConsumer
from pipeline.service.consumer.task_handling import HandlingRules, TaskContext
from pipeline.testing.memory_cluster import MemoryCluster
from pipeline.testing.memory_consumers import (
    DUE,
    ConsumerGroupWorld,
    MemoryLedgerTables,
    MemoryLedgerTransactions,
    MemorySubscription,
)
from pipeline.testing.simulated_process import SimulatedCrashError, SimulatedProcess
from pipeline.testing.virtual_time import VirtualClock

__all__ = ["FAILING", "GROUP", "ConsumerGroup", "ConsumerProcess"]

GROUP: Final = "group"
FAILING: Final = b"its handler raises"
_SESSION_MS: Final = 6_000
_TICK_MS: Final = 500
_THINK_MS: Final = 20
_SLOW_MS: Final = 3_000
_BATCHES: Final = BatchRules(batch_max=3, buffer_max=8, idle_commit_ms=500)
_FETCH_MAX: Final = 10


class _ConsumerClock:
    """The loop's time, for code that waits by calling `advance`: here others go on meanwhile.

    `asked_ms` is how long the last one who called it wants to wait, unless something happens.
    """

    def __init__(self) -> None:
        self._clock = VirtualClock()
        self.asked_ms = 0

    def now_ms(self) -> InstantMs:
        return self._clock.now_ms()

    def monotonic_ms(self) -> int:
        return self._clock.monotonic_ms()

    def advance(self, by_ms: int) -> None:
        """Only noted: `ConsumerProcess` sleeps between its steps."""
        self.asked_ms = by_ms


class ConsumerProcess:
    """One consumer: production code, one round at a time. `slow_until_ms`: it takes seconds for a round until then."""

    def __init__(self, name: str, world: ConsumerGroupWorld, clock: _ConsumerClock) -> None:
        self.process = SimulatedProcess(name)
        self.transactions = MemoryLedgerTransactions(world, self.process)
        self.slow_until_ms = 0
        self._cluster = world.cluster
        self._clock = clock
        self._consumer = DueConsumer(
            ConsumerPorts(
                subscription=MemorySubscription(world, self.process, fetch_max=_FETCH_MAX),
                transactions=self.transactions,
                tables=MemoryLedgerTables(world, self.process, machine=name.partition(".")[0]),
                codec=world.codec,
                clock=world.clock,
            ),
            handler=self._handle,
            handling=HandlingRules(group=GROUP, topic=DUE, attempts_max=2, backoff_ms=DurationMs(500)),
            batches=_BATCHES,
        )
        self._task: asyncio.Task[None] | None = None

    @property
    def buffered(self) -> int:
        """Records fetched and not handled yet, of the partition that has most of them."""
        return self._consumer.buffered

    @property
    def buffered_max(self) -> int:
        """What may be buffered of one partition: its bound, and the fetch that reached it."""
        return _BATCHES.buffer_max + _FETCH_MAX

    def start(self) -> None:
        """Join the group, and go on until killed."""
        self._task = asyncio.create_task(self._run(), name=self.process.name)

    async def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        try:
            self._consumer.open()
            while True:
                await self.process.stand()
                self._clock.asked_ms = 0
                self._consumer.step()
                asked_ms = self._clock.asked_ms
                is_slow = self._clock.monotonic_ms() < self.slow_until_ms
                await asyncio.sleep((_SLOW_MS if is_slow else _THINK_MS) / 1_000)
                if asked_ms > _THINK_MS:
                    await self._cluster.change(asked_ms - _THINK_MS)
        except SimulatedCrashError:
            self.process.kill()

    def _handle(self, task: DueTask, context: TaskContext) -> None:
        """An effect that is a record, in the transaction of the ledger's row."""
        self.process.step("handler")
        if task.payload == FAILING:
            raise ValueError(task.task_id)
        context.produce("outputs", task.task_id.encode(), task.emission_id.encode())


class ConsumerGroup:
    """All members, dead or alive, and the coordinator that gives them partitions."""

    def __init__(self, cluster: MemoryCluster, partition_count: int) -> None:
        self._clock = _ConsumerClock()
        self.world = ConsumerGroupWorld(
            partition_count=partition_count, group=GROUP, cluster=cluster, clock=self._clock
        )
        self.members: list[ConsumerProcess] = []
        self._silent_ms: dict[str, int] = {}

    @property
    def living(self) -> list[ConsumerProcess]:
        """Those that were not killed."""
        return [member for member in self.members if member.process.alive]

    def start(self, name: str) -> ConsumerProcess:
        """One more member; it gets its share of the partitions."""
        member = ConsumerProcess(name, self.world, self._clock)
        self.members.append(member)
        member.start()
        living = self.living
        for partition in range(self.world.partition_count):
            if partition % len(living) == len(living) - 1:
                self.world.give(partition, name)
        return member

    async def run(self) -> None:
        """The coordinator, until cancelled."""
        while True:
            await asyncio.sleep(_TICK_MS / 1_000)
            self._expel_silent()

    def _expel_silent(self) -> None:
        responding = [member for member in self.members if member.process.responds]
        for member in self.members:
            name = member.process.name
            self._silent_ms[name] = 0 if member.process.responds else self._silent_ms.get(name, 0) + _TICK_MS
            if self._silent_ms[name] >= _SESSION_MS and responding:
                self.world.expel(name, _heir(responding).process.name)
        for partition in range(self.world.partition_count):
            if partition not in self.world.owners and responding:
                self.world.give(partition, _heir(responding).process.name)


def _heir(responding: Sequence[ConsumerProcess]) -> ConsumerProcess:
    return responding[-1]
