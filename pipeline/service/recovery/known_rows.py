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
    """What was loaded: the positions that the rows reflect, and the keys that are no text.

    `positions` is None if there are none or the last ones can't be read; `has_rows` tells the one from the other.
    """

    positions: Positions | None
    has_rows: bool
    strange_keys: frozenset[bytes]


async def load_known(table: TimerTable, state_log: StateLog, codec: Codec, *, partition: int, end: Offset) -> KnownRows:
    """Load the rows up to `end` into an empty table, without index: to look things up, not to fire from.

    Rows are taken as bytes, unread: most are compared and never decoded.
    Raises `RefusedError` if a newer version wrote the state, `UnavailableError`.
    """
    positions: Positions | None = None
    has_rows = False
    strange: set[bytes] = set()
    if end > 0:
        async with aclosing(state_log.read(partition, Offset(0), end)) as chunks:
            async for chunk in chunks:
                latest = dict(chunk.records)
                raw = latest.pop(POSITIONS_KEY, None)
                if raw is not None:
                    positions = _readable_positions(raw, codec)
                rows = _rows(latest, strange)
                has_rows = has_rows or bool(rows)
                table.write(rows, b"")
    return KnownRows(positions=positions, has_rows=has_rows, strange_keys=frozenset(strange))


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


def _rows(latest: Mapping[bytes, bytes | None], strange: set[bytes]) -> list[TableRow]:
    """The changes of a chunk; keys that are no text are kept in `strange` while they have a value."""
    rows = []
    for key, value in latest.items():
        try:
            rows.append(TableRow(TaskId(key.decode()), value, None, None))
        except UnicodeDecodeError:
            if value is None:
                strange.discard(key)
            else:
                strange.add(key)
    return rows
