"""An upstream that schedules and cancels without pause, in a thread, and remembers what Kafka acknowledged and when."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final, Self

from tests.acceptance.harness import cancel, now_ms, schedule

if TYPE_CHECKING:
    import random

    from confluent_kafka import KafkaError

    from pipeline.core.events import Cancel, Schedule
    from tests.acceptance.harness import Deployment

TICK_S: Final = 0.02
DUE_WITHIN_MS: Final = 6_000
CANCELLED_SHARE: Final = 0.25
PENDING_MAX: Final = 5_000


class Load:
    """Sends about `per_tick` schedules every 20 ms until `stop`; a quarter of them is cancelled before they are due."""

    def __init__(self, deployment: Deployment, rng: random.Random, *, per_tick: int = 4) -> None:
        self.due_at_ms: dict[str, int] = {}
        """Every task whose schedule was acknowledged."""
        self.cancelled_at_ms: dict[str, int] = {}
        """When the cancel of a task was known to be acknowledged."""
        self.unknown: set[str] = set()
        """Tasks of which an event failed: it may have been appended, or not."""
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

    def must_fire(self) -> set[str]:
        """Tasks that have to come out: scheduled, and never cancelled."""
        return set(self.due_at_ms) - self.unknown - set(self.cancelled_at_ms)

    def must_not_fire(self) -> set[str]:
        """Tasks whose cancel was acknowledged before they were due."""
        return {
            task_id
            for task_id, at_ms in self.cancelled_at_ms.items()
            if task_id not in self.unknown and at_ms < self.due_at_ms[task_id]
        }

    def may_fire(self) -> set[str]:
        """Tasks that nothing can be said of: a cancel that came late, or an event whose fate is not known."""
        return self.unknown | (set(self.cancelled_at_ms) - self.must_not_fire())

    def _run(self) -> None:
        number = 0
        while not self._stop.wait(TICK_S):
            for _ in range(self._per_tick):
                number += 1
                due_at_ms = now_ms() + self._rng.randrange(DUE_WITHIN_MS)
                task = schedule(f"task-{number:06}", due_at_ms)
                self._send(task, due_at_ms)
                if self._rng.random() < CANCELLED_SHARE:
                    self._send(cancel(task.task_id), due_at_ms)
            self._producer.poll(0)
        self._producer.flush(80)

    def _send(self, event: Schedule | Cancel, due_at_ms: int) -> None:
        task_id = event.task_id
        is_cancel = not hasattr(event, "due_at_ms")

        def report(error: KafkaError | None, _message: Any) -> None:  # noqa: ANN401 - confluent's message
            if error is not None:
                self.unknown.add(task_id)
            elif is_cancel:
                self.cancelled_at_ms[task_id] = now_ms()
            else:
                self.due_at_ms[task_id] = due_at_ms

        value = self._deployment.codec.encode_event(event)
        while len(self._producer) > PENDING_MAX:  # the broker rests; memory must not grow meanwhile
            self._producer.poll(0.05)
        self._producer.produce(self._deployment.topics.events, value, task_id.encode(), on_delivery=report)
