"""A codec for simulations: msgpack, no schemas. Never for topics that others read."""

from typing import Any, TypeVar

import msgspec

from pipeline.core.effects import DeadTask, DueTask
from pipeline.core.events import Cancel, Event, Reason, Rejection, Schedule
from pipeline.core.positions import Positions
from pipeline.core.tasks import TaskState
from pipeline.errors import CorruptStateError

__all__ = ["PlainCodec", "decode_plain", "encode_plain"]

_T = TypeVar("_T")


class PlainCodec:
    """The codec port over msgpack."""

    def encode_event(self, event: Event) -> bytes:
        """The value of a `task-events` record: a byte that tells the kind, then the event."""
        return (b"S" if isinstance(event, Schedule) else b"C") + encode_plain(event)

    def decode_event(self, value: bytes) -> Event | Rejection:
        """The event in a value, or why it is none."""
        try:
            if value[:1] == b"S":
                return msgspec.msgpack.decode(value[1:], type=Schedule)
            if value[:1] == b"C":
                return msgspec.msgpack.decode(value[1:], type=Cancel)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return Rejection(reason=Reason.MALFORMED, message=str(error))
        return Rejection(reason=Reason.MALFORMED, message=f"neither a schedule nor a cancel: {value[:10].hex()}")

    def encode_state(self, state: TaskState) -> bytes:
        """A row."""
        return encode_plain(state)

    def decode_state(self, value: bytes) -> TaskState:
        """A row's state; raises `CorruptStateError`."""
        return decode_plain(value, TaskState)

    def encode_positions(self, positions: Positions) -> bytes:
        """A positions record."""
        return encode_plain(positions)

    def decode_positions(self, value: bytes) -> Positions:
        """A positions record's content; raises `CorruptStateError`."""
        return decode_plain(value, Positions)

    def encode_due(self, task: DueTask) -> bytes:
        """A `due-tasks` value."""
        return encode_plain(task)

    def decode_due(self, value: bytes) -> DueTask:
        """The due task in a value; raises `CorruptStateError`."""
        return decode_plain(value, DueTask)

    def encode_dead(self, task: DeadTask) -> bytes:
        """A `dead-tasks` value."""
        return encode_plain(task)

    def decode_dead(self, value: bytes) -> DeadTask:
        """The dead task in a value; raises `CorruptStateError`."""
        return decode_plain(value, DeadTask)


def encode_plain(value: msgspec.Struct) -> bytes:
    """Any value of the core."""
    return msgspec.msgpack.encode(value, enc_hook=_plain)


def decode_plain(value: bytes, kind: type[_T]) -> _T:
    """The value in `value`; raises `CorruptStateError`."""
    try:
        return msgspec.msgpack.decode(value, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptStateError(f"{len(value)} bytes are no {kind.__name__}: {error}") from error


def _plain(value: Any) -> Any:  # noqa: ANN401  # msgspec's hook takes what it does not know
    return dict(value)  # the read-only view that stands for "no headers"
