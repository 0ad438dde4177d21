"""Where the next emission will stand on its topic, so that a task's state can say it in the same transaction.

The owner is the only regular writer of its partition, so the offset is known beforehand: the end, plus one for each
record, plus one for each commit marker. The producer checks it against what the broker answers, before the commit; when
somebody else wrote there (a replay does), the transaction is done again without the offsets, and tells them instead.
"""

from collections.abc import Mapping

from pipeline.core.tasks import Offset
from pipeline.ports import ClusterIdentity, EndOffsets
from pipeline.service.owner.settings import OwnerSettings

__all__ = ["UNKNOWN_OFFSET", "Targets"]

UNKNOWN_OFFSET = Offset(-1)


class Targets:
    """The topics that tasks are emitted to, with the next offset of the owner's partition (-1: not known)."""

    def __init__(self, settings: OwnerSettings, end_offsets: EndOffsets, identity: ClusterIdentity) -> None:
        self._partition = settings.partition
        self._end_offsets = end_offsets
        self._topics = [
            topic
            for topic in (settings.due_topic, *sorted(settings.target_topics))
            if topic in identity.topics and settings.partition < identity.topics[topic].partition_count
        ]
        self._next: dict[str, Offset] = {}

    @property
    def next_offsets(self) -> Mapping[str, Offset]:
        """By topic; a topic that is absent can't be emitted to."""
        return self._next

    async def learn(self) -> None:
        """Ask for the ends, once: after the claim, when every earlier transaction has its markers."""
        for topic in self._topics:
            self._next[topic] = await self._end_offsets.end_offset(topic, self._partition)

    def forget(self) -> None:
        """A transaction was aborted, and its marker may not be there yet: the next one leaves the offsets unknown."""
        for topic in self._topics:
            self._next[topic] = UNKNOWN_OFFSET

    def expect(self, topic: str, count: int) -> tuple[Offset | None, Offset | None]:
        """The offsets that the first and last of the next `count` records must get, or None where not known."""
        first = self._next[topic]
        if first == UNKNOWN_OFFSET:
            return None, None
        return first, Offset(first + count - 1)

    def committed(self, last_offsets: Mapping[str, Offset]) -> None:
        """A transaction was committed; its last record on each topic is followed by its marker."""
        for topic, offset in last_offsets.items():
            if topic in self._next:
                self._next[topic] = Offset(offset + 2)
