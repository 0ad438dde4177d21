"""What a replay copies: the range that was asked for, each record as it is, never a copy of a copy."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from pipeline.core.applied import ledger_key
from pipeline.core.effects import DueTask
from pipeline.core.partitioning import partition_for_key
from pipeline.core.tasks import InstantMs, Offset, TaskId
from pipeline.errors import UnavailableError
from pipeline.service.recovery import replayer as module
from pipeline.service.recovery.ports import LogBounds, LogChunk, LogRecord
from pipeline.service.recovery.replayer import Replayer, ReplayRequest
from pipeline.testing.plain_codec import PlainCodec

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

pytestmark = pytest.mark.unit

CODEC = PlainCodec()
PARTITIONS = 2


class _Log:
    """Two partitions of `due-tasks` in memory; `start` is the first retained offset."""

    def __init__(self, start: int = 0) -> None:
        self.records: dict[int, list[LogRecord]] = {0: [], 1: []}
        self.start = start

    def add(self, task_id: str, at_ms: int, *headers: tuple[str, bytes]) -> LogRecord:
        partition = partition_for_key(task_id.encode(), PARTITIONS)
        task = DueTask(
            task_id=task_id,
            generation=at_ms,
            occurrence=0,
            attempt=0,
            emission_id="",
            due_at_ms=InstantMs(at_ms),
            fired_at_ms=InstantMs(at_ms),
            payload=b"p",
        )
        record = LogRecord(
            offset=len(self.records[partition]),
            timestamp=at_ms,
            key=task_id.encode(),
            value=CODEC.encode_due(task),
            headers=headers,
        )
        self.records[partition].append(record)
        return record

    async def bounds(self, _topic: str, partition: int) -> LogBounds:
        end = Offset(len(self.records[partition]))
        return LogBounds(start=Offset(min(self.start, end)), stable_end=end, end=end)

    async def offset_at(self, _topic: str, partition: int, at_ms: InstantMs) -> Offset | None:
        return next((Offset(r.offset) for r in self.records[partition][self.start :] if r.timestamp >= at_ms), None)

    async def read(self, _topic: str, partition: int, start: Offset, end: Offset) -> AsyncGenerator[LogChunk]:
        yield LogChunk(records=self.records[partition][start:end], position=end)


class _Writer:
    """Keeps what was committed; adds copies to the log too, as a real one does. Fails at the given commit."""

    def __init__(self, log: _Log, *, fails_at: int = 0) -> None:
        self.log = log
        self.committed: list[tuple[str, int, LogRecord | bytes, dict[str, bytes]]] = []
        self.commits = 0
        self._open: list[tuple[str, int, LogRecord | bytes, dict[str, bytes]]] = []
        self._fails_at = fails_at

    async def acquire(self) -> None: ...

    def begin(self) -> None:
        self._open = []

    def copy(self, topic: str, partition: int, record: LogRecord, headers: Mapping[str, bytes]) -> None:
        self._open.append((topic, partition, record, dict(headers)))

    def delete(self, topic: str, partition: int, key: bytes) -> None:
        self._open.append((topic, partition, key, {}))

    async def commit(self) -> None:
        self.commits += 1
        if self.commits == self._fails_at:
            raise UnavailableError("the brokers are gone")
        self.committed += self._open
        for _, partition, record, headers in self._open:
            if isinstance(record, LogRecord):
                self.log.add(record.key.decode() if record.key else "", 10_000, *headers.items())
                assert partition_for_key(record.key or b"", PARTITIONS) == partition

    async def abort(self) -> None: ...

    async def close(self) -> None: ...


def _request(**changes: object) -> ReplayRequest:
    fields: dict[str, object] = {
        "replay_id": "r1",
        "source_topic": "due-tasks",
        "target_topic": "due-tasks",
        "ledger_topic": "applied-tasks",
        "partition_count": PARTITIONS,
        "from_ms": InstantMs(100),
        "to_ms": InstantMs(200),
    }
    return ReplayRequest(**{**fields, **changes})  # type: ignore[arg-type]  # as the test gives them


def _replay(log: _Log, writer: _Writer, **changes: object) -> list[LogRecord]:
    """Plan and run; the records that were copied."""

    async def main() -> None:
        told: list[tuple[int, int]] = []
        replayer = Replayer(_request(**changes), log, CODEC, on_progress=lambda done, total: told.append((done, total)))
        plan = await replayer.plan()
        assert writer.commits == 0, "planning writes nothing"
        done = await replayer.run(plan, writer)
        assert (done, done) == told[-1]
        assert done == plan.records

    asyncio.run(main())
    return [record for _, _, record, _ in writer.committed if isinstance(record, LogRecord)]


def test_the_range_begins_with_its_first_instant_and_ends_before_its_last() -> None:
    """Two replays of adjoining ranges copy nothing twice and leave nothing out."""
    log = _Log()
    for at_ms in [99, 100, 150, 199, 200]:
        log.add("x", at_ms)

    assert [record.timestamp for record in _replay(log, _Writer(log))] == [100, 150, 199]


def test_copies_are_the_records_themselves_and_marked() -> None:
    """A consumer's handler must meet what it met then; the mark is for people and rebuilds."""
    log = _Log()
    original = log.add("x", 100, ("trace", b"1"))
    writer = _Writer(log)

    assert _replay(log, writer, target_topic="elsewhere") == [original]
    assert [(topic, headers) for topic, _, _, headers in writer.committed] == [
        ("elsewhere", {"duetasks-replay": b"r1"})
    ]


