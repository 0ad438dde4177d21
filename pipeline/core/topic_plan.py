"""What `duetasks topics apply` would do: create what is missing, mend settings; never delete, never add partitions."""

from collections.abc import Iterable, Mapping

import msgspec

from pipeline.core.topic_rules import ActualTopic, Declarations, Finding, Requirement, shared_partition_count

__all__ = ["Alteration", "Creation", "TopicPlan", "plan_topics"]


class Creation(msgspec.Struct, frozen=True, kw_only=True):
    """A topic to create, with all that is declared for it."""

    topic: str
    partition_count: int
    replica_count: int
    settings: tuple[Requirement, ...]


class Alteration(msgspec.Struct, frozen=True, kw_only=True):
    """A setting of a topic to change; the other settings stay as they are."""

    topic: str
    present: str | None
    required: Requirement


class TopicPlan(msgspec.Struct, frozen=True, kw_only=True):
    """All that has to be done; nothing if both are empty."""

    creations: tuple[Creation, ...]
    alterations: tuple[Alteration, ...]

    @property
    def is_empty(self) -> bool:
        """Whether all is as declared already, as far as a plan could mend it."""
        return not self.creations and not self.alterations

    def leaves(self, found: Iterable[Finding]) -> list[Finding]:
        """Those of `found` that remain when all of this is done; a person has to act on them."""
        created = {creation.topic for creation in self.creations}
        altered = {(alteration.topic, alteration.required.name) for alteration in self.alterations}
        return [f for f in found if f.topic not in created and (f.topic, f.setting) not in altered]


def plan_topics(
    declarations: Declarations, actual: Mapping[str, ActualTopic], *, partition_count: int, replica_count: int
) -> TopicPlan:
    """What turns `actual` into what is declared.

    A missing topic gets the partition count of those that exist, for one count must hold for all; `partition_count`
    and `replica_count` are for new deployments and new topics.
    """
    ours = {name: actual[name] for name in declarations.topics if name in actual}
    creations = tuple(
        Creation(
            topic=name,
            partition_count=shared_partition_count(ours) or partition_count,
            replica_count=replica_count,
            settings=declarations.requirements(name, replica_count=replica_count, actual=ours),
        )
        for name in declarations.topics
        if name not in ours
    )
    alterations = tuple(
        Alteration(topic=name, present=topic.settings.get(required.name), required=required)
        for name, topic in ours.items()
        for required in declarations.requirements(name, replica_count=topic.replica_count, actual=ours)
        if not required.met_by(topic.settings.get(required.name))
    )
    return TopicPlan(creations=creations, alterations=alterations)
