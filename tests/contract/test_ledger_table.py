"""One suite for every local copy of a ledger: the in-memory twin, and RocksDB."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Protocol

import pytest

from pipeline.adapters.rocksdb_ledger_table import RocksdbLedgerTables
from pipeline.core.events import DAY_MS
from pipeline.core.tasks import InstantMs, Offset
from pipeline.errors import UnavailableError
from pipeline.service.consumer.ports import LedgerTables, TableIdentity, TableRows
from pipeline.testing.memory_consumers import ConsumerGroupWorld, MemoryLedgerTables
from pipeline.testing.simulated_process import SimulatedProcess

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.contract


class MakeTables(Protocol):
    """Tables on the same disk each time, as a new process finds them."""

    def __call__(self) -> LedgerTables: ...


def identity(partition: int, *, topic_id: str = "topic-1", cluster_id: str = "cluster") -> TableIdentity:
    """Whose rows they are."""
    return TableIdentity(cluster_id=cluster_id, ledger_topic_id=topic_id, group="group", partition=partition)


def now_ms() -> InstantMs:
    """An instant."""
    return InstantMs(1_767_268_800_000)


@pytest.fixture(params=["memory", "rocksdb"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> MakeTables:
    """Both implementations."""
    if request.param == "rocksdb":
        return lambda: RocksdbLedgerTables(tmp_path, group="group", identity=identity, now_ms=now_ms)
    world = ConsumerGroupWorld()
    return lambda: MemoryLedgerTables(world, SimulatedProcess("process"))


def digest(number: int) -> bytes:
    """A row's name."""
    return number.to_bytes(16, "big")


def test_a_new_table_is_empty_and_at_the_beginning(make: MakeTables) -> None:
    """So that a restore without a local table reads everything."""
    table = make().open(0)

    assert table.position() == 0
    assert not table.contains(digest(1))
    table.close()


def test_rows_and_position_survive_a_restart(make: MakeTables) -> None:
    """A restart reads only what came after."""
    table = make().open(0)
    table.write(TableRows(added=[digest(1), digest(2)]), Offset(7))
    table.write(TableRows(added=[digest(3)], removed=[digest(1)]), Offset(9))
    table.close()

    again = make().open(0)

    assert again.position() == 9
    assert [again.contains(digest(number)) for number in range(5)] == [False, False, True, True, False]
    again.close()


def test_partitions_are_apart(make: MakeTables) -> None:
    """A row of one says nothing in another."""
    tables = make()
    zero, one = tables.open(0), tables.open(1)

    zero.write(TableRows(added=[digest(1)]), Offset(5))

    assert not one.contains(digest(1))
    assert one.position() == 0
    zero.close()
    one.close()


def test_a_table_put_aside_leaves_a_new_one(make: MakeTables) -> None:
    """What can't be trusted is read again from the topic."""
    tables = make()
    table = tables.open(0)
    table.write(TableRows(added=[digest(1)]), Offset(5))
    table.close()

    tables.put_aside(0, "for the test")

    fresh = tables.open(0)
    assert fresh.position() == 0
    assert not fresh.contains(digest(1))
    fresh.close()


@pytest.mark.parametrize("seed", range(5))
def test_a_table_is_what_its_writes_make_it(make: MakeTables, seed: int) -> None:
    """Against a plain set, over random writes and restarts."""
    print(f"seed {seed}")  # noqa: T201  # to be found in a failure's output
    chance = random.Random(seed)
    table, expected = make().open(0), set[bytes]()
    for position in range(1, 60):
        added = [digest(chance.randrange(40)) for _ in range(chance.randrange(4))]
        removed = sorted({digest(chance.randrange(40)) for _ in range(chance.randrange(3))} - set(added))
        table.write(TableRows(added=added, removed=removed), Offset(position))
        expected = (expected | set(added)) - set(removed)
        if chance.random() < 0.1:
            table.close()
            table = make().open(0)

    assert {digest(number) for number in range(40) if table.contains(digest(number))} == expected
    assert table.position() == 59
    table.close()


# -- what only a real disk can do ------------------------------------------------------------------------------


