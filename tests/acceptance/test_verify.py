"""`duetasks verify` and `why` on a real broker: every false record is found, and a running system is never accused."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Producer

from pipeline.adapters.audit_codec import AvroAuditCodec
from pipeline.adapters.consumer_codec import AvroConsumerCodec
from pipeline.adapters.kafka_admin import KafkaAdmin
from pipeline.core.events import Reason
from pipeline.core.partitioning import partition_for_key
from pipeline.core.tasks import InstantMs
from pipeline.wiring.audit import AuditChoice, audit
from tests.acceptance.harness import Deployment, cancel, now_ms, schedule
from tests.audit_topics import HandWritten

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pipeline.core.applied import AppliedTask
    from pipeline.service.audit.auditor import AuditReport

pytestmark = pytest.mark.acceptance

HOUR_MS = 3_600_000
LOAD_S = 8.0


class Codec(AvroAuditCodec):
    """What an audit reads, and the way to write it."""

    def encode_applied(self, task: AppliedTask) -> bytes:
        """A ledger row."""
        return AvroConsumerCodec(self).encode_applied(task)


class KafkaWriter:
    """Writes to one partition of a deployment's topics, outside of any transaction."""

    def __init__(self, deployment: Deployment, partition: int) -> None:
        self._deployment = deployment
        self._partition = partition
        self._producer = Producer({**deployment.settings.client_config(), "acks": "all", "linger.ms": 0})

    def now_ms(self) -> int:
        """The clock of this machine, which is the broker's too."""
        return now_ms()

    def topic(self, name: str) -> str:
        """The name with its prefix."""
        return self._deployment.topics.prefix + name

    def send(
        self, topic: str, key: bytes | None, value: bytes | None, headers: Mapping[str, bytes] | None = None
    ) -> tuple[int, int]:
        """Append one record; returns its offset and append time."""
        places: list[tuple[int, int]] = []

        def report(error: object, message: Any) -> None:  # noqa: ANN401 - confluent's message
            assert error is None, error
            places.append((message.offset(), message.timestamp()[1]))

        self._producer.produce(
            self.topic(topic),
            key=key,
            value=value,
            partition=self._partition,
            headers=dict(headers or {}),
            on_delivery=report,
        )
        self._producer.flush(20)
        return places[0]

    def identity(self) -> tuple[str, str, str]:
        """Ids of the cluster, `task-state` and `task-events`."""
        topics = self._deployment.topics
        found = KafkaAdmin(self._deployment.settings.client_config()).identity([topics.state, topics.events])
        return found.cluster_id, found.topics[topics.state].topic_id, found.topics[topics.events].topic_id


def name_in(partition: int, stem: str) -> str:
    """A task id that belongs to a partition of two."""
    return next(name for n in range(99) if partition_for_key((name := f"{stem}-{n}").encode(), 2) == partition)


def environment(deployment: Deployment, name: str) -> dict[str, str]:
    """The environment of a command with a data folder of that name."""
    chosen = {**deployment._chosen, "data_dir": deployment.folder / name}
    found = {key: value for key, value in os.environ.items() if not key.startswith("DUETASKS_")}
    return found | {f"DUETASKS_{key.upper()}": str(value) for key, value in chosen.items()}


def end_offsets(deployment: Deployment) -> dict[tuple[str, int], int]:
    """Where the topics end that an audit reads."""
    topics = deployment.topics
    names = (topics.events, topics.progress, topics.state, topics.due, topics.dead, topics.applied)
    return deployment.end_offsets(*names)


