"""Short chaos runs: every kind of fault that there is, on one broker and on three, under load."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

import pytest

from tests.chaos.faults import Kind, plan_faults
from tests.chaos.report import rows
from tests.chaos.run import Plan, Run

if TYPE_CHECKING:
    from pathlib import Path

    from tests.chaos.report import Report

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(540)]

KAFKA_IS_WELL = [
    Kind.AGENT_KILLED,
    Kind.AGENT_FROZEN,
    Kind.TABLES_LOST,
    Kind.CONSUMER_KILLED,
    Kind.CONSUMER_FROZEN,
]


def run_chaos(folder: Path, cache_dir: Path, **options: Any) -> Report:  # noqa: ANN401 - handed on
    """Carry a plan out; what pytest shows when it fails is enough to run it again by `make chaos`."""
    plan = Plan.of(seed=secrets.randbelow(10**9), calm_s=4.0, rate=100.0, pause_s=3.0, **options)
    print(f"seed {plan.seed}", *plan.faults, sep="\n")  # noqa: T201 - shown by pytest when it fails
    report = Run(plan, folder, cache_dir=cache_dir, on_progress=print).report()
    print(*(f"{row['what']:60} {row['value']}" for row in rows(report)), sep="\n")  # noqa: T201 - the same
    assert report.emitted > 300, "a load that shows nothing"
    assert report.faults == len(plan.faults)
    return report


@pytest.mark.parametrize(("nodes", "faults_s"), [(1, 25.0), (3, 35.0)])
def test_promises_hold_whatever_is_killed_or_frozen(
    nodes: int, faults_s: float, tmp_path: Path, kafka_cache_dir: Path
) -> None:
    """Nobody plans failures one at a time: whatever comes together, each promise holds while it lasts and after."""
    report = run_chaos(tmp_path, kafka_cache_dir, nodes=nodes, faults_s=faults_s)

    assert report.sentences == []
    assert report.is_right


def test_agents_and_consumers_that_die_in_a_row_break_nothing(tmp_path: Path, kafka_cache_dir: Path) -> None:
    """At any step of their work; and as Kafka itself is well all the time, every event has a known outcome."""
    report = run_chaos(tmp_path, kafka_cache_dir, nodes=1, faults_s=20.0, kinds=KAFKA_IS_WELL)

    assert report.sentences == []
    assert report.is_right
    assert report.unknown_outcomes == 0


def test_faults_follow_from_the_seed_and_leave_no_kind_out() -> None:
    """A run that found something must be repeated with the same faults; and what never happens shows nothing."""
    plan = plan_faults(7, 300)

    assert plan == plan_faults(7, 300)
    assert plan != plan_faults(8, 300)
    assert {fault.kind for fault in plan} == set(Kind)
    assert {fault.storm for fault in plan} > {0}
    assert [fault.at_s for fault in plan] == sorted(fault.at_s for fault in plan)
