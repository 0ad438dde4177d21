"""The simulator in every run: seeds that nobody has tried before, and the worlds that once broke a promise."""

import secrets
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Final

import msgspec
import pytest

from pipeline.testing.simulator.many import Tally, outcomes
from pipeline.testing.simulator.plan import Plan, draw_plan
from pipeline.testing.simulator.shrink import shrink
from pipeline.testing.simulator.simulation import simulate
from pipeline.testing.simulator.telling import tell

pytestmark = pytest.mark.simulation

STEPS: Final = 80
FOR_S: Final = 75
WORLDS_MIN: Final = 100
SEED_END: Final = 10**9
CORPUS: Final = sorted((Path(__file__).parent / "corpus").glob("*.json"))


def _fresh_seeds(first: int) -> Iterator[int]:
    """As many as there is time for."""
    until_s = time.monotonic() + FOR_S
    for seed in count(first):
        if time.monotonic() >= until_s:
            return
        yield seed


def test_no_promise_breaks_in_worlds_that_nobody_has_seen_before(capsys: pytest.CaptureFixture[str]) -> None:
    """Each run looks where none has looked; a failure comes with its seed, shrunk, and the command that repeats it."""
    first, tally = secrets.randbelow(SEED_END), Tally()
    with capsys.disabled():
        print(f"\nseeds from {first} on, {STEPS} steps")  # noqa: T201  # whoever reads the log of a run wants to know

    with closing(outcomes(_fresh_seeds(first), STEPS)) as running:
        for outcome in running:
            tally.add(outcome)
            if outcome.failure is not None:
                pytest.fail(tell(*shrink(draw_plan(outcome.seed, STEPS), outcome)))

    with capsys.disabled():
        faults = tally.faults.total()
        print(f"{tally.simulations} worlds, {tally.virtual_hours:.0f} hours, {faults} faults")  # noqa: T201  # the same
    assert tally.simulations >= WORLDS_MIN
    assert tally.emissions > tally.simulations
    assert tally.applied > tally.simulations


@pytest.mark.parametrize("file", CORPUS, ids=lambda file: file.stem)
def test_a_world_that_once_broke_a_promise_keeps_them_all(file: Path) -> None:
    """Each was found by a seed and mended; its name says what was wrong."""
    plan = msgspec.json.decode(file.read_bytes(), type=Plan)

    outcome = simulate(plan)

    assert outcome.failure is None, tell(plan, outcome)
    assert outcome.events > 0
