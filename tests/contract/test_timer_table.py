"""One suite for every timer table: the in-memory twin, and RocksDB."""

import asyncio
import subprocess
import sys
import time
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random

import msgspec
import pytest

from pipeline.adapters.rocksdb_timer_table import RocksdbTableStore
from pipeline.core.tasks import IndexEntry, IndexKind, InstantMs, TaskId
from pipeline.errors import CorruptStateError, NotFoundError, UnavailableError, UsageError
from pipeline.ports import TableRow, TableStore, TimerTable
from pipeline.testing.memory_timer_table import MemoryDisk, MemoryTableStore
from pipeline.testing.simulated_process import SimulatedProcess

pytestmark = pytest.mark.contract

MEMORY_BYTES = 32 * 1_048_576
LOCK_WAIT_MS = 100
FOREVER_MS = InstantMs(2**62)

STRANGE_IDS = (
    "a",
    "a\x00",
    "a\x00b",
    "a|b",
    "a:b",
    "a b",
    " ",
    "ä",
    unicodedata.normalize("NFC", "é"),
    unicodedata.normalize("NFD", "é"),
    "я",
    "🚀",
    "\U0010ffff",
    "\uffff",
    "x" * 1_024,
    "x" * 1_023 + "y",
    "0",
    "00",
    "meta",
)


class Subject(msgspec.Struct, kw_only=True):
    """One implementation: its store, and how to let the files of a closed table rot."""

    store: TableStore
    spoil: Callable[[int], None]
    exists: Callable[[str], bool]


def _memory(_folder: Path) -> Subject:
    disk = MemoryDisk()
    store = MemoryTableStore(disk, SimulatedProcess("under test"), lock_wait_ms=LOCK_WAIT_MS)
    return Subject(store=store, spoil=disk.spoil, exists=disk.aside.__contains__)


def _rocksdb(folder: Path) -> Subject:
    store = RocksdbTableStore(folder, memory_bytes=MEMORY_BYTES, lock_wait_ms=LOCK_WAIT_MS)

    def spoil(partition: int) -> None:
        (folder / str(partition) / "CURRENT").write_text("no manifest\n")

    return Subject(store=store, spoil=spoil, exists=lambda place: (Path(place) / "LOCK").exists())


@pytest.fixture(params=[_memory, _rocksdb], ids=["memory", "rocksdb"])
def subject(request: pytest.FixtureRequest, tmp_path: Path) -> Subject:
    """Each implementation in turn."""
    make: Callable[[Path], Subject] = request.param
    return make(tmp_path)


@pytest.fixture
def table(subject: Subject) -> Iterator[TimerTable]:
    """An open, empty table of partition 0."""
    opened = _open(subject)
    yield opened
    opened.close()


def _open(subject: Subject, partition: int = 0) -> TimerTable:
    return asyncio.run(_opened(subject, partition))


async def _opened(subject: Subject, partition: int) -> TimerTable:
    return await subject.store.open(partition)


def _entry(at_ms: int, task_id: str, kind: IndexKind = IndexKind.DUE) -> IndexEntry:
    return IndexEntry(InstantMs(at_ms), kind, TaskId(task_id))


def _added(at_ms: int, task_id: str, kind: IndexKind = IndexKind.DUE) -> TableRow:
    return TableRow(TaskId(task_id), b"row of " + task_id.encode(), None, _entry(at_ms, task_id, kind))


def _moved(at_ms: int, to_ms: int, task_id: str) -> TableRow:
    return TableRow(TaskId(task_id), b"moved", _entry(at_ms, task_id), _entry(to_ms, task_id))


def _removed(at_ms: int, task_id: str) -> TableRow:
    return TableRow(TaskId(task_id), None, _entry(at_ms, task_id), None)


def _due_ids(table: TimerTable, until_ms: int, limit: int = 1_000) -> list[str]:
    return [entry.task_id for entry in table.due(InstantMs(until_ms), limit)]


# -- rows, index and meta ----------------------------------------------------------------------------------------


def test_new_table_is_empty(table: TimerTable) -> None:
    """No meta tells a table that was never written from one that reflects nothing."""
    assert table.meta() is None
    assert table.get_many([TaskId("a")]) == [None]
    assert table.due(FOREVER_MS, 10) == []
    assert table.next_at_ms() is None
    assert table.scan(None, 10) == []