def duetasks(deployment: Deployment, *arguments: str) -> tuple[int, str, str]:
    """Run the command line as a user does: exit code, stdout, stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "pipeline.cli", *arguments],
        env=environment(deployment, "cli"),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def falsified(deployment: Deployment) -> tuple[str, set[tuple[str, str, int, int]]]:
    """Several violations at once in partition 1; returns the cancelled task, and what should be found where."""
    topics = HandWritten(KafkaWriter(deployment, 1), Codec(), partition=1, partition_count=2)
    full = topics.writer.topic
    early, cancelled, twice = (name_in(1, stem) for stem in ("early", "cancelled", "twice"))
    found = set()
    due_ms = now_ms() + 60_000
    topics.schedule(early, due_ms)
    topics.emit(early, fired_at_ms=InstantMs(due_ms - 1), fence_clock_ms=InstantMs(due_ms - 1))
    found.add(("EARLY", full("due-tasks"), 1, topics.due_offsets[early]))
    topics.schedule(cancelled, now_ms())
    before = topics.states[cancelled]
    topics.cancel(cancelled)
    topics.states[cancelled] = before
    topics.emit(cancelled)
    found.add(("OVERRULED", full("due-tasks"), 1, topics.due_offsets[cancelled]))
    topics.schedule(twice, now_ms())
    task = topics.emit(twice)
    found.add(("EMITTED_TWICE", full("due-tasks"), 1, topics.write_due(task)))
    topics.applied(task, due_offset=2)
    found.add(("APPLIED_TWICE", full("applied-tasks"), 1, topics.applied(task, due_offset=2)))
    found.add(("REFUSAL_MISSING", full("task-events"), 1, topics.raw_event(b"x", b"rubbish")))
    refused = topics.raw_event(b"y", b"rubbish")
    topics.dead(Reason.MALFORMED, refused, b"y")
    found.add(("UNDECODABLE", full("dead-tasks"), 1, topics.writer.send("dead-tasks", None, b"rubbish")[0]))
    overdue = name_in(1, "overdue")
    found.add(("OVERDUE", full("task-events"), 1, topics.schedule(overdue, now_ms() - HOUR_MS)))
    lost = name_in(1, "lost")
    found.add(("SCHEDULE_LOST", full("task-events"), 1, topics.schedule(lost, now_ms() + HOUR_MS)))
    topics.states[lost] = None
    topics.settle()
    return cancelled, found


def test_false_records_are_found_where_they_stand(deployment: Deployment) -> None:
    """Several kinds at once, through the command line; it writes nothing, and leaves nothing behind."""
    cancelled, expected = falsified(deployment)
    ends = end_offsets(deployment)

    code, out, _ = duetasks(deployment, "verify", "--json")

    told = json.loads(out)
    found = {(one["code"], one["topic"], one["partition"], one["offset"]) for one in told["findings"]}
    consequences = {one for one in found if one[0] in {"STATE_DIFFERS", "STATE_MISSING"}}
    assert (code, told["clean"], found - consequences) == (1, False, expected)
    assert len(consequences) == 3, "early, cancelled and lost have no row that fits"
    assert all(one["task_id"] or one["code"] == "UNDECODABLE" for one in told["findings"])
    assert all(one["meaning"] and one["remedy"] and one["detail"] for one in told["findings"])
    assert end_offsets(deployment) == ends
    assert [path.name for path in (deployment.folder / "cli").iterdir()] == ["verify.lock"]
    code, out, err = duetasks(deployment, "verify", "--partition", "1")
    assert code == 1
    assert f"{deployment.topics.due}-1@" in out
    assert "G4 OVERRULED: 1 found." in err
    code, out, _ = duetasks(deployment, "why", cancelled, "--json")
    assert (code, [one["what"] for one in json.loads(out)["chapters"]]) == (0, ["SCHEDULE", "CANCEL", "EMITTED"])


class Load:
    """Schedules, moves and cancels tasks, all due within seconds, until it is stopped."""

    def __init__(self, deployment: Deployment, seed: int) -> None:
        self._deployment = deployment
        self._random = random.Random(seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.sent = 0
        self._thread.start()

    def _run(self) -> None:
        producer = self._deployment.new_producer()
        while not self._stop.is_set():
            events = list(self._events())
            self._deployment.send(*events, producer=producer)
            self.sent += len(events)
            self._stop.wait(0.02)

    def _events(self) -> Iterator[Any]:
        rng = self._random
        for _ in range(rng.randint(1, 40)):
            task_id = f"task-{rng.randint(0, 300)}"
            version = rng.randint(1, 9) if task_id.endswith("7") else 0
            if rng.random() < 0.25:
                yield cancel(task_id, version=version)
            else:
                due_ms = now_ms() + rng.choice([-100, 0, 5, 100, 700, 2_000, HOUR_MS])
                yield schedule(task_id, due_ms, version=version, event_id=f"e{rng.randint(0, 5_000)}")

    def close(self) -> None:
        """No more."""
        self._stop.set()
        self._thread.join(30)


def test_a_running_system_is_never_accused(deployment: Deployment) -> None:
    """Under load, with consumers, an agent killed and one that takes over: what is in flight is no violation."""
    deployment.start_agent("a")
    deployment.start_agent("b")
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")  # noqa: T201 - to run it again
    reports: list[AuditReport] = []
    consumer = subprocess.Popen(
        [sys.executable, "-m", "pipeline.cli", "consume", "--group", f"billing-{deployment.settings.group_id}"],
        env=environment(deployment, "consumer"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        with closing(Load(deployment, seed)) as load:
            until_ms = now_ms() + int(LOAD_S * 1_000)
            while now_ms() < until_ms:
                reports.append(verified(deployment))
                if len(reports) == 2:
                    deployment.agents[0].kill()
                    deployment.start_agent("a", ready=False)
        deployment.await_ready(within_s=120)
        deployment.until(
            lambda: deployment.count(deployment.topics.applied) > 100, within_s=120, what="100 tasks are applied"
        )
        reports.append(verified(deployment))
    finally:
        consumer.kill()
        consumer.wait(10)

    assert [report.findings for report in reports] == [[]] * len(reports), f"seed {seed}"
    assert reports[-1].records[deployment.topics.events] == load.sent
    last = {promise.promise: promise for promise in reports[-1].promises}
    assert all(promise.checked > 100 for promise in last.values()), last
    assert not any(promise.unprovable for promise in last.values()), last


def verified(deployment: Deployment) -> AuditReport:
    """An audit as of now."""
    settings = deployment.settings.model_copy(update={"data_dir": deployment.folder / "auditor"})
    return audit(settings, AuditChoice(overdue_ms=60_000), on_progress=lambda _what, _done, _all: None)
