"""The rules of the consumer's loop, over in-memory twins."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pipeline.core.applied import Outcome, ledger_key
from pipeline.core.effects import DueTask
from pipeline.core.events import Reason
from pipeline.core.partitioning import partition_for_key
from pipeline.core.tasks import DurationMs, InstantMs, Offset
from pipeline.errors import UnavailableError, UsageError
from pipeline.service.consumer.counts import BatchRules
from pipeline.service.consumer.due_consumer import ConsumerPorts, DueConsumer, StopRules
from pipeline.service.consumer.task_handling import OUTPUTS_MAX, ConsumerStopError, HandlingRules, TaskContext
from pipeline.testing.memory_cluster import NewRecord
from pipeline.testing.memory_consumers import (
    DEAD,
    DUE,
    LEDGER,
    OFFSETS,
    ConsumerGroupWorld,
    MemoryLedgerTables,
    MemoryLedgerTransactions,
    MemorySubscription,
)
from pipeline.testing.memory_transaction import CommitFault
from pipeline.testing.simulated_process import SimulatedProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pipeline.core.effects import DeadTask
    from pipeline.service.consumer.ports import Fetched

pytestmark = pytest.mark.unit

IDLE = StopRules(idle_exit_ms=1_500)


def due(task_id: str, *, payload: bytes = b"") -> DueTask:
    """A due task with an emission id made from its own."""
    return DueTask(
        task_id=task_id,
        generation=1,
        occurrence=0,
        attempt=0,
        emission_id=f"e-{task_id}",
        due_at_ms=InstantMs(1),
        fired_at_ms=InstantMs(2),
        payload=payload,
    )


class Rig:
    """A world, one consumer in it, and what its handler saw; `on_task` may raise or change the world."""

    def __init__(self, *, partition_count: int = 1, attempts_max: int = 3, **batches: int) -> None:
        self.world = ConsumerGroupWorld(partition_count=partition_count)
        self.seen: list[tuple[str, int]] = []
        self.contexts: list[TaskContext] = []
        self.on_task: Callable[[DueTask, TaskContext], object] = lambda _task, _context: None
        self.process = SimulatedProcess("me")
        self.transactions = MemoryLedgerTransactions(self.world, self.process)
        self.tables = MemoryLedgerTables(self.world, self.process)
        self.subscription = MemorySubscription(self.world, self.process)
        self.consumer = DueConsumer(
            ConsumerPorts(
                subscription=self.subscription,
                transactions=self.transactions,
                tables=self.tables,
                codec=self.world.codec,
                clock=self.world.clock,
            ),
            handler=self._handle,
            handling=HandlingRules(
                group=self.world.group, topic=DUE, attempts_max=attempts_max, backoff_ms=DurationMs(1_000)
            ),
            batches=BatchRules(**{"idle_commit_ms": 500, **batches}),
        )
        for partition in range(partition_count):
            self.world.give(partition, "me")

    def _handle(self, task: DueTask, context: TaskContext) -> None:
        self.seen.append((task.task_id, self.world.clock.monotonic_ms()))
        self.contexts.append(context)
        self.on_task(task, context)

    @property
    def ids(self) -> list[str]:
        """The tasks that the handler was called for, in order."""
        return [task_id for task_id, _ in self.seen]

    def applied(self) -> list[str]:
        """The committed rows that say APPLIED."""
        return sorted(row.task_id for row in self.world.rows() if row.outcome is Outcome.APPLIED)

    def dead(self) -> list[DeadTask]:
        """What is on dead-tasks."""
        return [self.world.codec.decode_dead(entry.value or b"") for entry in self.world.cluster.committed(DEAD)]


def raising(*task_ids: str, error: type[Exception] = ValueError) -> Callable[[DueTask, TaskContext], None]:
    """A handler that fails for these tasks."""

    def handle(task: DueTask, _context: TaskContext) -> None:
        if task.task_id in task_ids:
            raise error(task.task_id)

    return handle


# -- handling ------------------------------------------------------------------------------------------------------


def test_a_task_whose_handler_keeps_raising_goes_to_dead_tasks_and_the_others_go_on() -> None:
    """A poison task must neither block its partition nor vanish."""
    rig = Rig(attempts_max=3)
    rig.world.emit(due("a"), due("bad"), due("c"))
    rig.on_task = raising("bad")

    counts = rig.consumer.run(IDLE)

    assert rig.ids == ["a", "bad", "bad", "bad", "c"]
    assert rig.applied() == ["a", "c"]
    (dead,) = rig.dead()
    assert (dead.reason, dead.task_id, dead.origin.offset) == (Reason.HANDLER_FAILED, "bad", 1)
    assert "ValueError: bad" in dead.message
    assert (counts.applied, counts.failed) == (2, 1)


def test_a_failing_task_waits_longer_each_time_while_other_partitions_go_on() -> None:
    """A pause that held up the whole consumer would turn one bad task into an outage."""
    rig = Rig(partition_count=2, attempts_max=3)
    other = next(f"t{n}" for n in range(99) if partition_for_key(f"t{n}".encode(), 2) != partition_for_key(b"bad", 2))
    rig.world.emit(due("bad"))
    rig.on_task = raising("bad")
    rig.consumer.open()
    while rig.ids != ["bad"]:
        rig.consumer.step()
    rig.world.emit(due(other))
    while other not in rig.ids:
        rig.consumer.step()
    while rig.consumer.counts.failed == 0:
        rig.consumer.step()

    assert rig.ids == ["bad", other, "bad", "bad"]
    times = [at_ms for task_id, at_ms in rig.seen if task_id == "bad"]
    assert times[1] - times[0] >= 1_000
    assert times[2] - times[1] >= 2_000


def test_what_was_handled_before_a_failing_task_is_committed_at_once() -> None:
    """Otherwise a crash during the pause would repeat tasks that were done long before."""
    rig = Rig()
    rig.world.emit(due("a"), due("bad"))
    rig.on_task = raising("bad")
    rig.consumer.open()

    while "bad" not in rig.ids:
        rig.consumer.step()

    assert rig.applied() == ["a"]


def test_a_handler_whose_store_is_down_is_tried_without_end() -> None:
    """An outage says nothing against the tasks: it must not empty the topic into dead-tasks."""
    rig = Rig(attempts_max=2)
    rig.world.emit(due("a"))

    def handle(_task: DueTask, context: TaskContext) -> None:
        if context.attempt <= 6:
            raise UnavailableError("the database is down")

    rig.on_task = handle

    rig.consumer.run(IDLE)

    assert [context.attempt for context in rig.contexts] == [1, 2, 3, 4, 5, 6, 7]
    assert rig.applied() == ["a"]
    assert rig.dead() == []


def test_a_record_that_is_no_due_task_is_set_aside_and_the_next_go_on() -> None:
    """One unreadable record must not stop a partition for ever."""
    rig = Rig()
    rig.world.cluster.send(DUE, b"k", b"rubbish", partition=0)
    rig.world.cluster.send(DUE, b"k", None, partition=0)
    rig.world.emit(due("a"))

    counts = rig.consumer.run(IDLE)

    assert rig.applied() == ["a"]
    assert [(dead.reason, dead.key, dead.value) for dead in rig.dead()] == [
        (Reason.MALFORMED, b"k", b"rubbish"),
        (Reason.MALFORMED, b"k", None),
    ]
    assert counts.malformed == 2


def test_records_of_failed_attempts_are_never_sent() -> None:
    """What the handler produced before it raised would otherwise be sent once for each attempt."""
    rig = Rig()
    rig.world.emit(due("a"))

    def handle(task: DueTask, context: TaskContext) -> None:
        context.produce("outputs", b"k", str(context.attempt).encode(), headers={"h": b"1"})
        if context.attempt < 3:
            raise ValueError(task.task_id)

    rig.on_task = handle

    rig.consumer.run(IDLE)

    (sent,) = rig.world.cluster.committed("outputs")
    assert (sent.key, sent.value, sent.headers) == (b"k", b"3", {"h": b"1"})


def test_a_handler_may_produce_only_so_many_records() -> None:
    """A transaction without a bound would outgrow its time-out."""
    rig = Rig(attempts_max=1)
    rig.world.emit(due("a"))

    def handle(_task: DueTask, context: TaskContext) -> None:
        for _ in range(OUTPUTS_MAX):
            context.produce("outputs", None, b"")
        with pytest.raises(UsageError, match="1000 records"):
            context.produce("outputs", None, b"")

    rig.on_task = handle

    rig.consumer.run(IDLE)

    assert rig.applied() == ["a"]


def test_the_handler_is_told_that_a_task_is_a_replay() -> None:
    """A handler may want to know; the ledger makes the others harmless."""
    rig = Rig()
    rig.world.emit(due("first"))
    rig.world.emit(due("again"), headers={"duetasks-replay": b"1"})

    rig.consumer.run(IDLE)

    assert [(context.replay, context.offset, context.partition) for context in rig.contexts] == [
        (False, 0, 0),
        (True, 2, 0),
    ]


# -- batches -------------------------------------------------------------------------------------------------------


def test_a_record_that_cannot_be_sent_sets_its_own_task_aside_and_no_other() -> None:
    """Case 22: one that is too large must not block what is in its batch, nor have it applied again."""
    rig = Rig(batch_max=16)
    rig.world.emit(*[due(f"t{number:02}") for number in range(10)])
    rig.on_task = lambda task, context: context.produce("outputs", None, task.task_id.encode())
    rig.transactions.is_poisoned = lambda record: record.topic == "outputs" and record.value == b"t06"

    rig.consumer.run(IDLE)

    assert rig.ids == [f"t{number:02}" for number in range(10)]
    assert rig.applied() == [f"t{number:02}" for number in range(10) if number != 6]
    (dead,) = rig.dead()
    assert (dead.task_id, dead.reason) == ("t06", Reason.HANDLER_FAILED)


def test_the_offset_never_passes_a_task_that_is_not_committed_yet() -> None:
    """A batch that is cut in parts and a crash between two of them: the second part must come again."""
    rig = Rig(batch_max=16)
    rig.world.emit(due("t0"), due("t1"))
    rig.on_task = lambda task, context: context.produce("outputs", None, task.task_id.encode())
    rig.transactions.is_poisoned = lambda record: record.topic == "outputs" and record.value == b"t0"
    offsets: list[int] = []

    def look(step: str) -> None:
        if step == "ledger.send":
            offsets.append(rig.world.committed_offset(0))

    rig.process.on_step = look

    rig.consumer.run(IDLE)

    assert offsets == [0, 0, 0, 1]
    assert rig.world.committed_offset(0) == 3


def test_batches_are_whole_again_after_a_record_that_cannot_be_sent() -> None:
    """One refused record must not leave the consumer with a transaction for each task from then on."""
    rig = Rig(batch_max=8)
    rig.world.emit(*[due(f"t{number:02}") for number in range(48)])
    rig.on_task = lambda task, context: context.produce("outputs", None, task.task_id.encode())
    rig.transactions.is_poisoned = lambda record: record.topic == "outputs" and record.value == b"t03"

    counts = rig.consumer.run(IDLE)

    assert len(rig.applied()) == 47
    assert counts.batches <= 16


def test_a_batch_ends_at_its_bound_of_bytes() -> None:
    """A hundred payloads of a megabyte must not become one transaction."""
    rig = Rig(batch_max=100, batch_bytes_max=3_000)
    rig.world.emit(*[due(f"t{number}", payload=b"x" * 1_000) for number in range(9)])

    counts = rig.consumer.run(IDLE)

    assert len(rig.applied()) == 9
    assert counts.batches >= 3


def test_a_dead_task_too_large_for_dead_tasks_keeps_size_and_hash() -> None:
    """The trace of a failure must not depend on the size of what failed."""
    rig = Rig(attempts_max=1)
    rig.world.emit(due("bad", payload=b"x" * 2_000), due("b"))
    rig.on_task = raising("bad")
    rig.transactions.is_poisoned = lambda record: record.topic == DEAD and len(record.value or b"") > 1_500

    rig.consumer.run(IDLE)

    (dead,) = rig.dead()
    assert dead.value is None
    assert dead.value_size > 2_000
    assert len(dead.value_sha256) == 32
    assert rig.applied() == ["b"]


def test_a_batch_ends_at_its_bound_of_records_and_of_time() -> None:
    """The batch is what a crash may repeat, so both bounds are promises."""
    rig = Rig(batch_max=4, batch_time_max_ms=100)
    rig.world.emit(*[due(f"t{number}") for number in range(8)])
    rig.consumer.open()
    while not rig.seen:
        rig.consumer.step()
    assert len(rig.ids) == 4
    rig.on_task = lambda _task, _context: rig.world.clock.advance(60)

    rig.consumer.step()

    assert len(rig.ids) == 6


def test_lag_ends_at_zero_over_trailing_markers() -> None:
    """Case 30: who watches the lag must see 0 when everything is done, though the log ends in a marker."""
    rig = Rig()
    rig.world.emit(due("a"))
    rig.consumer.open()
    while rig.consumer.counts.applied == 0:
        rig.consumer.step()
    rig.world.emit(due("aborted"), commit=False)

    for _ in range(20):
        rig.consumer.step()

    assert rig.world.committed_offset(0) == rig.world.cluster.log(DUE, 0).end_offset == 4
    assert rig.consumer.counts.batches == 2


def test_a_task_that_comes_after_a_failed_commit_of_a_mere_position_is_handled() -> None:
    """There was nothing in hand to try again, and a queue that waited for that try would wait for ever."""
    rig = Rig()
    rig.world.emit(due("aborted"), commit=False)
    rig.transactions.commits.append(CommitFault.RETRYABLE)
    rig.consumer.open()
    while rig.transactions.commits:
        rig.consumer.step()
    rig.world.emit(due("t"))

    for _ in range(50):
        rig.consumer.step()

    assert rig.applied() == ["t"]


def test_a_partition_that_waits_for_a_retry_buffers_only_so_much() -> None:
    """A poison task at the head of a million must not fill the memory with the others."""
    rig = Rig(buffer_max=20, batch_max=5, attempts_max=4)
    rig.world.emit(due("bad"), *[due(f"t{number}") for number in range(60)])
    rig.on_task = raising("bad")
    rig.consumer.open()
    while len(rig.ids) < 2:
        rig.consumer.step()
    (session,) = rig.consumer._sessions.values()

    assert len(session._queue) <= 20 + 10
    rig.consumer.run(IDLE)
    assert len(rig.applied()) == 60


# -- partitions that move ------------------------------------------------------------------------------------------


def test_a_revoked_partition_commits_what_is_finished_before_it_goes() -> None:
    """A planned move must repeat nothing; the group is served on the way, however long a batch is."""
    rig = Rig(batch_max=50, batch_time_max_ms=60_000)
    rig.world.emit(*[due(f"t{number}") for number in range(10)])

    def handle(_task: DueTask, _context: TaskContext) -> None:
        rig.world.clock.advance(60)
        if len(rig.seen) == 4:
            rig.world.give(0, "heir")

    rig.on_task = handle
    rig.consumer.open()
    for _ in range(20):
        rig.consumer.step()

    assert rig.ids == ["t0", "t1", "t2", "t3"]
    assert rig.applied() == rig.ids
    assert rig.world.committed_offset(0) == 4
    assert rig.world.owners == {0: "heir"}


def test_a_lost_partition_is_left_alone() -> None:
    """It is somebody else's: a commit would at best be fenced, at worst fence the right owner."""
    rig = Rig(batch_max=50, batch_time_max_ms=60_000)
    rig.world.emit(*[due(f"t{number}") for number in range(5)])

    def handle(_task: DueTask, _context: TaskContext) -> None:
        rig.world.clock.advance(60)
        if len(rig.seen) == 2:
            rig.world.expel("me", "heir")
            rig.process.steps.clear()

    rig.on_task = handle
    rig.consumer.open()
    for _ in range(20):
        rig.consumer.step()

    assert rig.world.rows() == []
    assert not [step for step in rig.process.steps if step.startswith("ledger.")]
    assert rig.consumer.counts.given_up == 2


