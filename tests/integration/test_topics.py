"""`duetasks topics` on a real broker: what is created is what was declared, and what drifted is found and mended."""

from __future__ import annotations

import asyncio
import socket
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec
import pytest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    ResourceType,
)

from pipeline.adapters.kafka_admin import KafkaAdmin
from pipeline.adapters.topic_setup import apply_topics, plan_for, refuse_unsafe_topics, verify_topics
from pipeline.cli.app import run
from pipeline.config import Settings
from pipeline.core.topic_rules import Severity
from pipeline.errors import RefusedError, TopicMismatchError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.conftest import BrokerUnderTest

pytestmark = pytest.mark.integration

_TIMEOUT_S = 20


@pytest.fixture
def settings(broker: BrokerUnderTest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Settings]:
    """A deployment of its own on the shared broker, for this process and for the commands it runs."""
    prefix = f"topics-{uuid.uuid4().hex[:8]}-"
    monkeypatch.setenv("DUETASKS_BOOTSTRAP_SERVERS", broker.bootstrap_servers)
    monkeypatch.setenv("DUETASKS_TOPIC_PREFIX", prefix)
    monkeypatch.setenv("DUETASKS_PARTITIONS", "2")
    settings = Settings()
    yield settings
    admin = _client(settings)
    made = [name for name in admin.list_topics(timeout=_TIMEOUT_S).topics if name.startswith(prefix)]
    for future in admin.delete_topics(made).values() if made else ():
        future.result(_TIMEOUT_S)


def _client(settings: Settings) -> AdminClient:
    return AdminClient(settings.client_config())


def _admin(settings: Settings) -> KafkaAdmin:
    return KafkaAdmin(settings.client_config())


def _alter(settings: Settings, topic: str, name: str, value: str) -> None:
    """As an operator would, beside our own code."""
    entry = ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
    client = _client(settings)  # kept: a client that is collected takes its answers with it
    client.incremental_alter_configs([resource])[resource].result(_TIMEOUT_S)
    admin = _admin(settings)
    _await(f"{topic}: {name}", lambda: admin.topics([topic])[topic].settings[name] == value)


def _create(settings: Settings, topic: str, partition_count: int) -> None:
    client = _client(settings)
    new = NewTopic(topic, num_partitions=partition_count, replication_factor=1)
    client.create_topics([new])[topic].result(_TIMEOUT_S)
    _await_partitions(settings, topic, partition_count)


def _await(what: str, shown: Callable[[], bool]) -> None:
    """The controller answers before the broker knows, and there is nothing to wait for but the broker's answer."""
    until_s = time.monotonic() + _TIMEOUT_S
    while not shown():
        assert time.monotonic() < until_s, f"{what} did not show"
        time.sleep(0.02)


def _await_partitions(settings: Settings, topic: str, count: int) -> None:
    admin = _admin(settings)
    _await(
        f"{topic} with {count} partitions",
        lambda: {found.partition_count for found in admin.topics([topic]).values()} == {count},
    )


def test_a_plan_changes_nothing(settings: Settings) -> None:
    """People type it to look."""
    plan = plan_for(settings)

    assert len(plan.creations) == 6
    assert _admin(settings).topics(list(vars(settings.topics).values())[1:]) == {}


def test_what_was_applied_is_what_was_declared(settings: Settings) -> None:
    """The broker itself is asked; a setting that it rounds or ignores would show here."""
    done = apply_topics(settings)

    assert [creation.topic for creation in done.creations] == [
        settings.topics.events,
        settings.topics.progress,
        settings.topics.state,
        settings.topics.due,
        settings.topics.dead,
        settings.topics.applied,
    ]
    assert verify_topics(settings) == []
    assert {topic.partition_count for topic in _admin(settings).topics([c.topic for c in done.creations]).values()} == {
        2
    }
    assert refuse_unsafe_topics(settings) == []


def test_applying_again_does_nothing(settings: Settings) -> None:
    """It runs at each start."""
    apply_topics(settings)
    before = _admin(settings).topics([settings.topics.events])

    assert apply_topics(settings).is_empty
    assert _admin(settings).topics([settings.topics.events]) == before


def test_a_drifted_setting_is_refused_and_then_mended(settings: Settings) -> None:
    """Somebody saved disk space; an agent must not start on that, and `apply` puts it right without touching others."""
    apply_topics(settings)
    _alter(settings, settings.topics.events, "min.compaction.lag.ms", "0")
    _alter(settings, settings.topics.events, "segment.ms", "3600000")

    with pytest.raises(TopicMismatchError, match=r"min\.compaction\.lag\.ms is 0s and must be at least 7d"):
        refuse_unsafe_topics(settings)
    done = apply_topics(settings)

    assert [(a.topic, a.required.name) for a in done.alterations] == [(settings.topics.events, "min.compaction.lag.ms")]
    assert verify_topics(settings) == []
    assert _admin(settings).topics([settings.topics.events])[settings.topics.events].settings["segment.ms"] == "3600000"


