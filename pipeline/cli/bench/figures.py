"""The sizes of a benchmark and its figures: flat, the same names every time, so that runs can be compared."""

import msgspec

__all__ = ["Figures", "Pace", "Sizes", "percentile", "rows"]


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """How much of everything; `pending` is what ingest schedules and restarts carry.

    Ingest and drain are measured `rounds` times, each with its part of `pending` and `drain`.
    """

    pending: int
    drain: int
    lateness_per_s: int
    lateness_s: int
    probes: int = 200
    warm_up: int = 20_000
    payload_bytes: int = 100
    agents: int = 1
    rounds: int = 3


class Pace(msgspec.Struct, frozen=True):
    """Records a second in one round, and those of the plain loop right after it."""

    per_s: float
    ceiling_per_s: float

    @property
    def ratio(self) -> float:
        """What is left of the ceiling."""
        return self.per_s / self.ceiling_per_s


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One run's figures; `bench/README.md` says how each is measured."""

    ingest_per_s: int
    ingest_ceiling_per_s: int
    ingest_ratio: float
    drain_per_s: int
    drain_ceiling_per_s: int
    drain_ratio: float
    lateness_ms_p50: float
    lateness_ms_p99: float
    lateness_ms_max: float
    early: int
    lost: int
    doubled: int
    restart_warm_s: float
    restart_cold_s: float
    rss_mb: float
    pending: int

    @property
    def is_right(self) -> bool:
        """Whether every promise held while it was measured."""
        return not (self.early or self.lost or self.doubled)


def percentile(sorted_values: list[float], percent: float) -> float:
    """The value that `percent` of the values do not exceed; the values must be sorted and not empty."""
    return sorted_values[min(len(sorted_values) - 1, int(len(sorted_values) * percent / 100))]


def rows(figures: Figures, sizes: Sizes) -> list[dict[str, str]]:
    """The table for people."""
    f = figures

    def row(what: str, value: str, ceiling: str = "", ratio: str = "") -> dict[str, str]:
        return {"what": what, "value": value, "ceiling": ceiling, "ratio": ratio}

    return [
        row(
            f"ingest, {sizes.pending:,} events",
            f"{f.ingest_per_s:,}/s",
            f"{f.ingest_ceiling_per_s:,}/s",
            f"{f.ingest_ratio:.2f}",
        ),
        row(
            f"drain, {sizes.drain:,} due at once",
            f"{f.drain_per_s:,}/s",
            f"{f.drain_ceiling_per_s:,}/s",
            f"{f.drain_ratio:.2f}",
        ),
        row(f"lateness at {sizes.lateness_per_s:,}/s, p50", f"{f.lateness_ms_p50:.0f} ms"),
        row("lateness, p99", f"{f.lateness_ms_p99:.0f} ms"),
        row("lateness, max", f"{f.lateness_ms_max:.0f} ms"),
        row(f"restart, {f.pending:,} pending, warm table", f"{f.restart_warm_s:.1f} s"),
        row(f"restart, {f.pending:,} pending, no table", f"{f.restart_cold_s:.1f} s"),
        row(f"agents' memory, {f.pending:,} pending", f"{f.rss_mb:.0f} MB"),
        row("early / lost / doubled", f"{f.early} / {f.lost} / {f.doubled}"),
    ]
