"""Pages of one partition: complete, without repetition, and bounded however rare the filter is."""

import pytest

from pipeline.core.tasks import InstantMs, Status, TaskId, TaskState
from pipeline.service import task_list
from pipeline.service.task_list import ListQuery, PageToken, list_slice

pytestmark = pytest.mark.unit


class _Owner:
    """The rows of a partition in memory; counts the rows that it hands out."""

    def __init__(self, *states: TaskState) -> None:
        self.states = {state.task_id: state for state in sorted(states, key=lambda state: state.task_id.encode())}
        self.handed_out = 0

    def get(self, task_id: TaskId) -> TaskState | None:
        self.handed_out += task_id in self.states
        return self.states.get(task_id)

    def scan(self, after: TaskId | None, limit: int) -> list[TaskState]:
        rows = [state for task_id, state in self.states.items() if after is None or task_id > after][:limit]
        self.handed_out += len(rows)
        return rows


def _task(task_id: str, *, status: Status = Status.SCHEDULED, due_at_ms: int = 0) -> TaskState:
    return TaskState(task_id=TaskId(task_id), status=status, due_at_ms=InstantMs(due_at_ms))


def _all(owner: _Owner, query: ListQuery, room: int = 100) -> list[str]:
    """The ids of all slices, each token taken through its text form as a caller does."""
    found: list[str] = []
    token = query.token
    while token.partition == query.token.partition:
        part = list_slice(owner, query, token, room)
        assert len(part.found) <= room
        found += [state.task_id for state in part.found]
        token = PageToken.decode(part.next.encode())
    return found


@pytest.mark.parametrize("room", [1, 2, 3, 100])
def test_pages_hold_each_task_once(room: int) -> None:
    """Whatever the size of a page, putting pages together gives the table."""
    ids = ["", "a", "a\x00", "a/b", "a%2Fb", "a?x=1", "é", "日本", "\U0001f980", "~"]
    owner = _Owner(*(_task(task_id) for task_id in ids))

    found = _all(owner, ListQuery(), room)

    assert found == sorted(ids)


@pytest.mark.parametrize("slice_rows", [1, 2, 5])
def test_slice_ends_do_not_lose_rows(slice_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice that is full may or may not be the last one."""
    monkeypatch.setattr(task_list, "SLICE_ROWS", slice_rows)
    ids = [f"t{number}" for number in range(10)]
    owner = _Owner(*(_task(task_id) for task_id in ids))

    assert _all(owner, ListQuery()) == ids
    assert _all(owner, ListQuery(prefix="t")) == ids
    assert _all(owner, ListQuery(prefix="t5")) == ["t5"]


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [
        ("order", ["order", "order/1", "order/2"]),
        ("order/", ["order/1", "order/2"]),
        ("b", ["b"]),
        ("orders", []),
        ("é", ["é", "é1"]),
        ("e", []),
        ("zz", []),
        ("\U0001f980", ["\U0001f980 crab"]),
    ],
)
def test_prefix_finds_itself_and_what_begins_so(prefix: str, expected: list[str]) -> None:
    """The id that equals the prefix is the first of them; neighbours in the order are none of them."""
    ids = ["a", "b", "orde", "order", "order/1", "order/2", "ordf", "é", "é1", "\U0001f980 crab"]
    owner = _Owner(*(_task(task_id) for task_id in ids))

    assert _all(owner, ListQuery(prefix=prefix)) == expected
    assert _all(owner, ListQuery(prefix=prefix), room=1) == expected


def test_prefix_does_not_look_at_the_other_rows() -> None:
    """A prefix is a range of the table: its cost does not grow with what lies before or behind it."""
    before = [_task(f"a{number:05}") for number in range(2_000)]
    behind = [_task(f"c{number:05}") for number in range(2_000)]
    owner = _Owner(*before, _task("b1"), _task("b2"), *behind)

    assert _all(owner, ListQuery(prefix="b")) == ["b1", "b2"]
    assert owner.handed_out <= task_list.SLICE_ROWS


def test_a_slice_with_a_rare_filter_is_bounded_and_goes_on() -> None:
    """A filter that fits one row in thousands must not hold timers up: the slice is empty, its token is not."""
    states = [_task(f"{number:05}", status=Status.EMITTED) for number in range(3_000)]
    owner = _Owner(*states, _task("99999"))
    query = ListQuery(status=Status.SCHEDULED)

    first = list_slice(owner, query, PageToken(), 10)

    assert list(first.found) == []
    assert first.looked_at == task_list.SLICE_ROWS
    assert first.next.partition == 0
    assert _all(owner, query) == ["99999"]


def test_due_before_leaves_the_instant_itself_out() -> None:
    """`due before noon` is not noon."""
    owner = _Owner(_task("early", due_at_ms=9), _task("sharp", due_at_ms=10), _task("late", due_at_ms=11))

    assert _all(owner, ListQuery(due_before_ms=10)) == ["early"]


@pytest.mark.parametrize("text", ["", "x", "é", "AAAA", PageToken(-1).encode(), PageToken(10**9).encode()])
def test_page_tokens_of_ones_own_making_are_refused(text: str) -> None:
    """A token that nobody gave out is the caller's fault, and no reason to look for partition -1."""
    with pytest.raises(ValueError, match="page_token"):
        PageToken.decode(text)


@pytest.mark.parametrize("limit", [-1, 0, 1_001])
def test_limits_have_limits(limit: int) -> None:
    """One answer has a bounded size."""
    with pytest.raises(ValueError, match="limit"):
        ListQuery(limit=limit)
