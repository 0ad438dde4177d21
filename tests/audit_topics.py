"""Topics written by hand, as an owner and a consumer would write them, so that tests can then falsify them.

Every method writes what is right unless a test says otherwise: `emit(..., fired_at_ms=...)` writes a due record that
differs in that field. `settle` writes the rows and the positions that belong to all that was done before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from pipeline.core.applied import AppliedTask, Outcome, ledger_key
from pipeline.core.effects import DeadTask, DueTask, Evidence, due_task
from pipeline.core.events import DAY_MS, Cancel, Event, Origin, Reason, Schedule
from pipeline.core.lifecycle import apply_event, mark_emitted
from pipeline.core.positions import POSITIONS_KEY, InputPosition, Positions
from pipeline.core.tasks import (
    NO_HEADERS,
    DurationMs,
    Generation,
    InstantMs,
    Offset,
    Partition,
    TaskId,
    TaskState,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Protocol

    class Writer(Protocol):
        """Appends records and knows what the cluster calls itself."""

        def now_ms(self) -> int: ...
        def topic(self, name: str) -> str: ...
        def send(
            self, topic: str, key: bytes | None, value: bytes | None, headers: Mapping[str, bytes] = ...
        ) -> tuple[int, int]: ...
        def identity(self) -> tuple[str, str, str]: ...


RETENTION_MS: Final = DurationMs(7 * DAY_MS)


class HandWritten:
    """One partition, number `partition`, of all topics, over a writer that appends where it is told to."""

    def __init__(self, writer: Writer, codec: Any, *, partition: int = 0, partition_count: int = 1) -> None:  # noqa: ANN401  # Avro's or the plain one
        self.writer = writer
        self.codec = codec
        self.partition = partition
        self.partition_count = partition_count
        self.states: dict[str, TaskState | None] = {}
        self.position = 0
        self.appended_at_ms = 0
        self.due_offsets: dict[str, int] = {}

    # -- upstream ----------------------------------------------------------------------------------------------

    def schedule(self, task_id: str, due_at_ms: int, **fields: Any) -> int:  # noqa: ANN401  # the event's own
        """A schedule that is applied; returns its offset."""
        return self._event(Schedule(task_id=TaskId(task_id), due_at_ms=InstantMs(due_at_ms), **fields))

    def cancel(self, task_id: str, **fields: Any) -> int:  # noqa: ANN401  # the same
        """A cancel that is applied; returns its offset."""
        return self._event(Cancel(task_id=TaskId(task_id), **fields))

    def raw_event(self, key: bytes | None, value: bytes | None) -> int:
        """Any bytes, passed over."""
        offset, self.appended_at_ms = self.writer.send("task-events", key, value)
        self.position = offset + 1
        return offset

    def _event(self, event: Event) -> int:
        offset, at_ms = self.writer.send("task-events", event.task_id.encode(), self.codec.encode_event(event))
        self.appended_at_ms = at_ms
        origin = Origin(
            topic="task-events", partition=self.partition, offset=Offset(offset), append_at_ms=InstantMs(at_ms)
        )
        result = apply_event(
            self.states.get(event.task_id),
            event,
            origin,
            generation=Generation(offset + 1),
            retention_ms=RETENTION_MS,
        )
        self.states[event.task_id] = result.state
        self.position = offset + 1
        return offset

    # -- the owner ---------------------------------------------------------------------------------------------

    def due(self, task_id: str, **changes: Any) -> DueTask:  # noqa: ANN401  # any field
        """The due record of a task as it is right now, with `changes`."""
        state = self.states[task_id]
        assert state is not None
        evidence = Evidence(
            fence_clock_ms=InstantMs(max(state.due_at_ms, self.writer.now_ms())),
            fence_offset=Offset(self.position),
            applied_offset=Offset(self.position),
        )
        return msgspec.structs.replace(due_task(state, Partition(self.partition), evidence), **changes)

    def write_due(self, task: DueTask, headers: Mapping[str, bytes] = NO_HEADERS) -> int:
        """A due record, whatever it says; returns its offset."""
        return self.writer.send("due-tasks", task.task_id.encode(), self.codec.encode_due(task), headers)[0]

    def emit(self, task_id: str, **changes: Any) -> DueTask:  # noqa: ANN401  # any field of the due record
        """The task fires, and its row knows."""
        task = self.due(task_id, **changes)
        state = self.states[task_id]
        assert state is not None
        self.due_offsets[task_id] = offset = self.write_due(task)
        self.states[task_id] = mark_emitted(
            state,
            fired_at_ms=InstantMs(max(task.fired_at_ms, state.due_at_ms)),
            emitted_offset=Offset(offset),
            retention_ms=RETENTION_MS,
        )
        return task

    def dead(self, reason: Reason, origin_offset: int, key: bytes | None, **fields: Any) -> int:  # noqa: ANN401  # the record's own
        """A record of what was set aside: the last event, unless told otherwise."""
        origin = Origin(
            topic=fields.pop("topic", self.writer.topic("task-events")),
            partition=self.partition,
            offset=Offset(origin_offset),
            append_at_ms=InstantMs(fields.pop("append_at_ms", self.appended_at_ms)),
        )
        dead = DeadTask(
            reason=reason,
            message="by hand",
            origin=origin,
            key=key,
            value=None,
            value_size=0,
            value_sha256=b"",
            **fields,
        )
        return self.writer.send("dead-tasks", key, self.codec.encode_dead(dead))[0]

    def row(self, task_id: str, state: TaskState | None) -> int:
        """A row, whatever it says."""
        value = None if state is None else self.codec.encode_state(state)
        return self.writer.send("task-state", task_id.encode(), value)[0]

    def settle(self, *, without: frozenset[str] = frozenset(), **changes: Any) -> None:  # noqa: ANN401  # of the positions
        """Write the rows but for those of `without`, and the positions, with `changes`."""
        for task_id, state in self.states.items():
            if task_id not in without and state is not None:
                self.row(task_id, state)
        cluster_id, state_id, events_id = self.writer.identity()
        inputs = {self.writer.topic("task-events"): InputPosition(topic_id=events_id, position=Offset(self.position))}
        positions = Positions(
            cluster_id=cluster_id,
            state_topic_id=state_id,
            partition=self.partition,
            partition_count=self.partition_count,
            inputs=inputs,
            stamp_ms=InstantMs(self.writer.now_ms()),
        )
        positions = msgspec.structs.replace(positions, **changes)
        self.writer.send("task-state", POSITIONS_KEY, self.codec.encode_positions(positions))

    # -- consumers ---------------------------------------------------------------------------------------------

    def applied(self, task: DueTask, group: str = "billing", *, due_offset: int = 0) -> int:
        """A ledger row; returns its offset."""
        row = AppliedTask(
            group=group,
            task_id=task.task_id,
            generation=task.generation,
            occurrence=task.occurrence,
            attempt=task.attempt,
            due_partition=self.partition,
            due_offset=Offset(due_offset),
            applied_at_ms=InstantMs(self.writer.now_ms()),
            outcome=Outcome.APPLIED,
        )
        return self.writer.send("applied-tasks", ledger_key(group, task), self.codec.encode_applied(row))[0]

    def forget(self, task: DueTask, group: str = "billing") -> None:
        """The ledger forgets a row, as a replay makes it."""
        self.writer.send("applied-tasks", ledger_key(group, task), None)
