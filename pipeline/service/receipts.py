"""What becomes of a send: the broker's acknowledgement, or the error."""

import msgspec

from pipeline.core.events import Event
from pipeline.core.tasks import InstantMs, Offset, Partition
from pipeline.errors import DuetasksError

__all__ = ["Outcome", "Receipt"]


class Receipt(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The broker has the event, on all in-sync replicas: where it stands, and when the broker appended it.

    Both are -1 (`is_placed` is false) if an earlier attempt of the client had got through already, and the broker only
    said so: rare, after an outage. The event counts all the same.
    """

    topic: str
    partition: Partition
    offset: Offset
    timestamp_ms: InstantMs
    event_id: str

    @property
    def is_placed(self) -> bool:
        """Whether the broker told where the event stands."""
        return self.offset >= 0


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One record of a bulk send: its place in the input, and exactly one of receipt and error.

    `event` is absent where the request could not even be made into one.
    """

    index: int
    event: Event | None = None
    receipt: Receipt | None = None
    error: DuetasksError | None = None

    def unwrap(self) -> Receipt:
        """The receipt; raises the error if there is none."""
        if self.error is not None:
            raise self.error
        assert self.receipt is not None, "an outcome has a receipt or an error"
        return self.receipt
