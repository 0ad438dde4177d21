"""The demonstration's play: what upstream says must lead to what the data file says, by two ways of computing it."""

from __future__ import annotations

import gzip
from typing import TYPE_CHECKING

import pytest

from pipeline.cli.demo.flights import PACKAGED_FILE, Flight, read_flights
from pipeline.cli.demo.story import Compression, Kind, NewsKind, call_of, first_ms, kind_of, news_of
from pipeline.core.tasks import InstantMs
from pipeline.errors import NotFoundError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.unit

MINUTE_MS = 60_000
PLANNED_MS = InstantMs(1_362_760_000_000)
FOR_EVER = {"from_ms": 0, "to_ms": 2**53}
HEAD = "scheduled_departure_utc,carrier,flight,origin,dest,departure_delay_min,cancelled\n"


def flight(delay_min: int | None) -> Flight:
    """A flight that left so many minutes after its time, or was cancelled (None)."""
    return Flight(
        task_id="boarding/x",
        name="UA1",
        origin="EWR",
        dest="IAH",
        planned_ms=PLANNED_MS,
        delay_ms=None if delay_min is None else delay_min * MINUTE_MS,
    )


def test_the_last_news_of_every_real_flight_is_what_must_come_of_it() -> None:
    """The table at the end is computed from the row alone; were the news wrong, it would blame the queue."""
    flights = read_flights(PACKAGED_FILE, **FOR_EVER)
    starts_ms = first_ms(flights)

    for each in flights:
        *_, last = news_of(each, starts_ms)
        assert call_of(each) == (None if last.kind is NewsKind.CANCEL else last.call_ms), each

    assert {kind_of(each) for each in flights} == set(Kind)


def test_all_news_of_every_real_flight_comes_half_an_hour_before_the_call_that_it_changes() -> None:
    """News that comes after the call is too late by right, and would prove nothing."""
    flights = read_flights(PACKAGED_FILE, **FOR_EVER)
    starts_ms = first_ms(flights)

    for each in flights:
        first, *others = news_of(each, starts_ms)
        assert first.kind is NewsKind.SCHEDULE
        assert starts_ms <= first.at_ms < first.call_ms
        assert all(news.before_ms - news.at_ms == 30 * MINUTE_MS for news in others)
        assert [first, *others] == sorted([first, *others], key=lambda news: news.at_ms)


def test_a_long_delay_creeps() -> None:
    """Each notice adds an hour at most, so one task is moved again and again."""
    news = list(news_of(flight(150), 0))

    assert [each.kind for each in news] == [NewsKind.SCHEDULE, NewsKind.MOVE, NewsKind.MOVE, NewsKind.MOVE]
    assert [(each.call_ms - PLANNED_MS) // MINUTE_MS for each in news] == [-30, 30, 90, 120]
    assert [(each.at_ms - PLANNED_MS) // MINUTE_MS for each in news] == [-240, -60, 0, 60]


def test_an_early_departure_is_no_news() -> None:
    """Moving a call into the past would make it late by definition; it was made as planned."""
    early = flight(-12)

    assert [each.kind for each in news_of(early, 0)] == [NewsKind.SCHEDULE]
    assert call_of(early) == PLANNED_MS - 30 * MINUTE_MS
    assert kind_of(early) is Kind.PLANNED


def test_time_is_compressed_without_drift() -> None:
    """Due times are whole milliseconds that both the upstream and the check compute."""
    compression = Compression(starts_ms=PLANNED_MS, real_starts_ms=1_000, speed=1_200)

    assert compression.real_ms(PLANNED_MS + 24 * 60 * MINUTE_MS) == 1_000 + 72_000
    assert compression.played_ms(73_000) == PLANNED_MS + 24 * 60 * MINUTE_MS


def test_a_range_of_the_file_is_taken(tmp_path: Path) -> None:
    """From inclusive, to exclusive, so that days can be put side by side."""
    file = tmp_path / "flights.csv.gz"
    rows = (
        "2013-01-01T10:15Z,UA,1,EWR,IAH,2,0\n2013-01-01T10:16Z,UA,2,EWR,IAH,,1\n2013-01-01T10:17Z,UA,3,EWR,IAH,-2,0\n"
    )
    file.write_bytes(gzip.compress((HEAD + rows).encode()))
    from_ms = 1_357_035_300_000  # 10:15

    found = read_flights(file, from_ms=from_ms, to_ms=from_ms + 2 * MINUTE_MS)

    assert [(each.name, each.delay_ms) for each in found] == [("UA1", 2 * MINUTE_MS), ("UA2", None)]
    with pytest.raises(NotFoundError, match="no flight in that time"):
        read_flights(file, from_ms=0, to_ms=from_ms)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (HEAD + "2013-01-01T10:15Z,UA,1,EWR,IAH,2,0\n2013-01-01,UA,2,EWR,IAH,2,0\n", "line 3"),
        (HEAD + "2013-01-01T10:15Z,UA,1,EWR,IAH,soon,0\n", "line 2"),
        (HEAD + "2013-01-01T10:15Z,UA,1,EWR,IAH,2,0\n" * 2, "twice"),
        ("when,who\n", "lacks the columns"),
    ],
)
def test_another_file_is_refused_with_the_line(tmp_path: Path, text: str, complaint: str) -> None:
    """People bring files of their own."""
    file = tmp_path / "flights.csv"
    file.write_text(text, "utf-8")

    with pytest.raises(UsageError, match=complaint):
        read_flights(file, **FOR_EVER)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    """A download that went wrong gets a sentence, not a traceback."""
    file = tmp_path / "flights.csv.gz"
    file.write_bytes(b"\x00\xff\xfe not gzip")

    with pytest.raises(UsageError, match="can't be read"):
        read_flights(file, **FOR_EVER)
