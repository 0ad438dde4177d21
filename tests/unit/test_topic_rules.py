"""Topics as declared against topics as they are: each finding from a right cluster with one thing wrong in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from pipeline.adapters.topic_setup import declarations_of, refuse
from pipeline.config import Settings
from pipeline.core.topic_plan import plan_topics
from pipeline.core.topic_rules import ActualTopic, DeclaredTopic, Finding, Severity, findings
from pipeline.errors import TopicMismatchError

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.unit

Cluster = dict[str, ActualTopic]
_DAY_MS = 86_400_000


@pytest.fixture(autouse=True)
def _no_settings_of_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.chdir(str(tmp_path))


def _settings(**values: object) -> Settings:
    return Settings(**values)  # type: ignore[arg-type]  # pydantic validates


def _as_declared(settings: Settings, replica_count: int = 1) -> Cluster:
    """A cluster in which all is right."""
    declarations = declarations_of(settings)
    return {
        name: ActualTopic(
            topic_id=f"id-of-{name}",
            partition_count=4,
            replica_count=replica_count,
            settings={
                required.name: required.value
                for required in declarations.requirements(name, replica_count=replica_count, actual={})
            },
        )
        for name in declarations.topics
    }


def _set(cluster: Cluster, topic: str, setting: str, value: str) -> Cluster:
    changed = {**cluster[topic].settings, setting: value}
    return {**cluster, topic: msgspec.structs.replace(cluster[topic], settings=changed)}


def _found(cluster: Cluster, settings: Settings | None = None, broker_count: int = 1) -> list[Finding]:
    return findings(declarations_of(settings or _settings()), cluster, broker_count=broker_count)


def test_a_cluster_as_declared_has_no_findings() -> None:
    """Else nobody would read them."""
    assert _found(_as_declared(_settings())) == []


def test_the_declared_settings_are_those_of_the_design() -> None:
    """Written down a second time on purpose: a changed file must be meant."""
    cluster = _as_declared(_settings())

    told = {name: cluster[name].settings for name in cluster}

    assert list(told) == ["task-events", "task-progress", "task-state", "due-tasks", "dead-tasks", "applied-tasks"]
    assert told["task-events"]["cleanup.policy"] == "compact,delete"
    assert told["task-events"]["min.compaction.lag.ms"] == str(7 * _DAY_MS)
    assert [told[name]["cleanup.policy"] for name in ("task-progress", "due-tasks", "dead-tasks")] == ["delete"] * 3
    assert [told[name]["cleanup.policy"] for name in ("task-state", "applied-tasks")] == ["compact"] * 2
    assert {told[name]["retention.ms"] for name in ("task-events", "due-tasks", "task-progress")} == {str(30 * _DAY_MS)}
    assert told["task-state"]["delete.retention.ms"] == str(7 * _DAY_MS)
    assert {settings["message.timestamp.type"] for settings in told.values()} == {"LogAppendTime"}
    events_bytes_max = int(told["task-events"]["max.message.bytes"])
    assert events_bytes_max > 1_000_000
    for name in ("task-state", "due-tasks", "dead-tasks"):
        assert int(told[name]["max.message.bytes"]) == events_bytes_max + 16_384


_LOSSES = [
    ("task-events", "cleanup.policy", "compact"),
    ("task-events", "cleanup.policy", "delete"),
    ("task-events", "min.compaction.lag.ms", "0"),
    ("task-events", "min.compaction.lag.ms", str(7 * _DAY_MS - 1)),
    ("task-events", "retention.ms", str(7 * _DAY_MS)),
    ("task-events", "retention.bytes", "1073741824"),
    ("task-events", "message.timestamp.type", "CreateTime"),
    ("task-events", "max.message.bytes", "1000000"),
    ("task-events", "unclean.leader.election.enable", "true"),
    ("task-progress", "cleanup.policy", "compact"),
    ("task-progress", "retention.ms", "1"),
    ("task-progress", "message.timestamp.type", "CreateTime"),
    ("task-state", "cleanup.policy", "compact,delete"),
    ("task-state", "cleanup.policy", "delete"),
    ("task-state", "delete.retention.ms", str(_DAY_MS)),
    ("task-state", "max.message.bytes", "1048588"),
    ("due-tasks", "cleanup.policy", "compact"),
    ("due-tasks", "retention.ms", str(7 * _DAY_MS)),
    ("due-tasks", "message.timestamp.type", "CreateTime"),
    ("due-tasks", "max.message.bytes", "1048588"),
    ("dead-tasks", "cleanup.policy", "compact"),
    ("dead-tasks", "max.message.bytes", "1048588"),
    ("applied-tasks", "cleanup.policy", "compact,delete"),
]


@pytest.mark.parametrize(("topic", "setting", "value"), _LOSSES)
def test_a_setting_that_can_lose_data_is_found_and_refused(topic: str, setting: str, value: str) -> None:
    """The one finding says where, what it is, what it costs and what to type; agents don't start on it."""
    found = _found(_set(_as_declared(_settings()), topic, setting, value))

    (finding,) = found
    assert (finding.topic, finding.setting, finding.severity) == (topic, setting, Severity.LOSES_DATA)
    cost = declarations_of(_settings()).topics[topic].settings[setting].otherwise
    assert finding.message.startswith(f"{topic}: {setting} is ")
    assert finding.message.endswith(f": {cost}. Type: duetasks topics apply")
    with pytest.raises(TopicMismatchError, match=f"{topic}: {setting}") as raised:
        refuse(found)
    assert raised.value.findings == (finding,)


