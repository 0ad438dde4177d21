"""Consumers that die, freeze, lose partitions and meet every outcome of a commit, at every step of theirs."""

from __future__ import annotations

import random
from collections import Counter
from itertools import count
from typing import TYPE_CHECKING

import pytest

from pipeline.core.applied import Outcome
from pipeline.core.effects import DueTask
from pipeline.core.tasks import DurationMs, InstantMs
from pipeline.service.consumer.counts import BatchRules
from pipeline.service.consumer.due_consumer import ConsumerPorts, DueConsumer, StopRules
from pipeline.service.consumer.task_handling import HandlingRules, TaskContext
from pipeline.testing.memory_cluster import NewRecord
from pipeline.testing.memory_consumers import (
    DEAD,
    DUE,
    LEDGER,
    ConsumerGroupWorld,
    MemoryLedgerTables,
    MemoryLedgerTransactions,
    MemorySubscription,
)
from pipeline.testing.memory_transaction import CommitFault
from pipeline.testing.simulated_process import SimulatedCrashError, SimulatedProcess

if TYPE_CHECKING:
    from collections.abc import Iterable

pytestmark = pytest.mark.simulation

BATCH_MAX = 3
POISON = "poison"
REFUSED = "poison by its output"
STEPS_MAX = 500


def due(task_id: str, generation: int = 1) -> DueTask:
    """An emission; its id is the same whenever it is emitted again."""
    return DueTask(
        task_id=task_id,
        generation=generation,
        occurrence=0,
        attempt=0,
        emission_id=f"{task_id}:{generation}",
        due_at_ms=InstantMs(1),
        fired_at_ms=InstantMs(2),
        payload=b"",
    )


class Member:
    """One consumer process: its handler writes to the outside at once, and to Kafka in the task's transaction."""

    def __init__(self, world: ConsumerGroupWorld, name: str, *, machine: str = "machine") -> None:
        self.process = SimulatedProcess(name)
        self.effects: list[str] = []
        self.transactions = MemoryLedgerTransactions(world, self.process)
        self.transactions.is_poisoned = lambda record: record.topic == "outputs" and record.key == REFUSED.encode()
        self.tables = MemoryLedgerTables(world, self.process, machine=machine)
        self.subscription = MemorySubscription(world, self.process)
        self.consumer = DueConsumer(
            ConsumerPorts(
                subscription=self.subscription,
                transactions=self.transactions,
                tables=self.tables,
                codec=world.codec,
                clock=world.clock,
            ),
            handler=self.handle,
            handling=HandlingRules(group=world.group, topic=DUE, attempts_max=2, backoff_ms=DurationMs(10)),
            batches=BatchRules(batch_max=BATCH_MAX, idle_commit_ms=500),
        )

    def handle(self, task: DueTask, context: TaskContext) -> None:
        """Two effects, one inside and one outside of the ledger's own store."""
        self.process.step("handler")
        if task.task_id == POISON:
            raise ValueError(task.task_id)
        self.effects.append(task.emission_id)
        context.produce("outputs", task.task_id.encode(), task.emission_id.encode())

    def run(self) -> None:
        """Until there has been nothing to do for a while, or the process dies."""
        try:
            self.consumer.run(StopRules(idle_exit_ms=1_500))
        except SimulatedCrashError:
            self.process.kill()


def outputs(world: ConsumerGroupWorld) -> list[str]:
    """The effects inside of the ledger's own store."""
    return sorted((entry.value or b"").decode() for entry in world.cluster.committed("outputs"))


def assert_applied_once(world: ConsumerGroupWorld, tasks: Iterable[DueTask]) -> None:
    """One row a task, one output an applied task, one dead record a failed one; nothing else."""
    expected = Counter({(task.task_id, task.generation): 1 for task in tasks})
    rows = world.rows()
    assert Counter((row.task_id, row.generation) for row in rows) == expected
    applied = [row for row in rows if row.outcome is Outcome.APPLIED]
    assert outputs(world) == sorted(f"{row.task_id}:{row.generation}" for row in applied)
    failed = {row.task_id for row in rows if row.outcome is Outcome.FAILED}
    assert failed == {task.task_id for task in tasks if task.task_id.startswith(POISON)}
    dead = [world.codec.decode_dead(entry.value or b"") for entry in world.cluster.committed(DEAD)]
    assert Counter(task.task_id for task in dead) == Counter(failed)


@pytest.mark.parametrize("machine", ["the same machine", "another machine"])
def test_a_crash_at_any_step_repeats_no_effect_in_kafka_and_at_most_one_batch_outside(machine: str) -> None:
    """Cases 34 and 37: between the move of the queue and its ack there is no gap, wherever the process dies."""
    for step in count(1):
        assert step < STEPS_MAX, "the consumer never gets through"
        world = ConsumerGroupWorld()
        tasks = [due(f"t{number}") for number in range(7)] + [
            due(REFUSED),
            due("t7"),
            due(POISON),
            due("t0", generation=2),
        ]
        world.emit(*tasks[:4])
        world.emit(due("aborted"), commit=False)
        world.emit(*tasks[4:], tasks[0])
        first, second = Member(world, "first", machine="the same machine"), Member(world, "second", machine=machine)
        world.give(0, "first")
        first.process.crash_before_step(step)

        first.run()
        if first.process.alive:
            break
        world.expel("first", "second")
        second.run()

        assert_applied_once(world, tasks)
        repeated = Counter(first.effects + second.effects)
        assert set(repeated) == {task.emission_id for task in tasks if task.task_id != POISON}
        assert sum(repeated.values()) - len(repeated) <= BATCH_MAX
        assert world.committed_offset(0) == world.cluster.log(DUE, 0).end_offset
    assert step > 30, "the story is too short to mean anything"


