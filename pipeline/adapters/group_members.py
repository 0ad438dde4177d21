"""Who is in a consumer group now."""

from collections.abc import Mapping
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Final

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient

from pipeline.adapters.kafka_ledger import LibrdkafkaLog
from pipeline.errors import UnavailableError

__all__ = ["group_members"]

DEADLINE_S: Final = 15.0


def group_members(client: Mapping[str, str], group: str) -> list[str]:
    """The members of a group, each as client id and host; empty if it has none or does not exist.

    A member that was killed counts until its session is over. Raises `UnavailableError`.
    """
    admin = AdminClient(
        {**client, "logger": LibrdkafkaLog()}
    )  # kept until the answer is here: without it nobody would wait for one
    try:
        asked = admin.describe_consumer_groups([group], request_timeout=DEADLINE_S)
        described = asked[group].result(DEADLINE_S + 1)
    except (KafkaException, FutureTimeoutError) as error:
        fault = error.args[0] if isinstance(error, KafkaException) else None
        if fault is not None and fault.code() == KafkaError.GROUP_ID_NOT_FOUND:
            return []
        raise UnavailableError(
            f"The members of group {group} can't be asked for ({fault.str() if fault else 'no answer'}): "
            "check that the brokers can be reached."
        ) from error
    return [f"{member.client_id} at {member.host}" for member in described.members]
