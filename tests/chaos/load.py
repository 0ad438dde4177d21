"""An upstream that schedules, moves and cancels without pause, and remembers what Kafka acknowledged and when."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec

from tests.acceptance.harness import cancel, now_ms, schedule

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable, Iterator

    from confluent_kafka import KafkaError

    from pipeline.core.effects import DueTask
    from pipeline.core.events import Cancel, Schedule
    from tests.acceptance.harness import Deployment

TICK_S: Final = 0.02
DUE_WITHIN_MS: Final = 5_000
"""A task is due at most so much later than it is sent, or moved."""
CANCELLED_SHARE: Final = 0.25
MOVED_SHARE: Final = 0.15
PENDING_MAX: Final = 5_000


class Sent(msgspec.Struct, kw_only=True):
    """What was sent of one task, and when it was known to be acknowledged (None: not yet, or never)."""

    due_at_ms: int
    scheduled_at_ms: int | None = None
    cancelled_at_ms: int | None = None
    moved_to_ms: int | None = None
    moved_at_ms: int | None = None
    is_unknown: bool = False
    """An event failed: it may have been appended, or not."""


class Load:
    """Sends `per_tick` schedules every 20 ms until `stop`; some are cancelled, some moved to a later instant."""

    def __init__(self, deployment: Deployment, rng: random.Random, *, per_tick: int = 4) -> None:
        self.tasks: dict[str, Sent] = {}
        self._deployment = deployment
        self._rng = rng
        self._per_tick = per_tick
        self._producer = deployment.new_producer(**{"delivery.timeout.ms": 60_000})
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="load")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Send nothing more; returns when everything sent was answered."""
        self._stop.set()
        self._thread.join(90)
        assert not self._thread.is_alive(), "the load does not end"

    @property
    def unknown(self) -> set[str]:
        """Tasks of which nothing can be said, as an event failed."""
        return {task_id for task_id, task in self.tasks.items() if task.is_unknown}

    def last_due_at_ms(self) -> int:
        """The latest instant that any task was ever due at, cancelled ones too."""
        return max(max(task.due_at_ms, task.moved_to_ms or 0) for task in self.tasks.values())

    def must_fire(self) -> set[str]:
        """Tasks that have to come out: scheduled, and never cancelled."""
        return {task_id for task_id, task in self._known() if task.cancelled_at_ms is None}

    def check(self, due: Iterable[DueTask]) -> None:
        """Hold what came out against what was asked for: once, not early, not after an acknowledged cancel or move."""
        came_out: dict[str, list[DueTask]] = {}
        for task in due:
            assert task.fired_at_ms >= task.due_at_ms, f"fired early: {task}"
            came_out.setdefault(task.task_id, []).append(task)
        wrong = [
            (task_id, sent, [(task.generation, task.due_at_ms, task.fired_at_ms) for task in came_out.get(task_id, [])])
            for task_id, sent in self._known()
            if not _is_right(sent, came_out.get(task_id, []))
        ]
        assert not wrong, f"{len(wrong)} tasks, the first: {wrong[:3]}"

    def _known(self) -> Iterator[tuple[str, Sent]]:
        return ((task_id, task) for task_id, task in self.tasks.items() if not task.is_unknown)

    def _run(self) -> None:
        number = 0
        while not self._stop.wait(TICK_S):
            for _ in range(self._per_tick):
                number += 1
                self._send_one(f"task-{number:06}")
            self._producer.poll(0)
        self._producer.flush(80)

    def _send_one(self, task_id: str) -> None:
        due_at_ms = now_ms() + self._rng.randrange(DUE_WITHIN_MS)
        sent = self.tasks[task_id] = Sent(due_at_ms=due_at_ms)
        self._send(schedule(task_id, due_at_ms), sent, "scheduled_at_ms")
        fate = self._rng.random()
        if fate < CANCELLED_SHARE:
            self._send(cancel(task_id), sent, "cancelled_at_ms")
        elif fate < CANCELLED_SHARE + MOVED_SHARE:
            sent.moved_to_ms = due_at_ms + self._rng.randrange(1, DUE_WITHIN_MS)
            self._send(schedule(task_id, sent.moved_to_ms), sent, "moved_at_ms")

    def _send(self, event: Schedule | Cancel, sent: Sent, note: str) -> None:
        def report(error: KafkaError | None, _message: Any) -> None:  # noqa: ANN401 - confluent's message
            if error is not None:
                sent.is_unknown = True
            else:
                setattr(sent, note, now_ms())

        value = self._deployment.codec.encode_event(event)
        while len(self._producer) > PENDING_MAX:  # the broker rests; memory must not grow meanwhile
            self._producer.poll(0.05)
        self._producer.produce(self._deployment.topics.events, value, event.task_id.encode(), on_delivery=report)


def _is_right(sent: Sent, came_out: list[DueTask]) -> bool:
    """Whether what came out of one task is what may: a request that came too late leaves both outcomes open."""
    instants = [task.due_at_ms for task in came_out]
    if len({task.generation for task in came_out}) != len(came_out):
        return False
    if sent.cancelled_at_ms is not None:
        in_time = sent.cancelled_at_ms < sent.due_at_ms
        return instants == [] if in_time else instants in ([], [sent.due_at_ms])
    if sent.moved_to_ms is not None and sent.moved_at_ms is not None:
        in_time = sent.moved_at_ms < sent.due_at_ms
        both = sorted([sent.due_at_ms, sent.moved_to_ms])
        return instants == [sent.moved_to_ms] or (not in_time and sorted(instants) == both)
    return instants == [sent.due_at_ms]
