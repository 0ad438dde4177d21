"""The promises, watched while a world runs: after every step what is new is judged, at the end everything.

Instants of the owners are judged by the owner's own clock, as it ran; what was acknowledged first is a matter of
virtual time, which all share. So skewed and stepped clocks excuse nothing: whatever was acknowledged before the owner
read its clock counts.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from pipeline.core.applied import AppliedTask, Outcome
from pipeline.core.effects import DeadTask, DueTask
from pipeline.core.events import Reason, Schedule
from pipeline.core.positions import POSITIONS_KEY, Positions
from pipeline.core.tasks import FINAL, InstantMs, Offset, Status, TaskId, TaskState, index_entry
from pipeline.service.consumer.task_handling import REPLAY_HEADER
from pipeline.service.owner.state_restore import decode_meta
from pipeline.testing.memory_cluster import MemoryCluster
from pipeline.testing.memory_consumers import PlainConsumerCodec
from pipeline.testing.memory_group import MemoryGroup
from pipeline.testing.memory_log import LogEntry
from pipeline.testing.memory_timer_table import DiskTable
from pipeline.testing.promises import EVENT_IDS_REMEMBERED, applied_wrongly, check_table_is_fold, missed
from pipeline.testing.simulated_process import SimulatedProcess
from pipeline.testing.simulator.consumers import GROUP, ConsumerGroup
from pipeline.testing.simulator.machine import Machine
from pipeline.testing.simulator.plan import Shape
from pipeline.testing.simulator.state_fold import StateFold
from pipeline.testing.simulator.upstream import Upstream
from pipeline.testing.virtual_time import VirtualClock

__all__ = ["BrokenPromiseError", "Judge"]

_CODEC: Final = PlainConsumerCodec()
STAMP_MS_MAX: Final = 6_000
"""Three heartbeats of the simulated owners: a claim that nobody renews would be forgotten by the brokers one day."""


class BrokenPromiseError(Exception):
    """The code under test broke a promise; the message begins with its name."""


class Judge:
    """Reads every topic of a world along, and remembers what must never come twice."""

    def __init__(
        self,
        shape: Shape,
        cluster: MemoryCluster,
        group: MemoryGroup,
        upstream: Upstream,
        consumers: ConsumerGroup,
        machines: Iterable[Machine],
        clocks: Mapping[str, VirtualClock],
    ) -> None:
        self._shape = shape
        self._remembered = 0 if shape.is_forgetful else EVENT_IDS_REMEMBERED
        self._cluster = cluster
        self._group = group
        self._upstream = upstream
        self._consumers = consumers
        self._machines = list(machines)
        self._clocks = clocks
        self._read: dict[tuple[str, int], Offset] = {}
        self._seen: set[tuple[str, int, int, int]] = set()
        self._tables: dict[tuple[str, int], tuple[DiskTable, bytes]] = {}
        self._told: dict[int, Offset] = {}
        self._folds = [StateFold() for _ in range(shape.partitions)]
        self._claims: dict[str, tuple[int, int]] = {}
        self._places: dict[tuple[str, int], Offset] = {}
        self._broken: BrokenPromiseError | None = None
        self.emissions: list[DueTask] = []
        self.dead: list[DeadTask] = []
        self.applied: list[AppliedTask] = []
        self.outputs: Counter[str] = Counter()
        self.positions: dict[int, Positions] = {}

    # -- after every step --------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Judge what is new; raises `BrokenPromiseError`, from then on always: whoever looked first may not tell."""
        if self._broken is not None:
            raise self._broken
        try:
            self._look()
        except BrokenPromiseError as error:
            self._broken = error
            raise

    def _look(self) -> None:
        for partition in range(self._shape.partitions):
            last = self._cluster.log("task-state", partition).last_committed(POSITIONS_KEY)
            if last is not None:
                self._judge_positions(partition, _CODEC.decode_positions(last.value or b""))
            self._folds[partition].read(self._cluster.log("task-state", partition))
            for entry in self._new("due-tasks", partition):
                self._judge_emission(entry)
            self.dead += [_CODEC.decode_dead(entry.value or b"") for entry in self._new("dead-tasks", partition)]
            self._judge_applied(partition)
            self._judge_group_offset(partition)
        for machine in self._machines:
            for partition, table in machine.disk.tables.items():
                self._judge_table(machine, partition, table)
        self._judge_claims()
        self._judge_bounds()

    def _judge_positions(self, partition: int, positions: Positions) -> None:
        known = self.positions.get(partition)
        self.positions[partition] = positions
        for topic, place in known.inputs.items() if known is not None else ():
            now = positions.inputs.get(topic)
            if now is None or (now.topic_id == place.topic_id and now.position < place.position):
                raise BrokenPromiseError(f"G1: the positions of {partition} go back from {place} to {now}")

    def _new(self, topic: str, partition: int) -> list[LogEntry]:
        log = self._cluster.log(topic, partition)
        position = max(self._read.get((topic, partition), Offset(0)), log.start_offset)
        entries, self._read[topic, partition] = log.read_committed(position, len(log.entries) + 1)
        return entries

    def _judge_emission(self, entry: LogEntry) -> None:
        if REPLAY_HEADER in entry.headers:
            return  # an operator's copy, for consumers to know
        task = _CODEC.decode_due(entry.value or b"")
        name = (task.task_id, task.generation, task.occurrence, task.attempt)
        if name in self._seen:
            raise BrokenPromiseError(f"G5: {name} was emitted twice")
        self._seen.add(name)
        self._places[task.task_id, task.generation] = entry.offset
        self.emissions.append(task)
        if task.fired_at_ms < task.due_at_ms:
            raise BrokenPromiseError(f"G3: {name} fired at {task.fired_at_ms}, due at {task.due_at_ms}")
        assert entry.transaction is not None, "owners write in transactions"
        read_ms = self._clocks[entry.transaction.by].first_read_ms(task.fired_at_ms)
        if read_ms is None:
            raise BrokenPromiseError(f"G3: {name} fired at {task.fired_at_ms}, which its owner's clock never showed")
        self._judge_overruling(task, read_ms)

    def _judge_overruling(self, task: DueTask, read_ms: int) -> None:
        history = self._upstream.history(TaskId(task.task_id))
        schedule = history.by_generation.get(task.generation)
        if schedule is None:
            raise BrokenPromiseError(f"G5: {task.task_id} generation {task.generation} was emitted, never scheduled")
        if task.due_at_ms != schedule.due_at_ms:
            raise BrokenPromiseError(f"G1: {task.task_id} was due at {schedule.due_at_ms}, not at {task.due_at_ms}")
        if isinstance(schedule.event, Schedule) and task.payload != schedule.event.payload:
            raise BrokenPromiseError(f"G1: {task.task_id} was emitted with the content of another: {task.payload!r}")
        if history.is_repeated(schedule) and not history.may_be_forgotten(schedule, self._remembered):
            raise BrokenPromiseError(
                f"G5: {task.task_id} was emitted for {schedule.event.event_id}, which was sent before and only again"
            )
        for other in history.overruling(schedule):
            # What is refused stands before it in the log, so it was applied before, whoever has heard of it.
            if other.is_refused or other.acknowledged_at_ms < read_ms:
                raise BrokenPromiseError(
                    f"G4: {task.task_id} of offset {schedule.offset} was emitted although {other.event.event_id} was "
                    f"acknowledged at {other.acknowledged_at_ms} ms, before the owner read its clock at {read_ms} ms"
                )

    def _judge_applied(self, partition: int) -> None:
        rows = [_CODEC.decode_applied(entry.value or b"") for entry in self._new("applied-tasks", partition)]
        new = [row for row in rows if row.group == GROUP]
        if new:
            self.applied += new
            _raise_first(applied_wrongly(self.applied, self.emissions))
        for entry in self._new("outputs", partition):
            name = (entry.value or b"").decode()
            self.outputs[name] += 1
            if self.outputs[name] > 1:
                raise BrokenPromiseError(f"G6: the effect of {name} is there twice")

    def _judge_group_offset(self, partition: int) -> None:
        told = self._group.offsets.get(partition)
        if told is None or told == self._told.get(partition):
            return
        self._told[partition] = told
        positions = self.positions.get(partition)
        place = positions.inputs.get("task-events") if positions is not None else None
        if place is None or told > place.position:
            raise BrokenPromiseError(f"G1: the group's offset {told} of {partition} is past what any table reflects")

    def _judge_table(self, machine: Machine, partition: int, table: DiskTable) -> None:
        known = self._tables.get((machine.name, partition))
        if table.meta is None or (known is not None and known[0] is table and known[1] is table.meta):
            return
        self._tables[machine.name, partition] = (table, table.meta)
        states = [_CODEC.decode_state(value) for value in table.rows.values()]
        for state in states:
            self._judge_row(state)
        if machine.agent is not None and machine.agent.is_active(partition):
            self._judge_fold(machine, partition, table, decode_meta(table.meta, _CODEC).state_position)
        entries = sorted(index_entry(state) for state in states)
        if entries != table.index:
            raise BrokenPromiseError(f"G2: the index of {partition} on {machine.name} does not agree with its rows")

    def _judge_fold(self, machine: Machine, partition: int, table: DiskTable, position: Offset) -> None:
        """The table is what `task-state` says up to where it claims to be, as that was before any compaction."""
        rows = self._folds[partition].at(position)
        if rows is not None and rows != table.rows:
            wrong = sorted(
                task_id for task_id in rows.keys() | table.rows if rows.get(task_id) != table.rows.get(task_id)
            )
            raise BrokenPromiseError(
                f"G7: table {partition} of {machine.name} is not what task-state says up to {position}: {wrong[:5]}"
            )

    def _judge_row(self, state: TaskState) -> None:
        if state.status not in FINAL:
            return
        until_ms = max(state.changed_at_ms, state.due_at_ms) + self._shape.retention_ms
        if state.wake_at_ms < until_ms:
            raise BrokenPromiseError(
                f"G4: {state.task_id}, {state.status}, is forgotten at {state.wake_at_ms}, to be kept until {until_ms}"
            )
        place = self._places.get((state.task_id, state.generation))
        if state.status is Status.CANCELLED and place is not None:
            raise BrokenPromiseError(f"G4: {state.task_id} is said to be cancelled, and was emitted at {place}")
        if state.emitted_offset >= 0 and place is not None and place != state.emitted_offset:
            raise BrokenPromiseError(
                f"G4: {state.task_id} is said to be emitted at {state.emitted_offset}, it stands at {place}"
            )

    def _judge_claims(self) -> None:
        """Who fences the owner before has asked the group first: a thawed zombie must not fence the right owner."""
        for machine in self._machines:
            if machine.agent is not None:
                self._judge_claim(machine.agent.process, "membership.prove", "transaction.acquire")
        for member in self._consumers.members:
            self._judge_claim(member.process, "subscription.prove", "ledger.acquire")

    def _judge_claim(self, process: SimulatedProcess, proof: str, claim: str) -> None:
        read, ahead = self._claims.get(process.name, (0, 0))
        for step in process.steps[read:]:
            ahead += (step == proof) - (step == claim)
            if ahead < 0:
                raise BrokenPromiseError(f"G2: {process.name} fences without the group's word that it may")
        self._claims[process.name] = (len(process.steps), ahead)

    def _judge_bounds(self) -> None:
        shape = self._shape
        records_max = 2 * (shape.batch_records_max + 2 * shape.fire_max) + 1
        for machine in self._machines:
            agent = machine.agent
            if agent is not None and agent.faults.records_max > records_max:
                raise BrokenPromiseError(f"bound: a transaction of {agent.faults.records_max} records")
        for member in self._consumers.members:
            if member.buffered > member.buffered_max:
                raise BrokenPromiseError(f"bound: a consumer buffers {member.buffered} records of a partition")

    # -- at the end --------------------------------------------------------------------------------------------------

    def conclude(self, now_ms: InstantMs, tables: Mapping[int, DiskTable]) -> None:
        """All is healed and time has passed: nothing may be missing. `tables` are those of the last owners."""
        self.look()
        self._judge_lost(now_ms)
        self._judge_refusals()
        self._judge_renewals(now_ms)
        if self._shape.consumers:
            self._judge_missed_effects()
        for partition, table in tables.items():
            try:
                check_table_is_fold(table, self._cluster.log("task-state", partition), _CODEC)
            except AssertionError as error:
                raise BrokenPromiseError(str(error)) from error

    def _judge_lost(self, now_ms: InstantMs) -> None:
        undeliverable = [
            DueTask(
                task_id=dead.task_id,
                generation=dead.generation,
                occurrence=0,
                attempt=0,
                emission_id="",
                due_at_ms=InstantMs(0),
                fired_at_ms=InstantMs(0),
                payload=b"",
            )
            for dead in self.dead
            if dead.reason is Reason.UNDELIVERABLE and dead.generation
        ]
        acknowledged = [sent.as_acknowledged() for sent in self._upstream.kept()]
        emitted = [*self.emissions, *undeliverable]
        _raise_first(missed(emitted, acknowledged, now_ms, remembered=self._remembered))

    def _judge_refusals(self) -> None:
        refused = Counter((dead.origin.partition, dead.origin.offset) for dead in self.dead if not dead.generation)
        for sent in self._upstream.rubbish:
            if sent.is_kept and not refused[sent.partition, sent.entry.offset]:
                raise BrokenPromiseError(f"G1: rubbish at {sent.partition}@{sent.entry.offset} has no dead record")

    def _judge_renewals(self, now_ms: InstantMs) -> None:
        for partition in range(self._shape.partitions):
            stamp_ms = self.positions[partition].stamp_ms
            if now_ms - stamp_ms > STAMP_MS_MAX:
                raise BrokenPromiseError(f"claim: the owner of {partition} has written nothing since {stamp_ms}")

    def _judge_missed_effects(self) -> None:
        finished = {(row.task_id, row.generation, row.occurrence): row.outcome for row in self.applied}
        for task in self.emissions:
            outcome = finished.get((task.task_id, task.generation, task.occurrence))
            if outcome is None:
                raise BrokenPromiseError(f"G6: {task.emission_id} of {task.task_id} was never applied")
            effects = self.outputs[task.emission_id]
            if effects != (outcome is Outcome.APPLIED):
                raise BrokenPromiseError(f"G6: {task.emission_id} is {outcome}, with {effects} effects")


def _raise_first(violations: Iterable[str]) -> None:
    for violation in violations:
        raise BrokenPromiseError(violation)