def test_a_member_that_the_group_has_given_up_does_not_fence_the_owner() -> None:
    """A thawed zombie that initialises the producer would stop the right owner, who would stop it in turn, for ever."""
    rig = Rig()
    rig.world.owners[0] = "the right owner"
    rig.consumer.open()

    for _ in range(50):
        rig.consumer.step()

    assert rig.consumer.counts.acquisitions == 0
    assert "ledger.acquire" not in rig.process.steps


def test_the_end_of_the_ledger_is_asked_for_after_the_previous_owner_was_fenced() -> None:
    """Until then it may still commit rows, and they would lie beyond an end that was asked for earlier."""
    rig = Rig()
    rig.world.emit(due("a"))
    topic_id = rig.world.cluster.topics()[LEDGER].topic_id
    zombie = rig.world.cluster.producer(f"duetasks-ledger-{topic_id}-group-0")
    zombie.init()

    def commit_late(step: str) -> None:
        if step == "ledger.acquire":
            zombie.send(NewRecord(topic=LEDGER, partition=0, key=ledger_key("group", due("a")), value=b"row"))
            zombie.commit()

    rig.process.on_step = commit_late

    counts = rig.consumer.run(IDLE)

    assert rig.ids == []
    assert counts.duplicates == 1


# -- the ledger ----------------------------------------------------------------------------------------------------


