"""The consumer on a real broker: restarts, moves, kills, freezes, and logs that end in every way."""

from __future__ import annotations

import os
import secrets
import signal
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

import msgspec
import pytest
from confluent_kafka import Producer

from pipeline.adapters.avro_codec import AvroCodec
from pipeline.config import Settings
from pipeline.consumer import DueTaskConsumer
from pipeline.core.applied import Outcome, ledger_key
from pipeline.core.events import Reason
from pipeline.errors import NotFoundError, TopicMismatchError, UnavailableError
from tests.integration.due_topics import (
    IDLE_MS,
    PARTITIONS,
    WITHIN_S,
    DueTopics,
    Process,
    Running,
    due,
    run_until_idle,
    tasks,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pipeline.core.effects import DueTask
    from pipeline.service.consumer.task_handling import TaskContext
    from tests.conftest import BrokerUnderTest

pytestmark = pytest.mark.integration


@pytest.fixture
def topics(broker: BrokerUnderTest, tmp_path: Path) -> Iterator[DueTopics]:
    """Topics of this test's own."""
    made = DueTopics(
        Settings(
            bootstrap_servers=broker.bootstrap_servers,
            topic_prefix=f"consumer-{secrets.token_hex(4)}-",
            data_dir=tmp_path / "data",
            partitions=PARTITIONS,
            session_timeout_ms=3_000,
            transaction_timeout_ms=10_000,
        )
    )
    yield made
    made.clean_up()


# -- once ------------------------------------------------------------------------------------------------------


def test_tasks_are_applied_once_across_restarts_and_replays(topics: DueTopics, tmp_path: Path) -> None:
    """The ledger outlives the process and its local copy, and lag ends at 0 behind the transaction's marker."""
    topics.emit(*tasks(40))
    first = run_until_idle(topics)
    topics.emit(*tasks(10), headers=[("duetasks-replay", b"1")])
    topics.emit(*tasks(5, start=40))

    warm = run_until_idle(topics)
    topics.emit(*tasks(45))
    cold = run_until_idle(topics, data_dir=tmp_path / "elsewhere")

    assert Counter(first) == Counter(task.task_id for task in tasks(40))
    assert Counter(warm) == Counter(task.task_id for task in tasks(5, start=40))
    assert cold == []
    assert topics.row_counts() == Counter(task.task_id for task in tasks(45))
    assert topics.lag("group") <= PARTITIONS  # the last marker of each partition at most
    for record in topics.read(topics.names.applied):
        row = topics.codec.decode_applied(record.value())
        assert record.partition() == row.due_partition
        assert record.key() == ledger_key("group", due(row.task_id))
        assert row.outcome is Outcome.APPLIED


def test_another_group_applies_every_task_for_itself(topics: DueTopics) -> None:
    """Groups share the ledger's topic, not its rows."""
    topics.emit(*tasks(5))
    run_until_idle(topics)
    seen: list[str] = []

    DueTaskConsumer("other", lambda task, _: seen.append(task.task_id), settings=topics.settings).run(
        idle_exit_ms=IDLE_MS
    )

    assert Counter(seen) == Counter(task.task_id for task in tasks(5))


def test_what_a_handler_produces_is_there_once_and_where_java_looks_for_its_key(topics: DueTopics) -> None:
    """Effects in Kafka are exactly once: the record and the row are one transaction."""
    topics.emit(*tasks(20))

    def handle(task: DueTask, context: TaskContext) -> None:
        context.produce(topics.outputs, task.task_id.encode(), b"out", headers={"h": b"1"})
        if context.attempt < 2:
            raise ValueError(task.task_id)

    run_until_idle(topics, handler=handle, backoff_ms=1)

    sent = topics.read(topics.outputs)
    assert Counter(record.key().decode() for record in sent) == Counter(task.task_id for task in tasks(20))
    due_places = {record.key(): record.partition() for record in topics.read(topics.names.due)}
    assert {record.key(): record.partition() for record in sent} == due_places
    assert sent[0].headers() == [("h", b"1")]


# -- trouble with single tasks ---------------------------------------------------------------------------------


def test_poison_goes_to_dead_tasks_and_the_others_go_on(topics: DueTopics) -> None:
    """A handler that keeps raising, a record that is no task, outputs that no broker takes: each for itself."""
    topics.emit(due("raises"), due("too-large"), due("no-topic"), *tasks(10))
    rubbish = Producer(topics.settings.client_config())
    rubbish.produce(topics.names.due, b"rubbish", b"k", partition=0)
    rubbish.flush(20)

    def handle(task: DueTask, context: TaskContext) -> None:
        if task.task_id == "raises":
            raise ValueError(task.task_id)
        if task.task_id == "too-large":
            context.produce(
                topics.outputs, b"k", os.urandom(3_000_000)
            )  # the broker measures what is left after compression
        if task.task_id == "no-topic":
            context.produce(f"{topics.outputs}-absent", b"k", b"v")

    seen = Running(topics, handler=handle, attempts_max=2, backoff_ms=1)
    counts = seen.consumer.run(idle_exit_ms=IDLE_MS)

    dead = [AvroCodec().decode_dead(record.value()) for record in topics.read(topics.names.dead)]
    assert {(one.task_id, one.reason) for one in dead} == {
        ("raises", Reason.HANDLER_FAILED),
        ("too-large", Reason.HANDLER_FAILED),
        ("no-topic", Reason.HANDLER_FAILED),
        ("", Reason.MALFORMED),
    }
    outcomes = {row.task_id: row.outcome for row in topics.rows()}
    assert {task_id for task_id, outcome in outcomes.items() if outcome is Outcome.APPLIED} == {
        task.task_id for task in tasks(10)
    }
    assert (counts.applied, counts.failed, counts.malformed) == (10, 3, 1)
    assert topics.read(topics.outputs) == []


# -- transactions of others ------------------------------------------------------------------------------------


def test_aborted_due_records_are_never_seen(topics: DueTopics) -> None:
    """An owner that was fenced in the middle has emitted nothing; the log may even end in what it left."""
    topics.emit(due("before"))
    with topics.transaction(commit=False) as emit:
        for task in tasks(20):
            emit(task)

    assert run_until_idle(topics) == ["before"]
    topics.emit(due("after"))
    with topics.transaction(commit=False) as emit:
        emit(due("aborted"))
    assert run_until_idle(topics) == ["after"]


@pytest.mark.parametrize("ending", ["committed", "aborted", "two aborted in a row"])
def test_restore_ends_whatever_the_ledger_ends_in(topics: DueTopics, tmp_path: Path, ending: str) -> None:
    """Markers and aborted records take offsets that no reader is handed; to wait for them is to wait for ever."""
    topics.emit(*tasks(6))
    run_until_idle(topics)
    stranger = topics.producer("stranger")
    stranger.init_transactions(20)
    for number in range(2 if "two" in ending else 1):
        stranger.begin_transaction()
        for partition in range(PARTITIONS):
            stranger.produce(topics.names.applied, b"row", f"other\0{number}\0".encode(), partition)
        stranger.flush(20)
        if ending == "committed":
            stranger.commit_transaction(20)
        else:
            stranger.abort_transaction(20)
    topics.emit(*tasks(7))

    assert run_until_idle(topics, data_dir=tmp_path / "cold") == ["t6"]
    assert topics.row_counts()["t6"] == 1


def test_restore_waits_for_an_open_transaction_of_a_stranger(topics: DueTopics, tmp_path: Path) -> None:
    """The group's own rows may lie behind it; when the stranger's transaction is over, the consumer goes on."""
    topics.emit(*tasks(20))
    first = Running(topics).start()
    first.await_count(20)
    stranger = topics.producer("stranger")
    stranger.init_transactions(20)
    stranger.begin_transaction()
    for partition in range(PARTITIONS):
        stranger.produce(topics.names.applied, b"row", b"other\0001\0000\0x", partition)
    stranger.flush(20)
    topics.emit(*tasks(20, start=20))
    first.await_count(40)
    first.stop()
    topics.emit(*tasks(41))
    second = Running(topics, data_dir=tmp_path / "cold").start()
    acquired_by_s = time.monotonic() + WITHIN_S
    while second.consumer.counts.acquisitions < PARTITIONS:
        assert time.monotonic() < acquired_by_s
        time.sleep(0.05)
    assert second.ids == []

    stranger.abort_transaction(20)

    second.await_count(1)
    second.stop()
    assert second.ids == ["t40"]
    assert topics.row_counts() == Counter(task.task_id for task in tasks(41))


# -- processes and partitions ----------------------------------------------------------------------------------


def test_partitions_move_between_consumers_without_a_second_application(topics: DueTopics, tmp_path: Path) -> None:
    """Cases 30 and 38: one joins, one leaves, it joins again; what moves takes its ledger along."""
    topics.emit(*tasks(30))
    first = Running(topics, data_dir=tmp_path / "first").start()
    first.await_count(30)
    second = Running(topics, data_dir=tmp_path / "second").start()
    joined_by_s = time.monotonic() + WITHIN_S
    emitted = 30
    while not second.ids:
        assert time.monotonic() < joined_by_s, "the second never got a partition"
        topics.emit(*tasks(10, start=emitted), *tasks(5, start=emitted - 10))
        emitted += 10
        time.sleep(0.2)
    first.stop()
    topics.emit(*tasks(20, start=emitted))
    emitted += 20
    third = Running(topics, data_dir=tmp_path / "first").start()
    second.await_count(1)
    topics.emit(*tasks(emitted))
    second.stop()
    third.stop()
    last = run_until_idle(topics)

    expected = Counter(task.task_id for task in tasks(emitted))
    assert Counter(first.ids + second.ids + third.ids + last) == expected
    assert topics.row_counts() == expected


def test_a_member_too_many_waits_and_leaves_when_idle(topics: DueTopics, tmp_path: Path) -> None:
    """It is a spare: neither an error, nor a consumer that never ends."""
    topics.emit(*tasks(10))
    working = [Running(topics, data_dir=tmp_path / str(number)).start() for number in range(PARTITIONS)]
    until_s = time.monotonic() + WITHIN_S
    while not all(len(one.consumer._consumer._sessions) == 1 for one in working):
        assert time.monotonic() < until_s, "the partitions were not shared"
        time.sleep(0.05)

    spare = run_until_idle(topics, data_dir=tmp_path / "spare")

    assert spare == []
    for one in working:
        one.stop()
    assert topics.row_counts() == Counter(task.task_id for task in tasks(10))


def test_a_partition_that_was_paused_when_it_was_lost_is_read_again(topics: DueTopics) -> None:
    """The client remembers a pause beyond the end of an assignment; a partition would stand still for ever."""
    topics.emit(*tasks(3_000))
    failing = threading.Event()
    failing.set()

    def handle(_task: DueTask, _context: TaskContext) -> None:
        if failing.is_set():
            raise UnavailableError("for the test")

    running = Running(topics, handler=handle, backoff_ms=10, backoff_max_ms=10)
    inner = running.consumer._consumer
    inner._batches = msgspec.structs.replace(inner._batches, buffer_max=100)
    sessions = inner._sessions
    running.start()
    until_s = time.monotonic() + WITHIN_S
    while not (len(sessions) == PARTITIONS and all(session._paused for session in sessions.values())):
        assert time.monotonic() < until_s, "nothing was paused"
        time.sleep(0.01)
    for partition in range(PARTITIONS):
        topics.fence_consumer("group", partition)
    failing.clear()

    until_s = time.monotonic() + WITHIN_S
    while len(topics.row_counts()) < 3_000:
        assert time.monotonic() < until_s, f"{len(topics.row_counts())} rows"
    running.stop()

    assert topics.row_counts() == Counter(task.task_id for task in tasks(3_000))
    assert running.consumer.counts.acquisitions == 2 * PARTITIONS


def test_a_killed_consumer_repeats_at_most_its_batches(topics: DueTopics, tmp_path: Path) -> None:
    """Case 34: SIGKILL in the middle; what was printed twice is no more than one batch of each partition."""
    batch = 5
    topics.emit(*tasks(400))
    killed = Process(topics, "--batch", str(batch), data_dir=tmp_path / "killed")
    killed.await_lines(60)
    killed.send(signal.SIGKILL)
    killed.wait()

    rest = run_until_idle(topics)

    printed = Counter(killed.ids + rest)
    assert set(printed) == {task.task_id for task in tasks(400)}
    assert sum(printed.values()) - 400 <= batch * PARTITIONS
    assert topics.row_counts() == Counter(task.task_id for task in tasks(400))


def test_a_frozen_consumer_that_thaws_adds_nothing(topics: DueTopics, tmp_path: Path) -> None:
    """SIGSTOP past the session time-out, another takes over, SIGCONT: the ledger and the offsets stay the heir's."""
    topics.emit(*tasks(200))
    frozen = Process(topics, "--batch", "5", "--exec", "sleep 0.01", data_dir=tmp_path / "frozen")
    acting_by_s = time.monotonic() + WITHIN_S
    while not topics.rows():
        assert time.monotonic() < acting_by_s
    frozen.send(signal.SIGSTOP)
    heir = Running(topics, data_dir=tmp_path / "heir").start()
    heir.await_count(100)

    frozen.send(signal.SIGCONT)
    topics.emit(*tasks(20, start=200))
    done_by_s = time.monotonic() + WITHIN_S
    while len(counts := topics.row_counts()) < 220:
        assert time.monotonic() < done_by_s, f"{len(counts)} rows"
        time.sleep(0.1)
    frozen.send(signal.SIGTERM)
    assert frozen.wait() == 0
    heir.stop()

    assert topics.row_counts() == Counter(task.task_id for task in tasks(220))


def test_sigterm_lets_the_task_in_hand_finish_and_leaves_at_once(topics: DueTopics, tmp_path: Path) -> None:
    """A deploy repeats nothing and makes nobody wait for a session to run out."""
    topics.emit(*tasks(200))
    process = Process(topics, "--batch", "50", data_dir=tmp_path / "data")
    process.await_lines(20)

    process.send(signal.SIGTERM)

    assert process.wait() == 0
    rest = run_until_idle(topics)
    assert Counter(process.ids + rest) == Counter(task.task_id for task in tasks(200))


def test_the_command_stops_at_its_budget_and_a_command_gets_its_task(topics: DueTopics, tmp_path: Path) -> None:
    """`--max` is exact, and `--exec` sees payload and metadata; what fails every time ends on dead-tasks."""
    topics.emit(*[due(f"t{number}", payload=f"p{number}".encode()) for number in range(6)])
    first = Process(topics, "--max", "2", data_dir=tmp_path / "data")
    assert first.wait() == 0
    assert len(first.lines) == 2
    assert first.lines[0]["payload"].startswith("p")

    target = tmp_path / "out"
    script = f'test $DUETASKS_TASK_ID != t5 && echo "$DUETASKS_TASK_ID $(cat)" >> {target}'
    second = Process(
        topics, "--idle-exit", "2s", "--attempts", "2", "--exec", f"sh -c '{script}'", data_dir=tmp_path / "data"
    )
    assert second.wait() == 0

    lines = target.read_text().splitlines() if target.exists() else []
    assert sorted(lines) == sorted(f"t{n} p{n}" for n in range(5) if f"t{n}" not in first.ids)
    outcomes = {row.task_id: row.outcome for row in topics.rows()}
    assert len(outcomes) == 6
    assert (outcomes["t5"] is Outcome.FAILED) == ("t5" not in first.ids)


# -- refusals --------------------------------------------------------------------------------------------------


def test_a_group_without_topics_is_told_what_to_type(broker: BrokerUnderTest, tmp_path: Path) -> None:
    """A typo in the prefix must not look like a quiet day."""
    settings = Settings(
        bootstrap_servers=broker.bootstrap_servers, topic_prefix=f"absent-{secrets.token_hex(4)}-", data_dir=tmp_path
    )

    with pytest.raises(NotFoundError, match="duetasks topics apply"):
        DueTaskConsumer("group", lambda *_: None, settings=settings).run()


def test_topics_of_different_partition_counts_are_refused(topics: DueTopics) -> None:
    """A row would have no partition of the same number, and a moved partition would lose its ledger."""
    target = f"{topics.settings.topic_prefix}target"
    topics.create(target, PARTITIONS + 1)

    with pytest.raises(TopicMismatchError, match="3 partitions"):
        DueTaskConsumer("group", lambda *_: None, settings=topics.settings, topic=target).run()
