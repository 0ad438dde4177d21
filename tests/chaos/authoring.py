"""What the upstreams of a chaos run ask for: schedules, moves, cancels, stale versions, and events sent again.

Some tasks belong to one upstream, others are shared: every upstream knows their names without being told, so several
write to the same task at once. Of the shared ones every second is versioned.
"""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING, Final

from pipeline.core.events import Cancel, Event, Schedule
from pipeline.core.tasks import DurationMs, InstantMs, TaskId
from tests.chaos.history import clock_ms

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

DUE_WITHIN_MS: Final = 6_000
"""A task is due at most so much later than it is asked for, or moved."""
LAST_DUE_MS: Final = 2 * DUE_WITHIN_MS
"""No event of this load lets a task be due later than so long after it was written."""
_SLICE_MS: Final = 250
_SLICES_BACK: Final = 20
_SHARED_OF_SLICE: Final = 4
_SHARED_SHARE: Final = 0.3
_RESENT_SHARE: Final = 0.06
_DELAY_SHARE: Final = 0.2
_FOLLOW_UPS_MAX: Final = 5_000


class Author:
    """Writes events, endlessly; `name` begins the ids of its own tasks and of all its events."""

    def __init__(self, name: str, rng: random.Random) -> None:
        self._name = name
        self._rng = rng
        self._numbers = itertools.count()
        self._follow_ups: list[tuple[int, int, Event]] = []
        self._recent: list[Event] = []

    def write(self, count: int) -> Iterator[Event]:
        """About `count` new events, and those that were put off until now."""
        now_ms = clock_ms()
        while self._follow_ups and self._follow_ups[0][0] <= now_ms:
            yield heapq.heappop(self._follow_ups)[2]
        for _ in range(count):
            chance = self._rng.random()
            if chance < _RESENT_SHARE and self._recent:
                yield self._rng.choice(self._recent)
                continue
            event = self._shared(now_ms) if chance < _RESENT_SHARE + _SHARED_SHARE else self._own(now_ms)
            self._recent = [*self._recent[-50:], event]
            yield event

    def _own(self, now_ms: int) -> Event:
        """A new task; a cancel or a move of it may follow, often close to its instant."""
        task_id = TaskId(f"{self._name}-{next(self._numbers):06}")
        due_at_ms = now_ms + self._rng.randrange(-200, DUE_WITHIN_MS)
        fate = self._rng.random()
        if fate < 0.25:
            self._later(due_at_ms, Cancel(task_id=task_id, event_id=self._event_id(), source=self._name))
        elif fate < 0.45:
            moved_ms = due_at_ms + self._rng.randrange(1, DUE_WITHIN_MS)
            self._later(due_at_ms, self._schedule(task_id, moved_ms))
        if self._rng.random() < _DELAY_SHARE and due_at_ms > now_ms:
            return Schedule(
                task_id=task_id,
                event_id=self._event_id(),
                delay_ms=DurationMs(due_at_ms - now_ms),
                source=self._name,
            )
        return self._schedule(task_id, due_at_ms)

    def _later(self, due_at_ms: int, event: Event) -> None:
        """Put an event off: half of them to the last moment, when it is close which comes first."""
        now_ms = clock_ms()
        close = self._rng.random() < 0.5
        at_ms = due_at_ms + self._rng.randrange(-150, 50) if close else self._rng.randrange(now_ms, now_ms + 2_000)
        if len(self._follow_ups) < _FOLLOW_UPS_MAX:
            heapq.heappush(self._follow_ups, (at_ms, next(self._numbers), event))

    def _shared(self, now_ms: int) -> Event:
        """An event for a task that others write to as well."""
        number = self._rng.randrange(_SHARED_OF_SLICE)
        time_slice = now_ms // _SLICE_MS - self._rng.randrange(_SLICES_BACK)
        task_id = TaskId(f"shared-{time_slice}-{number}")
        # Ten milliseconds a version: writers tie now and then, and some are behind.
        version = now_ms // 10 - self._rng.randrange(100) if number % 2 else 0
        if self._rng.random() < 0.35:
            return Cancel(task_id=task_id, event_id=self._event_id(), version=version, source=self._name)
        return self._schedule(task_id, now_ms + self._rng.randrange(DUE_WITHIN_MS), version=version)

    def _schedule(self, task_id: TaskId, due_at_ms: int, *, version: int = 0) -> Schedule:
        return Schedule(
            task_id=task_id,
            event_id=self._event_id(),
            version=version,
            due_at_ms=InstantMs(due_at_ms),
            payload=self._name.encode(),
            source=self._name,
        )

    def _event_id(self) -> str:
        return f"{self._name}-e{next(self._numbers)}"
