"""What an audit reads, over Avro: all that owners write, and what consumers write."""

from pipeline.adapters.avro_codec import AvroCodec
from pipeline.adapters.consumer_codec import AvroConsumerCodec
from pipeline.core.applied import AppliedTask

__all__ = ["AvroAuditCodec"]


class AvroAuditCodec(AvroCodec):
    """Implements `AuditCodec`."""

    def __init__(self) -> None:
        super().__init__()
        self._consumers = AvroConsumerCodec(self)
        self._progress = self.coder("TaskProgress")

    def decode_applied(self, value: bytes) -> AppliedTask:
        """A ledger row; raises `CorruptStateError` if the bytes are not one."""
        return self._consumers.decode_applied(value)

    def check_progress(self, value: bytes) -> None:
        """Raise `CorruptStateError` unless the value is a report of progress."""
        self._progress.decode(value)
