"""Laws of instants and durations, near the numbers at which other schedulers overflowed (cases 40, 41, 43)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.durations import (
    format_duration,
    format_instant,
    instant_ms,
    parse_duration_ms,
    parse_instant_ms,
)
from pipeline.core.tasks import DurationMs, InstantMs

pytestmark = pytest.mark.property

_EDGES = [2**31, 2**32, 2**31 * 1_000, 2**32 * 1_000, 2**53, 2**63, 2_592_000_000]
_LAST_MS = 253_402_300_799_999  # the end of the year 9999
_near_edges = st.builds(lambda edge, step: edge + step, st.sampled_from(_EDGES), st.integers(-2, 2))
_lengths_ms = st.one_of(_near_edges, st.integers(0, 2**70))
_UNITS_MS = {"w": 604_800_000, "d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1_000, "ms": 1}


@given(_lengths_ms)
def test_a_duration_survives_being_shown_and_read(length_ms: int) -> None:
    """No float in between, and no 32 bits: 25 days came out as at once elsewhere."""
    assert parse_duration_ms(format_duration(DurationMs(length_ms))) == length_ms
    assert parse_duration_ms(f"{length_ms}ms") == length_ms


@given(st.sampled_from(sorted(_UNITS_MS)), st.integers(0, 2**64), st.text("0123456789", min_size=0, max_size=20))
def test_a_decimal_amount_is_exact_and_rounded_up_once(unit: str, whole: int, fraction: str) -> None:
    """Against exact fractions: never early, and late by less than a millisecond."""
    text = f"{whole}.{fraction}" if fraction else str(whole)
    exact = Fraction(text) * _UNITS_MS[unit]

    read = parse_duration_ms(text + unit)

    assert read - 1 < exact <= read


@given(st.one_of(st.integers(-62_135_596_800_000, _LAST_MS), _near_edges.filter(lambda ms: ms <= _LAST_MS)))
def test_an_instant_survives_being_shown_and_read(at_ms: int) -> None:
    """What `status` prints can be typed into `schedule --at`."""
    assert parse_instant_ms(format_instant(InstantMs(at_ms))) == at_ms


@given(st.integers(_LAST_MS + 1, 2**80))
def test_any_later_instant_can_still_be_shown(at_ms: int) -> None:
    """A task at the end of a long horizon must not break a list."""
    assert format_instant(InstantMs(at_ms)) == f"{at_ms} ms"


@given(st.datetimes(min_value=datetime(1, 1, 2), max_value=datetime(9999, 12, 30)), st.timezones())  # noqa: DTZ001  # hypothesis wants them naive
def test_text_and_datetime_agree_in_every_zone(naive: datetime, zone: object) -> None:
    """The command line and the SDK must mean the same instant, in gaps and folds of daylight saving too."""
    moment = naive.replace(tzinfo=zone)  # type: ignore[arg-type]  # a zone
    offset = moment.utcoffset()
    assert offset is not None
    if offset % timedelta(minutes=1):
        moment = moment.astimezone(UTC)  # local mean time has seconds, which RFC 3339 can't write

    assert parse_instant_ms(moment.isoformat()) == instant_ms(moment)


@given(st.text(max_size=150))
def test_arbitrary_text_is_read_or_refused_with_a_sentence(text: str) -> None:
    """Whatever is typed: a number, or a ValueError that quotes it; nothing else escapes."""
    for parse in (parse_duration_ms, parse_instant_ms):
        try:
            assert isinstance(parse(text), int)
        except ValueError as error:
            assert len(str(error)) > 20  # noqa: PT017  # both outcomes are right
