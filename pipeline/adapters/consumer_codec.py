"""The consuming side's codec over Avro."""

import msgspec

from pipeline.adapters.avro_codec import AvroCodec
from pipeline.core.applied import AppliedTask, Outcome
from pipeline.core.effects import DeadTask, DueTask
from pipeline.core.tasks import Offset

__all__ = ["AvroConsumerCodec"]


class AvroConsumerCodec:
    """Implements `ConsumerCodec`; `decode_applied` is for tools and tests that read the ledger."""

    def __init__(self, codec: AvroCodec) -> None:
        self._codec = codec
        self._applied = codec.coder("AppliedTask")

    def decode_due(self, value: bytes) -> DueTask:
        """The due task in a record; raises `CorruptStateError` if the bytes are not one."""
        return self._codec.decode_due(value)

    def encode_dead(self, task: DeadTask) -> bytes:
        """The value of a `dead-tasks` record."""
        return self._codec.encode_dead(task)

    def encode_applied(self, task: AppliedTask) -> bytes:
        """The value of a ledger row."""
        return self._applied.encode(msgspec.structs.asdict(task))

    def decode_applied(self, value: bytes) -> AppliedTask:
        """The row in a record; raises `CorruptStateError` if the bytes are not one."""
        fields = self._applied.decode(value)
        fields["outcome"] = Outcome(fields["outcome"])
        fields["due_offset"] = Offset(fields["due_offset"])
        return AppliedTask(**fields)
