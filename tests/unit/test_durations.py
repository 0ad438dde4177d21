"""Instants and durations as people write them: what is read, what is refused, and that a fraction is never early."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest

from pipeline.core.durations import (
    duration_ms,
    format_duration,
    format_instant,
    instant_ms,
    parse_duration_ms,
    parse_instant_ms,
)

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("text", "expected_ms"),
    [
        ("30m", 1_800_000),
        ("1h30m", 5_400_000),
        ("2d", 172_800_000),
        ("1w", 604_800_000),
        ("90s", 90_000),
        ("250ms", 250),
        ("1m1ms", 60_001),
        ("1.5h", 5_400_000),
        ("0s", 0),
        ("PT30M", 1_800_000),
        ("P1DT2H", 93_600_000),
        ("P2W", 1_209_600_000),
        ("PT0.25S", 250),
    ],
)
def test_a_duration_means_what_its_units_say(text: str, expected_ms: int) -> None:
    """Minutes and milliseconds share a letter, hours and ISO hours a word: each has exactly one reading."""
    assert expected_ms == parse_duration_ms(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "30",
        "m",
        "-5m",
        "+5m",
        "5 m",
        "5M",
        "5x",
        "1m1h",
        "1m1m",
        "1e3s",
        "1_000s",
        "1.s",
        ".5s",
        "٣m",
        "5m\n",
        "P",
        "PT",
        "P1DT",
        "P1M",
        "P1Y",
        "PT5",
        "1h PT5M",
        "9" * 200 + "s",
        "nan",
        "inf",
    ],
)
def test_what_is_no_duration_is_refused_with_an_example(text: str) -> None:
    """A guess would delay somebody's task by a wrong amount; months and years have no length."""
    with pytest.raises(ValueError, match=r"is not a duration: .*30m"):
        parse_duration_ms(text)


@pytest.mark.parametrize(("text", "expected_ms"), [("0.0001s", 1), ("1.0000000001ms", 2), ("0.5ms", 1), ("1.0ms", 1)])
def test_a_fraction_of_a_millisecond_rounds_up(text: str, expected_ms: int) -> None:
    """Rounded down, the task would fire before the instant that was asked for."""
    assert expected_ms == parse_duration_ms(text)


def test_fractions_add_up_before_they_are_rounded() -> None:
    """Rounding each part by itself would give two milliseconds."""
    assert parse_duration_ms("0.0000001h0.64ms") == 1


@pytest.mark.parametrize(
    ("text", "expected_ms"),
    [
        ("1970-01-01T00:00:00Z", 0),
        ("2026-04-01T14:30:00Z", 1_775_053_800_000),
        ("2026-04-01t14:30:00z", 1_775_053_800_000),
        ("2026-04-01 14:30:00Z", 1_775_053_800_000),
        ("2026-04-01T16:30:00+02:00", 1_775_053_800_000),
        ("2026-04-01T09:00:00-05:30", 1_775_053_800_000),
        ("2026-04-01T14:30:00-00:00", 1_775_053_800_000),
        ("2026-04-01T14:30:00.5Z", 1_775_053_800_500),
        ("2026-04-01T14:30:00.123456Z", 1_775_053_800_124),
        ("1969-12-31T23:59:59.999Z", -1),
        ("0001-01-01T00:00:00Z", -62_135_596_800_000),
        ("9999-12-31T23:59:59.999Z", 253_402_300_799_999),
    ],
)
def test_an_instant_is_the_same_wherever_it_was_written(text: str, expected_ms: int) -> None:
    """An offset says where the writer stood, never when the task is due."""
    assert expected_ms == parse_instant_ms(text)


@pytest.mark.parametrize("text", ["2026-04-01T14:30:00", "2026-04-01 14:30:00.5"])
def test_an_instant_without_an_offset_is_refused(text: str) -> None:
    """Whose half past two? The machine's zone is not the sender's."""
    with pytest.raises(ValueError, match=r"has no offset.*end it with Z"):
        parse_instant_ms(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "now",
        "2026-04-01",
        "1775053800000",
        "2026-04-01T14:30Z",
        "2026-4-1T14:30:00Z",
        "20260401T143000Z",
        "2026-02-30T00:00:00Z",
        "2026-13-01T00:00:00Z",
        "2026-04-01T24:00:00Z",
        "2026-04-01T14:30:60Z",
        "2026-04-01T14:30:00+24:00",
        "2026-04-01T14:30:00+02:60",
        "2026-04-01T14:30:00.Z",
        "٢026-04-01T14:30:00Z",
    ],
)
def test_what_is_no_instant_is_refused(text: str) -> None:
    """30 February must be the caller's problem now and not the 2 March of a task."""
    with pytest.raises(ValueError, match="is not an instant"):
        parse_instant_ms(text)


def test_a_naive_datetime_is_refused() -> None:
    """The commonest mistake with times in Python, and silent everywhere else."""
    with pytest.raises(ValueError, match="has no time zone"):
        instant_ms(datetime(2026, 4, 1, 14, 30))  # noqa: DTZ001  # the mistake


def test_an_aware_datetime_rounds_up() -> None:
    """One microsecond too early is early."""
    moment = datetime(2026, 4, 1, 16, 30, 0, 1, tzinfo=timezone(timedelta(hours=2)))

    assert instant_ms(moment) == 1_775_053_800_001


def test_a_timedelta_rounds_up() -> None:
    """The same for a delay."""
    assert duration_ms(timedelta(microseconds=1)) == 1
    assert duration_ms(timedelta(microseconds=-1)) == 0
    assert duration_ms(timedelta(days=100_000)) == 8_640_000_000_000


def test_instants_beyond_the_calendar_are_shown_as_numbers() -> None:
    """A horizon may reach past the year 9999; showing a task must not fail."""
    assert format_instant(instant_ms(datetime.max.replace(tzinfo=UTC))) == "253402300800000 ms"


def test_durations_are_shown_in_the_units_that_they_have() -> None:
    """People compare settings by eye."""
    assert [format_duration(ms) for ms in (0, 1, 60_000, 604_800_000, 90_061_001, -500)] == [  # type: ignore[arg-type]  # plain numbers do
        "0s",
        "1ms",
        "1m",
        "7d",
        "1d1h1m1s1ms",
        "-500ms",
    ]
