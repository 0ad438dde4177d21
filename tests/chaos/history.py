"""What the processes of a chaos run write down of what they do, a JSON line before and after each step.

A line is one write to a file opened for appending, so a process that is killed leaves every line that it wrote, and at
most misses the one after its last step: that step then counts as one of unknown outcome. Nothing here is read from a
clock but `at_ms`, the sender's own, taken after the answer had come.
"""

from __future__ import annotations

import os
import time
from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

from pipeline.core.tasks import InstantMs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pipeline.core.effects import DueTask
    from pipeline.core.events import Event


class What(StrEnum):
    """The steps."""

    SENDING = "sending"
    ACKNOWLEDGED = "acknowledged"
    UNSENT = "unsent"
    """The client says that it is certainly not in the log."""
    UNKNOWN = "unknown"
    PLACED = "placed"
    """Within a transaction: it stands there, and counts only if the transaction is committed."""
    COMMITTED = "committed"
    ABORTED = "aborted"
    APPLYING = "applying"


class Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One step; `attempt` names one sending of an event, or the transaction that it was sent in."""

    what: What
    attempt: str = ""
    event_id: str = ""
    task_id: str = ""
    generation: int = 0
    occurrence: int = 0
    partition: int = -1
    offset: int = -1
    at_ms: InstantMs = InstantMs(0)
    event: bytes = b""
    """Its Avro, so that an upstream that was killed can send it again."""


def clock_ms() -> InstantMs:
    """The clock of this machine, which is everybody's here."""
    return InstantMs(time.time_ns() // 1_000_000)


class HistoryFile:
    """Appends lines; safe to use from several threads, as each line is one write."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._encoder = msgspec.json.Encoder()

    def write(self, line: Line) -> None:
        """Append one line."""
        os.write(self._descriptor, self._encoder.encode(line) + b"\n")

    def sending(self, attempt: str, event: Event, value: bytes) -> None:
        """Before an event is handed to the client."""
        self.write(
            Line(what=What.SENDING, attempt=attempt, event_id=event.event_id, task_id=event.task_id, event=value)
        )

    def stands(self, what: What, attempt: str, event: Event, partition: int, offset: int) -> None:
        """After the broker has told where it stands."""
        self.write(
            Line(
                what=what,
                attempt=attempt,
                event_id=event.event_id,
                partition=partition,
                offset=offset,
                at_ms=clock_ms(),
            )
        )

    def note(self, what: What, attempt: str, event_id: str = "") -> None:
        """After anything else; the instant is read now."""
        self.write(Line(what=what, attempt=attempt, event_id=event_id, at_ms=clock_ms()))

    def applying(self, task: DueTask) -> None:
        """Before a consumer lets its effect happen."""
        self.write(
            Line(what=What.APPLYING, task_id=task.task_id, generation=task.generation, occurrence=task.occurrence)
        )


def read_history(*paths: Path) -> Iterator[Line]:
    """All whole lines of these files."""
    decoder = msgspec.json.Decoder(Line)
    for path in sorted(paths):
        *whole, torn = path.read_bytes().split(b"\n")
        yield from map(decoder.decode, whole)
        if torn.endswith(b"}"):
            yield decoder.decode(torn)
