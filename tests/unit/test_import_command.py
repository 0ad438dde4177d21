"""An import that is interrupted: what was answered without a gap is written down, and no more than that."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pipeline.adapters.import_file import ImportFile
from pipeline.cli.import_command import _Import
from pipeline.cli.output import Output
from pipeline.core.events import Reason, Schedule
from pipeline.core.tasks import InstantMs, Offset, Partition
from pipeline.errors import DuetasksError, RejectedTaskError, UnsentError
from pipeline.service.receipts import Outcome, Receipt

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable
    from pathlib import Path

pytestmark = pytest.mark.unit


class _Broker:
    """Answers for the producer: takes every value but those that it has an error for."""

    def __init__(self, errors: dict[bytes, DuetasksError]) -> None:
        self.errors = errors
        self.taken: list[tuple[bytes, str]] = []

    def send(self, values: Iterable[bytes], *, event_id: Callable[[bytes], str]) -> Generator[Outcome]:
        for index, value in enumerate(values):
            if value in self.errors:
                yield Outcome(index=index, error=self.errors[value])
                continue
            self.taken.append((value, event_id(value)))
            receipt = Receipt(
                topic="t", partition=Partition(0), offset=Offset(index), timestamp_ms=InstantMs(0), event_id=""
            )
            yield Outcome(index=index, event=Schedule(task_id="t"), receipt=receipt)


def _run(path: Path, broker: _Broker) -> _Import:
    file = ImportFile(path, path.parent / "data", line_bytes_max=1_000)
    work = _Import(file, file.place(), Output(as_json=True))
    work.run(broker.send, lambda _: None)
    return work


def test_a_broker_that_stops_answering_loses_no_line(tmp_path: Path) -> None:
    """The next run begins with the line that was not answered, and gives it the same id."""
    path = tmp_path / "f.jsonl"
    path.write_bytes(b"1\n2\n3\n4\n")
    broker = _Broker({b"2": RejectedTaskError("no", reason=Reason.MALFORMED), b"3": UnsentError("gone")})

    with pytest.raises(UnsentError, match=r"Stopped after line 2: gone.*goes on from there"):
        _run(path, broker)
    first_ids = dict(broker.taken)
    broker.errors.clear()
    work = _run(path, broker)

    assert [value for value, _ in broker.taken] == [b"1", b"3", b"4"]
    assert (work.start.lines, work.sent, work.place.lines, work.place.refused) == (2, 2, 4, 1)
    again = _Broker({})
    (path.parent / "data" / "imports").joinpath(next((path.parent / "data" / "imports").iterdir()).name).unlink()
    _run(path, again)
    assert dict(again.taken)[b"1"] == first_ids[b"1"]
    assert dict(again.taken)[b"3"] == dict(broker.taken)[b"3"]


def test_an_interruption_by_hand_keeps_the_place(tmp_path: Path) -> None:
    """Ctrl-C is a way to stop, not an error."""
    path = tmp_path / "f.jsonl"
    path.write_bytes(b"1\n2\n3\n")

    class _Interrupted(_Broker):
        def send(self, values: Iterable[bytes], *, event_id: Callable[[bytes], str]) -> Generator[Outcome]:
            for outcome in super().send(values, event_id=event_id):
                if outcome.index == 2:
                    raise KeyboardInterrupt
                yield outcome

    with pytest.raises(KeyboardInterrupt):
        _run(path, _Interrupted({}))

    assert _run(path, _Broker({})).start.lines == 2
