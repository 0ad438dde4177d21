"""Consumers under brokers that stop and die, and under a hand that kills and freezes them at random."""

from __future__ import annotations

import random
import secrets
import signal
import time
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from pipeline.config import Settings
from tests.integration.due_topics import PARTITIONS, DueTopics, Process, Running, run_until_idle, tasks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pipeline.core.effects import DueTask
    from pipeline.embedded import EmbeddedBroker
    from pipeline.service.task_handling import TaskContext
    from tests.conftest import BrokerUnderTest

pytestmark = pytest.mark.chaos

WITHIN_S = 120.0


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[str], DueTopics]]:
    """Topics of this test's own on the broker that it names."""
    made: list[DueTopics] = []

    def create(bootstrap_servers: str) -> DueTopics:
        settings = Settings(
            bootstrap_servers=bootstrap_servers,
            topic_prefix=f"chaos-{secrets.token_hex(4)}-",
            data_dir=tmp_path / "data",
            partitions=PARTITIONS,
            session_timeout_ms=3_000,
            transaction_timeout_ms=4_000,
        )
        made.append(DueTopics(settings))
        return made[-1]

    yield create
    for topics in made:
        topics.clean_up()


def await_rows(topics: DueTopics, count: int) -> None:
    """Return when the ledger has so many rows."""
    until_s = time.monotonic() + WITHIN_S
    while len(topics.row_counts()) < count:
        assert time.monotonic() < until_s, f"only {len(topics.row_counts())} of {count} were applied"
        time.sleep(0.5)


def test_consumers_outlive_a_broker_that_pauses_and_one_that_dies(
    private_broker: Callable[..., EmbeddedBroker], make: Callable[[str], DueTopics]
) -> None:
    """Commits without an answer, sessions and transactions that run out: effects in Kafka stay exactly once."""
    broker = private_broker()
    topics = make(broker.start().bootstrap_servers)
    count = 4_000
    topics.emit(*tasks(count))

    def handle(task: DueTask, context: TaskContext) -> None:
        time.sleep(0.002)
        context.produce(topics.outputs, task.task_id.encode(), b"out")

    running = [Running(topics, handler=handle, batch_max=20).start() for _ in range(2)]
    running[0].await_count(100)
    broker.pause()
    time.sleep(6)
    broker.resume()
    seen = len(running[0].ids)
    running[0].await_count(seen + 100)
    broker.kill()
    broker.start()
    await_rows(topics, count)
    for one in running:
        one.stop()

    assert topics.row_counts() == Counter(task.task_id for task in tasks(count))
    sent = Counter(record.key().decode() for record in topics.read(topics.outputs))
    assert sent == Counter(task.task_id for task in tasks(count))


def test_consumers_that_are_killed_and_frozen_at_random_apply_each_task_once(
    broker: BrokerUnderTest, make: Callable[[str], DueTopics], tmp_path: Path
) -> None:
    """Case 34, again and again: what is doubled outside of Kafka is at most a batch of each partition a time."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")  # noqa: T201  # shown by pytest when it fails
    chance = random.Random(seed)
    topics = make(broker.bootstrap_servers)
    batch, rounds = 5, 8
    processes: list[Process] = []

    def start() -> Process:
        processes.append(Process(topics, "--batch", str(batch), data_dir=tmp_path / f"{chance.randrange(2)}"))
        return processes[-1]

    alive = [start(), start()]
    for number in range(rounds):
        topics.emit(*tasks(200, start=200 * number))
        before = sum(len(one.lines) for one in processes)
        until_s = time.monotonic() + WITHIN_S
        while sum(len(one.lines) for one in processes) < before + chance.randrange(1, 150):
            assert time.monotonic() < until_s, "nobody works"
            time.sleep(0.01)
        victim = chance.randrange(2)
        if chance.random() < 0.5:
            alive[victim].send(signal.SIGKILL)
            alive[victim] = start()
        else:
            alive[victim].send(signal.SIGSTOP)
            time.sleep(chance.choice([0.5, 5.0]))
            alive[victim].send(signal.SIGCONT)
    await_rows(topics, 200 * rounds)
    for one in alive:
        one.send(signal.SIGTERM)
        assert one.wait() == 0
    rest = run_until_idle(topics)

    expected = Counter(task.task_id for task in tasks(200 * rounds))
    assert topics.row_counts() == expected
    printed = Counter([task_id for one in processes for task_id in one.ids] + rest)
    assert set(printed) == set(expected)
    assert sum(printed.values()) - len(expected) <= batch * PARTITIONS * rounds
