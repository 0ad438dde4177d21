"""What a timer table reflects: how far it has read, of which topics, and who may read it.

The same facts travel in `task-state` as the positions record of each transaction and stand in the local table's meta,
so that a table can never be taken for another's, nor for newer than it is.
"""

from collections.abc import Mapping
from typing import Final

import msgspec

from pipeline.core.tasks import Generation, InstantMs, Offset

__all__ = [
    "FORMAT_VERSION",
    "POSITIONS_KEY",
    "InputPosition",
    "Positions",
    "TableFault",
    "generation_of",
    "resume_input",
    "table_fault",
]

FORMAT_VERSION: Final = 1
POSITIONS_KEY: Final = b"\x00positions"
"""The key of the positions record; admission refuses task ids that start with a zero byte."""


class InputPosition(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """How far one input topic was read: the next offset, the topic's id, and the base of its generations."""

    topic_id: str
    position: Offset
    generation_base: int = 0


class Positions(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One positions record. `stamp_ms` was read *before* the transaction that wrote it; `owner` names who wrote it."""

    cluster_id: str
    state_topic_id: str
    partition: int
    partition_count: int
    inputs: Mapping[str, InputPosition]
    stamp_ms: InstantMs
    owner: str = ""
    format_version: int = FORMAT_VERSION
    min_reader: int = FORMAT_VERSION


class TableFault(msgspec.Struct, frozen=True, kw_only=True):
    """Why a local table is put aside, in a sentence."""

    message: str


def generation_of(position: InputPosition, offset: Offset) -> Generation:
    """The generation that a SCHEDULE at `offset` starts: never used before, not even by a topic of the same name."""
    return Generation(position.generation_base + offset + 1)


def resume_input(recorded: InputPosition | None, topic_id: str) -> InputPosition:
    """Where to read on: the recorded position, or 0 of a topic created anew, its generations above the old ones."""
    if recorded is None:
        return InputPosition(topic_id=topic_id, position=Offset(0))
    if recorded.topic_id == topic_id:
        return recorded
    return InputPosition(
        topic_id=topic_id, position=Offset(0), generation_base=recorded.generation_base + recorded.position
    )


def table_fault(
    local: Positions, *, cluster_id: str, state_topic_id: str, partition: int, now_ms: InstantMs, offline_max_ms: int
) -> TableFault | None:
    """None if the local table may be used to restore from, else why it must be put aside.

    A table whose stamp is older than `delete.retention.ms` of `task-state` may have missed tombstones that are gone.
    """
    if local.format_version > FORMAT_VERSION or local.min_reader > FORMAT_VERSION:
        return TableFault(message=f"written in format {local.format_version}, this agent reads up to {FORMAT_VERSION}")
    if local.cluster_id != cluster_id:
        return TableFault(message=f"it belongs to cluster {local.cluster_id}, this is {cluster_id}")
    if local.state_topic_id != state_topic_id:
        return TableFault(message=f"it belongs to task-state {local.state_topic_id}, this is {state_topic_id}")
    if local.partition != partition:
        return TableFault(message=f"it belongs to partition {local.partition}, this is {partition}")
    if now_ms - local.stamp_ms > offline_max_ms:
        return TableFault(
            message=f"it was last known good {(now_ms - local.stamp_ms) // 1000} s ago; "
            f"deletions older than {offline_max_ms // 1000} s may be gone from task-state"
        )
    return None
