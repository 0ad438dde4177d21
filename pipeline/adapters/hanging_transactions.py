"""Ends what still hangs of an earlier owner's transaction, although its coordinator takes it for ended.

A broker that was killed and comes back can leave the end out on partitions without a leader just then (Kafka 4.4:
"these partitions are likely deleted already"). Readers would wait there for ever, and the next commit of the same
producer would commit what was given up. An abort by the same producer ends it as what it is.
"""

from collections.abc import Sequence
from typing import Any, Final

import structlog

__all__ = ["HANGING_KEY", "abort_hanging"]

log = structlog.get_logger(__name__)

HANGING_KEY: Final = b"\x00hanging"
"""Key of a record that is always aborted; no task has it."""


def abort_hanging(
    producer: Any,  # noqa: ANN401  # librdkafka's, untyped
    topics: Sequence[str],
    *,
    partition: int,
    timeout_s: float,
    offsets: tuple[Sequence[Any], object] | None = None,
) -> None:
    """Abort a transaction that reaches this partition of each topic, and the group's offsets if they are given.

    `producer` must be the one that the hanging transaction belongs to: of the same `transactional.id`, acquired.
    `offsets` are places and the group's metadata, as `send_offsets_to_transaction` takes them; they change nothing.
    Blocks. Raises `KafkaException`.
    """
    log.warning("open_transaction_found", partition=partition, topics=list(topics), offsets=offsets is not None)
    producer.begin_transaction()
    for topic in topics:
        producer.produce(topic, key=HANGING_KEY, value=b"", partition=partition)
    # Only what was sent is part of the transaction, and only there an abort leaves its mark.
    producer.flush(timeout_s)
    if offsets is not None:
        producer.send_offsets_to_transaction(*offsets, timeout_s)
    producer.abort_transaction(timeout_s)
