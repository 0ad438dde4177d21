"""What `dead-tasks` says of a partition's past: which events were refused, which due tasks could not be emitted."""

from collections.abc import Mapping, Sequence

import msgspec

from pipeline.core.effects import DeadTask
from pipeline.core.events import Reason
from pipeline.core.rebuild import Burial
from pipeline.core.tasks import Generation, InstantMs, TaskId
from pipeline.errors import CorruptStateError
from pipeline.service.recovery.ports import LogBounds, PartitionLog, RecoveryCodec

__all__ = ["Refusal", "SetAside", "read_set_aside"]


class Refusal(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An event that was refused; `append_at_ms` tells it from one of an earlier topic of the same name."""

    append_at_ms: InstantMs
    reason: Reason
    message: str
    task_id: str


class SetAside(msgspec.Struct, frozen=True, kw_only=True):
    """Refused events by their offset, and burials in the order in which they were written."""

    refusals: Mapping[int, Refusal]
    burials: Sequence[Burial]


async def read_set_aside(
    log: PartitionLog, codec: RecoveryCodec, *, topic: str, events_topic: str, partition: int, bounds: LogBounds
) -> SetAside:
    """All of it; what consumers set aside there is left out. Raises `UnavailableError`."""
    refusals: dict[int, Refusal] = {}
    burials: list[Burial] = []
    async for chunk in log.read(topic, partition, bounds.start, bounds.end):
        for record in chunk.records:
            dead = _decoded(record.value, codec)
            if dead is None or (dead.origin.topic, dead.origin.partition) != (events_topic, partition):
                continue
            if not dead.generation:
                refusals[dead.origin.offset] = Refusal(
                    append_at_ms=dead.origin.append_at_ms,
                    reason=dead.reason,
                    message=dead.message,
                    task_id=dead.task_id,
                )
            elif dead.reason is Reason.UNDELIVERABLE:
                burials.append(
                    Burial(
                        task_id=TaskId(dead.task_id),
                        generation=Generation(dead.generation),
                        dead_at_ms=dead.dead_at_ms,
                        append_at_ms=InstantMs(record.timestamp),
                    )
                )
    return SetAside(refusals=refusals, burials=burials)


def _decoded(value: bytes | None, codec: RecoveryCodec) -> DeadTask | None:
    try:
        return codec.decode_dead(value or b"")
    except CorruptStateError:
        return None  # not ours