def test_a_row_of_another_group_says_nothing() -> None:
    """Each group applies every task for itself."""
    rig = Rig()
    rig.world.cluster.send(LEDGER, ledger_key("other", due("a")), b"row", partition=0)
    rig.world.emit(due("a"))

    rig.consumer.run(IDLE)

    assert rig.ids == ["a"]


def test_a_row_that_an_operator_deletes_lets_its_task_be_applied_again() -> None:
    """The way back for a task that was applied wrongly: delete its row, replay it."""
    rig = Rig()
    rig.world.emit(due("a"), due("b"))
    rig.consumer.run(IDLE)
    rig.world.cluster.send(LEDGER, ledger_key("group", due("a")), None, partition=0)
    rig.world.emit(due("a"), due("b"), headers={"duetasks-replay": b"1"})
    rig.world.give(0, "me")

    rig.consumer.run(IDLE)

    assert rig.ids == ["a", "b", "a"]


def test_a_local_table_ahead_of_its_topic_is_put_aside() -> None:
    """It says that tasks were applied of which the topic knows nothing: it is of another topic, or records are lost."""
    rig = Rig()
    rig.world.disks["machine", 0] = (Offset(1_000), frozenset())
    rig.world.emit(due("a"))

    rig.consumer.run(IDLE)

    assert rig.tables.put_asides == [0]
    assert rig.applied() == ["a"]


