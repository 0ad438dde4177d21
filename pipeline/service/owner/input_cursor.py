"""Reads one partition's input in order, and notices when something was skipped."""

from collections import deque
from collections.abc import Sequence

import msgspec

from pipeline.core.tasks import Offset
from pipeline.errors import RetryableError
from pipeline.ports import EventSource, InputBatch, InputRecord

__all__ = ["InputCursor", "InputSlice"]


class InputSlice(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The next records, and the position once they are applied."""

    records: Sequence[InputRecord]
    end_position: Offset


class InputCursor:
    """Where the owner stands in its input; a slice stays until `advance`, so failed work is simply tried again."""

    def __init__(self, source: EventSource, position: Offset) -> None:
        self._source = source
        self.position = position
        self._fetched = position
        self._batches: deque[InputBatch] = deque()
        self._done = 0  # records of the first batch that are applied
        self._strays = 0
        source.seek(position)

    def peek(self, *, records_max: int, bytes_max: int) -> InputSlice:
        """Up to `records_max` records or `bytes_max` bytes (one record may exceed it), not yet applied.

        Raises `RetryableError` if the source does not continue where it should even after a seek: acquire again,
        which finds out whether records were lost or the topic is another.
        """
        if records_max <= 0:
            return InputSlice(records=(), end_position=self.position)
        self._pull(records_max)
        taken: list[InputRecord] = []
        size = 0
        end = self.position
        skip = self._done
        for batch in self._batches:
            have = batch.records[skip : skip + records_max - len(taken)]
            fitting, size = _fitting(have, size, bytes_max, is_first=not taken)
            taken.extend(have[:fitting])
            if skip + fitting < len(batch.records):
                if fitting:
                    end = Offset(have[fitting - 1].offset + 1)
                break
            end = batch.end_position
            skip = 0
        return InputSlice(records=taken, end_position=end)

    def advance(self, done: InputSlice) -> None:
        """The slice is committed: never hand it out again."""
        left = len(done.records)
        while self._batches:
            batch = self._batches[0]
            have = len(batch.records) - self._done
            if left < have or (left == have and batch.end_position > done.end_position):
                self._done += left
                break
            left -= have
            self._done = 0
            self._batches.popleft()
        self.position = done.end_position

    def _pull(self, records_max: int) -> None:
        buffered = sum(len(batch.records) for batch in self._batches) - self._done
        while buffered < records_max:
            batch = self._source.take()
            if batch is None:
                return
            if batch.start_position != self._fetched:
                self._stray(batch)
                return
            self._strays = 0
            self._fetched = batch.end_position
            self._batches.append(batch)
            buffered += len(batch.records)

    def _stray(self, batch: InputBatch) -> None:
        """Something was skipped or repeated: seek back once, then let the owner look into it."""
        self._strays += 1
        if self._strays > 1:
            raise RetryableError(
                f"the input continues at {batch.start_position} instead of {self._fetched}: acquiring again"
            )
        self._source.seek(self._fetched)


def _fitting(records: Sequence[InputRecord], size: int, bytes_max: int, *, is_first: bool) -> tuple[int, int]:
    """How many of the records fit, and the bytes with them; the very first one always does."""
    whole = size + sum(len(record.value or b"") + len(record.key or b"") for record in records)
    if whole <= bytes_max:
        return len(records), whole
    for number, record in enumerate(records):
        size += len(record.value or b"") + len(record.key or b"")
        if size > bytes_max and not (is_first and number == 0):
            return number, size
    return len(records), size