def test_rows_index_and_meta_come_back_as_written(table: TimerTable) -> None:
    """What one write brought is there, whole."""
    table.write([_added(30, "c"), _added(10, "a"), _added(20, "b")], b"\x00meta\xff")

    assert table.meta() == b"\x00meta\xff"
    assert table.get_many([TaskId("b"), TaskId("nobody"), TaskId("a"), TaskId("b")]) == [
        b"row of b",
        None,
        b"row of a",
        b"row of b",
    ]
    assert table.due(FOREVER_MS, 10) == [_entry(10, "a"), _entry(20, "b"), _entry(30, "c")]
    assert table.next_at_ms() == 10


def test_empty_value_is_not_a_missing_row(table: TimerTable) -> None:
    """A row of no bytes is a row."""
    table.write([TableRow(TaskId("a"), b"", None, _entry(1, "a"))], b"")

    assert table.get_many([TaskId("a")]) == [b""]
    assert table.meta() == b""


def test_write_without_rows_moves_the_meta(table: TimerTable) -> None:
    """Heartbeats write positions alone."""
    table.write([_added(10, "a")], b"one")
    table.write([], b"two")

    assert table.meta() == b"two"
    assert table.get_many([TaskId("a")]) == [b"row of a"]


def test_index_is_ordered_by_instant_then_kind_then_id(table: TimerTable) -> None:
    """The order of firing is the order of `IndexEntry`, also where decimal or string order would differ."""
    entries = [
        _entry(at_ms, task_id, kind)
        for at_ms in (0, 9, 10, 255, 256, 65_536, 2**31, 2**32, 2**53, 2**62)
        for kind in IndexKind
        for task_id in ("b", "a", "é", "\uffff", "🚀", "a\x00")
    ]
    Random(1).shuffle(entries)
    table.write([TableRow(entry.task_id, b"", None, entry) for entry in entries], b"")

    assert table.due(FOREVER_MS, 1_000) == sorted(entries)


def test_due_is_inclusive_and_bounded(table: TimerTable) -> None:
    """A timer is due at its instant, not a millisecond earlier; never more come than were asked for."""
    table.write([_added(at_ms, f"task {at_ms:02}") for at_ms in range(10, 20)], b"")

    assert _due_ids(table, 9) == []
    assert _due_ids(table, 10) == ["task 10"]
    assert _due_ids(table, 19, 3) == ["task 10", "task 11", "task 12"]
    assert _due_ids(table, 19, 0) == []
    assert len(_due_ids(table, 19)) == 10


def test_moving_a_timer_leaves_one_entry(table: TimerTable) -> None:
    """A rescheduled task must not fire at its old instant as well."""
    table.write([_added(10, "a"), _added(20, "b")], b"")
    table.write([_moved(10, 30, "a")], b"")

    assert table.due(FOREVER_MS, 10) == [_entry(20, "b"), _entry(30, "a")]
    assert table.get_many([TaskId("a")]) == [b"moved"]


def test_row_may_change_without_its_entry(table: TimerTable) -> None:
    """Most noted verdicts leave the timer where it is: nothing to drop, nothing to add."""
    table.write([_added(10, "a")], b"")
    table.write([TableRow(TaskId("a"), b"noted", None, None)], b"")

    assert table.get_many([TaskId("a")]) == [b"noted"]
    assert table.due(FOREVER_MS, 10) == [_entry(10, "a")]


def test_entry_dropped_and_added_alike_stays(table: TimerTable) -> None:
    """Whichever way it is written, an unchanged entry is not lost."""
    table.write([_added(10, "a")], b"")
    table.write([TableRow(TaskId("a"), b"again", _entry(10, "a"), _entry(10, "a"))], b"")

    assert table.due(FOREVER_MS, 10) == [_entry(10, "a")]
    assert table.next_at_ms() == 10


def test_removed_row_leaves_nothing(table: TimerTable) -> None:
    """Purged is gone from rows, index and scan; removing what is not there does no harm."""
    table.write([_added(10, "a"), _added(20, "b")], b"")
    table.write([_removed(10, "a"), TableRow(TaskId("nobody"), None, None, None)], b"")

    assert table.get_many([TaskId("a")]) == [None]
    assert table.due(FOREVER_MS, 10) == [_entry(20, "b")]
    assert table.scan(None, 10) == [(TaskId("b"), b"row of b")]


def test_failed_write_changes_nothing(table: TimerTable) -> None:
    """All or nothing: a write that raises in the middle leaves rows, index and meta as they were."""
    table.write([_added(10, "a")], b"before")
    assert table.next_at_ms() == 10

    class Broken(list[TableRow]):
        def __iter__(self) -> Iterator[TableRow]:
            yield _added(5, "b")
            raise RuntimeError("no more rows")

    with pytest.raises((RuntimeError, CorruptStateError)):
        table.write(Broken(), b"after")

    assert table.next_at_ms() == 10
    assert table.meta() == b"before"
    assert table.get_many([TaskId("b")]) == [None]
    assert table.due(FOREVER_MS, 10) == [_entry(10, "a")]