def test_an_unreadable_local_table_is_put_aside_and_restored() -> None:
    """The topic is the truth; a broken disk costs a longer start."""
    rig = Rig()
    rig.tables.corrupt_once.add(0)
    rig.world.cluster.send(LEDGER, ledger_key("group", due("a")), b"row", partition=0)
    rig.world.emit(due("a"), due("b"))

    rig.consumer.run(IDLE)

    assert rig.tables.put_asides == [0]
    assert rig.ids == ["b"]


def test_a_consumer_that_joins_late_gets_what_was_due_before() -> None:
    """Case 25: a group without an offset begins at the first record, not at the latest."""
    rig = Rig()
    rig.world.emit(due("a"))
    rig.world.clock.advance(86_400_000)

    rig.consumer.run(IDLE)

    assert rig.ids == ["a"]
    assert rig.world.cluster.committed(OFFSETS) != []


def test_rows_never_expire_before_what_they_guard() -> None:
    """Case 17: a group that was away for a year still knows what it applied when it is emitted again."""
    rig = Rig()
    rig.world.emit(due("a"))
    rig.consumer.run(IDLE)
    rig.world.clock.advance(366 * 86_400_000)
    rig.world.emit(due("a"), headers={"duetasks-replay": b"1"})
    rig.world.give(0, "me")

    rig.consumer.run(IDLE)

    assert rig.ids == ["a"]
    assert rig.consumer.counts.duplicates == 1


