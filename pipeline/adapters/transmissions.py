"""Tells a failed send that certainly never left this process from one whose outcome is unknown.

A delivery report that says "timed out" is given for both, so librdkafka's statistics are asked: for each partition they
count the messages that were put into requests. If that count equals the acknowledgements received, then no message
without an acknowledgement was ever put into one. A message that was sent twice raises the count for good: it is
subtracted once nothing is under way. Every doubt counts as unknown.
"""

from collections import Counter
from typing import Final

import msgspec

__all__ = ["Transmissions"]

_UNASSIGNED: Final = -1


class _PartitionStatistics(msgspec.Struct):
    txmsgs: int = 0


class _TopicStatistics(msgspec.Struct):
    partitions: dict[str, _PartitionStatistics] = {}


class _Statistics(msgspec.Struct):
    topics: dict[str, _TopicStatistics] = {}


_decode: Final = msgspec.json.Decoder(_Statistics).decode


class Transmissions:
    """Counts what was put into requests and what was acknowledged, by partition of one topic; for one thread."""

    def __init__(self, topic: str) -> None:
        self._topic = topic
        self._acknowledged: Counter[int] = Counter()
        self._repeated: Counter[int] = Counter()
        self._transmitted: dict[int, int] = {}

    def acknowledged(self, partition: int) -> None:
        """A message of `partition` was acknowledged."""
        self._acknowledged[partition] += 1

    def update(self, statistics: str, *, idle: bool) -> None:
        """Take librdkafka's statistics; `idle`: no message waits for its report, so whatever is above was a repeat."""
        topic = _decode(statistics).topics.get(self._topic)
        if topic is None:
            return
        self._transmitted = {int(number): found.txmsgs for number, found in topic.partitions.items()}
        if idle:
            for partition, transmitted in self._transmitted.items():
                self._repeated[partition] = transmitted - self._acknowledged[partition]

    def never_sent(self, partition: int) -> bool:
        """Whether a message of `partition` that failed before the last `update` was certainly in no request."""
        if partition == _UNASSIGNED:
            return True  # it never got as far as a partition's queue
        transmitted = self._transmitted.get(partition)
        return transmitted is not None and transmitted == self._acknowledged[partition] + self._repeated[partition]
