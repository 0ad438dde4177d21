"""The demonstration's verdict: it must be able to fail, in each way that a promise can be broken."""

from __future__ import annotations

import pytest

from pipeline.cli.demo.checking import Applied, Expected, Tally, compare, rows
from pipeline.cli.demo.story import Kind

pytestmark = pytest.mark.unit

DUE_AT_MS = 1_362_750_000_000
EXPECTED = {
    "on-time": Expected(kind=Kind.PLANNED, due_at_ms=DUE_AT_MS),
    "delayed": Expected(kind=Kind.DELAYED, due_at_ms=DUE_AT_MS + 60_000),
    "cancelled": Expected(kind=Kind.CANCELLED, due_at_ms=None),
}


def call(task_id: str, due_at_ms: int, *, fired_after_ms: int = 5, seen_after_ms: float = 20.0) -> Applied:
    """A call that a consumer made for a task that was due at `due_at_ms`."""
    return Applied(
        task_id=task_id,
        due_at_ms=due_at_ms,
        fired_at_ms=due_at_ms + fired_after_ms,
        seen_at_ms=due_at_ms + seen_after_ms,
    )


ON_TIME = call("on-time", DUE_AT_MS)
DELAYED = call("delayed", DUE_AT_MS + 60_000)


def total(applied: list[Applied]) -> Tally:
    """The sum over all kinds of flights."""
    return sum(compare(EXPECTED, applied).values(), Tally())


def test_calls_made_once_at_their_final_time_are_right() -> None:
    """Otherwise the demonstration could never succeed."""
    found = compare(EXPECTED, [DELAYED, ON_TIME])

    assert found[Kind.PLANNED] == Tally(flights=1, calls=1, right=1)
    assert found[Kind.DELAYED] == Tally(flights=1, calls=1, right=1)
    assert found[Kind.CANCELLED] == Tally(flights=1)
    assert all(tally.is_right for tally in found.values())


def test_a_missing_call_is_wrong() -> None:
    """A lost task must not pass for a task that nobody wanted."""
    found = total([ON_TIME])

    assert found.missing == 1
    assert not found.is_right


def test_a_call_made_twice_is_wrong() -> None:
    """The second one is what the ledger is there to prevent."""
    found = total([ON_TIME, DELAYED, DELAYED])

    assert found.doubled == 1
    assert found.right == 1
    assert not found.is_right


@pytest.mark.parametrize("moments", [{"fired_after_ms": -1}, {"seen_after_ms": -0.5}])
def test_a_call_before_its_time_is_wrong(moments: dict[str, int]) -> None:
    """By the agent's clock and by the clock on the wall: neither may be believed alone."""
    found = total([call("on-time", DUE_AT_MS, **moments), DELAYED])  # type: ignore[arg-type]  # two keyword arguments

    assert found.early == 1
    assert not found.is_right


def test_a_call_at_a_time_that_was_moved_is_wrong() -> None:
    """A delay that got lost: the call was made once, but for the departure that was planned first."""
    found = total([ON_TIME, call("delayed", DUE_AT_MS)])

    assert found.wrong_time == 1
    assert found.early == 1
    assert not found.is_right


def test_a_call_later_than_its_time_is_right_and_one_for_a_later_time_is_not() -> None:
    """Lateness breaks no promise, another due time does."""
    assert total([call("on-time", DUE_AT_MS, fired_after_ms=9_000, seen_after_ms=9_500), DELAYED]).is_right
    assert total([call("on-time", DUE_AT_MS + 1), DELAYED]).wrong_time == 1


@pytest.mark.parametrize("task_id", ["cancelled", "not in the file"])
def test_a_call_that_nobody_wanted_is_wrong(task_id: str) -> None:
    """The order that was paid for and cancelled all the same: what all of this is about."""
    found = total([ON_TIME, DELAYED, call(task_id, DUE_AT_MS)])

    assert found.unwanted == 1
    assert not found.is_right


def test_the_table_ends_with_the_sum() -> None:
    """People read the last line."""
    table = rows(compare(EXPECTED, [ON_TIME]))

    assert [row["kind"] for row in table] == [*Kind, "all"]
    assert table[-1] == {
        "kind": "all",
        "flights": 3,
        "calls": 2,
        "right": 1,
        "missing": 1,
        "doubled": 0,
        "early": 0,
        "wrong_time": 0,
        "unwanted": 0,
    }
