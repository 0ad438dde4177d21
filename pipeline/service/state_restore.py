"""Brings a timer table up to a position of `task-state`: rows, index and the positions that they reflect."""

from collections.abc import Callable, Mapping
from contextlib import aclosing
from typing import TypeVar

import msgspec

from pipeline.core.positions import FORMAT_VERSION, POSITIONS_KEY, Positions
from pipeline.core.tasks import Offset, TaskId, index_entry
from pipeline.errors import CorruptStateError, RefusedError
from pipeline.ports import Codec, StateLog, TableMeta, TableRow, TimerTable

__all__ = ["Restored", "decode_meta", "encode_meta", "restore_table"]

Progress = Callable[[int, int], None]
_T = TypeVar("_T")


class Restored(msgspec.Struct, frozen=True, kw_only=True):
    """What the table reflects now, how far `task-state` is in it, and how many rows were written."""

    positions: Positions | None
    position: Offset
    rows: int


def encode_meta(meta: TableMeta, codec: Codec) -> bytes:
    """The table's meta: the position in `task-state`, then the positions record."""
    return meta.state_position.to_bytes(8, "big") + codec.encode_positions(meta.positions)


def decode_meta(value: bytes, codec: Codec) -> TableMeta:
    """The meta as it was written; raises `CorruptStateError`."""
    return TableMeta(
        state_position=Offset(int.from_bytes(value[:8], "big")), positions=codec.decode_positions(value[8:])
    )


async def restore_table(
    table: TimerTable,
    *,
    codec: Codec,
    state_log: StateLog,
    partition: int,
    meta: TableMeta | None,
    end: Offset,
    on_progress: Progress,
) -> Restored:
    """Read `task-state` on from where `meta` says (None: the table is new), up to `end`.

    Raises `RefusedError` if the state needs a newer reader or can't be read, `CorruptStateError` if the table can't be,
    `UnavailableError`. `on_progress` hears (position, end).
    """
    positions = meta.positions if meta is not None else None
    position = meta.state_position if meta is not None else Offset(0)
    written = 0
    on_progress(position, end)
    if position < end:
        async with aclosing(state_log.read(partition, position, end)) as chunks:
            async for chunk in chunks:
                latest = dict(chunk.records)
                raw = latest.pop(POSITIONS_KEY, None)
                if raw is not None:
                    positions = _decoded(raw, codec.decode_positions, POSITIONS_KEY, partition)
                    _check_reader(positions)
                rows = _restored_rows(table, codec, latest, partition)
                position = chunk.position
                # Without positions the meta stays empty, which no later start takes for a whole table.
                meta_bytes = b""
                if positions is not None:
                    meta_bytes = encode_meta(TableMeta(positions=positions, state_position=position), codec)
                table.write(rows, meta_bytes)
                written += len(rows)
                on_progress(position, end)
    return Restored(positions=positions, position=position, rows=written)


def _check_reader(positions: Positions) -> None:
    if positions.min_reader > FORMAT_VERSION:
        raise RefusedError(
            f"task-state of partition {positions.partition} needs a reader of format {positions.min_reader}: "
            "update this agent"
        )


def _decoded(value: bytes, decode: Callable[[bytes], _T], key: bytes, partition: int) -> _T:
    """What a record of `task-state` holds; if it can't be read, no local table is at fault: refused, not put aside."""
    try:
        return decode(value)
    except (CorruptStateError, UnicodeDecodeError) as error:
        raise RefusedError(
            f"task-state of partition {partition} holds a record with key {key!r} that can't be read ({error}): "
            "find out who wrote it; `duetasks rebuild --from events` makes the topic anew"
        ) from error


def _task_id(key: bytes) -> TaskId:
    return TaskId(key.decode())


def _restored_rows(
    table: TimerTable, codec: Codec, latest: Mapping[bytes, bytes | None], partition: int
) -> list[TableRow]:
    ids = [_decoded(key, _task_id, key, partition) for key in latest]
    rows = []
    for task_id, old, new in zip(ids, table.get_many(ids), latest.values(), strict=True):
        drop = None if old is None else index_entry(codec.decode_state(old))
        add = None if new is None else index_entry(_decoded(new, codec.decode_state, task_id.encode(), partition))
        if drop == add:
            drop = add = None
        if old is None and new is None:
            continue
        rows.append(TableRow(task_id, new, drop, add))
    return rows
