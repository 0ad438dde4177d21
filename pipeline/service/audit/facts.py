"""Facts: what an audit keeps of the records that it has read, under keys that sort together what belongs together.

A key begins with the partition and a letter:

- `t`, the task's key, then its last row, marks, burials, and its events and emissions by place: judged task by task;
- `g`, a generation, then its emissions and what ledgers say of it: judged generation by generation;
- `r`, an offset of `task-events`: that event was refused;
- `d`, a topic's number and an offset: a consumer set that due record aside.
"""

from typing import Final

import msgspec

__all__ = [
    "DUE",
    "EMISSION",
    "EVENT",
    "LEDGER",
    "DueFact",
    "LedgerFact",
    "RecordFact",
    "RefusalFact",
    "burial_key",
    "changed_key",
    "due_key",
    "generation_of_key",
    "generation_prefix",
    "generations",
    "given_up_key",
    "ledger_fact_key",
    "packed",
    "place_of",
    "refusal_key",
    "row_key",
    "task_of_key",
    "task_prefix",
    "tasks",
    "timeline_key",
]

ROW: Final = 0
CHANGED: Final = 1
BURIAL: Final = 2
TIMELINE: Final = 3
EMISSION: Final = 0  # before the event at the same place: an emission reflects the events below its position
EVENT: Final = 1
DUE: Final = 0
LEDGER: Final = 1
_BIAS: Final = 1 << 63
"""Numbers of forged records may be negative; biased, their bytes sort as they do."""


class RecordFact(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """A record as it was read: a row, an event, an emission or a burial; `topic` is the number of a target topic."""

    offset: int
    at_ms: int
    value: bytes | None
    topic: int = 0
    refusal: "RefusalFact | None" = None
    key: bytes | None = None


class RefusalFact(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """An event that is on `dead-tasks`; `append_at_ms` tells it from one of an earlier topic of the same name."""

    append_at_ms: int
    reason: str
    task_id: str


class DueFact(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """An emission or a copy of one, as far as G5 and G6 need it."""

    task_id: str
    occurrence: int
    attempt: int
    topic: int
    offset: int
    at_ms: int
    is_copy: bool


class LedgerFact(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """A ledger record, as far as G6 needs it."""

    group: str
    task_id: str
    occurrence: int
    offset: int
    at_ms: int
    is_tombstone: bool


def packed(fact: msgspec.Struct) -> bytes:
    """The value of a fact."""
    return msgspec.msgpack.encode(fact)


def tasks(partition: int) -> bytes:
    """The prefix of all facts that are judged task by task."""
    return partition.to_bytes(2, "big") + b"t"


def generations(partition: int) -> bytes:
    """The prefix of all facts that are judged generation by generation."""
    return partition.to_bytes(2, "big") + b"g"


def task_prefix(partition: int, key: bytes) -> bytes:
    """The prefix of one task's facts; the empty key stands for all records that can't name a task."""
    return tasks(partition) + len(key).to_bytes(2, "big") + key


def task_of_key(fact_key: bytes) -> tuple[bytes, bytes]:
    """The task's key in the key of a fact, and what follows: a kind and its order."""
    end = 5 + int.from_bytes(fact_key[3:5], "big")
    return fact_key[5:end], fact_key[end:]


def row_key(partition: int, key: bytes) -> bytes:
    """Of the last record of a task in `task-state`."""
    return task_prefix(partition, key) + bytes([ROW])


def changed_key(partition: int, key: bytes) -> bytes:
    """Of the mark that there is a newer record in `task-state` than those that were read."""
    return task_prefix(partition, key) + bytes([CHANGED])


def burial_key(partition: int, key: bytes, offset: int) -> bytes:
    """Of a record that set the due task aside."""
    return task_prefix(partition, key) + bytes([BURIAL]) + offset.to_bytes(8, "big")


def timeline_key(partition: int, key: bytes, place: int, kind: int, topic: int, offset: int) -> bytes:
    """Of an event or emission."""
    return (
        task_prefix(partition, key)
        + bytes([TIMELINE])
        + _number(place)
        + bytes([kind, topic])
        + offset.to_bytes(8, "big")
    )


def place_of(rest: bytes) -> int:
    """The place of an event or emission, from what follows the task in its key."""
    return int.from_bytes(rest[1:9], "big") - _BIAS


def generation_prefix(partition: int, generation: int) -> bytes:
    """The prefix of one generation's facts."""
    return generations(partition) + _number(generation)


def generation_of_key(fact_key: bytes) -> tuple[int, int]:
    """The generation in the key of a fact, and its kind."""
    return int.from_bytes(fact_key[3:11], "big") - _BIAS, fact_key[11]


def due_key(partition: int, generation: int, topic: int, offset: int) -> bytes:
    """Of an emission or a copy."""
    return generation_prefix(partition, generation) + bytes([DUE, topic]) + offset.to_bytes(8, "big")


def ledger_fact_key(partition: int, generation: int, offset: int) -> bytes:
    """Of a ledger record."""
    return generation_prefix(partition, generation) + bytes([LEDGER]) + offset.to_bytes(8, "big")


def refusal_key(partition: int, offset: int) -> bytes:
    """Of the refusal of the event at this offset."""
    return partition.to_bytes(2, "big") + b"r" + _number(offset)


def given_up_key(partition: int, topic: int, offset: int) -> bytes:
    """Of the due record at this offset, which a consumer set aside."""
    return partition.to_bytes(2, "big") + b"d" + bytes([topic]) + _number(offset)


def _number(value: int) -> bytes:
    return min(max(value + _BIAS, 0), (1 << 64) - 1).to_bytes(8, "big")
