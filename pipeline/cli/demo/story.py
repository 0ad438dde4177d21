"""What upstream says about each flight, and when; and, computed another way, what must come of it."""

from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import Final

import msgspec

from pipeline.cli.demo.flights import Flight

__all__ = ["Compression", "Kind", "News", "NewsKind", "call_of", "first_ms", "kind_of", "news_of"]

_MINUTE_MS: Final = 60_000
_HOUR_MS: Final = 60 * _MINUTE_MS
CALL_BEFORE_MS: Final = 30 * _MINUTE_MS
NEWS_BEFORE_MS: Final = _HOUR_MS
NOTICE_MAX_MS: Final = _HOUR_MS
SCHEDULED_BEFORE_MS: Final = 4 * _HOUR_MS
_PROLOGUE_MS: Final = 90 * _MINUTE_MS


class Kind(StrEnum):
    """What became of a flight."""

    PLANNED = "on time"
    DELAYED = "delayed"
    CANCELLED = "cancelled"


class NewsKind(StrEnum):
    """What a piece of news does to the boarding call."""

    SCHEDULE = "schedule"
    MOVE = "move"
    CANCEL = "cancel"


class News(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """Something that upstream learns at `at_ms`: the call is due at `call_ms`, or is off.

    `before_ms` is when the call would be made without it, or 0: it must have reached Kafka by then.
    """

    at_ms: int
    task_id: str
    kind: NewsKind
    call_ms: int = 0
    before_ms: int = 0


class Compression(msgspec.Struct, frozen=True, kw_only=True):
    """Maps the play's time to real time: `speed` seconds of the play in each second."""

    starts_ms: int
    real_starts_ms: int
    speed: float

    def real_ms(self, at_ms: int) -> int:
        """The real instant at which `at_ms` is played."""
        return self.real_starts_ms + round((at_ms - self.starts_ms) / self.speed)

    def played_ms(self, real_ms: float) -> int:
        """The play's instant at a real one."""
        return self.starts_ms + int((real_ms - self.real_starts_ms) * self.speed)


def kind_of(flight: Flight) -> Kind:
    """What became of the flight."""
    if flight.delay_ms is None:
        return Kind.CANCELLED
    return Kind.DELAYED if flight.delay_ms > 0 else Kind.PLANNED


def call_of(flight: Flight) -> int | None:
    """When the one call of the flight must be made, from its row alone; None if none may be made."""
    if flight.delay_ms is None:
        return None
    return flight.planned_ms + max(0, flight.delay_ms) - CALL_BEFORE_MS


def first_ms(flights: Iterable[Flight]) -> int:
    """When the play begins: a while before the first news of any flight."""
    return min(flight.planned_ms for flight in flights) - _PROLOGUE_MS


def news_of(flight: Flight, starts_ms: int) -> Iterator[News]:
    """What upstream says about the flight, in order; nothing of it before `starts_ms`."""
    planned_call_ms = flight.planned_ms - CALL_BEFORE_MS
    yield News(
        at_ms=max(starts_ms, flight.planned_ms - SCHEDULED_BEFORE_MS),
        task_id=flight.task_id,
        kind=NewsKind.SCHEDULE,
        call_ms=planned_call_ms,
    )
    if flight.delay_ms is None:
        yield News(
            at_ms=flight.planned_ms - NEWS_BEFORE_MS,
            task_id=flight.task_id,
            kind=NewsKind.CANCEL,
            before_ms=planned_call_ms,
        )
        return
    known_ms = 0
    while known_ms < flight.delay_ms:
        expected_ms = flight.planned_ms + known_ms
        known_ms = min(flight.delay_ms, known_ms + NOTICE_MAX_MS)
        yield News(
            at_ms=expected_ms - NEWS_BEFORE_MS,
            task_id=flight.task_id,
            kind=NewsKind.MOVE,
            call_ms=flight.planned_ms + known_ms - CALL_BEFORE_MS,
            before_ms=expected_ms - CALL_BEFORE_MS,
        )
