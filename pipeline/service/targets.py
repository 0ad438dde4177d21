"""Where the next emission will stand on its topic, so that a task's state can say it in the same transaction.

The owner is the only regular writer of its partition, so the offset is known beforehand: the end, plus one for each
record, plus one for each commit marker. The producer checks it against what the broker answers, before the commit; when
somebody else wrote there (a replay does), the transaction is done again without the guess.
"""

from collections.abc import Iterable, Mapping

from pipeline.core.tasks import Offset
from pipeline.ports import ClusterIdentity, EndOffsets
from pipeline.service.owner_settings import OwnerSettings

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
        self._guessing = True

    @property
    def next_offsets(self) -> Mapping[str, Offset]:
        """By topic; a topic that is absent can't be emitted to."""
        return self._next

    async def learn(self, *, guess: bool = True) -> None:
        """Ask for the ends anew; without `guess`, the next transaction leaves the offsets unknown."""
        self._guessing = guess
        for topic in self._topics:
            known = await self._end_offsets.end_offset(topic, self._partition) if guess else UNKNOWN_OFFSET
            self._next[topic] = known

    def advance(self, topic: str, count: int) -> tuple[Offset | None, Offset | None]:
        """The offsets that the first and last of the next `count` records must get, or None where not known."""
        first = self._next[topic]
        if first == UNKNOWN_OFFSET:
            return None, None
        self._next[topic] = Offset(first + count)
        return first, Offset(first + count - 1)

    async def committed(self, topics: Iterable[str]) -> None:
        """The transaction that wrote to `topics` was committed: its marker takes an offset in each."""
        if not self._guessing:
            await self.learn()
            return
        for topic in topics:
            self._next[topic] = Offset(self._next[topic] + 1)