# -- the cursor --------------------------------------------------------------------------------------------------


def test_insert_below_what_has_fired_is_found(table: TimerTable) -> None:
    """The index cursor is a lower bound: a task that is due earlier than all before must not be overlooked."""
    table.write([_added(at_ms, f"task {at_ms}") for at_ms in (100, 200, 300)], b"")
    assert _due_ids(table, 150) == ["task 100"]
    table.write([_removed(100, "task 100")], b"")
    assert _due_ids(table, 150) == []

    table.write([_added(50, "early")], b"")

    assert table.next_at_ms() == 50
    assert _due_ids(table, 150) == ["early"]


def test_insert_into_a_table_that_ran_empty_is_found(table: TimerTable) -> None:
    """Empty is a state of the cursor too."""
    table.write([_added(100, "a")], b"")
    assert _due_ids(table, 100) == ["a"]
    table.write([_removed(100, "a")], b"")
    assert table.next_at_ms() is None

    table.write([_added(90, "b")], b"")
    table.write([_added(80, "c")], b"")

    assert table.next_at_ms() == 80
    assert _due_ids(table, 100) == ["c", "b"]


def test_clock_that_steps_back_finds_what_is_due_then(table: TimerTable) -> None:
    """An earlier `until` must not be answered from a cursor that has moved on."""
    table.write([_added(at_ms, f"task {at_ms}") for at_ms in (100, 200, 300)], b"")
    assert len(_due_ids(table, 250)) == 2
    table.write([_removed(100, "task 100")], b"")
    assert _due_ids(table, 350) == ["task 200", "task 300"]

    table.write([_added(90, "early")], b"")

    assert _due_ids(table, 95) == ["early"]
    assert _due_ids(table, 200) == ["early", "task 200"]


def test_first_instant_follows_every_change(table: TimerTable) -> None:
    """`next_at_ms` decides how long the owner sleeps: it may be cached, never wrong."""
    steps: list[tuple[Sequence[TableRow], int | None]] = [
        ([_added(50, "a")], 50),
        ([_added(70, "b")], 50),
        ([_moved(50, 60, "a")], 60),
        ([_moved(60, 80, "a")], 70),
        ([_removed(70, "b")], 80),
        ([_added(10, "c"), _removed(80, "a")], 10),
        ([_removed(10, "c"), _added(90, "d")], 90),
        ([_removed(90, "d")], None),
        ([_added(5, "e"), _added(4, "f")], 4),
    ]
    for rows, expected in steps:
        table.write(rows, b"")
        assert table.next_at_ms() == expected


@pytest.mark.parametrize("seed", range(20))
def test_any_mix_of_changes_and_looks_agrees_with_a_plain_dict(subject: Subject, seed: int) -> None:
    """Cursor and caches are an optimisation that nobody may notice."""
    random = Random(seed)
    model: dict[str, int] = {}
    table = _open(subject)
    for step in range(300):
        rows = []
        for task_id in {f"task {random.randrange(40)}" for _ in range(random.randrange(4))}:
            old, new = model.get(task_id), random.choice([None, random.randrange(100)])
            drop = None if old is None else _entry(old, task_id)
            add = None if new is None else _entry(new, task_id)
            rows.append(TableRow(TaskId(task_id), None if new is None else b"%d" % new, drop, add))
            model.pop(task_id, None)
            if new is not None:
                model[task_id] = new
        table.write(rows, b"%d" % step)
        entries = sorted(_entry(at_ms, task_id) for task_id, at_ms in model.items())
        if random.random() < 0.5:
            assert table.next_at_ms() == (entries[0].at_ms if entries else None)
        if random.random() < 0.5:
            until_ms, limit = random.randrange(-1, 101), random.randrange(1, 20)
            expected = [entry for entry in entries if entry.at_ms <= until_ms][:limit]
            assert table.due(InstantMs(until_ms), limit) == expected
        if random.random() < 0.02:
            table.close()
            table = _open(subject)
            assert table.meta() == b"%d" % step
    assert dict(table.scan(None, 1_000)) == {task_id: b"%d" % at_ms for task_id, at_ms in model.items()}
    table.close()


# -- ids and paging ----------------------------------------------------------------------------------------------


