"""Asks a cluster what it is and what its topics are, creates topics and alters their settings: confluent's AdminClient.

Each call has one time-out for all its requests, and ends in `UnavailableError` when that has passed.
"""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    ResourceType,
)

from pipeline.core.topic_plan import Alteration, Creation
from pipeline.core.topic_rules import ActualTopic
from pipeline.errors import DuetasksError, RefusedError, UnavailableError
from pipeline.ports import ClusterIdentity, TopicIdentity

__all__ = ["KafkaAdmin"]

TIMEOUT_S_DEFAULT: Final = 10.0
# librdkafka answers by itself when a request's time-out has passed; this is only in case that it does not.
_GRACE_S: Final = 1.0
_REQUEST_S_MIN: Final = 0.1
_SETTLE_PAUSE_S: Final = 0.05
_FORBIDDEN: Final = frozenset(
    {
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.POLICY_VIOLATION,
        KafkaError.INVALID_CONFIG,
        KafkaError.INVALID_REPLICATION_FACTOR,
        KafkaError.INVALID_PARTITIONS,
    }
)


class KafkaAdmin:
    """One connection to ask and to administer; implements `ports.ClusterView`.

    Args:
        client_config: librdkafka's settings that reach the cluster (`Settings.client_config()`).
        timeout_s: what one call takes at most, all its requests together.

    All methods raise `UnavailableError` if the cluster does not answer in time, and `RefusedError` if it answers no.

    """

    def __init__(self, client_config: Mapping[str, str], *, timeout_s: float = TIMEOUT_S_DEFAULT) -> None:
        self._servers = client_config["bootstrap.servers"]
        self._timeout_s = timeout_s
        # Without a logger librdkafka prints each failed connection on stderr, twenty times a second; what matters of
        # it comes back as the error of a request.
        quiet = logging.Logger("librdkafka")  # noqa: LOG001  # apart from the tree, so that nothing reaches it
        quiet.addHandler(logging.NullHandler())
        self._client = AdminClient(dict(client_config), logger=quiet)

    async def describe(self, topics: Sequence[str]) -> ClusterIdentity:
        """Identity of cluster and topics as of now; topics that do not exist are absent."""
        return await asyncio.to_thread(self.identity, topics)

    def identity(self, topics: Sequence[str]) -> ClusterIdentity:
        """The same, for callers that may block."""
        until_s = self._deadline()
        found = {
            name: TopicIdentity(topic_id=str(topic.topic_id), partition_count=len(topic.partitions))
            for name, topic in self._describe_topics(topics, until_s).items()
        }
        return ClusterIdentity(cluster_id=self._metadata(until_s, *topics[:1]).cluster_id, topics=found)

    def topics(self, names: Sequence[str]) -> dict[str, ActualTopic]:
        """Those of the topics that exist, with all their settings."""
        until_s = self._deadline()
        described = self._describe_topics(names, until_s)
        resources = {name: ConfigResource(ResourceType.TOPIC, name) for name in described}
        settings = self._describe_settings(list(resources.values()), until_s)
        return {
            name: ActualTopic(
                topic_id=str(topic.topic_id),
                partition_count=len(topic.partitions),
                # The least of its partitions: a chain is as strong as that.
                replica_count=min(len(partition.replicas) for partition in topic.partitions),
                settings=settings[resources[name]],
            )
            for name, topic in described.items()
        }

    def broker_count(self) -> int:
        """How many brokers the cluster has now."""
        return len(self._metadata(self._deadline()).brokers)

    def default_replica_count(self) -> int:
        """Replicas that a broker gives to a topic for which nothing is said."""
        until_s = self._deadline()
        brokers = self._metadata(until_s).brokers
        if not brokers:
            raise self._unavailable("name its brokers", "it has none that are alive now")
        broker = ConfigResource(ResourceType.BROKER, str(min(brokers)))
        return int(self._describe_settings([broker], until_s)[broker].get("default.replication.factor", "1"))

    def create(self, creations: Sequence[Creation]) -> None:
        """Create topics and wait until they are there; one that somebody else just created is left as it is."""
        if not creations:
            return
        until_s = self._deadline()
        new = [
            NewTopic(
                creation.topic,
                num_partitions=creation.partition_count,
                replication_factor=creation.replica_count,
                config={required.name: required.value for required in creation.settings},
            )
            for creation in creations
        ]
        for name, future in self._client.create_topics(new, request_timeout=self._remaining(until_s)).items():
            self._result(future, until_s, f"create {name}", fine=KafkaError.TOPIC_ALREADY_EXISTS)
        # Existence is enough: one that somebody else created at the same time may have settings of its own.
        self._await_shown({creation.topic: {} for creation in creations}, until_s)

    def alter(self, alterations: Sequence[Alteration]) -> None:
        """Change settings of topics and wait until they show; settings that are not named stay as they are."""
        if not alterations:
            return
        until_s = self._deadline()
        by_topic: dict[str, list[ConfigEntry]] = {}
        for alteration in alterations:
            entry = ConfigEntry(
                alteration.required.name,
                alteration.required.value,
                incremental_operation=AlterConfigOpType.SET,
            )
            by_topic.setdefault(alteration.topic, []).append(entry)
        resources = [
            ConfigResource(ResourceType.TOPIC, name, incremental_configs=entries) for name, entries in by_topic.items()
        ]
        futures = self._client.incremental_alter_configs(resources, request_timeout=self._remaining(until_s))
        for resource, future in futures.items():
            self._result(future, until_s, f"alter {resource.name}")
        self._await_shown(
            {name: {entry.name: entry.value for entry in entries} for name, entries in by_topic.items()}, until_s
        )

    def _metadata(self, until_s: float, *topic: str) -> Any:  # noqa: ANN401  # confluent's metadata has no types
        """Cluster id and brokers, and what is known of one topic, or of all.

        Not by `describe_cluster`: when a cluster answers that no broker is alive, as one does that was paused, it ends
        the whole process (librdkafka 2.16, `Assertion rko_result failed`).
        """
        try:
            return self._client.list_topics(*topic, timeout=self._remaining(until_s))
        except KafkaException as error:
            raise self._translated(error.args[0], "describe the cluster") from error

    def _describe_topics(self, names: Sequence[str], until_s: float) -> dict[str, Any]:
        if not names:
            return {}
        # Any broker tells who the controller is; librdkafka would go on asking the one that it knew, dead or not.
        self._metadata(until_s, *names[:1])
        collection = TopicCollection(list(names))
        futures = self._client.describe_topics(collection, request_timeout=self._remaining(until_s))
        found = {
            name: self._result(future, until_s, f"describe {name}", fine=KafkaError.UNKNOWN_TOPIC_OR_PART)
            for name, future in futures.items()
        }
        return {name: topic for name, topic in found.items() if topic is not None}

    def _describe_settings(
        self, resources: list[ConfigResource], until_s: float
    ) -> dict[ConfigResource, dict[str, str]]:
        if not resources:
            return {}
        futures = self._client.describe_configs(resources, request_timeout=self._remaining(until_s))
        return {
            resource: {
                entry.name: entry.value
                for entry in self._result(future, until_s, f"describe the settings of {resource.name}").values()
                if entry.value is not None
            }
            for resource, future in futures.items()
        }

    def _await_shown(self, wanted: Mapping[str, Mapping[str, str]], until_s: float) -> None:
        """The controller answers before every broker knows: whoever looks next must see what was done."""
        resources = {name: ConfigResource(ResourceType.TOPIC, name) for name in wanted}
        while True:
            shown = self._describe_topics(list(wanted), until_s)
            if len(shown) == len(wanted):
                settings = self._describe_settings(list(resources.values()), until_s)
                if all(wanted[name].items() <= settings[resources[name]].items() for name in wanted):
                    return
            if time.monotonic() >= until_s:
                raise UnavailableError(
                    f"Kafka at {self._servers} set up {', '.join(wanted)}, but did not show it within "
                    f"{self._timeout_s:g} s: try again."
                )
            time.sleep(_SETTLE_PAUSE_S)

    def _deadline(self) -> float:
        return time.monotonic() + self._timeout_s

    @staticmethod
    def _remaining(until_s: float) -> float:
        return max(_REQUEST_S_MIN, until_s - time.monotonic())

    def _result(self, future: "Future[Any]", until_s: float, what: str, fine: int | None = None) -> Any:  # noqa: ANN401  # as each request answers
        """What a request answers; None where it fails in the way that is `fine`."""
        try:
            return future.result(self._remaining(until_s) + _GRACE_S)
        except FutureTimeoutError as error:
            raise self._unavailable(what, "no answer") from error
        except KafkaException as error:
            if error.args[0].code() == fine:
                return None
            raise self._translated(error.args[0], what) from error
        finally:
            self._client.poll(0)  # lets librdkafka's log lines go, which would pile up

    def _translated(self, error: KafkaError, what: str) -> DuetasksError:
        if error.code() in _FORBIDDEN:
            return RefusedError(f"Kafka at {self._servers} refuses to {what}: {error.str()}.")
        return self._unavailable(what, error.str())

    def _unavailable(self, what: str, why: str) -> UnavailableError:
        return UnavailableError(
            f"Kafka at {self._servers} did not answer within {self._timeout_s:g} s when asked to {what} ({why}): "
            "see that it runs, and that DUETASKS_BOOTSTRAP_SERVERS names it."
        )
