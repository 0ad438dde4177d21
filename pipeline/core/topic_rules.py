"""What topics must be like, and what it would cost if they were not: declarations against what a cluster has.

Pure: `topics/*.toml` is read and the cluster is asked elsewhere. Most declared values stand for themselves; a size may
lean on another one, the largest event that admission allows or what `task-events` really takes.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from enum import StrEnum
from math import inf
from typing import Final, assert_never

import msgspec

from pipeline.core.durations import format_duration, parse_duration_ms
from pipeline.core.tasks import DurationMs

__all__ = [
    "ActualTopic",
    "Declarations",
    "DeclaredSetting",
    "DeclaredTopic",
    "Finding",
    "Requirement",
    "Rule",
    "Severity",
    "findings",
    "shared_partition_count",
    "told",
]

REPLICAS_WANTED: Final = 3
_SIZE: Final = "max.message.bytes"
_UNLIMITED_WHEN_NEGATIVE: Final = frozenset({"retention.ms", "retention.bytes"})


class Severity(StrEnum):
    """Whether duetasks may run with it."""

    LOSES_DATA = "LOSES_DATA"
    ADVICE = "ADVICE"


class Rule(StrEnum):
    """How an actual value is held against the declared one."""

    EQUAL = "equal"
    AT_LEAST = "at_least"
    AT_MOST = "at_most"


class DeclaredSetting(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One setting of a topic as its file declares it: a `value`, or a size that exceeds another by so many bytes.

    `reason` says why it is so, `otherwise` what another value would cost; both are read by people.
    `only_with_replicas`: it applies to topics with at least so many replicas.
    """

    rule: Rule
    severity: Severity
    reason: str
    otherwise: str
    value: str | None = None
    event_bytes_max_plus: int | None = None
    task_events_plus: int | None = None
    only_with_replicas: int = 1

    def __post_init__(self) -> None:
        given = [v for v in (self.value, self.event_bytes_max_plus, self.task_events_plus) if v is not None]
        if len(given) != 1:
            raise ValueError("a setting needs exactly one of value, event_bytes_max_plus and task_events_plus")


