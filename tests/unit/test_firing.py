"""Which timers fire, from the table and from what the batch in hand has changed."""

from itertools import permutations

import pytest

from pipeline.core.firing import plan_due
from pipeline.core.tasks import IndexEntry, IndexKind, InstantMs, Status, TaskId, TaskState, index_entry

pytestmark = pytest.mark.unit

NOW_MS = InstantMs(100)


def _state(task_id: str, due_at_ms: int, status: Status = Status.SCHEDULED) -> TaskState:
    at_ms = InstantMs(due_at_ms)
    return TaskState(task_id=TaskId(task_id), status=status, due_at_ms=at_ms, wake_at_ms=at_ms)


def _ids(entries: list[IndexEntry]) -> list[str]:
    return [entry.task_id for entry in entries]


@pytest.mark.parametrize("in_the_batch", range(5))
@pytest.mark.parametrize("order", list(permutations([70, 80, 90, 100])))
def test_every_order_of_due_times_fires_earliest_first(order: tuple[int, ...], in_the_batch: int) -> None:
    """Sent in whatever order, in the table or still in the batch: a queue once fired only the last one sent."""
    states = [_state(f"sent {number}", due_at_ms) for number, due_at_ms in enumerate(order)]
    stored, fresh = states[: len(states) - in_the_batch], states[len(states) - in_the_batch :]

    planned = plan_due(
        sorted(index_entry(state) for state in stored), {state.task_id: state for state in fresh}, NOW_MS, 10
    )

    assert planned == sorted(index_entry(state) for state in states)


def test_due_is_inclusive_to_the_millisecond() -> None:
    """No bucket, no rounding: 100 is due at 100, 101 is not, in the table and in the batch."""
    indexed = [IndexEntry(InstantMs(at_ms), IndexKind.DUE, TaskId(f"t{at_ms}")) for at_ms in (99, 100, 101)]
    changed = {TaskId(f"c{at_ms}"): _state(f"c{at_ms}", at_ms) for at_ms in (99, 100, 101)}

    assert _ids(plan_due(indexed, changed, NOW_MS, 10)) == ["c99", "t99", "c100", "t100"]


def test_entry_that_the_batch_has_overruled_does_not_fire() -> None:
    """Cancelled, moved or purged in the same transaction: the table's index still has the old entry."""
    indexed = [
        IndexEntry(InstantMs(10), IndexKind.DUE, TaskId(name)) for name in ("cancelled", "gone", "kept", "moved")
    ]
    changed = {
        TaskId("cancelled"): _state("cancelled", 5_000, Status.CANCELLED),
        TaskId("gone"): None,
        TaskId("moved"): _state("moved", 50),
    }

    planned = plan_due(indexed, changed, NOW_MS, 10)

    assert [(entry.task_id, entry.at_ms) for entry in planned] == [("kept", 10), ("moved", 50)]


def test_limit_takes_the_earliest_of_both() -> None:
    """A bounded transaction must not prefer the batch to an older timer of the table."""
    indexed = [IndexEntry(InstantMs(at_ms), IndexKind.DUE, TaskId(f"t{at_ms}")) for at_ms in (10, 30, 50)]
    changed = {TaskId(f"c{at_ms}"): _state(f"c{at_ms}", at_ms) for at_ms in (20, 40)}

    assert _ids(plan_due(indexed, changed, NOW_MS, 3)) == ["t10", "c20", "t30"]
    assert plan_due(indexed, changed, NOW_MS, 0) == []


def test_kinds_at_one_instant_come_in_firing_order() -> None:
    """Fresh due work first, forgetting last."""
    changed = {
        TaskId("purge"): _state("purge", 50, Status.CANCELLED),
        TaskId("retry"): _state("retry", 50, Status.RETRY_WAIT),
        TaskId("lease"): _state("lease", 50, Status.RUNNING),
        TaskId("due"): _state("due", 50),
    }

    assert _ids(plan_due([], changed, NOW_MS, 10)) == ["due", "retry", "lease", "purge"]
