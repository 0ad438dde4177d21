"""What each word of the vocabulary does to a world. Every choice is drawn from the step's own number."""

import random
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from pipeline.core.applied import AppliedTask, Outcome, ledger_key
from pipeline.core.events import Cancel, Event, Schedule
from pipeline.core.tasks import DurationMs, InstantMs, Offset, TaskId
from pipeline.service.consumer.task_handling import REPLAY_HEADER
from pipeline.testing.memory_cluster import NewRecord
from pipeline.testing.memory_transaction import CommitFault
from pipeline.testing.simulated_process import SimulatedProcess
from pipeline.testing.simulator.consumers import FAILING
from pipeline.testing.simulator.machine import Machine
from pipeline.testing.simulator.plan import Kind, Step
from pipeline.testing.simulator.upstream import EVENTS, describe
from pipeline.testing.simulator.world import POISON, World

__all__ = ["perform"]

_DUE_IN_MS: Final = (-500, 0, 1, 20, 300, 300, 1_000, 1_500, 3_000, 8_000, 30_000)
_CLOCK_STEPS_MS: Final = (-3_000, -400, -50, 50, 400, 3_000)
_LONG_CLOCK_STEPS_MS: Final = (-3_600_000, 3_600_000)
_DRIFTS_PPM: Final = (-200_000, -500, 500, 200_000)
_BURST: Final = 12
_SOON_MS: Final = 3_000
_STEPS_A_VERSION: Final = 3
"""So that now and then two events of a task have the same version."""


class _Act:
    """One step on its way: the world, the step's own choices, its number."""

    def __init__(self, world: World, step: Step) -> None:
        self.world = world
        self.number = step.number
        self.kind = step.kind
        self.choices = random.Random(step.pick)  # noqa: S311  # to be repeated, not to be secret

    def chance(self, percent: int) -> bool:
        return self.choices.randrange(100) < percent

    def note(self, what: str) -> None:
        self.world.note(f"#{self.number} {what}")

    def machine(self) -> Machine:
        return self.choices.choice(self.world.machines)

    def partition(self) -> int:
        return self.choices.randrange(self.world.shape.partitions)


async def perform(world: World, step: Step) -> None:
    """Do what the step says; a step that makes no sense now (thaw what is not frozen) does nothing."""
    done = _ACTIONS[step.kind](_Act(world, step))
    if done is not None:
        await done


# -- what upstreams do -----------------------------------------------------------------------------------------------


