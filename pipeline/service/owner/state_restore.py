"""Brings a timer table up to a position of `task-state`: rows, index and the positions that they reflect."""

from collections.abc import Callable, Mapping
from contextlib import aclosing
from typing import TypeVar

import msgspec

from pipeline.core.positions import FORMAT_VERSION, POSITIONS_KEY, Positions
from pipeline.core.tasks import InstantMs, Offset, TaskId, index_entry
from pipeline.errors import CorruptStateError, RefusedError
from pipeline.ports import Clock, Codec, StateLog, TableMeta, TableRow, TimerTable

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
    clock: Clock,
    until_ms: InstantMs,
    on_progress: Progress,
) -> Restored:
    """Read `task-state` on from where `meta` says (None: the table is new), up to `end`.

    A record that can't be read is passed over if a later one of its key replaces it, as after a rebuild.
    After `until_ms` by `clock` the brokers may have forgotten deletions of rows that the table has: it was away, or the
    restore has taken, longer than they keep them. Raises `RefusedError` if the state needs a newer reader or can't be
    read, `CorruptStateError` if the table can't be or it is too late, `UnavailableError`. `on_progress` hears
    (position, end).
    """
    positions = meta.positions if meta is not None else None
    position = meta.state_position if meta is not None else Offset(0)
    written = 0
    on_progress(position, end)
    is_checked = False
    if position < end:
        async with aclosing(state_log.read(partition, position, end)) as chunks:
            async for chunk in chunks:
                latest = dict(chunk.records)
                try:
                    found, rows = _decoded_chunk(table, codec, latest, partition)
                except RefusedError:
                    if not is_checked:
                        await _refuse_what_stays_unreadable(codec, state_log, partition, position, end)
                        is_checked = True
                    found, rows = _decoded_chunk(table, codec, _readable(codec, latest, partition), partition)
                if clock.now_ms() > until_ms:
                    raise CorruptStateError("it grew too old while it was restored: deletions may be gone by now")
                positions = positions if found is None else found
                position = chunk.position
                # Without positions the meta stays empty, which no later start takes for a whole table.
                meta_bytes = b""
                if positions is not None:
                    meta_bytes = encode_meta(TableMeta(positions=positions, state_position=position), codec)
                table.write(rows, meta_bytes)
                written += len(rows)
                on_progress(position, end)
    return Restored(positions=positions, position=position, rows=written)


def _decoded_chunk(
    table: TimerTable, codec: Codec, latest: Mapping[bytes, bytes | None], partition: int
) -> tuple[Positions | None, list[TableRow]]:
    """The positions and the changes in a chunk; raises `RefusedError` at a record that can't be read."""
    raw = latest.get(POSITIONS_KEY)
    positions = None
    if raw is not None:
        positions = _decoded(raw, codec.decode_positions, POSITIONS_KEY, partition)
        _check_reader(positions)
    rest = {key: value for key, value in latest.items() if key != POSITIONS_KEY}
    return positions, _restored_rows(table, codec, rest, partition)


async def _refuse_what_stays_unreadable(
    codec: Codec, state_log: StateLog, partition: int, start: Offset, end: Offset
) -> None:
    """Look ahead, once: raise `RefusedError` for the last record of a key that can't be read.

    One that a later record replaces does no harm: that is how a rebuild mends the topic, whose old records stay until
    they are compacted. A key that can't be read is harmless once it was deleted.
    """
    faults: dict[bytes, RefusedError] = {}
    async with aclosing(state_log.read(partition, start, end)) as chunks:
        async for chunk in chunks:
            for key, value in chunk.records:
                fault = _fault(codec, key, value, partition)
                if fault is None:
                    faults.pop(key, None)
                else:
                    faults[key] = fault
    for fault in faults.values():
        raise fault


def _readable(codec: Codec, latest: Mapping[bytes, bytes | None], partition: int) -> dict[bytes, bytes | None]:
    """The records that can be read and mean a row: those of unreadable keys mean none, deleted or not."""
    return {
        key: value for key, value in latest.items() if _is_text(key) and _fault(codec, key, value, partition) is None
    }


def _fault(codec: Codec, key: bytes, value: bytes | None, partition: int) -> RefusedError | None:
    if value is None:
        return None
    try:
        if key == POSITIONS_KEY:
            _check_reader(_decoded(value, codec.decode_positions, key, partition))
        else:
            _decoded(key, _task_id, key, partition)
            _decoded(value, codec.decode_state, key, partition)
    except RefusedError as error:
        return error
    return None


def _is_text(key: bytes) -> bool:
    try:
        key.decode()
    except UnicodeDecodeError:
        return False
    return True


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
