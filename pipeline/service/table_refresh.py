"""Puts a local table aside and builds it anew from `task-state`: the ordinary restore, on purpose."""

from collections.abc import Callable

import msgspec

from pipeline.core.positions import POSITIONS_KEY, Positions
from pipeline.core.tasks import Offset
from pipeline.ports import Codec, StateLog, TableStore
from pipeline.service.state_restore import restore_table

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
    """Read all of it and count; changes nothing. Raises `UnavailableError`, `CorruptStateError`."""
    present: set[bytes] = set()
    positions: Positions | None = None
    if end > 0:
        async for chunk in state_log.read(partition, Offset(0), end):
            for key, value in chunk.records:
                if key == POSITIONS_KEY and value is not None:
                    positions = codec.decode_positions(value)
                elif value is None:
                    present.discard(key)
                else:
                    present.add(key)
            on_progress(chunk.position, end)
    return StateContent(rows=len(present), positions=positions, end=end)


async def refresh_table(
    store: TableStore,
    state_log: StateLog,
    codec: Codec,
    content: StateContent,
    *,
    partition: int,
    on_progress: Progress,
) -> tuple[str, int]:
    """Where the old table went, and how many rows the new one has.

    If `task-state` holds nothing of the partition, the old table is put aside and none takes its place: what the agent
    does then is the agent's rule. Raises `UnavailableError` if somebody has the table open.
    """
    aside = store.put_aside(partition, "duetasks rebuild --from state")
    if content.positions is None:
        return aside, 0
    table = await store.open(partition)
    try:
        restored = await restore_table(
            table,
            codec=codec,
            state_log=state_log,
            partition=partition,
            meta=None,
            end=content.end,
            on_progress=on_progress,
        )
    finally:
        table.close()
    return aside, restored.rows
