"""A cluster, its upstreams and its agents in memory, on virtual time; what was acknowledged and emitted is kept.

Make it inside of `run_virtual`. `check` holds the promises against all that happened so far, at any moment;
`heal_and_check` lets faults end, and then also demands that nothing was missed.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from pipeline.core.effects import DeadTask, DueTask
from pipeline.core.events import Cancel, Event, Schedule
from pipeline.core.tasks import NO_HEADERS, DurationMs, InstantMs, Offset, TaskId
from pipeline.ports import TableMeta
from pipeline.service.owner.acquisition import decode_meta
from pipeline.service.owner.settings import OwnerSettings
from pipeline.service.owner.status import Phase
from pipeline.testing.memory_cluster import MemoryCluster, MemoryProducer, NewRecord
from pipeline.testing.memory_group import MemoryGroup
from pipeline.testing.memory_log import LogEntry
from pipeline.testing.memory_timer_table import MemoryDisk
from pipeline.testing.plain_codec import PlainCodec
from pipeline.testing.promises import (
    Acknowledged,
    check_cancels_count,
    check_emitted_once,
    check_never_early,
    check_nothing_missed,
    check_table_is_fold,
)
from pipeline.testing.simulated_agent import SimulatedAgent
from pipeline.testing.simulated_owner import SIMULATED_TOPICS
from pipeline.testing.simulated_process import SimulatedProcess
from pipeline.testing.virtual_time import VirtualClock

__all__ = ["SimulatedWorld"]

_LOOK_AGAIN_S: Final = 0.01
_PATIENCE_MS: Final = 120_000


class SimulatedWorld:
    """Partition 0 of everything, one broker, one consumer group, and as many machines as agents are given disks."""

    def __init__(self, *, partition_count: int = 1) -> None:
        self.clock = VirtualClock()
        self.cluster = MemoryCluster(self.clock)
        self.group = MemoryGroup()
        self.disk = MemoryDisk()
        self.codec = PlainCodec()
        self.acknowledged: list[Acknowledged] = []
        self.agents: list[SimulatedAgent] = []
        self.generation_base = 0
        for topic in SIMULATED_TOPICS:
            self.cluster.create_topic(topic, partition_count)

    # -- agents ------------------------------------------------------------------------------------------------

    def agent(
        self,
        name: str = "",
        *,
        disk: MemoryDisk | None = None,
        settings: OwnerSettings | None = None,
        on_step: Callable[[str], None] | None = None,
    ) -> SimulatedAgent:
        """A new agent, not started; on the common disk unless it gets one of its own."""
        agent = SimulatedAgent(
            self.cluster,
            self.group,
            self.disk if disk is None else disk,
            process=SimulatedProcess(name or f"agent-{len(self.agents) + 1}", on_step=on_step),
            clock=self.clock,
            settings=settings,
        )
        self.agents.append(agent)
        return agent

    async def started(self, name: str = "", *, settings: OwnerSettings | None = None) -> SimulatedAgent:
        """A new agent that has acquired the partition."""
        agent = self.agent(name, settings=settings)
        agent.start()
        await self.until(lambda: agent.owner.status.phase is Phase.ACTIVE)
        return agent

    # -- upstream ----------------------------------------------------------------------------------------------

    def schedule(
        self,
        task_id: str,
        *,
        due_in_ms: int | None = None,
        delay_ms: int | None = None,
        version: int = 0,
        event_id: str = "",
        payload: bytes = b"",
        through: MemoryProducer | None = None,
    ) -> Offset:
        """Ask for a task; acknowledged at once, or by `commit_upstream` if sent `through` a transaction."""
        due_at_ms = None if due_in_ms is None else InstantMs(self.clock.now_ms() + due_in_ms)
        delay = None if delay_ms is None else DurationMs(delay_ms)
        event = Schedule(
            task_id=TaskId(task_id),
            event_id=event_id,
            version=version,
            due_at_ms=due_at_ms,
            delay_ms=delay,
            payload=payload,
        )
        return self.send(event, through=through)

    def cancel(
        self, task_id: str, *, version: int = 0, event_id: str = "", through: MemoryProducer | None = None
    ) -> Offset:
        """Ask that a task be forgotten; acknowledged like `schedule`."""
        return self.send(Cancel(task_id=TaskId(task_id), event_id=event_id, version=version), through=through)

    def send(self, event: Event, *, through: MemoryProducer | None = None) -> Offset:
        """Append an event to partition 0."""
        key, value = event.task_id.encode(), self.codec.encode_event(event)
        if through is not None:
            return through.send(NewRecord(topic="task-events", partition=0, key=key, value=value, headers=NO_HEADERS))[
                0
            ]
        entry = self.cluster.send("task-events", key, value, partition=0)
        self._acknowledge(entry)
        return entry.offset

    def commit_upstream(self, producer: MemoryProducer) -> None:
        """Commit an upstream's transaction: its events are acknowledged now."""
        log = self.cluster.log("task-events", 0)
        mine = [entry for entry in log.entries if _is_open_of(entry, producer)]
        producer.commit()
        for entry in mine:
            self._acknowledge(entry)

    def recreate_events(self) -> None:
        """Delete and create `task-events`: offsets start again, generations must not."""
        self.generation_base += self.position()
        self.cluster.create_topic("task-events", len(self.cluster.topics()["task-events"].logs))

    def _acknowledge(self, entry: LogEntry) -> None:
        assert entry.value is not None, "our events have values"
        event = self.codec.decode_event(entry.value)
        assert isinstance(event, Schedule | Cancel), "our events can be read"
        self.acknowledged.append(
            Acknowledged(
                event=event,
                offset=entry.offset,
                acknowledged_at_ms=self.clock.now_ms(),
                append_at_ms=entry.timestamp,
                generation_base=self.generation_base,
            )
        )

    # -- what came out -----------------------------------------------------------------------------------------

    def emissions(self) -> list[DueTask]:
        """What a `read_committed` reader of `due-tasks` sees."""
        found = self.cluster.committed("due-tasks")
        return [self.codec.decode_due(entry.value) for entry in found if entry.value is not None]

    def emitted(self) -> list[str]:
        """The ids of the emitted tasks, in order."""
        return [task.task_id for task in self.emissions()]

    def dead(self) -> list[DeadTask]:
        """What a `read_committed` reader of `dead-tasks` sees."""
        found = self.cluster.committed("dead-tasks")
        return [self.codec.decode_dead(entry.value) for entry in found if entry.value is not None]

    def meta(self) -> TableMeta | None:
        """What the table on the common disk says of itself."""
        table = self.disk.tables.get(0)
        return None if table is None or not table.meta else decode_meta(table.meta, self.codec)

    def position(self) -> Offset:
        """How far `task-events` is in the table on the common disk."""
        meta = self.meta()
        return Offset(0) if meta is None or not meta.positions.inputs else meta.positions.inputs["task-events"].position

    # -- time and judgement ------------------------------------------------------------------------------------

    async def until(self, condition: Callable[[], bool], *, within_ms: int = _PATIENCE_MS) -> None:
        """Let time pass until `condition` holds; raises `TimeoutError` after `within_ms` virtual milliseconds."""
        async with asyncio.timeout(within_ms / 1_000):
            while not condition():  # noqa: ASYNC110  # a condition over the whole world has no event to wait for
                await asyncio.sleep(_LOOK_AGAIN_S)

    async def applied(self, agent: SimulatedAgent) -> None:
        """Wait until the agent has applied all that is in `task-events` now."""
        end = self.cluster.log("task-events", 0).end_offset
        await self.until(lambda: agent.owner.status.phase is Phase.ACTIVE and agent.owner.status.position >= end)

    def check(self) -> None:
        """What must hold at any moment: G3, G4, G5, and the group's offset never past a table."""
        emissions = self.emissions()
        check_emitted_once(emissions)
        check_never_early(emissions)
        check_cancels_count(emissions, self.acknowledged)

    async def heal_and_check(self, *, pass_ms: int = 3_600_000) -> None:
        """End all faults, run a fresh agent for `pass_ms`, and demand G1, G2 and G7 as well."""
        for agent in self.agents:
            await agent.kill()
        self.cluster.hold_markers = False
        self.cluster.write_markers()
        await self.clock.advance(20_000)  # whatever transaction was left open has timed out
        healthy = await self.started("healthy")
        await self.clock.advance(pass_ms)
        await self.applied(healthy)
        await healthy.stop()
        self.check()
        check_nothing_missed(self.emissions(), self.acknowledged, self.clock.now_ms())
        check_table_is_fold(self.disk.tables[0], self.cluster.log("task-state", 0), self.codec)


def _is_open_of(entry: LogEntry, producer: MemoryProducer) -> bool:
    run = entry.transaction
    return run is not None and run is producer.run