@pytest.mark.parametrize("batch", [1, 2, 500])
def test_a_replay_never_copies_its_own_output(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes to the topic that it reads, within the time that it was asked for."""
    monkeypatch.setattr(module, "BATCH_RECORDS", batch)
    log = _Log()
    for number in range(5):
        log.add(f"t{number}", 100)

    copied = _replay(log, _Writer(log), to_ms=InstantMs(10**9))

    assert sorted(Counter(record.key for record in copied).values()) == [1] * 5
    assert all(not record.headers for record in copied)


def test_copies_of_earlier_replays_are_left_out_unless_asked_for() -> None:
    """Else each replay of a range would double it."""
    for include, count in [(False, 1), (True, 2)]:
        log = _Log()
        log.add("x", 100)
        log.add("x", 150, ("duetasks-replay", b"r0"))
        assert len(_replay(log, _Writer(log), include_replays=include)) == count


def test_one_task_is_found_in_its_partition_alone() -> None:
    """A replay of one task reads one partition and copies that task only."""
    log = _Log()
    for task_id in ["a", "b", "c", "d"]:
        log.add(task_id, 100)

    assert [record.key for record in _replay(log, _Writer(log), task_id=TaskId("c"))] == [b"c"]


def test_a_ledger_forgets_in_the_transaction_of_the_copy() -> None:
    """The group that asks applies the task again; the rows of others stay."""
    log = _Log()
    record = log.add("x", 100)
    writer = _Writer(log)

    _replay(log, writer, forget_for="billing")

    task = CODEC.decode_due(record.value or b"")
    partition = partition_for_key(b"x", PARTITIONS)
    assert [item[:3] for item in writer.committed] == [
        ("applied-tasks", partition, ledger_key("billing", task)),
        ("due-tasks", partition, record),
    ]
    assert writer.commits == 1


def test_what_was_committed_before_a_failure_is_whole_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay is at least once: nothing of a failed batch is out."""
    monkeypatch.setattr(module, "BATCH_RECORDS", 2)
    log = _Log()
    for _ in range(5):
        log.add("x", 100)
    writer = _Writer(log, fails_at=2)

    with pytest.raises(UnavailableError):
        _replay(log, writer)

    assert len(writer.committed) == 2


def test_expired_emissions_are_told() -> None:
    """A replay that finds less than was emitted says why."""
    log = _Log(start=2)
    for at_ms in [100, 110, 120]:
        log.add("x", at_ms)
    partition = partition_for_key(b"x", PARTITIONS)

    plan = asyncio.run(Replayer(_request(), log, CODEC, on_progress=lambda *_: None).plan())

    assert plan.records == 1
    assert any(f"partition {partition} of due-tasks starts at 2" in note for note in plan.notes)
