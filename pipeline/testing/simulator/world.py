"""One simulated world: brokers, machines, upstreams, consumers, and the judge who watches them."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Final

from pipeline.core.tasks import DurationMs, Offset
from pipeline.testing.memory_cluster import MemoryCluster, NewRecord
from pipeline.testing.memory_consumers import PlainConsumerCodec
from pipeline.testing.memory_group import MemoryGroup
from pipeline.testing.memory_log import MemoryLog
from pipeline.testing.simulated_owner import SIMULATED_TOPICS, simulated_settings
from pipeline.testing.simulator.consumers import ConsumerGroup
from pipeline.testing.simulator.coordinator import Coordinator
from pipeline.testing.simulator.judge import BrokenPromiseError, Judge
from pipeline.testing.simulator.machine import AgentProcess, Machine
from pipeline.testing.simulator.plan import Kind, Shape
from pipeline.testing.simulator.upstream import EVENTS, Upstream
from pipeline.testing.virtual_time import VirtualClock

__all__ = ["POISON", "World"]

POISON: Final = "poison"
"""What the ids of tasks begin with whose due record the brokers refuse."""
HEARTBEAT_MS: Final = 2_000
_LOOK_AGAIN_S: Final = 0.05
_CLEANER_S: Final = 0.2
_PATIENCE_MS: Final = 180_000
_QUIET_MS: Final = 3_000
_TRANSACTION_TIMEOUT_MS: Final = 10_000
_LATEST_DUE_MS_MAX: Final = 120_000


class World:
    """Make it inside of `run_virtual`; `history` tells what happened, a line each."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape = shape
        self.seed = seed
        self.clock = VirtualClock()
        self.cluster = MemoryCluster(self.clock, transaction_timeout_ms=_TRANSACTION_TIMEOUT_MS)
        for topic in SIMULATED_TOPICS:
            self.cluster.create_topic(topic, shape.partitions)
        self.codec = PlainConsumerCodec()
        self.group = MemoryGroup()
        self.coordinator = Coordinator(self.group, shape.partitions, static_members=shape.static_members)
        self.machines = [Machine(f"machine-{number}") for number in range(shape.machines)]
        self.upstream = Upstream(self.cluster, shape.partitions)
        self.consumers = ConsumerGroup(self.cluster, shape.partitions)
        self.clocks: dict[str, VirtualClock] = {}
        self.judge = Judge(shape, self.cluster, self.group, self.upstream, self.consumers, self.machines, self.clocks)
        self.history: list[str] = []
        self.deposed: set[str] = set()
        self._lives = 0
        self._running: list[asyncio.Task[None]] = []
        self._is_cleaning = False
        self._settings = simulated_settings(
            retention_ms=DurationMs(shape.retention_ms),
            offline_max_ms=DurationMs(shape.offline_max_ms),
            heartbeat_interval_ms=HEARTBEAT_MS,
            batch_records_max=shape.batch_records_max,
            fire_max=shape.fire_max,
        )

    # -- life --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Everything runs."""
        self._running = [asyncio.create_task(self.coordinator.run()), asyncio.create_task(self.consumers.run())]
        for machine in self.machines:
            self.start_agent(machine)
        for number in range(self.shape.consumers):
            self.consumers.start(f"consumer-{number}.{self._life()}")

    async def close(self) -> None:
        """Nothing runs any more."""
        self.upstream.cancel_sending()
        for task in self._running:
            task.cancel()
        for machine in self.machines:
            if machine.agent is not None:
                await machine.agent.kill()
        for member in self.consumers.members:
            await member.kill()
        await asyncio.gather(*self._running, return_exceptions=True)

    def start_agent(self, machine: Machine) -> AgentProcess:
        """A new process on the machine."""
        name = f"{machine.name}.{self._life()}"
        agent = AgentProcess(
            name,
            machine,
            self.cluster,
            self.coordinator,
            settings=self._settings,
            shape=self.shape,
            seed=self.seed,
        )
        agent.faults.is_poisoned = _is_poison
        self.clocks[name] = machine.clock
        machine.agent = agent
        agent.start()
        return agent

    def start_consumer(self) -> str:
        """One more consumer process; its name."""
        name = f"consumer-{self._life() % max(1, self.shape.consumers)}.{self._lives}"
        self.consumers.start(name)
        return name

    def note(self, what: str) -> None:
        """Tell the history."""
        self.history.append(f"{self.clock.monotonic_ms() / 1_000:>9.3f} s  {what}")

    @property
    def agents(self) -> list[AgentProcess]:
        """The processes that run, frozen or not."""
        return [machine.running for machine in self.machines if machine.running is not None]

    def logs(self, topics: Iterable[str] = SIMULATED_TOPICS) -> list[MemoryLog]:
        """Every partition of these topics."""
        return [log for topic in topics for log in self.cluster.topics()[topic].logs]

    def position(self, partition: int) -> Offset:
        """How far `task-events` was read for certain: what the last committed positions record says."""
        self.judge.look()
        positions = self.judge.positions.get(partition)
        place = positions.inputs.get(EVENTS) if positions is not None else None
        topic_id = self.cluster.topics()[EVENTS].topic_id
        return place.position if place is not None and place.topic_id == topic_id else Offset(0)

    def compact(self) -> None:
        """As the log cleaner would at its worst moment: of `task-events` only what was read for certain.

        From then on it comes again and again, and forgets deletions as soon as it may.
        """
        self._compact()
        if not self._is_cleaning and self._deletions_kept_ms <= _PATIENCE_MS:
            self._is_cleaning = True
            self._running.append(asyncio.create_task(self._go_on_compacting()))

    @property
    def _deletions_kept_ms(self) -> int:
        """`delete.retention.ms`: the longest absence of a local table; clocks may differ by as much as they do here."""
        return self.shape.offline_max_ms + self.shape.skew_ms

    async def _go_on_compacting(self) -> None:
        while True:
            await asyncio.sleep(_CLEANER_S)
            self._compact()

    def _compact(self) -> None:
        self.upstream.settle()
        now_ms = self.clock.now_ms()
        for partition in range(self.shape.partitions):
            position = self.position(partition)
            log = self.cluster.log("task-state", partition)
            log.compact(now_ms=now_ms, delete_retention_ms=self._deletions_kept_ms)
            self.cluster.log(EVENTS, partition).compact(before=position)

    def _life(self) -> int:
        self._lives += 1
        return self._lives

    # -- the end -----------------------------------------------------------------------------------------------------

    async def heal_and_conclude(self) -> None:
        """All faults end; then every promise is demanded, liveness too. Raises `BrokenPromiseError`."""
        self.note("all faults end")
        if Kind.COMPACTION in self.shape.nemeses:
            self.compact()
        self._heal()
        await self.upstream.idle()
        self.upstream.end_transaction(commit=False)
        self.upstream.settle()
        await self._until("every partition has an owner that is through", self._is_caught_up)
        # Whatever is due by then has fired; what may be purged is purged once.
        last_due_ms = min(self.upstream.last_due_ms(), self.clock.now_ms() + _LATEST_DUE_MS_MAX)
        await asyncio.sleep(max(0, last_due_ms - self.clock.now_ms()) / 1_000)
        await asyncio.sleep((_QUIET_MS + 2 * HEARTBEAT_MS) / 1_000)
        await self._until("every partition has an owner that is through", self._is_caught_up)
        await self._until("everything emitted was applied", self._is_applied, promise="G6")
        await self._until("every transaction has ended", self._is_decided)
        now_ms = self.clock.now_ms()
        tables = {
            partition: machine.disk.tables[partition]
            for machine in self.machines
            for partition in range(self.shape.partitions)
            if machine.agent is not None and machine.agent.is_active(partition)
        }
        for agent in self.agents:
            await agent.stop()
        self.judge.conclude(now_ms, tables)

    def _heal(self) -> None:
        self.cluster.hold_markers = False
        self.cluster.write_markers()
        self.deposed.clear()
        for log in self.logs():
            log.release()
        for machine in self.machines:
            self._heal_machine(machine)
        for member in self.consumers.members:
            member.process.spare()
            member.process.thaw()
            member.slow_until_ms = 0
            member.transactions.commits.clear()
        if self.shape.consumers and not self.consumers.living:
            self.start_consumer()
        self.cluster.notify()

    def _heal_machine(self, machine: Machine) -> None:
        machine.disk.is_full = machine.disk.refuses_renames = False
        machine.clock.drift(0)
        machine.clock.step(self.clock.now_ms() - machine.clock.now_ms())
        if machine.running is None:
            self.start_agent(machine)
            return
        agent = machine.running
        agent.process.spare()
        agent.process.thaw()
        agent.faults.commits.clear()
        agent.faults.unavailable_acquires = 0
        for simulated in agent.simulated.values():
            simulated.end_offsets.unavailable = 0

    async def _until(self, what: str, condition: Callable[[], bool], *, promise: str = "G2") -> None:
        until_ms = self.clock.monotonic_ms() + _PATIENCE_MS
        while not condition():
            self.judge.look()
            if self.clock.monotonic_ms() > until_ms:
                states = [
                    f"{agent.process.name}/{partition} {owner.status.phase} {owner.status.message}".strip()
                    for agent in self.agents
                    for partition, owner in agent.pool.owners.items()
                ]
                raise BrokenPromiseError(
                    f"{promise}: not within {_PATIENCE_MS // 1_000} s: {what}; {'; '.join(states)}"
                )
            await asyncio.sleep(_LOOK_AGAIN_S)

    def _is_caught_up(self) -> bool:
        return all(self._is_through(partition) for partition in range(self.shape.partitions))

    def _is_through(self, partition: int) -> bool:
        end = self.cluster.log(EVENTS, partition).end_offset
        owners = [machine for machine in self.machines if machine.agent and machine.agent.is_active(partition)]
        if len(owners) != 1 or owners[0].agent is None:
            return False
        index = owners[0].disk.tables[partition].index
        is_firing = bool(index) and index[0].at_ms <= self.clock.now_ms()
        return owners[0].agent.pool.owners[partition].status.position >= end and not is_firing

    def _is_decided(self) -> bool:
        self.cluster.expire_transactions()
        return all(log.last_stable_offset == log.end_offset for log in self.logs())

    def _is_applied(self) -> bool:
        self.judge.look()
        done = {(row.task_id, row.generation, row.occurrence) for row in self.judge.applied}
        return not self.shape.consumers or all(
            (task.task_id, task.generation, task.occurrence) in done for task in self.judge.emissions
        )


def _is_poison(record: NewRecord) -> bool:
    return record.topic == "due-tasks" and (record.key or b"").startswith(POISON.encode())
