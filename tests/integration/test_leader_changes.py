"""Clients that outlive an election: the leader that they asked is not the one that answers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from pipeline.adapters.kafka_offsets import KafkaOffsets

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipeline.embedded import EmbeddedBroker

pytestmark = pytest.mark.integration


def test_ends_of_a_partition_are_told_again_after_its_leader_was_restarted(
    private_broker: Callable[..., EmbeddedBroker],
) -> None:
    """The fence asks for them: a client that repeats an old leader epoch for ever would stop all firing."""
    broker = private_broker()
    admin = AdminClient({"bootstrap.servers": broker.start().bootstrap_servers, "log_level": 0})
    admin.create_topics([NewTopic("somewhere", 1, 1)])["somewhere"].result(10)
    offsets = KafkaOffsets(admin)
    assert asyncio.run(offsets.end_offset("somewhere", 0)) == 0

    broker.kill()
    broker.start()

    assert asyncio.run(offsets.end_offset("somewhere", 0)) == 0
