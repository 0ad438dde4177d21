"""Everything at once, by seed: two machines, a busy upstream, kills, freezes, rebalances, lost disks, compaction."""

import random
from typing import TYPE_CHECKING

import pytest

from pipeline.core.tasks import DurationMs
from pipeline.testing.memory_cluster import MemoryProducer, NewRecord
from pipeline.testing.memory_timer_table import DiskTable, MemoryDisk
from pipeline.testing.memory_transaction import CommitFault
from pipeline.testing.simulated_owner import simulated_settings
from pipeline.testing.simulated_world import SimulatedWorld
from pipeline.testing.virtual_time import run_virtual

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipeline.testing.simulated_agent import SimulatedAgent

pytestmark = pytest.mark.simulation

SETTINGS = simulated_settings(
    retention_ms=DurationMs(600_000), heartbeat_interval_ms=2_000, batch_records_max=5, fire_max=3
)
ACTIONS = 120


class _Storm:
    """Random actions on one world; all randomness comes from `seed`."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.world = SimulatedWorld()
        self.disks = [self.world.disk, MemoryDisk()]
        self.running: list[SimulatedAgent | None] = [None, None]
        self.copies: list[DiskTable | None] = [None, None]
        self.upstream = self.world.cluster.producer("upstream")
        self.upstream.init()
        self.versions: dict[str, int] = {}
        self.sent = 0

    async def run(self) -> None:
        actions: list[tuple[int, Callable[[], object]]] = [
            (10, self.schedule),
            (8, self.cancel),
            (2, self.send_again),
            (2, self.rubbish),
            (3, self.end_upstream),
            (2, self.fault),
            (1, self.compact),
            (1, self.hold_markers),
            (1, self.foreign),
        ]
        names = [action for weight, action in actions for _ in range(weight)]
        await self.restart(0)
        for _ in range(ACTIONS):
            self.random.choice(names)()
            if self.random.random() < 0.12:
                await self.trouble()
            await self.world.clock.advance(self.random.choice([0, 1, 5, 50, 200, 700]))
        self.world.check()
        for agent in self.running:
            if agent is not None:
                agent.process.thaw()
                await agent.kill()
        if self.upstream.run is not None and not self.upstream.is_fenced:
            self.upstream.abort()
        self.world.disk = self.disks[self.random.randrange(2)]
        await self.world.heal_and_check(pass_ms=120_000)

    # -- upstream --

    def _task(self) -> tuple[str, int, str]:
        """A task id, a version where the task is a versioned one, a fresh event id."""
        task_id = f"task {self.random.randrange(6)}"
        self.sent += 1
        if task_id[-1] in "01":
            known = self.versions.get(task_id, 0)
            version = max(1, known + self.random.choice([-1, 0, 1, 1, 1]))
            self.versions[task_id] = max(known, version)
            return task_id, version, f"event {self.sent}"
        return task_id, 0, f"event {self.sent}"

    def _through(self) -> MemoryProducer | None:
        if self.random.random() > 0.15:
            return None
        if self.upstream.is_fenced:
            self.upstream.init()
        return self.upstream

    def schedule(self) -> None:
        task_id, version, event_id = self._task()
        self.world.schedule(
            task_id,
            due_in_ms=self.random.choice([-500, 0, 1, 20, 300, 1_000, 1_500, 3_000, 30_000]),
            version=version,
            event_id=event_id,
            through=self._through(),
        )

    def cancel(self) -> None:
        task_id, version, event_id = self._task()
        self.world.cancel(task_id, version=version, event_id=event_id, through=self._through())

    def send_again(self) -> None:
        """An upstream whose acknowledgement was lost sends one of its last events once more."""
        if self.world.acknowledged:
            self.world.send(self.random.choice(self.world.acknowledged[-5:]).event)

    def rubbish(self) -> None:
        key = self.random.choice([b"task 3", None, b"\xff"])
        self.world.cluster.send("task-events", key, self.random.choice([None, b"rubbish"]), partition=0)

    def end_upstream(self) -> None:
        if self.upstream.run is None or self.upstream.is_fenced:
            return
        if self.random.random() < 0.5:
            self.world.commit_upstream(self.upstream)
        else:
            self.upstream.abort()

    # -- faults --

    def fault(self) -> None:
        for agent in self.running:
            if agent is not None:
                agent.faults.commits.append(self.random.choice([None, *CommitFault]))
                agent.end_offsets.unavailable += self.random.randrange(2)

    def compact(self) -> None:
        """Positions travel in `task-state`: what any table reflects was read, an older table is restored first."""
        self.world.cluster.log("task-state", 0).compact()
        self.world.cluster.log("task-events", 0).compact(before=self.world.position())

    def hold_markers(self) -> None:
        self.world.cluster.hold_markers = not self.world.cluster.hold_markers
        if not self.world.cluster.hold_markers:
            self.world.cluster.write_markers()

    def foreign(self) -> None:
        """Somebody's transaction in `task-state` that never ends by itself."""
        stranger = self.world.cluster.producer(f"stranger {self.sent}")
        stranger.init()
        stranger.send(NewRecord(topic="task-state", partition=0, key=b"task 9", value=b"never seen"))

    async def trouble(self) -> None:
        machine = self.random.randrange(2)
        agent = self.running[machine]
        choice = self.random.random()
        if agent is None or not agent.process.alive:
            await self.restart(machine)
        elif choice < 0.4:
            await agent.kill()
            self.running[machine] = None
            self._spoil_disk(machine)
        elif choice < 0.6:
            agent.process.freeze()
        elif choice < 0.8:
            agent.process.thaw()
        else:
            self.world.group.rebalance({0: agent.process.name})

    def _spoil_disk(self, machine: int) -> None:
        disk = self.disks[machine]
        if 0 not in disk.tables:
            return
        choice = self.random.random()
        if choice < 0.2:
            disk.lose(0)
        elif choice < 0.3:
            disk.spoil(0)
        elif choice < 0.5 and self.copies[machine] is not None:
            disk.put_back(0, self.copies[machine])
        elif choice < 0.8:
            self.copies[machine] = disk.copy(0)

    async def restart(self, machine: int) -> None:
        agent = self.world.agent(
            f"machine {machine} life {len(self.world.agents)}", disk=self.disks[machine], settings=SETTINGS
        )
        agent.process.latency_ms = lambda: self.random.choice([0, 0, 0, 1, 3, 20])
        agent.start()
        self.running[machine] = agent


@pytest.mark.parametrize("seed", range(60))
def test_promises_hold_in_a_storm(seed: int) -> None:
    """Whatever happens in whatever order: nothing lost, doubled or early, and every cancel in time counts."""

    async def main() -> None:
        await _Storm(seed).run()

    run_virtual(main)