@pytest.mark.parametrize(
    ("topic", "setting", "value"),
    [
        ("dead-tasks", "retention.ms", "1000"),
        ("task-state", "segment.bytes", "1073741824"),
        ("task-state", "message.timestamp.type", "CreateTime"),
        ("applied-tasks", "delete.retention.ms", "0"),
    ],
)
def test_a_setting_that_only_costs_comfort_is_advice(topic: str, setting: str, value: str) -> None:
    """Refusing to run would be worse than what it warns of."""
    found = _found(_set(_as_declared(_settings()), topic, setting, value))

    assert [(finding.setting, finding.severity) for finding in found] == [(setting, Severity.ADVICE)]
    refuse(found)


@pytest.mark.parametrize(
    ("topic", "setting", "value"),
    [
        ("task-events", "cleanup.policy", "delete,compact"),
        ("task-events", "retention.ms", "-1"),
        ("task-events", "retention.ms", str(365 * _DAY_MS)),
        ("task-events", "min.compaction.lag.ms", str(30 * _DAY_MS)),
        ("task-state", "segment.bytes", "16777216"),
        ("task-state", "retention.ms", "1"),
    ],
)
def test_an_operator_may_be_more_careful_than_declared(topic: str, setting: str, value: str) -> None:
    """Longer is safe, and settings that are not declared are the operator's own."""
    cluster = _set(_as_declared(_settings()), topic, setting, value)

    assert _found(cluster) == []
    assert plan_topics(declarations_of(_settings()), cluster, partition_count=4, replica_count=1).is_empty


def test_state_must_take_what_task_events_really_takes() -> None:
    """An operator who raises the size of events alone gets tasks that are accepted and can't be stored."""
    found = _found(_set(_as_declared(_settings()), "task-events", "max.message.bytes", "4000000"))

    assert [(finding.topic, finding.setting) for finding in found] == [
        ("task-state", "max.message.bytes"),
        ("due-tasks", "max.message.bytes"),
        ("dead-tasks", "max.message.bytes"),
    ]
    assert "must be at least 4016384" in found[0].message


def test_sizes_follow_the_admission_limit() -> None:
    """A deployment that admits larger events needs larger topics."""
    found = _found(_as_declared(_settings()), _settings(event_bytes_max=2_000_000))

    assert [finding.topic for finding in found] == ["task-events", "task-state", "due-tasks", "dead-tasks"]


@pytest.mark.parametrize("topic", ["task-events", "task-progress", "task-state", "due-tasks", "dead-tasks"])
def test_one_topic_with_another_partition_count_is_named(topic: str) -> None:
    """Not all the others: the odd one out is what somebody changed. `apply` can't mend it, and does not promise to."""
    cluster = _as_declared(_settings())
    cluster[topic] = msgspec.structs.replace(cluster[topic], partition_count=8)

    found = _found(cluster)

    (finding,) = found
    assert (finding.topic, finding.severity) == (topic, Severity.LOSES_DATA)
    assert f"{topic} has 8 partitions where most of the topics have 4" in finding.message
    plan = plan_topics(declarations_of(_settings()), cluster, partition_count=4, replica_count=1)
    assert plan.is_empty
    assert plan.leaves(found) == [finding]


def test_a_missing_topic_is_a_finding_with_the_command_that_makes_it() -> None:
    """A first start before `topics apply` must not end in a time-out."""
    cluster = _as_declared(_settings())
    del cluster["task-state"]

    (finding,) = _found(cluster)

    assert (finding.topic, finding.severity) == ("task-state", Severity.LOSES_DATA)
    assert "does not exist" in finding.message
    assert finding.message.endswith("Type: duetasks topics apply")


def test_a_missing_setting_counts_as_wrong() -> None:
    """A broker that does not know a setting does not keep it."""
    cluster = _as_declared(_settings())
    without = {k: v for k, v in cluster["task-events"].settings.items() if k != "min.compaction.lag.ms"}
    cluster["task-events"] = msgspec.structs.replace(cluster["task-events"], settings=without)

    (finding,) = _found(cluster)

    assert "min.compaction.lag.ms is not set" in finding.message


