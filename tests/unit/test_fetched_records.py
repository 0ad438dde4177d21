"""Records are taken out of a fetch as aiokafka itself does it, only faster: the same ones, up to the same position."""

from dataclasses import dataclass
from struct import pack
from types import SimpleNamespace

import pytest
from aiokafka.consumer.fetcher import READ_COMMITTED, READ_UNCOMMITTED, FetchResult, PartitionRecords
from aiokafka.errors import CorruptRecordException
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from aiokafka.record.legacy_records import LegacyRecordBatchBuilder
from aiokafka.record.memory_records import MemoryRecords
from aiokafka.record.util import calc_crc32c
from aiokafka.structs import TopicPartition
from hypothesis import given
from hypothesis import strategies as st

from pipeline.adapters.fetched_records import all_records

pytestmark = pytest.mark.unit

PLACE = TopicPartition("task-events", 0)
_CRC_AT, _ATTRIBUTES_AT, _CONTROL = 17, 21, 0x20


@dataclass(frozen=True)
class Batch:
    """One record batch, or the marker that ends its producer's transaction; `hole`: offsets that compaction left."""

    producer: int
    is_transactional: bool = False
    marker: str = ""
    records: int = 1
    hole: int = 0


class Assignment:
    """What aiokafka asks of an assignment: where its reader stands."""

    active = True

    def __init__(self, position: int) -> None:
        self.position = position

    def state_value(self, _place: TopicPartition) -> SimpleNamespace:
        return SimpleNamespace(paused=False, position=self.position, consumed_to=self._move)

    def _move(self, position: int) -> None:
        self.position = position


def encode(batch: Batch, base_offset: int) -> bytes:
    """The batch as a broker sends it."""
    is_transactional = batch.is_transactional or bool(batch.marker)
    builder = DefaultRecordBatchBuilder(2, 0, is_transactional, batch.producer, 0, 0, 1_000_000)
    for number in range(batch.records):
        key = pack(">hh", 0, 0 if batch.marker == "abort" else 1) if batch.marker else b"key-%d" % number
        builder.append(number, 1_000 + number, key, b"value-%d" % base_offset, [])
    raw = bytearray(builder.build())
    raw[:8] = pack(">q", base_offset)
    if batch.marker:
        raw[_ATTRIBUTES_AT + 1] |= _CONTROL
        raw[_CRC_AT:_ATTRIBUTES_AT] = pack(">I", calc_crc32c(bytes(raw[_ATTRIBUTES_AT:])))
    return bytes(raw)


def fetched(batches: list[Batch], position: int, isolation: int) -> tuple[FetchResult, Assignment]:
    """A fetch of these batches, and the assignment of who reads them from `position` on."""
    raw, offset = b"", 0
    open_since: dict[int, int] = {}
    aborted: list[tuple[int, int]] = []
    for batch in batches:
        offset += batch.hole
        raw += encode(batch, offset)
        if batch.marker:
            since = open_since.pop(batch.producer, None)
            if batch.marker == "abort" and since is not None:
                aborted.append((batch.producer, since))
        elif batch.is_transactional:
            open_since.setdefault(batch.producer, offset)
        offset += batch.records
    assignment = Assignment(position)
    records = PartitionRecords(PLACE, MemoryRecords(raw), aborted, position, None, None, True, isolation)
    return FetchResult(PLACE, assignment=assignment, partition_records=records, backoff=0), assignment


def seen(records: list) -> list[tuple[int, int, bytes | None, bytes | None]]:  # type: ignore[type-arg]  # of two kinds
    """What an owner looks at."""
    return [(record.offset, record.timestamp, record.key, record.value) for record in records]


BATCHES = st.one_of(
    st.builds(Batch, producer=st.just(-1), records=st.integers(1, 4), hole=st.integers(0, 3)),
    st.builds(
        Batch, producer=st.integers(1, 3), is_transactional=st.just(True), records=st.integers(1, 4), hole=st.just(0)
    ),
    st.builds(Batch, producer=st.integers(1, 3), marker=st.sampled_from(["commit", "abort"])),
)


@given(
    batches=st.lists(BATCHES, max_size=12),
    position=st.integers(0, 6),
    isolation=st.sampled_from([READ_COMMITTED, READ_UNCOMMITTED]),
)
def test_the_same_records_up_to_the_same_position_as_aiokafka(
    batches: list[Batch], position: int, isolation: int
) -> None:
    """Aborted transactions, markers, holes of compaction, and a position in the middle of a batch."""
    theirs, their_place = fetched(batches, position, isolation)
    ours, our_place = fetched(batches, position, isolation)

    expected = seen(theirs.getall())

    assert seen(all_records(ours)) == expected
    assert our_place.position == their_place.position


def test_what_an_aborted_transaction_wrote_is_not_seen() -> None:
    """By hand, so that not all rests on the comparison."""
    batches = [
        Batch(producer=-1),
        Batch(producer=1, is_transactional=True, records=2),
        Batch(producer=2, is_transactional=True),
        Batch(producer=1, marker="abort"),
        Batch(producer=2, marker="commit"),
    ]
    result, place = fetched(batches, 0, READ_COMMITTED)

    assert [record.offset for record in all_records(result)] == [0, 3]
    assert place.position == 6


def test_a_wrong_checksum_is_told_and_moves_nothing() -> None:
    """Broken bytes are fetched again, not skipped."""
    raw = bytearray(encode(Batch(producer=-1, records=3), 0))
    raw[-2] ^= 1
    assignment = Assignment(0)
    records = PartitionRecords(PLACE, MemoryRecords(bytes(raw)), [], 0, None, None, True, READ_COMMITTED)
    result = FetchResult(PLACE, assignment=assignment, partition_records=records, backoff=0)

    with pytest.raises(CorruptRecordException):
        all_records(result)

    assert assignment.position == 0


def test_a_fetch_from_before_a_seek_is_dropped() -> None:
    """The position moved while the fetch was under way: its records are not the next ones."""
    result, place = fetched([Batch(producer=-1, records=3)], 0, READ_COMMITTED)
    place.position = 7

    assert all_records(result) == []
    assert place.position == 7


@pytest.mark.parametrize("magic", [0, 1])
def test_records_of_old_formats_are_taken_too(magic: int) -> None:
    """A topic that is older than the cluster may still hold them; they do not tell where a batch begins."""

    def result() -> FetchResult:
        builder = LegacyRecordBatchBuilder(magic, 0, 1_000_000)
        for offset in range(3):
            builder.append(offset, 1_000, b"k", b"v")
        records = PartitionRecords(
            PLACE, MemoryRecords(bytes(builder.build())), [], 1, None, None, True, READ_COMMITTED
        )
        return FetchResult(PLACE, assignment=Assignment(1), partition_records=records, backoff=0)

    taken = all_records(result())

    assert [record.offset for record in taken] == [1, 2]
    assert seen(taken) == seen(result().getall())
