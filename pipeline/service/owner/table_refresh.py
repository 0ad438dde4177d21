"""Puts a local table aside and builds it anew from `task-state`: the ordinary restore, on purpose."""

from collections.abc import Callable

import msgspec

from pipeline.core.positions import POSITIONS_KEY, Positions
from pipeline.core.tasks import InstantMs, Offset
from pipeline.errors import CorruptStateError, RefusedError
from pipeline.ports import Clock, Codec, StateLog, TableStore
from pipeline.service.owner.state_restore import restore_table

__all__ = ["StateContent", "read_content", "refresh_table"]

Progress = Callable[[int, int], None]


class StateContent(msgspec.Struct, frozen=True, kw_only=True):
    """What a partition of `task-state` holds up to `end`: rows, and the positions that they reflect (None: nothing)."""

    rows: int
    positions: Positions | None
    end: Offset


async def read_content(
    state_log: StateLog, codec: Codec, partition: int, end: Offset, on_progress: Progress
) -> StateContent:
    """Read all of it and count; changes nothing. Raises `UnavailableError`, `RefusedError` if it can't be read."""
    present: set[bytes] = set()
    raw: bytes | None = None
    if end > 0:
        async for chunk in state_log.read(partition, Offset(0), end):
            for key, value in chunk.records:
                if key == POSITIONS_KEY:
                    raw = value  # the last one counts: a rebuild may have replaced one that can't be read
                elif value is None:
                    present.discard(key)
                else:
                    present.add(key)
            on_progress(chunk.position, end)
    positions = None if raw is None else _decoded(raw, codec, partition)
    return StateContent(rows=len(present), positions=positions, end=end)


def _decoded(value: bytes, codec: Codec, partition: int) -> Positions:
    try:
        return codec.decode_positions(value)
    except CorruptStateError as error:
        raise RefusedError(
            f"The positions record of task-state, partition {partition}, can't be read ({error}): "
            "`duetasks rebuild --from events` makes the topic anew."
        ) from error


async def refresh_table(
    store: TableStore,
    state_log: StateLog,
    codec: Codec,
    content: StateContent,
    *,
    partition: int,
    clock: Clock,
    deletions_kept_ms: int,
    on_progress: Progress,
) -> str:
    """Where the old table went; the new one has the rows of `content`.

    If `task-state` holds nothing of the partition, the old table is put aside and none takes its place: what the agent
    does then is the agent's rule. Raises `UnavailableError` if somebody has the table open, `CorruptStateError` if the
    restore took longer than the topic keeps deletions.
    """
    until_ms = InstantMs(clock.now_ms() + deletions_kept_ms)
    aside = store.put_aside(partition, "duetasks rebuild --from state")
    if content.positions is None:
        return aside
    table = await store.open(partition)
    try:
        await restore_table(
            table,
            codec=codec,
            state_log=state_log,
            partition=partition,
            meta=None,
            end=content.end,
            clock=clock,
            until_ms=until_ms,
            on_progress=on_progress,
        )
    finally:
        table.close()
    return aside
