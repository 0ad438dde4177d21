"""Which timers fire: the earliest due ones of the table as it is with the batch in hand already applied."""

from collections.abc import Iterable, Mapping

from pipeline.core.tasks import IndexEntry, InstantMs, TaskId, TaskState, index_entry

__all__ = ["plan_due"]


def plan_due(
    indexed: Iterable[IndexEntry], changed: Mapping[TaskId, TaskState | None], now_ms: InstantMs, limit: int
) -> list[IndexEntry]:
    """Timers to look at by `now_ms`, earliest first, at most `limit`.

    `indexed` are the table's entries in order; `changed` are rows that the batch in hand has replaced (None: removed),
    whose old entries no longer count. To be complete, `indexed` must hold `limit + len(changed)` entries where there
    are so many.
    """
    due = [entry for entry in indexed if entry.at_ms <= now_ms and entry.task_id not in changed]
    fresh = [index_entry(state) for state in changed.values() if state is not None and state.wake_at_ms <= now_ms]
    if fresh:
        due = sorted([*due, *fresh])
    return due[:limit]
