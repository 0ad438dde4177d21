"""The topics of one deployment: declared in `topics/*.toml`, compared with the cluster, created and mended."""

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from pipeline.adapters.kafka_admin import KafkaAdmin
from pipeline.config import Settings
from pipeline.core.topic_plan import TopicPlan, plan_topics
from pipeline.core.topic_rules import ActualTopic, Declarations, DeclaredTopic, Finding, Severity, findings
from pipeline.errors import TopicMismatchError
from pipeline.package_files import package_folder

__all__ = ["apply_topics", "declarations_of", "plan_for", "refuse_unsafe_topics", "verify_topics"]

REPLICAS_MAX_UNASKED: Final = 3


def declarations_of(settings: Settings) -> Declarations:
    """What `topics/*.toml` declares, under the deployment's names and with its sizes."""
    files = {path.stem: path for path in package_folder("topics").glob("*.toml")}
    declared = {name: msgspec.toml.decode(path.read_bytes(), type=DeclaredTopic) for name, path in files.items()}
    in_order = sorted(declared.items(), key=lambda item: item[1].order)
    return Declarations(
        topics={settings.topic_prefix + name: topic for name, topic in in_order},
        events_topic=settings.topics.events,
        event_bytes_max=settings.event_bytes_max,
        target_topics=settings.target_topics,
    )


def verify_topics(settings: Settings, *, admin: KafkaAdmin | None = None) -> list[Finding]:
    """All that is not as declared, now; empty if all is well. Changes nothing.

    Raises:
        UnavailableError: the cluster does not answer.
        RefusedError: it does not let us look.

    """
    admin = admin or KafkaAdmin(settings.client_config())
    declarations = declarations_of(settings)
    actual = admin.topics([*declarations.topics, *declarations.target_topics])
    return findings(declarations, actual, broker_count=admin.broker_count())


def refuse_unsafe_topics(settings: Settings, *, admin: KafkaAdmin | None = None) -> list[Finding]:
    """What agents call before they start: returns the advice, if that is all there is to say.

    Raises:
        TopicMismatchError: the topics can lose data; message and `findings` name each way, and what to type.
        UnavailableError: the cluster does not answer.

    """
    found = verify_topics(settings, admin=admin)
    refuse(found)
    return found


def refuse(found: Sequence[Finding]) -> None:
    """Raise `TopicMismatchError` if one of the findings loses data."""
    unsafe = [finding for finding in found if finding.severity is Severity.LOSES_DATA]
    if unsafe:
        sentences = "; ".join(finding.message for finding in unsafe)
        raise TopicMismatchError(f"The topics can lose data: {sentences}.", findings=found)


def plan_for(settings: Settings, *, admin: KafkaAdmin | None = None) -> TopicPlan:
    """What `apply_topics` would do now; changes nothing. Raises as `verify_topics` does."""
    admin = admin or KafkaAdmin(settings.client_config())
    declarations = declarations_of(settings)
    return _plan(settings, declarations, admin, admin.topics(list(declarations.topics)))


def apply_topics(settings: Settings, *, admin: KafkaAdmin | None = None) -> TopicPlan:
    """Create the topics that are missing and mend settings; returns what was done.

    It never deletes a topic and never adds partitions: `verify_topics` tells what is left. Safe to repeat, and to run
    twice at once. Raises as `verify_topics` does.
    """
    admin = admin or KafkaAdmin(settings.client_config())
    plan = plan_for(settings, admin=admin)
    admin.create(plan.creations)
    admin.alter(plan.alterations)
    return plan


def _plan(
    settings: Settings, declarations: Declarations, admin: KafkaAdmin, actual: Mapping[str, ActualTopic]
) -> TopicPlan:
    replica_count = settings.replication_factor or min(
        REPLICAS_MAX_UNASKED, admin.default_replica_count(), admin.broker_count()
    )
    return plan_topics(declarations, actual, partition_count=settings.partitions, replica_count=replica_count)
