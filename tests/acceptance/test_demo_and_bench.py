"""`duetasks demo` and `duetasks bench` as a person types them, only smaller."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.acceptance

FLAT_KEYS = {
    "ingest_per_s",
    "ingest_ceiling_per_s",
    "ingest_ratio",
    "drain_per_s",
    "drain_ceiling_per_s",
    "drain_ratio",
    "lateness_ms_p50",
    "lateness_ms_p99",
    "lateness_ms_max",
    "early",
    "lost",
    "doubled",
    "restart_warm_s",
    "restart_cold_s",
    "rss_mb",
    "pending",
}


def duetasks(*arguments: str, folder: Path, cache_dir: Path) -> subprocess.CompletedProcess[str]:
    """Run the command line with a temporary folder of its own, which it must leave empty."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DUETASKS_")}
    folder.mkdir()
    return subprocess.run(
        [sys.executable, "-m", "pipeline.cli", *arguments],
        env=kept | {"TMPDIR": str(folder), "DUETASKS_CACHE_DIR": str(cache_dir)},
        cwd=folder.parent,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_a_few_hundred_real_flights_get_their_calls_right_though_the_agent_is_killed(
    tmp_path: Path, kafka_cache_dir: Path
) -> None:
    """What the product promises, on real data, with the check that is computed from the data file alone."""
    ended = duetasks(
        "demo",
        *("--from", "2013-03-08T18:00:00Z", "--to", "2013-03-08T22:00:00Z", "--speed", "1800", "--json"),
        folder=tmp_path / "temporary",
        cache_dir=kafka_cache_dir,
    )

    assert ended.returncode == 0, ended.stdout + ended.stderr
    result: dict[str, Any] = msgspec.json.decode(ended.stdout)
    total = {name: sum(tally[name] for tally in result["tallies"].values()) for name in ("flights", "calls", "right")}
    assert total["flights"] > 200
    assert total["right"] == total["calls"] > 100
    assert result["is_right"]
    assert result["dead_s"] > 0
    assert not list((tmp_path / "temporary").iterdir())


def test_the_benchmark_measures_everything_and_finds_every_promise_kept(tmp_path: Path, kafka_cache_dir: Path) -> None:
    """Figures are compared by name over the years, and a fast queue that loses a task is worth nothing."""
    figures_file = tmp_path / "figures.json"

    ended = duetasks(
        "bench",
        *("--pending", "2000", "--drain", "2000", "--rounds", "2", "--lateness-s", "2", "--json", str(figures_file)),
        folder=tmp_path / "temporary",
        cache_dir=kafka_cache_dir,
    )

    assert ended.returncode == 0, ended.stdout + ended.stderr
    figures: dict[str, float] = msgspec.json.decode(figures_file.read_bytes())
    assert set(figures) == FLAT_KEYS
    assert (figures["early"], figures["lost"], figures["doubled"]) == (0, 0, 0)
    assert figures["pending"] == 2_000
    assert min(figures.values(), default=0) >= 0
    # The lower of two: of the rates, of the ceilings, and of the ratios.
    for phase in ("ingest", "drain"):
        rate, ceiling, ratio = (figures[f"{phase}_{name}"] for name in ("per_s", "ceiling_per_s", "ratio"))
        assert 0 < ratio <= rate / ceiling + 0.01
    assert "ingest" in ended.stdout
    assert not list((tmp_path / "temporary").iterdir())