# -- the end -------------------------------------------------------------------------------------------------------


def test_stop_finishes_the_task_in_hand_commits_and_leaves() -> None:
    """SIGTERM: the task that runs is finished, the next is not begun, nothing is repeated."""
    rig = Rig()
    rig.world.emit(*[due(f"t{number}") for number in range(5)])

    def handle(_task: DueTask, _context: TaskContext) -> None:
        if len(rig.seen) == 2:
            rig.consumer.stop()

    rig.on_task = handle

    rig.consumer.run()

    assert rig.ids == ["t0", "t1"]
    assert rig.applied() == ["t0", "t1"]
    assert rig.world.owners == {}


@pytest.mark.parametrize("applied_max", [1, 3, 7])
def test_a_budget_is_used_exactly(applied_max: int) -> None:
    """`--max 3` must not handle a fourth task that nobody then commits."""
    rig = Rig(partition_count=3, batch_max=2)
    rig.world.emit(*[due(f"t{number}") for number in range(20)])

    counts = rig.consumer.run(StopRules(applied_max=applied_max))

    assert len(rig.ids) == counts.applied == len(rig.applied()) == applied_max


def test_a_task_that_is_set_aside_late_does_not_use_up_the_budget() -> None:
    """`--max 3` means three applied tasks, also if one more was handled and then refused by the brokers."""
    rig = Rig(batch_max=3)
    rig.world.emit(*[due(f"t{number}") for number in range(6)])
    rig.on_task = lambda task, context: context.produce("outputs", None, task.task_id.encode())
    rig.transactions.is_poisoned = lambda record: record.topic == "outputs" and record.value == b"t1"

    rig.consumer.run(StopRules(applied_max=3))

    assert rig.applied() == ["t0", "t2", "t3"]


