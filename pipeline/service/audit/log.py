"""The records of one partition, as an audit reads them: counted, and accused where they can't be read."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing

from pipeline.core.audit import Code, Finding, Tally
from pipeline.core.tasks import InstantMs, Offset
from pipeline.service.audit.ports import AuditRequest
from pipeline.service.recovery.ports import LogBounds, LogRecord, PartitionLog

__all__ = ["KEY_BYTES_MAX", "AuditLog", "Progress"]

KEY_BYTES_MAX = 8_192
"""The longest key that can name a task, whatever the settings are."""

Progress = Callable[[str, int, int], None]
"""Hears what is being read, how far it is, and how much it is."""


class AuditLog:
    """One partition of every topic; `records` counts what was read of each, `notes` say what is out of reach."""

    def __init__(
        self, partition: int, request: AuditRequest, log: PartitionLog, tally: Tally, *, on_progress: Progress
    ) -> None:
        self.partition = partition
        self.notes: list[str] = []
        self.records: dict[str, int] = {}
        self._request = request
        self._log = log
        self._tally = tally
        self._on_progress = on_progress

    async def bounds(self, topic: str) -> LogBounds:
        """As of now; raises `UnavailableError`."""
        return await self._log.bounds(topic, self.partition)

    async def chunks(self, topic: str, start: Offset, end: Offset) -> AsyncIterator[Sequence[LogRecord]]:
        """The committed records from `start`, or from what is still retained, up to `end`."""
        # Asked again right before: retention may have moved it since the ends were captured.
        start = max(start, (await self.bounds(topic)).start)
        what = f"Reading {topic}, partition {self.partition}"
        self._on_progress(what, 0, end - start)
        async with aclosing(self._log.read(topic, self.partition, start, end)) as chunks:
            async for chunk in chunks:
                self.records[topic] = self.records.get(topic, 0) + len(chunk.records)
                yield chunk.records
                self._on_progress(what, chunk.position - start, end - start)

    def violated(self, code: Code, topic: str, record: LogRecord, detail: str) -> None:
        """A record that is wrong by itself."""
        if self._request.from_ms <= record.timestamp < self._request.to_ms:
            key = b"" if record.key is None else record.key[:KEY_BYTES_MAX]
            self.accuse(code, topic, record.offset, record.timestamp, detail, key.decode(errors="replace"))

    def accuse(self, code: Code, topic: str, offset: int, at_ms: int, detail: str, task_id: str = "") -> None:
        """Something that is wrong, whenever it was."""
        self._tally.violated(
            Finding(
                code=code,
                topic=topic,
                partition=self.partition,
                offset=offset,
                at_ms=InstantMs(at_ms),
                detail=detail,
                task_id=task_id,
            )
        )