def _filled(folder: Path) -> None:
    table = RocksdbLedgerTables(folder, group="group", identity=identity, now_ms=now_ms).open(0)
    table.write(TableRows(added=[digest(1)]), Offset(5))
    table.close()


def _asides(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "consumers" / "group").iterdir() if ".aside-" in path.name)


@pytest.mark.parametrize(
    "other",
    [
        lambda partition: identity(partition, topic_id="topic-2"),
        lambda partition: identity(partition, cluster_id="another"),
    ],
)
def test_a_table_of_another_topic_or_cluster_is_put_aside(
    tmp_path: Path, other: Callable[[int], TableIdentity]
) -> None:
    """Its rows would skip tasks that were never applied here; and it is kept, it may be somebody's."""
    _filled(tmp_path)

    table = RocksdbLedgerTables(tmp_path, group="group", identity=other, now_ms=now_ms).open(0)

    assert table.position() == 0
    assert not table.contains(digest(1))
    assert len(_asides(tmp_path)) == 1
    table.close()


@pytest.mark.parametrize("victim", ["CURRENT", "MANIFEST"])
def test_an_unreadable_table_is_put_aside(tmp_path: Path, victim: str) -> None:
    """A broken file costs a full restore, not the consumer."""
    _filled(tmp_path)
    (path,) = (tmp_path / "consumers" / "group" / "0.0").glob(f"{victim}*")
    path.write_bytes(b"\x00rubbish\xff" * 100)

    table = RocksdbLedgerTables(tmp_path, group="group", identity=identity, now_ms=now_ms).open(0)

    assert table.position() == 0
    assert len(_asides(tmp_path)) == 1
    table.close()


@pytest.mark.parametrize(("days", "kept"), [(4, True), (6, False)])
def test_a_table_that_was_away_for_long_is_put_aside(tmp_path: Path, days: int, kept: bool) -> None:  # noqa: FBT001  # a parameter
    """The topic forgets deletions after a week: a row that an operator deleted would stay in an old copy for ever."""
    _filled(tmp_path)
    later = InstantMs(now_ms() + days * DAY_MS)

    table = RocksdbLedgerTables(tmp_path, group="group", identity=identity, now_ms=lambda: later).open(0)

    assert table.contains(digest(1)) == kept
    assert len(_asides(tmp_path)) == (0 if kept else 1)
    table.close()


def test_a_neighbour_takes_the_next_slot_and_the_first_once_it_is_free(tmp_path: Path) -> None:
    """Two consumers of a machine never share a table, and a partition that moves finds its rows again."""
    tables = [RocksdbLedgerTables(tmp_path, group="group", identity=identity, now_ms=now_ms) for _ in range(3)]
    first = tables[0].open(0)
    first.write(TableRows(added=[digest(1)]), Offset(5))
    second = tables[1].open(0)
    assert second.position() == 0
    first.close()

    third = tables[2].open(0)

    assert third.position() == 5
    second.close()
    third.close()


def test_slots_are_bounded(tmp_path: Path) -> None:
    """A leak of tables must end in a sentence, not in a full disk."""
    tables = RocksdbLedgerTables(tmp_path, group="group", identity=identity, now_ms=now_ms)
    held = [tables.open(0) for _ in range(16)]

    with pytest.raises(UnavailableError, match="16 local ledgers of partition 0"):
        tables.open(0)

    for table in held:
        table.close()


@pytest.mark.parametrize("group", ["../../etc", "a/b", "ä" * 100, "x" * 200, "."])
def test_any_group_has_a_folder_below_its_own(tmp_path: Path, group: str) -> None:
    """A group's name is the user's; it must neither leave the folder nor be too long for one."""
    tables = RocksdbLedgerTables(tmp_path, group=group, identity=identity, now_ms=now_ms)

    table = tables.open(0)

    assert table.path.resolve().parent.parent == (tmp_path / "consumers").resolve()
    table.close()


def test_without_a_folder_nothing_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A consumer in a read-only container leaves no temporary files behind."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    tables = RocksdbLedgerTables(None, group="group", identity=identity, now_ms=now_ms)
    table = tables.open(0)
    table.close()
    assert list(tmp_path.iterdir())

    tables.close()

    assert list(tmp_path.iterdir()) == []