def test_strange_ids_stay_apart(table: TimerTable) -> None:
    """Zero bytes, separators, both forms of an accent, emoji, a kilobyte: every id is one task of its own."""
    assert len(set(STRANGE_IDS)) == len(STRANGE_IDS)
    table.write([_added(7, task_id) for task_id in STRANGE_IDS], b"")

    assert table.get_many([TaskId(task_id) for task_id in STRANGE_IDS]) == [
        b"row of " + task_id.encode() for task_id in STRANGE_IDS
    ]
    assert _due_ids(table, 7) == sorted(STRANGE_IDS)

    table.write([_removed(7, "a"), _removed(7, unicodedata.normalize("NFD", "é"))], b"")
    kept = sorted(set(STRANGE_IDS) - {"a", unicodedata.normalize("NFD", "é")})
    assert _due_ids(table, 7) == kept
    assert [task_id for task_id, _ in table.scan(None, 100)] == kept


@pytest.mark.parametrize("page", [1, 2, 7, 100])
def test_scan_pages_over_every_row_once(table: TimerTable, page: int) -> None:
    """Lists are paged: whatever the page size, each row comes once, in id order, and the end is an empty page."""
    table.write([_added(7, task_id) for task_id in STRANGE_IDS], b"")

    seen: list[str] = []
    after: TaskId | None = None
    while found := table.scan(after, page):
        assert len(found) <= page
        seen += [task_id for task_id, _ in found]
        after = found[-1][0]

    assert seen == sorted(STRANGE_IDS)


def test_scan_goes_on_after_an_id_that_is_gone(table: TimerTable) -> None:
    """The row of the last page's end may have been purged meanwhile."""
    table.write([_added(1, task_id) for task_id in "abcd"], b"")
    table.write([_removed(1, "b")], b"")

    assert [task_id for task_id, _ in table.scan(TaskId("b"), 10)] == ["c", "d"]
    assert table.scan(TaskId("a"), 0) == []


# -- life of the files -------------------------------------------------------------------------------------------


def test_closed_table_comes_back_as_it_was_left(subject: Subject) -> None:
    """Rows, index and meta outlive the process."""
    table = _open(subject)
    table.write([_added(10, "a"), _added(20, "b")], b"meta")
    table.write([_removed(10, "a")], b"newer")
    assert table.next_at_ms() == 20
    table.close()

    again = _open(subject)

    assert again.meta() == b"newer"
    assert again.scan(None, 10) == [(TaskId("b"), b"row of b")]
    assert again.due(FOREVER_MS, 10) == [_entry(20, "b")]
    again.close()


def test_partitions_are_apart(subject: Subject) -> None:
    """Each partition has a table of its own, open at the same time."""
    first, second = _open(subject, 0), _open(subject, 1)
    first.write([_added(10, "a")], b"first")
    second.write([_added(20, "b")], b"second")

    assert (first.meta(), second.meta()) == (b"first", b"second")
    assert first.get_many([TaskId("b")]) == [None]
    first.close()
    second.close()


def test_table_in_use_is_refused_with_its_holder(subject: Subject) -> None:
    """Two owners on one table would both lose: the second waits for a bounded time, then says who holds it."""
    table = _open(subject)

    with pytest.raises(UnavailableError, match=r"held by (process \d+|under test)"):
        _open(subject)

    table.close()
    _open(subject).close()


def test_table_let_go_while_waiting_is_opened(subject: Subject) -> None:
    """An agent that starts while the old one is just ending must not fail."""
    table = _open(subject)

    async def main() -> TimerTable:
        waiting = asyncio.create_task(_opened(subject, 0))
        await asyncio.sleep(0.03)
        table.close()
        return await waiting

    asyncio.run(main()).close()


def test_closing_twice_does_no_harm_and_using_it_then_raises(subject: Subject) -> None:
    """Shutdown paths overlap; a forgotten reference must not touch files that another process may own."""
    table = _open(subject)
    table.close()
    table.close()

    for use in (
        table.meta,
        table.next_at_ms,
        lambda: table.get_many([TaskId("a")]),
        lambda: table.due(FOREVER_MS, 1),
        lambda: table.scan(None, 1),
        lambda: table.write([], b""),
    ):
        with pytest.raises(UsageError, match="closed"):
            use()


def test_table_put_aside_is_kept_and_a_new_one_begins(subject: Subject) -> None:
    """Never deleted: what went wrong can be looked into. A second one does not overwrite the first."""
    places = []
    for _ in range(2):
        table = _open(subject)
        assert table.meta() is None
        table.write([_added(10, "a")], b"old")
        table.close()
        places.append(subject.store.put_aside(0, "for the test"))

    assert len(set(places)) == 2
    assert all(subject.exists(place) for place in places)
    with pytest.raises(NotFoundError):
        subject.store.put_aside(0, "there is none")


