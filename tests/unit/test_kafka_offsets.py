"""What brokers answer when they are asked for the ends of partitions, while leaders change."""

import asyncio
from collections.abc import Mapping
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka.admin import OffsetSpec

from pipeline.adapters.kafka_offsets import KafkaOffsets

pytestmark = pytest.mark.unit

NOT_KNOWN = -1001


class Brokers:
    """An admin client whose `list_offsets` gives these answers, one after the other."""

    def __init__(self, *answers: int) -> None:
        self._answers = list(answers)

    def list_offsets(self, wanted: Mapping[Any, Any], **_options: object) -> dict[Any, Future[Any]]:
        """The next answer, for all places."""
        answered: Future[Any] = Future()
        answered.set_result(SimpleNamespace(offset=self._answers.pop(0)))
        return dict.fromkeys(wanted, answered)

    def list_topics(self, *_topic: object) -> None:
        """Nothing to learn."""


@pytest.mark.parametrize("question", ["start_offset", "end_offset"])
def test_an_answer_that_tells_no_offset_is_asked_for_again(question: str) -> None:
    """Chaos on three nodes showed it: taken for an end, it looks as if records had been lost."""
    offsets = KafkaOffsets(Brokers(NOT_KNOWN, 7))  # type: ignore[arg-type]  # as far as it is asked

    found = asyncio.run(getattr(offsets, question)("task-events", 0))

    assert found == 7


def test_offset_zero_is_an_answer() -> None:
    """An empty partition ends at 0."""
    offsets = KafkaOffsets(Brokers(0))  # type: ignore[arg-type]  # as far as it is asked

    assert asyncio.run(offsets.ask([("task-events", 0)], OffsetSpec.latest())) == {("task-events", 0): 0}
