"""What the owner sends out, as values: due tasks and dead tasks. The shell encodes and produces them."""

from collections.abc import Mapping
from typing import Final

import msgspec

from pipeline.core.events import Origin, Reason
from pipeline.core.tasks import (
    NO_HEADERS,
    InstantMs,
    Offset,
    Partition,
    TaskState,
)

__all__ = ["DEFAULT_TARGET", "DeadTask", "DueTask", "Evidence", "due_task", "emission_id"]

DEFAULT_TARGET: Final = "due-tasks"


class Evidence(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Why firing was right: the clock read first, the end of the input asked for after it, how far was applied."""

    fence_clock_ms: InstantMs
    fence_offset: Offset
    applied_offset: Offset
    generation_base: int = 0


class DueTask(msgspec.Struct, frozen=True, gc=False):
    """One emission, as consumers read it. `applied_offset` is how far `task-events` had been applied when it fired.

    Id and generation may be given by position, for speed: see `TaskState`.
    """

    task_id: str
    generation: int
    occurrence: int
    attempt: int
    emission_id: str
    due_at_ms: InstantMs
    fired_at_ms: InstantMs
    payload: bytes
    content_type: str = ""
    headers: Mapping[str, bytes] = NO_HEADERS
    source: str = ""
    version: int = 0
    scheduled_offset: Offset = Offset(-1)
    applied_offset: Offset = Offset(-1)
    fence_offset: Offset = Offset(-1)
    fence_clock_ms: InstantMs = InstantMs(0)


class DeadTask(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What was set aside and why; of a value that is too large for the topic, only size and SHA-256 are kept."""

    reason: Reason
    message: str
    origin: Origin
    key: bytes | None
    value: bytes | None
    value_size: int
    value_sha256: bytes
    task_id: str = ""
    generation: int = 0
    dead_at_ms: InstantMs = InstantMs(0)


def emission_id(state: TaskState, partition: Partition) -> str:
    """The name of one emission, the same whenever it is computed again: partition:generation:occurrence:attempt."""
    return f"{partition}:{state.generation}:{state.occurrence}:{state.attempt}"


def due_task(state: TaskState, partition: Partition, evidence: Evidence) -> DueTask:
    """The record that tells consumers that `state`'s task is due."""
    return DueTask(
        state.task_id,
        state.generation,
        occurrence=state.occurrence,
        attempt=state.attempt,
        emission_id=emission_id(state, partition),
        due_at_ms=state.due_at_ms,
        fired_at_ms=evidence.fence_clock_ms,
        payload=state.payload,
        content_type=state.content_type,
        headers=state.headers,
        source=state.source,
        version=state.version,
        scheduled_offset=Offset(max(-1, state.generation - evidence.generation_base - 1)),
        applied_offset=evidence.applied_offset,
        fence_offset=evidence.fence_offset,
        fence_clock_ms=evidence.fence_clock_ms,
    )