def test_a_missing_topic_gets_the_partition_count_of_the_others(settings: Settings) -> None:
    """The setting says 2 by now; the deployment was made with 3."""
    _create(settings, settings.topics.due, 3)

    apply_topics(settings)

    found = _admin(settings).topics([settings.topics.due, settings.topics.events])
    assert {topic.partition_count for topic in found.values()} == {3}
    assert verify_topics(settings) == []


def test_a_topic_with_another_partition_count_is_refused_and_left_alone(settings: Settings) -> None:
    """Adding partitions would send a task's cancel to another partition than its schedule: a person decides."""
    apply_topics(settings)
    client = _client(settings)
    more = NewPartitions(settings.topics.events, 5)
    client.create_partitions([more])[settings.topics.events].result(_TIMEOUT_S)
    _await_partitions(settings, settings.topics.events, 5)

    assert apply_topics(settings).is_empty

    (finding,) = verify_topics(settings)
    assert (finding.topic, finding.severity) == (settings.topics.events, Severity.LOSES_DATA)
    with pytest.raises(TopicMismatchError, match="has 5 partitions where most of the topics have 2"):
        refuse_unsafe_topics(settings)
    assert _admin(settings).topics([settings.topics.state])[settings.topics.state].partition_count == 2


def test_two_that_apply_at_once_both_succeed(settings: Settings) -> None:
    """Two machines are started by one script."""
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(apply_topics, [settings, settings]))

    assert len(done) == 2
    assert verify_topics(settings) == []


def test_a_recreated_topic_has_another_identity(settings: Settings) -> None:
    """Offsets of the old one mean nothing in the new one; owners tell them apart by this."""
    admin, client = _admin(settings), _client(settings)
    events = settings.topics.events
    _create(settings, events, 2)
    before = asyncio.run(admin.describe([events, "no-such-topic"]))
    client.delete_topics([events])[events].result(_TIMEOUT_S)
    _create_again(settings, events, 2)

    after = asyncio.run(admin.describe([events]))

    assert set(before.topics) == set(after.topics) == {events}
    assert before.cluster_id == after.cluster_id != ""
    assert before.topics[events].topic_id != after.topics[events].topic_id
    assert {len(before.topics[events].topic_id), after.topics[events].partition_count} == {22, 2}


def _create_again(settings: Settings, topic: str, partition_count: int) -> None:
    """A deletion is acknowledged before it is done."""
    until_s = time.monotonic() + _TIMEOUT_S
    while True:
        try:
            return _create(settings, topic, partition_count)
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS or time.monotonic() > until_s:
                raise


def test_what_the_cluster_refuses_is_refused_with_its_reason(settings: Settings) -> None:
    """Five replicas on one broker: trying again would not help."""
    with pytest.raises(RefusedError, match=r"refuses to create .*task-events.*replication"):
        apply_topics(settings.model_copy(update={"replication_factor": 5}))


def test_a_cluster_that_does_not_answer_is_unavailable_within_the_time_out(unused_address: str) -> None:
    """And not for ever, and without librdkafka's hundred lines on stderr."""
    admin = KafkaAdmin({"bootstrap.servers": unused_address}, timeout_s=1)

    with pytest.raises(UnavailableError, match=rf"Kafka at {unused_address} did not answer within 1 s"):
        admin.topics(["task-events"])
    with pytest.raises(UnavailableError):
        asyncio.run(admin.describe(["task-events"]))


@pytest.fixture
def unused_address() -> str:
    """Where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def test_the_commands_tell_people_and_programs_the_same(settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    """Code 4 before, 0 after; the plan names each topic and setting with its reason."""
    assert run(["topics", "verify", "--json"]) == 4
    missing = msgspec.json.decode(capsys.readouterr().out)
    assert (missing["safe"], len(missing["findings"])) == (False, 6)

    assert run(["topics", "plan"]) == 0
    planned = capsys.readouterr().out
    assert f"+ {settings.topics.events}  partitions 2, replicas 1" in planned
    assert "min.compaction.lag.ms = 7d\n      The outage that we tolerate." in planned
    assert planned.endswith("Nothing was changed. To do this, type: duetasks topics apply\n")

    assert run(["topics", "apply", "--json"]) == 0
    applied = msgspec.json.decode(capsys.readouterr().out)
    assert applied["created"][0]["topic"] == settings.topics.events
    assert (applied["altered"], applied["findings"]) == ([], [])

    assert run(["topics", "verify"]) == 0
    assert capsys.readouterr().out.endswith("are as declared.\n")
    assert run(["topics", "plan"]) == 0
    assert capsys.readouterr().out == "Nothing to do.\n"
