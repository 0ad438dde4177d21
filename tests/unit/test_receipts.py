"""What a sender is told of an event that the broker acknowledged."""

import pytest

from pipeline.adapters.event_sender import receipt_of

pytestmark = pytest.mark.unit


class Acknowledged:
    """A delivery report of librdkafka; `offset` None: the broker had the record from an earlier attempt."""

    def __init__(self, offset: int | None) -> None:
        self._offset = offset

    def partition(self) -> int:
        """Where it was sent."""
        return 3

    def offset(self) -> int | None:
        """Where it stands."""
        return self._offset

    def timestamp(self) -> tuple[int, int]:
        """When it was appended, by the broker's clock."""
        return (2, 1_000)


def test_a_receipt_tells_where_and_when_the_broker_appended_the_event() -> None:
    """Offset and instant are what later verdicts and delays are counted from."""
    receipt = receipt_of(Acknowledged(7), "task-events", "e1")  # type: ignore[arg-type]  # as far as it is asked

    assert (receipt.partition, receipt.offset, receipt.timestamp_ms) == (3, 7, 1_000)
    assert receipt.is_placed


def test_a_receipt_of_what_the_broker_had_already_says_that_the_place_is_not_known() -> None:
    """Chaos on three nodes showed it: the event counts, and nothing may be reckoned from a place that nobody told."""
    receipt = receipt_of(Acknowledged(None), "task-events", "e1")  # type: ignore[arg-type]  # as far as it is asked

    assert (receipt.offset, receipt.timestamp_ms) == (-1, -1)
    assert not receipt.is_placed