def test_a_handler_may_stop_the_consumer_and_leave_its_task() -> None:
    """A printer whose reader is gone has nothing against the task: the next consumer gets it."""
    rig = Rig()
    rig.world.emit(due("a"), due("b"))
    rig.on_task = raising("b", error=ConsumerStopError)

    rig.consumer.run(IDLE)

    assert rig.ids == ["a", "b"]
    assert rig.applied() == ["a"]
    assert rig.world.committed_offset(0) == 1


def test_a_broken_handler_of_its_own_kind_does_not_lose_finished_work() -> None:
    """An interrupt in the middle of a handler: what was finished before is committed on the way out."""
    rig = Rig()
    rig.world.emit(due("a"), due("b"))

    def handle(task: DueTask, _context: TaskContext) -> None:
        if task.task_id == "b":
            raise KeyboardInterrupt

    rig.on_task = handle

    with pytest.raises(KeyboardInterrupt):
        rig.consumer.run(IDLE)

    assert rig.applied() == ["a"]


def test_idle_time_does_not_run_while_a_task_is_in_hand() -> None:
    """`--idle-exit 1s` must not leave while a failing task waits for its next attempt."""
    rig = Rig(attempts_max=3)
    rig.world.emit(due("bad"))
    rig.on_task = raising("bad")

    rig.consumer.run(StopRules(idle_exit_ms=700))

    assert rig.ids == ["bad"] * 3
    assert len(rig.dead()) == 1


def test_idle_time_does_not_run_before_the_first_answer_of_a_fetch() -> None:
    """A slow broker must not look like an empty topic."""
    rig = Rig()
    rig.world.emit(due("a"))
    fetch, answers = rig.subscription.take, 30

    def slow_take(timeout_ms: int) -> Sequence[Fetched]:
        nonlocal answers
        if answers == 0:
            return fetch(timeout_ms)
        answers -= 1
        rig.world.clock.advance(100)
        return ()

    rig.subscription.take = slow_take  # type: ignore[method-assign]  # the only way to make the twin slow

    rig.consumer.run(StopRules(idle_exit_ms=700))

    assert rig.ids == ["a"]


def test_a_group_that_never_answers_ends_in_unavailable() -> None:
    """A consumer that waits for ever for its group looks healthy and does nothing."""
    rig = Rig()
    rig.world.news("me").clear()

    with pytest.raises(UnavailableError, match="no answer for 2 s"):
        rig.consumer.run(StopRules(join_max_ms=2_000, idle_exit_ms=100))
