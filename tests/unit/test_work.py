import asyncio
from typing import NamedTuple

import pytest

from pipeline.core.effects import DeadTask
from pipeline.core.events import Reason, Rejection
from pipeline.core.positions import InputPosition
from pipeline.core.tasks import InstantMs, Offset, Partition
from pipeline.ports import InputRecord
from pipeline.service.owner.overlay import RecentRows
from pipeline.service.owner.settings import OwnerSettings
from pipeline.service.owner.work import Quarantine, Work
from pipeline.testing.memory_timer_table import MemoryDisk, MemoryTableStore
from pipeline.testing.plain_codec import PlainCodec
from pipeline.testing.simulated_process import SimulatedProcess

pytestmark = pytest.mark.unit

EMIT_BYTES_MAX = 100_000


class Record(NamedTuple):
    """An input record."""

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None


def _dead_task_of(record: Record) -> tuple[bytes | None, DeadTask]:
    codec = PlainCodec()
    table = asyncio.run(MemoryTableStore(MemoryDisk(), SimulatedProcess("test")).open(0))
    settings = OwnerSettings(
        partition=Partition(0),
        owner="test",
        events_topic="task-events",
        state_topic="task-state",
        due_topic="due-tasks",
        dead_topic="dead-tasks",
        emit_bytes_max=EMIT_BYTES_MAX,
    )
    work = Work(
        settings=settings,
        codec=codec,
        table=table,
        recent=RecentRows(),
        place=InputPosition(topic_id="t", position=Offset(0)),
        partition_count=1,
        quarantine=Quarantine(),
        now_ms=InstantMs(record.timestamp),
    )

    def refuse(_: InputRecord) -> Rejection:
        return Rejection(reason=Reason.MALFORMED, message="made up")

    work.apply([record], refuse)
    (out,) = work.refusals
    assert out.value is not None
    return out.key, codec.decode_dead(out.value)


def _assert_fits(key: bytes | None, value: bytes | None) -> DeadTask:
    sent_key, dead = _dead_task_of(Record(0, 1, key, value))
    kept = len(sent_key or b"") + len(dead.key or b"") + len(dead.value or b"")
    assert kept <= EMIT_BYTES_MAX
    return dead


@pytest.mark.parametrize("size", [0, 1, EMIT_BYTES_MAX - 2_100, EMIT_BYTES_MAX, 10 * EMIT_BYTES_MAX])
def test_a_refused_record_fits_on_dead_tasks_whatever_its_size(size: int) -> None:
    """A refusal that can't be written would hold up everything behind it."""
    dead = _assert_fits(b"k", b"x" * size)

    assert dead.value_size == size
    assert (dead.value is None) == (len(dead.value_sha256) == 32)


def test_a_huge_key_is_told_but_not_kept() -> None:
    """The key travels twice on `dead-tasks`, so a huge one would make any record too large."""
    dead = _assert_fits(b"k" * EMIT_BYTES_MAX, b"value")

    assert dead.key is None
    assert dead.value == b"value"
    assert str(EMIT_BYTES_MAX) in dead.message
