"""The place in the input: slices are bounded, stay until they are done, and nothing is skipped."""

from collections import deque
from random import Random

import msgspec
import pytest

from pipeline.core.tasks import Offset
from pipeline.errors import RetryableError
from pipeline.ports import InputBatch
from pipeline.service.owner.input_cursor import InputCursor

pytestmark = pytest.mark.unit


class _Record(msgspec.Struct, frozen=True):
    offset: int
    value: bytes | None = b"v"
    key: bytes | None = b"k"
    timestamp: int = 0


class _Source:
    """Hands out the batches it was given, and remembers where it was told to go."""

    def __init__(self, *batches: InputBatch) -> None:
        self.batches = deque(batches)
        self.seeks: list[int] = []

    def seek(self, position: Offset) -> None:
        self.seeks.append(position)

    def take(self) -> InputBatch | None:
        return self.batches.popleft() if self.batches else None

    async def wait(self, timeout_ms: int) -> None:
        raise NotImplementedError

    def wake(self) -> None:
        raise NotImplementedError

    def pause(self) -> None:
        raise NotImplementedError


def _batch(start: int, end: int, offsets: list[int] | None = None) -> InputBatch:
    records = [_Record(offset) for offset in (range(start, end) if offsets is None else offsets)]
    return InputBatch(start_position=Offset(start), end_position=Offset(end), records=records)


def _offsets(cursor: InputCursor, records_max: int = 100, bytes_max: int = 10_000) -> tuple[list[int], int]:
    found = cursor.peek(records_max=records_max, bytes_max=bytes_max)
    return [record.offset for record in found.records], found.end_position


def test_slice_is_handed_out_again_until_it_is_done() -> None:
    """A transaction that failed is simply tried again with the same records."""
    cursor = InputCursor(_Source(_batch(5, 8)), Offset(5))

    assert _offsets(cursor) == ([5, 6, 7], 8)
    assert _offsets(cursor, 2) == ([5, 6], 7)
    assert cursor.position == 5

    cursor.advance(cursor.peek(records_max=2, bytes_max=100))

    assert cursor.position == 7
    assert _offsets(cursor) == ([7], 8)


def test_position_moves_over_markers_and_holes() -> None:
    """Markers take offsets: a position that stays at the last record would never reach the fence's target."""
    cursor = InputCursor(_Source(_batch(0, 4, [1]), _batch(4, 5, []), _batch(5, 9, [6])), Offset(0))

    assert _offsets(cursor) == ([1, 6], 9)
    assert _offsets(cursor, 1) == ([1], 5)

    cursor.advance(cursor.peek(records_max=1, bytes_max=100))
    assert _offsets(cursor) == ([6], 9)
    cursor.advance(cursor.peek(records_max=100, bytes_max=100))
    assert cursor.position == 9


def test_bytes_bound_a_slice_but_one_record_always_fits() -> None:
    """A single large record must not block the partition."""
    cursor = InputCursor(_Source(_batch(0, 5)), Offset(0))

    assert _offsets(cursor, 100, 5) == ([0, 1], 2)
    assert _offsets(cursor, 100, 1) == ([0], 1)


def test_slice_of_no_records_takes_none() -> None:
    """A turn of timers alone carries no input along: the record at fault must be able to stand alone."""
    cursor = InputCursor(_Source(_batch(0, 5)), Offset(0))
    assert _offsets(cursor, 0) == ([], 0)
    _offsets(cursor, 2)

    assert _offsets(cursor, 0) == ([], 0)
    cursor.advance(cursor.peek(records_max=0, bytes_max=100))

    assert _offsets(cursor) == ([0, 1, 2, 3, 4], 5)


def test_gap_is_sought_back_once_and_then_reported() -> None:
    """Skipped offsets are lost events; if the source insists, the owner acquires again and finds out why."""
    source = _Source(_batch(0, 3), _batch(5, 8), _batch(3, 8))
    cursor = InputCursor(source, Offset(0))

    assert _offsets(cursor) == ([0, 1, 2], 3)
    assert source.seeks == [0, 3]
    assert _offsets(cursor) == ([0, 1, 2, 3, 4, 5, 6, 7], 8)

    source.batches.extend([_batch(10, 12), _batch(10, 12)])
    assert _offsets(cursor) == ([0, 1, 2, 3, 4, 5, 6, 7], 8)
    with pytest.raises(RetryableError, match="10 instead of 8"):
        _offsets(cursor)


@pytest.mark.parametrize("seed", range(50))
def test_every_record_comes_once_in_order_however_it_is_cut(seed: int) -> None:
    """Batches, holes and slices of any size: what is advanced over is every record, once."""
    random = Random(seed)
    batches, expected, at = [], [], 0
    for _ in range(12):
        end = at + random.randrange(1, 9)
        offsets = sorted(random.sample(range(at, end), random.randrange(0, end - at + 1)))
        batches.append(_batch(at, end, offsets))
        expected += offsets
        at = end
    cursor = InputCursor(_Source(*batches), Offset(0))

    seen: list[int] = []
    while cursor.position < at:
        found = cursor.peek(records_max=random.randrange(5), bytes_max=random.choice([1, 4, 100]))
        assert found.end_position >= cursor.position
        if random.random() < 0.7:
            seen += [record.offset for record in found.records]
            cursor.advance(found)

    assert seen == expected