def test_two_in_sync_replicas_are_asked_for_only_where_there_are_three() -> None:
    """On one broker `min.insync.replicas=2` would refuse every write."""
    three = _as_declared(_settings(), replica_count=3)
    assert {topic.settings["min.insync.replicas"] for topic in three.values()} == {"2"}
    assert all("min.insync.replicas" not in topic.settings for topic in _as_declared(_settings()).values())

    (finding,) = _found(_set(three, "task-events", "min.insync.replicas", "1"), broker_count=3)

    assert (finding.setting, finding.severity) == ("min.insync.replicas", Severity.ADVICE)


def test_few_replicas_are_advice_where_there_are_brokers_for_more() -> None:
    """One broker is a choice; one replica on three brokers is most likely a forgotten default."""
    found = _found(_as_declared(_settings()), broker_count=3)

    assert {(finding.setting, finding.severity) for finding in found} == {("replication.factor", Severity.ADVICE)}
    assert len(found) == 6


def test_a_target_topic_needs_the_partitions_that_owners_write_to() -> None:
    """Emissions go to the owner's partition number; missing ones would be set aside as undeliverable."""
    settings = _settings(target_topics=frozenset({"emails", "letters", "wide"}))
    cluster = _as_declared(settings)
    cluster["emails"] = ActualTopic(topic_id="x", partition_count=1, replica_count=1, settings={})
    cluster["wide"] = ActualTopic(topic_id="y", partition_count=12, replica_count=1, settings={})

    found = _found(cluster, settings)

    assert [(finding.topic, finding.severity) for finding in found] == [
        ("emails", Severity.ADVICE),
        ("letters", Severity.ADVICE),
    ]


def test_a_prefix_is_before_every_name() -> None:
    """Two deployments on one cluster must not touch each other's topics."""
    declarations = declarations_of(_settings(topic_prefix="staging-"))

    assert all(name.startswith("staging-") for name in declarations.topics)
    assert declarations.events_topic in declarations.topics


def test_a_plan_creates_what_is_missing_with_the_count_of_the_others() -> None:
    """The setting `partitions` may have changed since; a topic with another count would be a mismatch from birth."""
    cluster = _as_declared(_settings())
    del cluster["due-tasks"]

    plan = plan_topics(declarations_of(_settings()), cluster, partition_count=16, replica_count=1)

    (creation,) = plan.creations
    assert (creation.topic, creation.partition_count, plan.alterations) == ("due-tasks", 4, ())
    assert plan.leaves(_found(cluster)) == []


def test_a_plan_for_an_empty_cluster_uses_the_settings() -> None:
    """A first `topics apply`."""
    plan = plan_topics(declarations_of(_settings()), {}, partition_count=16, replica_count=3)

    assert {(creation.partition_count, creation.replica_count) for creation in plan.creations} == {(16, 3)}
    assert [creation.topic for creation in plan.creations] == list(declarations_of(_settings()).topics)
    wanted = {required.name: required.value for required in plan.creations[0].settings}
    assert wanted["min.insync.replicas"] == "2"


def test_a_plan_mends_each_drifted_setting_and_no_other() -> None:
    """What an operator set beside ours stays as it is."""
    cluster = _set(_as_declared(_settings()), "task-events", "retention.ms", "1")

    plan = plan_topics(declarations_of(_settings()), cluster, partition_count=4, replica_count=1)

    (alteration,) = plan.alterations
    assert (alteration.topic, alteration.present) == ("task-events", "1")
    assert (alteration.required.name, alteration.required.value) == ("retention.ms", str(30 * _DAY_MS))
    assert plan.leaves(_found(cluster)) == []


def test_every_declared_setting_says_why_and_what_else_it_would_cost() -> None:
    """A setting without a reason is the first one that somebody changes."""
    for topic in declarations_of(_settings()).topics.values():
        for declared in topic.settings.values():
            assert declared.reason.endswith(".")
            assert declared.otherwise
            assert not declared.otherwise.endswith(".")


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text + "\nsurprise = 1\n",
        lambda text: text.replace('rule = "equal"', 'rule = "roughly"', 1),
        lambda text: text.replace('value = "7d"', 'value = "7d"\ntask_events_plus = 1', 1),
        lambda text: text.replace('value = "7d"\n', "", 1),
    ],
)
def test_a_mistake_in_a_declaration_is_an_error(change: Callable[[str], str]) -> None:
    """A misspelt key would otherwise be a protection that is silently absent."""
    from pipeline.package_files import package_folder  # noqa: PLC0415  # only here

    text = change((package_folder("topics") / "task-events.toml").read_text("utf-8"))

    with pytest.raises(msgspec.ValidationError):
        msgspec.toml.decode(text, type=DeclaredTopic)