class DeclaredTopic(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One topic as its file declares it; `order` is its place in lists."""

    order: int
    purpose: str
    settings: Mapping[str, DeclaredSetting]


class ActualTopic(msgspec.Struct, frozen=True, kw_only=True):
    """A topic as the cluster has it, with all its settings, defaults included."""

    topic_id: str
    partition_count: int
    replica_count: int
    settings: Mapping[str, str]


class Requirement(msgspec.Struct, frozen=True, kw_only=True):
    """A setting with its value worked out, in Kafka's words."""

    name: str
    value: str
    declared: DeclaredSetting

    def met_by(self, actual: str | None) -> bool:
        """Whether a topic with this actual value may stay as it is."""
        if actual is None:
            return False
        match self.declared.rule:
            case Rule.EQUAL:
                return set(actual.split(",")) == set(self.value.split(","))
            case Rule.AT_LEAST:
                return _amount(self.name, actual) >= _amount(self.name, self.value)
            case Rule.AT_MOST:
                return _amount(self.name, actual) <= _amount(self.name, self.value)
            case _:
                assert_never(self.declared.rule)


class Declarations(msgspec.Struct, frozen=True, kw_only=True):
    """The topics of one deployment by their full names, and what their sizes lean on.

    `target_topics` are not ours, but tasks are emitted to them by partition number.
    """

    topics: Mapping[str, DeclaredTopic]
    events_topic: str
    event_bytes_max: int
    target_topics: frozenset[str] = frozenset()

    def requirements(
        self, topic: str, *, replica_count: int, actual: Mapping[str, ActualTopic]
    ) -> tuple[Requirement, ...]:
        """What `topic` must be set to if it has so many replicas, beside the topics that there are."""
        return tuple(
            Requirement(name=name, value=self._value(name, declared, actual), declared=declared)
            for name, declared in self.topics[topic].settings.items()
            if declared.only_with_replicas <= replica_count
        )

    def _value(self, name: str, declared: DeclaredSetting, actual: Mapping[str, ActualTopic]) -> str:
        if declared.event_bytes_max_plus is not None:
            return str(self.event_bytes_max + declared.event_bytes_max_plus)
        if declared.task_events_plus is not None:
            return str(self._events_bytes_max(actual) + declared.task_events_plus)
        assert declared.value is not None, "checked when it was made"
        if name.endswith(".ms") and not declared.value.lstrip("-").isdigit():
            return str(parse_duration_ms(declared.value))
        return declared.value

    def _events_bytes_max(self, actual: Mapping[str, ActualTopic]) -> int:
        """What `task-events` takes, or will take once it is as declared."""
        wanted = int(self._value(_SIZE, self.topics[self.events_topic].settings[_SIZE], actual))
        present = actual.get(self.events_topic)
        return max(wanted, int(present.settings.get(_SIZE, 0))) if present is not None else wanted


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Something about a topic that is not as declared: `message` is what it is, what it costs, and what to type.

    `setting` is empty where the topic as a whole is meant.
    """

    topic: str
    setting: str
    severity: Severity
    message: str


def findings(declarations: Declarations, actual: Mapping[str, ActualTopic], *, broker_count: int) -> list[Finding]:
    """All that is not as declared, in the order of the declarations; empty if all is well."""
    found: list[Finding] = []
    ours = {name: actual[name] for name in declarations.topics if name in actual}
    shared_count = shared_partition_count(ours)
    for name, declared in declarations.topics.items():
        if name not in ours:
            found.append(_missing(name, declared))
            continue
        if ours[name].partition_count != shared_count:
            found.append(_partition_mismatch(name, ours[name].partition_count, shared_count))
        found += _drift(declarations, name, ours)
    found += _few_replicas(ours, broker_count)
    return found + [
        _weak_target(name, actual.get(name), shared_count)
        for name in sorted(declarations.target_topics)
        if name not in actual or actual[name].partition_count < shared_count
    ]


def shared_partition_count(topics: Mapping[str, ActualTopic]) -> int:
    """The partition count that most of `topics` have, of equals the first one's; 0 if there are none."""
    counts = Counter(topic.partition_count for topic in topics.values())
    return counts.most_common(1)[0][0] if counts else 0


def told(name: str, value: str | None) -> str:
    """A setting's value for people: durations as durations."""
    if value is None:
        return "not set"
    if name in _UNLIMITED_WHEN_NEGATIVE and value.startswith("-"):
        return "unlimited"
    return format_duration(DurationMs(int(value))) if name.endswith(".ms") else value


def _missing(name: str, declared: DeclaredTopic) -> Finding:
    message = f"{name} does not exist: {declared.purpose}. Type: duetasks topics apply"
    return Finding(topic=name, setting="", severity=Severity.LOSES_DATA, message=message)


def _partition_mismatch(name: str, count: int, shared_count: int) -> Finding:
    message = (
        f"{name} has {_partitions(count)} where most of the topics have {shared_count}: a task's events, its state and "
        "its emissions would no longer be in partitions of one number, and a cancel could miss its task. Partitions "
        "of a topic in use can't be changed safely. If it is new and empty, delete it and type: duetasks topics apply. "
        "Else begin anew under another DUETASKS_TOPIC_PREFIX"
    )
    return Finding(topic=name, setting="", severity=Severity.LOSES_DATA, message=message)


def _drift(declarations: Declarations, name: str, actual: Mapping[str, ActualTopic]) -> Iterable[Finding]:
    topic = actual[name]
    for required in declarations.requirements(name, replica_count=topic.replica_count, actual=actual):
        present = topic.settings.get(required.name)
        if not required.met_by(present):
            bound = {Rule.EQUAL: "", Rule.AT_LEAST: "at least ", Rule.AT_MOST: "at most "}[required.declared.rule]
            message = (
                f"{name}: {required.name} is {told(required.name, present)} and must be "
                f"{bound}{told(required.name, required.value)}: {required.declared.otherwise}. "
                "Type: duetasks topics apply"
            )
            yield Finding(topic=name, setting=required.name, severity=required.declared.severity, message=message)


def _few_replicas(actual: Mapping[str, ActualTopic], broker_count: int) -> Iterable[Finding]:
    wanted = min(REPLICAS_WANTED, broker_count)
    for name, topic in actual.items():
        if topic.replica_count < wanted:
            message = (
                f"{name} has {topic.replica_count} of {wanted} possible replicas: what was acknowledged is lost with "
                "the disks that hold it. Raise it with Kafka's kafka-reassign-partitions tool, and set "
                f"DUETASKS_REPLICATION_FACTOR={wanted} for topics to come"
            )
            yield Finding(topic=name, setting="replication.factor", severity=Severity.ADVICE, message=message)


def _weak_target(name: str, present: ActualTopic | None, shared_count: int) -> Finding:
    what = f"has {_partitions(present.partition_count)} of {shared_count} needed" if present else "does not exist"
    message = (
        f"{name} is a target topic and {what}: tasks for it are set aside on dead-tasks as UNDELIVERABLE. "
        f"Create it with at least {_partitions(shared_count)}, or take it out of DUETASKS_TARGET_TOPICS"
    )
    return Finding(topic=name, setting="", severity=Severity.ADVICE, message=message)


def _partitions(count: int) -> str:
    return f"{count} partition{'' if count == 1 else 's'}"


def _amount(name: str, value: str) -> float:
    amount = int(value)
    return inf if amount < 0 and name in _UNLIMITED_WHEN_NEGATIVE else amount
