"""What was emitted from one partition, over all topics that tasks are emitted to, in the order of firing."""

from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Final

from pipeline.core.rebuild import REPLAY_HEADER, Emission
from pipeline.core.tasks import Offset
from pipeline.errors import CorruptStateError
from pipeline.service.recovery.ports import LogChunk, LogRecord, PartitionLog, RecoveryCodec

__all__ = ["EmissionQueue", "emission_of", "last_emissions"]

NEVER: Final = 1 << 63
_TAIL_RECORDS: Final = 200


def emission_of(record: LogRecord, codec: RecoveryCodec, *, target_topic: str) -> Emission | None:
    """The emission in a record of a target topic; None for a replay's copy, or for what others write there."""
    if record.value is None or any(name == REPLAY_HEADER for name, _ in record.headers):
        return None
    try:
        task = codec.decode_due(record.value)
    except CorruptStateError:
        return None
    return Emission(task=task, target_topic=target_topic, offset=Offset(record.offset))


async def last_emissions(
    log: PartitionLog, codec: RecoveryCodec, topic: str, partition: int, start: Offset, end: Offset
) -> list[tuple[Emission, LogRecord]]:
    """Some of the last emissions between two offsets, with their records, in order; looks back until there are any."""
    reach = _TAIL_RECORDS
    while end > start:
        lower = Offset(max(start, end - reach))
        found: list[tuple[Emission, LogRecord]] = []
        async for chunk in log.read(topic, partition, lower, end):
            for record in chunk.records:
                emission = emission_of(record, codec, target_topic="")
                if emission is not None:
                    found.append((emission, record))
        if found or lower == start:
            return found[-_TAIL_RECORDS:]
        reach *= 10
    return []


class EmissionQueue:
    """Emissions by position, read as they are needed; `next_position` is that of the first one, or `NEVER`."""

    def __init__(self, streams: Mapping[str, AsyncIterator[LogChunk]], codec: RecoveryCodec) -> None:
        """`streams`: the chunks of each topic, by the target topic that tasks name it by ("" for `due-tasks`)."""
        self._codec = codec
        self._open = dict(streams)
        self._buffered: dict[str, deque[Emission]] = {name: deque() for name in streams}
        self.next_position = -1  # until the first look
        self.taken = 0
        self.records = 0

    async def take(self, position: int) -> Sequence[Emission]:
        """All emissions that were made when the events had been applied up to `position` or less."""
        found: list[Emission] = []
        while True:
            await self._fill()
            heads = [queue for queue in self._buffered.values() if queue]
            if not heads:
                self.next_position = NEVER
                break
            first = min(heads, key=lambda queue: _order(queue[0]))
            self.next_position = first[0].position
            if self.next_position > position:
                break
            found.append(first.popleft())
        self.taken += len(found)
        return found

    async def _fill(self) -> None:
        """At least one emission of each topic that has any left."""
        for name, chunks in list(self._open.items()):
            while not self._buffered[name]:
                chunk = await anext(chunks, None)
                if chunk is None:
                    del self._open[name]
                    break
                self.records += len(chunk.records)
                for record in chunk.records:
                    emission = emission_of(record, self._codec, target_topic=name)
                    if emission is not None:
                        self._buffered[name].append(emission)


def _order(emission: Emission) -> tuple[int, int, int, str]:
    return emission.position, emission.task.fired_at_ms, emission.task.due_at_ms, emission.task.task_id
