"""What a partition of `task-state` says now, as far as it can be read: a rebuild must not fail on what it mends."""

from collections.abc import Mapping
from contextlib import aclosing

import msgspec

from pipeline.core.positions import FORMAT_VERSION, POSITIONS_KEY, Positions
from pipeline.core.tasks import Offset, TaskId
from pipeline.errors import CorruptStateError, RefusedError
from pipeline.ports import Codec, StateLog, TableRow, TimerTable

__all__ = ["KnownRows", "load_known"]


class KnownRows(msgspec.Struct, frozen=True, kw_only=True):
    """What was loaded: the positions that the rows reflect, and the keys whose records can't be read.

    `positions` is None if there are none or the last ones can't be read; `has_rows` tells the one from the other.
    """

    positions: Positions | None
    has_rows: bool
    unreadable: frozenset[bytes]


async def load_known(table: TimerTable, state_log: StateLog, codec: Codec, *, partition: int, end: Offset) -> KnownRows:
    """Load the readable rows up to `end` into an empty table, without index: to look things up, not to fire from.

    Raises `RefusedError` if a newer version wrote the state, `UnavailableError`.
    """
    positions: Positions | None = None
    has_rows = False
    unreadable: set[bytes] = set()
    if end > 0:
        async with aclosing(state_log.read(partition, Offset(0), end)) as chunks:
            async for chunk in chunks:
                latest = dict(chunk.records)
                raw = latest.pop(POSITIONS_KEY, None)
                if raw is not None:
                    positions = _readable_positions(raw, codec)
                rows = _readable_rows(latest, codec, unreadable)
                has_rows = has_rows or bool(rows)
                table.write(rows, b"")
    return KnownRows(positions=positions, has_rows=has_rows, unreadable=frozenset(unreadable))


def _readable_positions(raw: bytes, codec: Codec) -> Positions | None:
    try:
        positions = codec.decode_positions(raw)
    except CorruptStateError:
        return None
    if positions.min_reader > FORMAT_VERSION:
        raise RefusedError(
            f"task-state of partition {positions.partition} was written in format {positions.format_version}: rebuild "
            "it with the version of duetasks that wrote it."
        )
    return positions


def _readable_rows(latest: Mapping[bytes, bytes | None], codec: Codec, unreadable: set[bytes]) -> list[TableRow]:
    """The changes of a chunk; a key joins `unreadable` when its last record can't be read, and leaves it otherwise."""
    rows = []
    for key, value in latest.items():
        try:
            task_id = TaskId(key.decode())
            is_row = value is None or codec.decode_state(value).task_id == task_id
        except UnicodeDecodeError:
            unreadable.add(key)
            continue
        except CorruptStateError:
            is_row = False
        if is_row:
            unreadable.discard(key)
        else:
            unreadable.add(key)
        # What an earlier record said of a key that can't be read now is not true any more.
        rows.append(TableRow(task_id, value if is_row else None, None, None))
    return rows
