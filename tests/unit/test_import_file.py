"""How far a file was imported: an interrupted import goes on, and a file that was changed is not taken for the old."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from pipeline.adapters.import_file import ImportFile
from pipeline.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.unit


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of four lines, one of them empty, the last without an end."""
    file = tmp_path / "events.jsonl"
    file.write_bytes(b'{"a": 1}\n\n{"b": 2}\r\n{"c": 3}')
    return file


def _open(path: Path, line_bytes_max: int = 1_000) -> ImportFile:
    return ImportFile(path, path.parent / "data", line_bytes_max=line_bytes_max)


def test_lines_are_numbered_as_editors_do_and_empty_ones_left_out(path: Path) -> None:
    """A refused line must be found by its number."""
    file = _open(path)

    lines = list(file.lines(file.place()))

    assert [(line.number, line.value) for line in lines] == [(1, b'{"a": 1}'), (3, b'{"b": 2}'), (4, b'{"c": 3}')]
    assert file.line_count() == 4
    assert lines[-1].place.bytes == path.stat().st_size


def test_an_import_goes_on_after_the_saved_line(path: Path) -> None:
    """What was answered is not sent again."""
    file = _open(path)
    lines = list(file.lines(file.place()))
    file.save(msgspec.structs.replace(lines[1].place, refused=1))

    again = _open(path)
    place = again.place()

    assert (place.lines, place.refused) == (3, 1)
    assert [line.value for line in again.lines(place)] == [b'{"c": 3}']


@pytest.mark.parametrize(("before", "added"), [(b'{"a": 1}\n', b'{"b": 2}\n'), (b'{"a": 1}', b'\r\n{"b": 2}')])
def test_lines_that_were_added_are_all_that_is_left(path: Path, before: bytes, added: bytes) -> None:
    """A file that grows can be imported again and again, also if its last line had no end yet."""
    path.write_bytes(before)
    file = _open(path)
    file.save(list(file.lines(file.place()))[-1].place)
    with path.open("ab") as more:
        more.write(added)

    place = _open(path).place()

    assert [line.number for line in file.lines(place)] == [2]


@pytest.mark.parametrize(
    "content", [b'{"a": 9}\n\n{"b": 2}\r\n{"c": 3}', b'{"a": 1}\n', b"", b'\n{"a": 1}\n\n{"b": 2}\n']
)
def test_a_file_that_was_changed_before_the_place_is_begun_anew(path: Path, content: bytes) -> None:
    """Going on by number would skip lines that were never sent."""
    file = _open(path)
    file.save(list(file.lines(file.place()))[1].place)
    path.write_bytes(content)

    assert _open(path).place().lines == 0


def test_the_same_line_has_the_same_id_whenever_it_is_sent(path: Path) -> None:
    """Lines that were sent after the last save are sent again: the agent must know them."""
    file = _open(path)
    ids = [file.event_id(line) for line in file.lines(file.place())]

    again = _open(path)

    assert [again.event_id(line) for line in again.lines(again.place())] == ids
    assert len(set(ids)) == 3


def test_another_run_another_line_another_file_give_other_ids(path: Path, tmp_path: Path) -> None:
    """Else tasks that are meant anew would be dropped as duplicates."""
    path.write_bytes(b'{"a": 1}\n{"a": 1}\n')
    other = tmp_path / "other.jsonl"
    other.write_bytes(b'{"a": 1}\n')
    file, second = _open(path), _open(other)
    start = file.place()

    ids = [file.event_id(line) for line in file.lines(start)]
    ids += [file.event_id(line) for line in file.lines(msgspec.structs.replace(start, run=1))]
    ids += [second.event_id(line) for line in second.lines(second.place())]

    assert len(set(ids)) == 5


def test_a_state_file_that_can_t_be_read_is_no_state(path: Path) -> None:
    """Beginning anew is harmless: the ids are the same."""
    file = _open(path)
    file.save(list(file.lines(file.place()))[-1].place)
    for state in (path.parent / "data" / "imports").iterdir():
        state.write_bytes(b"{")

    assert _open(path).place().lines == 0


def test_a_line_longer_than_any_event_is_cut_and_counted_whole(path: Path) -> None:
    """A file without line ends must not be read into memory; the lines behind it keep their places."""
    path.write_bytes(b"x" * 5_000 + b'\n{"b": 2}\n')
    file = _open(path, line_bytes_max=100)

    lines = list(file.lines(file.place()))

    assert [(line.number, len(line.value)) for line in lines] == [(1, 100), (2, 8)]
    assert [line.number for line in file.lines(lines[0].place)] == [2]


def test_a_missing_file_is_the_caller_s_mistake(tmp_path: Path) -> None:
    """Exit code 2, and its name."""
    with pytest.raises(UsageError, match="nowhere"):
        _open(tmp_path / "nowhere.jsonl")
