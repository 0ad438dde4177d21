"""Instants and durations as people write them, to whole milliseconds and back, in integer arithmetic throughout.

A part finer than a millisecond is rounded up: a task that is due at .0005 s and fired at .000 would be early.
"""

import re
from datetime import UTC, datetime, timedelta
from typing import Final

from pipeline.core.tasks import DurationMs, InstantMs

__all__ = [
    "duration_ms",
    "format_duration",
    "format_instant",
    "instant_ms",
    "parse_duration_ms",
    "parse_instant_ms",
]

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_TEXT_LENGTH_MAX: Final = 100

_UNITS_MS: Final = {
    "w": 7 * 86_400_000,
    "d": 86_400_000,
    "h": 3_600_000,
    "m": 60_000,
    "s": 1_000,
    "ms": 1,
}
_AMOUNT: Final = r"([0-9]+(?:\.[0-9]+)?)"
_SHORT: Final = re.compile("".join(rf"(?:{_AMOUNT}{unit})?" for unit in _UNITS_MS))
_ISO: Final = re.compile(rf"P(?:{_AMOUNT}W)?(?:{_AMOUNT}D)?(?:T(?:{_AMOUNT}H)?(?:{_AMOUNT}M)?(?:{_AMOUNT}S)?)?")
_INSTANT: Final = re.compile(
    r"([0-9]{4})-([0-9]{2})-([0-9]{2})[Tt ]([0-9]{2}):([0-9]{2}):([0-9]{2})(?:\.([0-9]+))?"
    r"([Zz]|[+-][0-9]{2}:[0-9]{2})?"
)


def parse_duration_ms(text: str) -> DurationMs:
    """Milliseconds in a duration such as `30m`, `1h30m`, `2d`, `1.5h`, `250ms` or ISO 8601 `PT30M`, `P1DT2H`.

    Units fall from weeks to milliseconds, each at most once; months and years have no fixed length and are refused.

    Raises:
        ValueError: `text` is no such duration; the message says what one looks like.

    """
    match = _ISO.fullmatch(text) or _SHORT.fullmatch(text) if len(text) <= _TEXT_LENGTH_MAX else None
    amounts = match.groups() if match else ()
    if not any(amounts) or text.endswith("T"):
        raise ValueError(
            f"{_quoted(text)} is not a duration: write a number and a unit (w, d, h, m, s, ms), "
            "like 30m, 1h30m or 2d, or ISO 8601 like PT30M"
        )
    exact = [_scaled(amount, unit_ms) for amount, unit_ms in zip(amounts, _UNITS_MS.values(), strict=False) if amount]
    scale = max(denominator for _, denominator in exact)
    total = sum(numerator * (scale // denominator) for numerator, denominator in exact)
    return DurationMs(-(-total // scale))


def parse_instant_ms(text: str) -> InstantMs:
    """Milliseconds since 1970 of an RFC 3339 instant such as `2026-04-01T14:30:00Z` or `2026-04-01T16:30:00.5+02:00`.

    Raises:
        ValueError: `text` is no such instant, has no offset (whose 14:30 would it be?), or names a day or an hour
            that does not exist; the message says which.

    """
    match = _INSTANT.fullmatch(text) if len(text) <= _TEXT_LENGTH_MAX else None
    if match is None:
        raise ValueError(f"{_quoted(text)} is not an instant: write RFC 3339, like 2026-04-01T14:30:00Z")
    *fields, fraction, offset = match.groups()
    if offset is None:
        raise ValueError(
            f"{_quoted(text)} has no offset, so it could be anybody's: "
            "end it with Z for UTC, or with the offset, like +02:00"
        )
    try:
        moment = datetime(*(int(field) for field in fields), tzinfo=UTC)  # type: ignore[arg-type,misc]  # six numbers and a zone
    except ValueError as error:
        raise ValueError(f"{_quoted(text)} is not an instant: {error}") from error
    fraction_ms, denominator = _scaled(f"0.{fraction or 0}", 1_000)
    return InstantMs(instant_ms(moment) - _offset_ms(offset, text) - (-fraction_ms // denominator))


def instant_ms(moment: datetime) -> InstantMs:
    """Milliseconds since 1970 of an aware datetime, rounded up.

    Raises:
        ValueError: `moment` is naive; give it a zone.

    """
    if moment.utcoffset() is None:
        raise ValueError(f"{moment.isoformat()} has no time zone, so it could be anybody's: use an aware datetime")
    return InstantMs(-((_EPOCH - moment) // timedelta(milliseconds=1)))


def duration_ms(duration: timedelta) -> DurationMs:
    """Milliseconds in `duration`, rounded up."""
    return DurationMs(-(duration // timedelta(milliseconds=-1)))  # the longest one has no negative


def format_instant(at_ms: InstantMs) -> str:
    """RFC 3339 in UTC with milliseconds; beyond the calendar (year 9999) the bare number and its unit."""
    try:
        moment = _EPOCH + timedelta(milliseconds=at_ms)
    except OverflowError:
        return f"{at_ms} ms"
    return moment.replace(tzinfo=None).isoformat(timespec="milliseconds") + "Z"


def format_duration(length_ms: DurationMs) -> str:
    """The shortest form that `parse_duration_ms` reads back as the same; a leading `-` if it is negative."""
    rest, parts = abs(length_ms), ""
    for unit, unit_ms in list(_UNITS_MS.items())[1:]:
        amount, rest = divmod(rest, unit_ms)
        parts += f"{amount}{unit}" if amount else ""
    return ("-" if length_ms < 0 else "") + (parts or "0s")


def _scaled(amount: str, unit_ms: int) -> tuple[int, int]:
    """A decimal number of units in milliseconds, as numerator and a power of ten."""
    whole, _, fraction = amount.partition(".")
    return int(whole + fraction) * unit_ms, 10 ** len(fraction)


def _offset_ms(offset: str, text: str) -> int:
    if offset in "Zz":
        return 0
    hours, minutes = int(offset[1:3]), int(offset[4:6])
    if hours > 23 or minutes > 59:  # noqa: PLR2004  # a clock's
        raise ValueError(f"{_quoted(text)} is not an instant: the offset {offset} is beyond 23:59")
    return (-1 if offset[0] == "-" else 1) * (hours * 60 + minutes) * _UNITS_MS["m"]


def _quoted(text: str) -> str:
    shown = text if len(text) <= _TEXT_LENGTH_MAX else text[:_TEXT_LENGTH_MAX] + "..."
    return repr(shown)