def test_corrupted_files_are_reported_and_can_be_put_aside(subject: Subject) -> None:
    """Any open error but a held lock: the owner puts the table aside and restores from `task-state`."""
    table = _open(subject)
    table.write([_added(10, "a")], b"old")
    table.close()
    subject.spoil(0)

    with pytest.raises(CorruptStateError):
        _open(subject)
    subject.store.put_aside(0, "corrupted")
    table = _open(subject)

    assert table.meta() is None
    table.close()


# -- RocksDB alone -----------------------------------------------------------------------------------------------


def _fire_all(table: TimerTable, count: int) -> None:
    for start in range(0, count, 2_000):
        rows = [_added(1_000 + number, f"task {number:07}") for number in range(start, start + 2_000)]
        table.write(rows, b"")
    table.write([_added(10_000_000, "last")], b"")
    fired = 0
    while due := table.due(InstantMs(1_000 + count), 2_000):
        table.write([TableRow(entry.task_id, None, entry, None) for entry in due], b"")
        fired += len(due)
    assert fired == count


def test_looking_for_the_next_timer_stays_cheap_after_many_fired(tmp_path: Path) -> None:
    """A seek from the start walks over a tombstone for each timer that ever fired; the cursor keeps off them."""
    table = _open(_rocksdb(tmp_path))
    _fire_all(table, 40_000)
    first = min(_duration_s(lambda: table.due(InstantMs(20_000_000), 10)) for _ in range(5))
    # The walk that the cursor saves, for comparison on the same machine: a step back of the clock forces it.
    until = iter(range(19_999_999, 0, -1))
    walk = min(_duration_s(lambda: table.due(InstantMs(next(until)), 10)) for _ in range(5))
    table.close()

    assert first * 20 < walk


def _duration_s(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


_HOLDER = """
import asyncio, sys
from pathlib import Path
from pipeline.adapters.rocksdb_timer_table import RocksdbTableStore
from pipeline.core.tasks import IndexEntry, IndexKind
from pipeline.ports import TableRow

table = asyncio.run(RocksdbTableStore(Path(sys.argv[1]), memory_bytes=2**25, lock_wait_ms=0).open(0))
for number in range(1, 1_000_000):
    entry = IndexEntry(number, IndexKind.DUE, f"task {number}")
    table.write([TableRow(entry.task_id, b"%d" % number, None, entry)], b"%d" % number)
    if number == 500:
        print("ready", flush=True)
        if sys.argv[2] == "hold":
            sys.stdin.read()
"""


def _holder(folder: Path, how: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(folder), how], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def test_table_held_by_another_process_names_its_pid(tmp_path: Path) -> None:
    """An operator wants to know which process to stop."""
    with _holder(tmp_path, "hold") as process:
        try:
            with pytest.raises(UnavailableError, match=rf"held by process {process.pid}\b"):
                _open(_rocksdb(tmp_path))
        finally:
            process.kill()


def test_write_is_whole_after_sigkill(tmp_path: Path) -> None:
    """Killed in the middle of thousands of writes: rows, index and meta are those of one and the same write."""
    with _holder(tmp_path, "write") as process:
        process.kill()

    table = _open(_rocksdb(tmp_path))
    meta = table.meta()
    assert meta is not None
    last = int(meta)
    assert last >= 500
    assert len(table.scan(None, last + 10)) == last
    assert [entry.at_ms for entry in table.due(FOREVER_MS, last + 10)] == list(range(1, last + 1))
    table.close()


def test_truncated_data_file_is_corrupt_state(tmp_path: Path) -> None:
    """A data file cut short by a full or failing disk is found out at the latest when it is read."""
    subject = _rocksdb(tmp_path)
    table = _open(subject)
    table.write([_added(number, f"task {number}") for number in range(5_000)], b"meta")
    table.close()
    _open(subject).close()  # the log becomes a data file when it is replayed
    files = sorted((tmp_path / "0").glob("*.sst"))
    assert files
    for file in files:
        content = file.read_bytes()
        file.write_bytes(content[: len(content) // 2])

    with pytest.raises(CorruptStateError):
        _read_all(subject)


def _read_all(subject: Subject) -> None:
    table = _open(subject)
    try:
        table.scan(None, 10_000)
    finally:
        table.close()
