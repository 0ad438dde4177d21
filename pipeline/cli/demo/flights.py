"""The flights of a data file, as values."""

import csv
import gzip
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from pipeline.core.durations import parse_instant_ms
from pipeline.core.tasks import InstantMs
from pipeline.errors import NotFoundError, UsageError

__all__ = ["PACKAGED_FILE", "Flight", "read_flights"]

PACKAGED_FILE: Final = Path(__file__).parent / "flights-2013-03-06.csv.gz"
_MINUTE_MS: Final = 60_000
_COLUMNS: Final = frozenset(
    {"scheduled_departure_utc", "carrier", "flight", "origin", "dest", "departure_delay_min", "cancelled"}
)


class Flight(msgspec.Struct, frozen=True, kw_only=True):
    """One flight as it went. `delay_ms` is negative if it left early, and None if it was cancelled."""

    task_id: str
    name: str
    origin: str
    dest: str
    planned_ms: InstantMs
    delay_ms: int | None


def read_flights(file: Path, *, from_ms: int, to_ms: int) -> list[Flight]:
    """The flights that were planned to depart in `from_ms <= planned < to_ms`, in the file's order.

    Raises:
        NotFoundError: no such file, or no flight in that time.
        UsageError: it is no such file; the message names the line.

    """
    try:
        flights = [flight for flight in _rows(file) if from_ms <= flight.planned_ms < to_ms]
    except FileNotFoundError as error:
        raise NotFoundError(f"There is no file {file}.") from error
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} can't be read: {error}. It must be CSV, or CSV compressed by gzip (.gz).") from error
    if not flights:
        raise NotFoundError(f"{file.name} has no flight in that time: choose another --from and --to.")
    if len({flight.task_id for flight in flights}) != len(flights):
        raise UsageError(f"{file} has a flight twice: carrier, flight, origin and departure together must be unique.")
    return flights


def _rows(file: Path) -> Iterator[Flight]:
    with gzip.open(file, "rt", encoding="utf-8") if file.suffix == ".gz" else file.open(encoding="utf-8") as lines:
        reader = csv.DictReader(lines)
        missing = _COLUMNS - set(reader.fieldnames or ())
        if missing:
            raise UsageError(f"{file} lacks the columns {', '.join(sorted(missing))}.")
        for row in reader:
            try:
                yield _flight(row)
            except (ValueError, TypeError) as error:
                raise UsageError(f"{file}, line {reader.line_num}: {error}.") from error


def _flight(row: Mapping[str, str]) -> Flight:
    planned, name, origin = row["scheduled_departure_utc"], row["carrier"] + row["flight"], row["origin"]
    return Flight(
        task_id=f"boarding/{planned}/{name}/{origin}",
        name=name,
        origin=origin,
        dest=row["dest"],
        planned_ms=parse_instant_ms(planned.replace("Z", ":00Z")),
        delay_ms=None if row["cancelled"] == "1" else int(row["departure_delay_min"]) * _MINUTE_MS,
    )
