"""How far consumer groups have read, as the group coordinator has it."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final

from confluent_kafka import ConsumerGroupTopicPartitions, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from pipeline.adapters.kafka_ledger import LibrdkafkaLog
from pipeline.core.tasks import Offset
from pipeline.errors import UnavailableError

__all__ = ["KafkaGroupOffsets"]

DEADLINE_S: Final = 15.0


class KafkaGroupOffsets:
    """Implements `GroupOffsets`."""

    def __init__(self, client: Mapping[str, str]) -> None:
        self._admin = AdminClient({**client, "logger": LibrdkafkaLog()})

    async def committed(self, group: str, places: Sequence[tuple[str, int]]) -> Mapping[tuple[str, int], Offset]:
        """The group's committed offsets by topic and partition; where it has none, nothing."""
        asked = ConsumerGroupTopicPartitions(group, [TopicPartition(*place) for place in places])
        try:
            answers = self._admin.list_consumer_group_offsets([asked], request_timeout=DEADLINE_S)
            answer = await asyncio.wrap_future(answers[group])
        except KafkaException as error:
            if error.args[0].code() == KafkaError.GROUP_ID_NOT_FOUND:
                return {}
            raise UnavailableError(
                f"The offsets of group {group} can't be had: {error.args[0].str()}. Check that the brokers can be "
                "reached."
            ) from error
        return {
            (found.topic, found.partition): Offset(found.offset)
            for found in answer.topic_partitions
            if found.error is None and found.offset >= 0
        }