@pytest.mark.parametrize("fault", list(CommitFault))
@pytest.mark.parametrize("number", range(4))
def test_every_outcome_of_a_commit_ends_in_one_application(fault: CommitFault, number: int) -> None:
    """A commit without an answer may have happened: only the ledger on Kafka can tell, never what is in memory."""
    world = ConsumerGroupWorld()
    tasks = [due(f"t{at}") for at in range(8)]
    world.emit(*tasks)
    world.give(0, "only")
    member = Member(world, "only")
    member.transactions.commits.extend([*[None] * number, fault])

    member.run()

    assert_applied_once(world, tasks)
    assert sum(Counter(member.effects).values()) - len(tasks) <= BATCH_MAX


def test_a_zombie_that_thaws_in_its_handler_writes_nothing() -> None:
    """Its partition was given away while it stood still; its row, its output and its offset must not count."""
    world = ConsumerGroupWorld()
    tasks = [due(f"t{at}") for at in range(5)]
    world.emit(*tasks)
    world.give(0, "zombie")
    zombie, heir = Member(world, "zombie", machine="its own"), Member(world, "heir")

    def freeze_once(step: str) -> None:
        if step == "handler" and len(zombie.effects) == 1:
            zombie.process.on_step = None
            world.expel("zombie", "heir")
            heir.run()

    zombie.process.on_step = freeze_once

    zombie.run()

    assert_applied_once(world, tasks)
    assert zombie.consumer.counts.applied == 0
    assert sorted(heir.effects) == sorted(task.emission_id for task in tasks)


def test_restore_waits_for_a_foreign_transaction_on_the_ledger_partition() -> None:
    """The last stable offset would end the restore before the group's own rows, and all would be applied again."""
    world = ConsumerGroupWorld()
    tasks = [due(f"t{at}") for at in range(4)]
    world.emit(*tasks)
    stranger = world.cluster.producer("another-group")
    stranger.init()
    stranger.send(NewRecord(topic=LEDGER, partition=0, key=b"other\x001\x000\x00x", value=b"row"))
    world.give(0, "first")
    first, second = Member(world, "first"), Member(world, "second", machine="another")
    first.consumer.open()
    while first.consumer.counts.applied < len(tasks):
        first.consumer.step()
    world.expel("first", "second")
    world.emit(*tasks)

    second.run()

    assert_applied_once(world, tasks)
    assert second.effects == []


class Turmoil:
    """Three members on two machines, and a seeded hand that moves, freezes and fails them between any two effects."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.world = ConsumerGroupWorld(partition_count=3)
        self.members = [Member(self.world, f"m{number}", machine=f"machine {number % 2}") for number in range(3)]
        self.names = [member.process.name for member in self.members]
        self.tasks: list[DueTask] = []
        self.running = self.members[0]
        self.frozen = False
        for partition in range(3):
            self.world.give(partition, self.chance.choice(self.names))
        for member in self.members:
            member.consumer.open()
            member.process.on_step = self.disturb

    def disturb(self, step: str) -> None:
        """Now and then: who runs stands still here, while the group moves partitions and somebody else goes on."""
        del step
        if self.frozen or self.chance.random() > 0.04:
            return
        self.frozen = True
        if self.chance.random() < 0.5:
            self.world.expel(self.chance.choice(self.names), self.chance.choice(self.names))
        elif self.world.owners:
            self.world.give(self.chance.choice(list(self.world.owners)), self.chance.choice(self.names))
        other = self.chance.choice([member for member in self.members if member is not self.running])
        for _ in range(self.chance.randrange(6)):
            other.consumer.step()
        self.frozen = False

    def emit(self) -> None:
        """New tasks, and old ones again as a replay does."""
        if self.chance.random() < 0.2:
            fresh = [due(f"t{len(self.tasks)}-{at}") for at in range(self.chance.randrange(1, 6))]
            self.world.emit(*fresh)
            self.tasks += fresh
        if self.tasks and self.chance.random() < 0.1:
            self.world.emit(self.chance.choice(self.tasks), headers={"duetasks-replay": b"1"})

    def step(self) -> None:
        """One member's step, perhaps with a fault waiting for its next commit."""
        self.running = self.chance.choice(self.members)
        if self.chance.random() < 0.1:
            self.running.transactions.commits.append(self.chance.choice([None, *CommitFault]))
        self.running.consumer.step()

    def heal(self) -> None:
        """No more faults; everybody gets the time to finish."""
        for member in self.members:
            member.process.on_step = None
            member.transactions.commits.clear()
        for _ in range(600):
            for member in self.members:
                member.consumer.step()


@pytest.mark.parametrize("seed", range(60))
def test_random_moves_freezes_and_faults_never_apply_twice(seed: int) -> None:
    """Cases 30 and 38: partitions go to and fro, owners freeze between any two effects, commits fail in every way."""
    print(f"seed {seed}")  # noqa: T201  # to be found in a failure's output
    turmoil = Turmoil(seed)

    for _ in range(300):
        turmoil.emit()
        turmoil.step()
    turmoil.heal()

    world = turmoil.world
    assert_applied_once(world, turmoil.tasks)
    for partition in range(3):
        assert world.committed_offset(partition) == world.cluster.log(DUE, partition).end_offset