def _event(act: _Act, *, is_cancel: bool) -> Event:
    shape, choices = act.world.shape, act.choices
    task = choices.randrange(shape.tasks)
    is_poison = Kind.POISON_RECORD in shape.nemeses and task == 0
    task_id = TaskId(f"{POISON if is_poison else 'task'} {task}")
    # Some tasks are versioned: rising with the step, sometimes out of order.
    versioned = task % 3 == 1 and not shape.is_forgetful
    version = max(1, act.number // _STEPS_A_VERSION + choices.choice([-4, -1, 0, 0, 0])) if versioned else 0
    event_id = f"e{act.number}"
    if is_cancel:
        return Cancel(task_id=task_id, event_id=event_id, version=version)
    due_in_ms = choices.choice(_DUE_IN_MS)
    payload = FAILING if choices.randrange(12) == 0 else event_id.encode()
    if choices.randrange(4) == 0:
        return Schedule(
            task_id=task_id, event_id=event_id, version=version, delay_ms=DurationMs(max(0, due_in_ms)), payload=payload
        )
    due_at_ms = InstantMs(act.world.clock.now_ms() + due_in_ms)
    return Schedule(task_id=task_id, event_id=event_id, version=version, due_at_ms=due_at_ms, payload=payload)


def _send(act: _Act, event: Event) -> None:
    upstream, choices = act.world.upstream, act.choices
    if Kind.OPEN_TRANSACTION in act.world.shape.nemeses and act.chance(15):
        act.note(f"{describe(event)}, in a transaction")
        upstream.send_in_transaction(event)
        return
    after_ms = choices.choice([0, 0, 0, 0, 10, 400]) if not act.world.shape.is_forgetful else 0
    answer_ms = choices.choice([0, 0, 0, 5, 300])
    is_answered = act.world.shape.is_forgetful or not act.chance(8)
    act.note(
        describe(event)
        + (f", sent {after_ms} ms later" if after_ms else "")
        + ("" if is_answered else ", the answer is lost and it is sent again")
    )
    upstream.send(event, after_ms=after_ms, answer_ms=answer_ms, is_answered=is_answered)


def _schedule(act: _Act) -> None:
    _send(act, _event(act, is_cancel=False))


def _cancel(act: _Act) -> None:
    if not act.world.shape.is_forgetful and act.chance(40) and _cancel_at_the_last_moment(act):
        return
    _send(act, _event(act, is_cancel=True))


def _cancel_at_the_last_moment(act: _Act) -> bool:
    """Of something that is due soon, so that it is acknowledged just before or after that; False if nothing is."""
    now_ms = act.world.clock.now_ms()
    soon = [
        event
        for event in act.world.upstream.last_events(8)
        if isinstance(event, Schedule) and event.due_at_ms is not None and 0 < event.due_at_ms - now_ms <= _SOON_MS
    ]
    if not soon:
        return False
    target = act.choices.choice(soon)
    assert target.due_at_ms is not None, "chosen by it"
    version = target.version + act.choices.choice([0, 1]) if target.version else 0
    cancel = Cancel(task_id=target.task_id, event_id=f"e{act.number}", version=version)
    after_ms = max(0, target.due_at_ms - now_ms - act.choices.choice([-3, 1, 1, 3, 10, 40, 150]))
    act.note(f"{describe(cancel)}, sent {after_ms} ms later, when it is about to be due")
    act.world.upstream.send(cancel, after_ms=after_ms)
    return True


def _burst(act: _Act) -> None:
    due_at_ms = InstantMs(act.world.clock.now_ms() + act.choices.choice([0, 100, 1_000]))
    act.note(f"{_BURST} tasks that are due at {due_at_ms}")
    for number in range(_BURST):
        task_id = TaskId(f"burst {act.number}.{number}")
        act.world.upstream.send(Schedule(task_id=task_id, event_id=f"e{act.number}.{number}", due_at_ms=due_at_ms))


def _send_again(act: _Act) -> None:
    events = act.world.upstream.last_events(5)
    if events:
        event = act.choices.choice(events)
        act.note(f"{describe(event)}, once more")
        act.world.upstream.send(event)


def _poison(act: _Act) -> None:
    key, value = act.choices.choice([(b"task 3", b"rubbish"), (b"task 3", None), (None, b"rubbish"), (b"\xff", b"C")])
    act.note(f"a record with key {key!r} and value {value!r}")
    act.world.upstream.send_rubbish(key, value, act.partition())


def _refused_event(act: _Act) -> None:
    """What breaks a rule: a target that is not on the list, or a partition that is not the task's."""
    event = _event(act, is_cancel=False)
    assert isinstance(event, Schedule), "no cancel was asked for"
    partitions = act.world.shape.partitions
    if partitions > 1 and act.chance(50):
        # A task that nobody has heard of: in a partition where it has a row already, its key would not be looked at.
        stray = msgspec.structs.replace(event, task_id=TaskId(f"stray {act.number}"))
        partition = (act.world.upstream.partition_of(stray.task_id) + 1) % partitions
        act.note(f"{describe(stray)}, in partition {partition}, where it does not belong")
        value = act.world.codec.encode_event(stray)
        act.world.upstream.send_rubbish(stray.task_id.encode(), value, partition)
        return
    act.note(f"{describe(event)}, for a topic that is not allowed")
    version = event.version + act.choices.choice([0, 1, 4]) if event.version else 0
    act.world.upstream.send_refused(msgspec.structs.replace(event, target_topic="nowhere", version=version))


def _end_transaction(act: _Act) -> None:
    if act.world.upstream.has_open_transaction:
        commit = act.chance(60)
        act.note(f"the upstream {'commits' if commit else 'aborts'} its transaction")
        act.world.upstream.end_transaction(commit=commit)


def _open_transaction(act: _Act) -> None:
    event = _event(act, is_cancel=act.chance(50))
    act.note(f"{describe(event)}, in a transaction")
    act.world.upstream.send_in_transaction(event)


# -- processes -------------------------------------------------------------------------------------------------------


async def _crash(act: _Act) -> None:
    agent = act.machine().running
    if agent is None:
        return
    if act.chance(50):
        act.note(f"{agent.process.name} is killed")
        await agent.kill()
        return
    steps = act.choices.randrange(1, 25)
    act.note(f"{agent.process.name} will die before its {steps}th effect from now")
    agent.process.crash_before_step(len(agent.process.steps) + steps)


async def _restart(act: _Act) -> None:
    machine = act.machine()
    if machine.running is None:
        if machine.agent is not None:
            await machine.agent.kill()  # it may have died by itself: its tasks are ended
        agent = act.world.start_agent(machine)
        act.note(f"{agent.process.name} starts")


def _freeze(act: _Act) -> None:
    agent = act.machine().running
    if agent is not None:
        _stop_signal(act, agent.process)


def _stop_signal(act: _Act, process: SimulatedProcess) -> None:
    """Now, or in the middle of what it will do."""
    if act.chance(50):
        act.note(f"{process.name} is frozen")
        process.freeze()
        return
    steps = act.choices.randrange(1, 25)
    act.note(f"{process.name} will be frozen after its {steps}th effect from now")
    process.freeze_after_step(len(process.steps) + steps)


def _thaw(act: _Act) -> None:
    processes = [agent.process for agent in act.world.agents] + [
        member.process for member in act.world.consumers.living
    ]
    frozen = [process for process in processes if not process.responds]
    if frozen:
        process = act.choices.choice(frozen)
        act.note(f"{process.name} goes on")
        process.thaw()


def _rebalance(act: _Act) -> None:
    act.note("rebalance")
    act.world.coordinator.rebalance()


def _partition_lost(act: _Act) -> None:
    agent = act.machine().running
    if agent is not None:
        act.note(f"the group expels {agent.process.name}")
        act.world.coordinator.expel(agent)


async def _join_or_leave(act: _Act) -> None:
    machine = act.machine()
    agent = machine.running
    if agent is None:
        await _restart(act)
    elif agent.process.responds and len(act.world.agents) > 1:
        act.note(f"{agent.process.name} leaves in good order")
        await agent.stop()


# -- brokers ---------------------------------------------------------------------------------------------------------


def _faults(act: _Act) -> list[CommitFault | None]:
    """A few commits that go wrong, each in its way or all in the same."""
    count = act.choices.randrange(1, 5)
    if act.chance(30):
        return [act.choices.choice(list(CommitFault))] * count
    return [act.choices.choice([None, *CommitFault]) for _ in range(count)]


def _commit_fault(act: _Act) -> None:
    agent = act.machine().running
    if agent is not None:
        faults = _faults(act)
        act.note(f"the next commits of {agent.process.name}: {', '.join(str(fault or 'well') for fault in faults)}")
        agent.faults.commits.extend(faults)


def _unavailable(act: _Act) -> None:
    agent = act.machine().running
    if agent is not None:
        act.note(f"{agent.process.name} gets no answers for a while")
        agent.faults.unavailable_acquires += act.choices.randrange(2)
        for simulated in agent.simulated.values():
            simulated.end_offsets.unavailable += act.choices.randrange(3)


def _stranger(act: _Act) -> None:
    topics = ["task-state", *(["applied-tasks"] if act.world.shape.consumers else [])]
    topic, partition = act.choices.choice(topics), act.partition()
    act.note(f"a stranger's transaction stays open in {topic}-{partition}")
    stranger = act.world.cluster.producer(f"stranger {act.number}")
    stranger.init()
    stranger.send(NewRecord(topic=topic, partition=partition, key=b"task 9", value=b"never seen"))
    if topic == "applied-tasks" and act.chance(50):
        _other_group(act, partition)


def _other_group(act: _Act, partition: int) -> None:
    """Another group has applied the last emissions already: its rows stand in the same ledger."""
    world = act.world
    for entry in world.cluster.log("due-tasks", partition).committed()[-3:]:
        task = world.codec.decode_due(entry.value or b"")
        row = AppliedTask(
            group="another",
            task_id=task.task_id,
            generation=task.generation,
            occurrence=task.occurrence,
            attempt=task.attempt,
            due_partition=partition,
            due_offset=entry.offset,
            applied_at_ms=world.clock.now_ms(),
            outcome=Outcome.APPLIED,
        )
        world.cluster.send(
            "applied-tasks", ledger_key("another", task), world.codec.encode_applied(row), partition=partition
        )


def _replay(act: _Act) -> None:
    """An operator emits again what was emitted: who has applied it must not apply it again."""
    world, partition = act.world, act.partition()
    log = world.cluster.log("due-tasks", partition)
    found = log.committed()[-20:]
    for entry in act.choices.sample(found, min(len(found), 3)):
        act.note(f"what stands at due-tasks-{partition}@{entry.offset} is emitted again")
        log.append(entry.key, entry.value, at_ms=world.clock.now_ms(), headers={REPLAY_HEADER: b"by an operator"})
    world.cluster.notify()


def _hold_markers(act: _Act) -> None:
    cluster = act.world.cluster
    cluster.hold_markers = not cluster.hold_markers
    act.note("markers are held back" if cluster.hold_markers else "markers are written")
    if not cluster.hold_markers:
        cluster.write_markers()


def _lagging_replicas(act: _Act) -> None:
    topic = act.choices.choice([EVENTS, EVENTS, "task-state", "due-tasks"])
    log, name = act.world.cluster.log(topic, partition := act.partition()), f"{topic}-{partition}"
    if log.end_offset < log.log_end_offset:
        act.note(f"the replicas of {name} catch up")
        log.release()
        act.world.upstream.settle()
        act.world.cluster.notify()
    else:
        act.note(f"the replicas of {name} lag")
        log.hold()


def _leader_change(act: _Act) -> None:
    topic = act.choices.choice([EVENTS, EVENTS, "task-state", "due-tasks"])
    log, name = act.world.cluster.log(topic, partition := act.partition()), f"{topic}-{partition}"
    lost = log.change_leader()
    act.note(f"another leader for {name}; {lost} unacknowledged records are gone")
    act.world.upstream.settle()
    act.world.cluster.notify()
    for agent in act.world.agents:
        for simulated in agent.simulated.values():
            simulated.end_offsets.unavailable += act.choices.randrange(2)


def _deposed_leader(act: _Act) -> None:
    """For a few questions to come, the agent is answered what was true now, or a while ago.

    The plain fence takes the leader's word (a limit that the promises state); the written one does not, and neither
    does a restore.
    """
    topics = ["task-state", *([EVENTS, EVENTS] if act.world.shape.fence_by_writing else [])]
    topic, answers = act.choices.choice(topics), act.choices.randrange(1, 10)
    act.note(f"a deposed leader of {topic} answers whoever asks, {answers} times")
    for partition in range(act.world.shape.partitions):
        old_end = act.world.cluster.log(topic, partition).end_offset
        left = [answers]

        def answer(asked: str, end: Offset, old_end: Offset = old_end, left: list[int] = left) -> Offset:
            if asked != topic or left[0] <= 0:
                return end
            left[0] -= 1
            return min(end, old_end)

        for agent in act.world.agents:
            agent.answer(partition, answer)


def _compact(act: _Act) -> None:
    act.note("compaction of task-state and of what was read of task-events")
    act.world.compact()


def _retain(act: _Act) -> None:
    world = act.world
    act.note("retention removes what was read")
    world.upstream.settle()
    for partition in range(world.shape.partitions):
        world.cluster.log(EVENTS, partition).delete_before(world.position(partition))
        if world.shape.consumers:
            log = world.cluster.log("due-tasks", partition)
            log.delete_before(min(log.end_offset, world.consumers.world.committed_offset(partition)))


async def _recreate(act: _Act) -> None:
    """An operator stops the agents and creates `task-events` anew: offsets begin again, generations must not."""
    world = act.world
    for log in world.logs([EVENTS]):
        log.release()
    world.cluster.notify()
    await world.upstream.idle()
    world.upstream.end_transaction(commit=False)
    for agent in world.agents:
        await agent.kill()
    world.upstream.settle()
    act.note("agents are stopped, task-events is deleted and created")
    for partition in range(world.shape.partitions):
        position = world.position(partition)
        world.upstream.forget_unread(partition, position)
        world.upstream.generation_bases[partition] += position
    world.cluster.create_topic(EVENTS, world.shape.partitions)
    for machine in world.machines:
        world.start_agent(machine)


# -- clocks and disks ------------------------------------------------------------------------------------------------


def _clock_step(act: _Act) -> None:
    machine = act.machine()
    steps = _CLOCK_STEPS_MS + (_LONG_CLOCK_STEPS_MS if act.world.shape.long_clock_steps else ())
    by_ms = act.choices.choice(steps)
    act.note(f"the clock of {machine.name} steps by {by_ms} ms")
    machine.clock.step(by_ms)


def _clock_drift(act: _Act) -> None:
    machine, ppm = act.machine(), act.choices.choice(_DRIFTS_PPM)
    act.note(f"the clock of {machine.name} gains {ppm} ppm")
    machine.clock.drift(ppm)


def _disk_full(act: _Act) -> None:
    machine = act.machine()
    machine.disk.is_full = not machine.disk.is_full
    act.note(f"the disk of {machine.name} {'is full' if machine.disk.is_full else 'has room again'}")


async def _with_the_machine_down(act: _Act, what: str, do: Callable[[Machine, int], None]) -> None:
    """Kill the agent of a machine, and do something to one table on its disk."""
    machine, partition = act.machine(), act.partition()
    if partition not in machine.disk.tables:
        return
    if machine.agent is not None:
        await machine.agent.kill()
    act.note(f"{machine.name} goes down; {what} ({partition})")
    do(machine, partition)


async def _disk_lost(act: _Act) -> None:
    await _with_the_machine_down(act, "its table is lost", lambda machine, partition: machine.disk.lose(partition))


async def _disk_spoiled(act: _Act) -> None:
    await _with_the_machine_down(act, "its table is spoiled", lambda machine, partition: machine.disk.spoil(partition))


async def _power_loss(act: _Act) -> None:
    writes = act.choices.randrange(1, 4)
    await _with_the_machine_down(
        act,
        f"its table loses the last {writes} writes",
        lambda machine, partition: machine.disk.lose_power(partition, writes),
    )


async def _older_copy(act: _Act) -> None:
    machine, partition = act.machine(), act.partition()
    if partition not in machine.disk.tables:
        return
    if partition not in machine.copies:
        act.note(f"somebody copies table {partition} of {machine.name}")
        machine.copies[partition] = machine.disk.copy(partition)
        return
    copy = machine.copies.pop(partition)
    if machine.agent is not None:
        await machine.agent.kill()
    act.note(f"{machine.name} goes down; the copy of table {partition} is put back")
    machine.disk.put_back(partition, copy)


# -- consumers -------------------------------------------------------------------------------------------------------


async def _consumer_crash(act: _Act) -> None:
    living = act.world.consumers.living
    if not living or (len(living) < act.world.shape.consumers and act.chance(60)):
        if act.world.shape.consumers:
            act.note(f"{act.world.start_consumer()} starts")
        return
    member = act.choices.choice(living)
    if act.chance(40):
        act.note(f"{member.process.name} is killed")
        await member.kill()
        return
    steps = act.choices.randrange(1, 20)
    act.note(f"{member.process.name} will die before its {steps}th effect from now")
    member.process.crash_before_step(len(member.process.steps) + steps)


def _consumer_freeze(act: _Act) -> None:
    living = act.world.consumers.living
    if living:
        member = act.choices.choice(living)
        _stop_signal(act, member.process)


def _slow_consumer(act: _Act) -> None:
    living = act.world.consumers.living
    if living:
        member = act.choices.choice(living)
        act.note(f"{member.process.name} is slow for 20 s")
        member.slow_until_ms = act.world.clock.monotonic_ms() + 20_000


def _consumer_fault(act: _Act) -> None:
    living = act.world.consumers.living
    if living:
        member = act.choices.choice(living)
        faults = _faults(act)
        act.note(f"the next commits of {member.process.name}: {', '.join(str(fault or 'well') for fault in faults)}")
        member.transactions.commits.extend(faults)


_ACTIONS: Final[dict[Kind, Callable[[_Act], Awaitable[None] | None]]] = {
    Kind.SCHEDULE: _schedule,
    Kind.CANCEL: _cancel,
    Kind.BURST: _burst,
    Kind.SEND_AGAIN: _send_again,
    Kind.END_TRANSACTION: _end_transaction,
    Kind.CRASH: _crash,
    Kind.RESTART: _restart,
    Kind.FREEZE: _freeze,
    Kind.THAW: _thaw,
    Kind.REBALANCE: _rebalance,
    Kind.PARTITION_LOST: _partition_lost,
    Kind.JOIN_OR_LEAVE: _join_or_leave,
    Kind.COMMIT_FAULT: _commit_fault,
    Kind.UNAVAILABLE: _unavailable,
    Kind.OPEN_TRANSACTION: _open_transaction,
    Kind.STRANGER: _stranger,
    Kind.HOLD_MARKERS: _hold_markers,
    Kind.LAGGING_REPLICAS: _lagging_replicas,
    Kind.LEADER_CHANGE: _leader_change,
    Kind.DEPOSED_LEADER: _deposed_leader,
    Kind.COMPACTION: _compact,
    Kind.RETENTION: _retain,
    Kind.TOPIC_RECREATED: _recreate,
    Kind.CLOCK_STEP: _clock_step,
    Kind.CLOCK_DRIFT: _clock_drift,
    Kind.DISK_FULL: _disk_full,
    Kind.DISK_LOST: _disk_lost,
    Kind.DISK_SPOILED: _disk_spoiled,
    Kind.OLDER_COPY: _older_copy,
    Kind.POWER_LOSS: _power_loss,
    Kind.POISON_RECORD: _poison,
    Kind.REFUSED_EVENT: _refused_event,
    Kind.REPLAY: _replay,
    Kind.CONSUMER_CRASH: _consumer_crash,
    Kind.CONSUMER_FREEZE: _consumer_freeze,
    Kind.SLOW_CONSUMER: _slow_consumer,
    Kind.CONSUMER_FAULT: _consumer_fault,
}
