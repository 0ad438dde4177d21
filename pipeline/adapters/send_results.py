"""The two ways to wait for what becomes of events: a future for one, and outcomes in order for many."""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from datetime import timedelta
from typing import Final, TypeVar

from pipeline.adapters.event_sender import EventSender
from pipeline.core.events import Event
from pipeline.errors import DuetasksError, UnknownOutcomeError
from pipeline.service.receipts import Outcome, Receipt
from pipeline.service.task_requests import OutgoingEvent

__all__ = ["SendFuture", "outcomes_in_order", "receipt_of", "submit_one", "try_submit_one", "unanswered"]

Item = TypeVar("Item")

_UNDER_WAY_MAX: Final = 50_000
"""Events of one bulk send that wait for their answer, or for an earlier one's: what it keeps in memory."""
_UNDER_WAY_BYTES_MAX: Final = 268_435_456
"""The same in bytes, for large ones."""


class SendFuture(Future[Receipt]):
    """The receipt to come of one event. It can't be cancelled: what was handed over may be sent at any moment."""

    def __init__(self, sender: EventSender, event: Event) -> None:
        super().__init__()
        self.event = event
        self._sender = sender
        self.set_running_or_notify_cancel()

    def settle(self, answer: Receipt | DuetasksError) -> None:
        """Take the answer; called by the sender."""
        if isinstance(answer, Receipt):
            self.set_result(answer)
        else:
            self.set_exception(answer)

    def result(self, timeout: float | None = None) -> Receipt:
        """The receipt, waiting up to `timeout` seconds; raises the event's error, or `TimeoutError` to ask again."""
        try:
            return super().result(timeout)
        except DuetasksError as error:
            self._sender.told(error)
            raise

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The event's error or None, waiting up to `timeout` seconds; raises `TimeoutError` to ask again."""
        error = super().exception(timeout)
        if error is not None:
            self._sender.told(error)
        return error


def submit_one(sender: EventSender, outgoing: OutgoingEvent) -> SendFuture:
    """Send one event; the future of its receipt. Raises `UnsentError` as `EventSender.submit` does."""
    future = SendFuture(sender, outgoing.event)
    sender.submit(outgoing, future.settle)
    return future


def try_submit_one(sender: EventSender, outgoing: OutgoingEvent) -> SendFuture | None:
    """As `submit_one`, but None at once if the queue is full."""
    future = SendFuture(sender, outgoing.event)
    return future if sender.try_submit(outgoing, future.settle) else None


def receipt_of(future: Future[Receipt], limit: timedelta) -> Receipt:
    """The receipt, waiting at most `limit`; raises the event's error, `UnknownOutcomeError` when the time is over."""
    try:
        return future.result(limit.total_seconds())
    except TimeoutError as error:
        raise unanswered(future, limit) from error


def unanswered(future: Future[Receipt], limit: timedelta) -> UnknownOutcomeError:
    """The error for one that waited long enough; the answer that may come later needs no other reader."""
    assert isinstance(future, SendFuture), "a future of submit_one"
    future.add_done_callback(lambda answered: answered.exception())
    event = future.event
    return UnknownOutcomeError(
        f"no answer within {limit.total_seconds():g} s; the event may still arrive. Send it again with the same "
        f"event_id ({event.event_id}), which makes a second arrival harmless",
        event=event,
    )


class _Place:
    """One event's place in the order of a bulk send, and its answer once there is one."""

    __slots__ = ("answer", "event", "index", "size")

    def __init__(self, index: int) -> None:
        self.index = index
        self.size = 0
        self.event: Event | None = None
        self.answer: Receipt | DuetasksError | None = None

    def settle(self, answer: Receipt | DuetasksError) -> None:
        self.answer = answer


def outcomes_in_order(
    sender: EventSender, items: Iterable[Item], prepare: Callable[[Item], OutgoingEvent]
) -> Generator[Outcome]:
    """Send every item, many at a time; yields one outcome for each, in the order of `items`.

    What `prepare` refuses, or what can't be handed over, is an outcome too; nothing but `items` itself can raise here.
    """
    places: deque[_Place] = deque()
    size = 0
    for index, item in enumerate(items):
        place = _Place(index)
        places.append(place)
        try:
            outgoing = prepare(item)
            place.event = outgoing.event
            place.size = len(outgoing.value)
            size += place.size
            sender.submit(outgoing, place.settle)
        except DuetasksError as error:
            place.answer = error
        while places and (
            places[0].answer is not None or len(places) >= _UNDER_WAY_MAX or size >= _UNDER_WAY_BYTES_MAX
        ):
            size -= places[0].size
            yield _outcome(sender, places.popleft())
    while places:
        yield _outcome(sender, places.popleft())


def _outcome(sender: EventSender, place: _Place) -> Outcome:
    while place.answer is None:
        sender.wait_progress()
    if isinstance(place.answer, Receipt):
        return Outcome(index=place.index, event=place.event, receipt=place.answer)
    sender.told(place.answer)
    return Outcome(index=place.index, event=place.event, error=place.answer)
