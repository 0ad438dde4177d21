"""The airline: sends each piece of news when it becomes known, with the producer SDK."""

import json
import time
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

from pipeline import CancelRequest, ScheduleRequest, TaskProducer
from pipeline.cli.demo.flights import Flight
from pipeline.cli.demo.story import Compression, News, NewsKind

if TYPE_CHECKING:
    from concurrent.futures import Future

    from pipeline.config import Settings
    from pipeline.service.receipts import Receipt

__all__ = ["Upstream"]

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Upstream:
    """Sends news without waiting for receipts, and notes those that came when it was too late for them to count."""

    def __init__(self, settings: "Settings", flights: Mapping[str, Flight], compression: Compression) -> None:
        self._producer = TaskProducer(settings, source="airline")
        self._flights = flights
        self._compression = compression
        self.sent: Counter[NewsKind] = Counter()
        self.too_late: list[str] = []
        """Tasks whose news Kafka acknowledged only after the call that it was to move or cancel was due."""

    def send(self, news: News) -> None:
        """Send one piece of news; raises what the producer raises."""
        request: CancelRequest | ScheduleRequest = CancelRequest(task_id=news.task_id)
        if news.kind is not NewsKind.CANCEL:
            request = ScheduleRequest(
                task_id=news.task_id,
                due_at=_EPOCH + timedelta(milliseconds=self._compression.real_ms(news.call_ms)),
                payload=self._payload(news),
                content_type="application/json",
            )
        self.sent[news.kind] += 1
        receipt = self._producer.submit(request)
        if news.before_ms:
            must_be_there_ms = self._compression.real_ms(news.before_ms)
            receipt.add_done_callback(lambda done: self._note(done, news.task_id, must_be_there_ms))

    def close(self) -> None:
        """Wait for all receipts; raises if one of them did not come."""
        self._producer.close()

    def _note(self, done: "Future[Receipt]", task_id: str, must_be_there_ms: int) -> None:
        done.result()  # an error is raised here, and by `close`
        if time.time() * 1000 >= must_be_there_ms:
            self.too_late.append(task_id)

    def _payload(self, news: News) -> str:
        flight = self._flights[news.task_id]
        call_at = _EPOCH + timedelta(milliseconds=news.call_ms)
        return json.dumps(
            {"flight": flight.name, "from": flight.origin, "to": flight.dest, "call_at": call_at.isoformat()}
        )
