"""Many simulations at once: one process a core, each a seed after the other."""

import os
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from itertools import islice
from multiprocessing import get_context
from typing import Final

import msgspec

from pipeline.testing.simulator.plan import draw_plan
from pipeline.testing.simulator.simulation import Outcome, simulate

__all__ = ["Tally", "outcomes"]

_SEEDS_AT_ONCE: Final = 8
_MS_AN_HOUR: Final = 3_600_000


class Tally(msgspec.Struct, kw_only=True):
    """What many simulations came to."""

    simulations: int = 0
    virtual_ms: int = 0
    events: int = 0
    emissions: int = 0
    applied: int = 0
    faults: Counter[str] = msgspec.field(default_factory=Counter)

    def add(self, outcome: Outcome) -> None:
        """Count one."""
        self.simulations += 1
        self.virtual_ms += outcome.virtual_ms
        self.events += outcome.events
        self.emissions += outcome.emissions
        self.applied += outcome.applied
        self.faults.update(outcome.faults)

    @property
    def virtual_hours(self) -> float:
        """Hours that passed in all worlds together."""
        return self.virtual_ms / _MS_AN_HOUR


def outcomes(seeds: Iterable[int], steps: int, *, jobs: int | None = None) -> Generator[Outcome]:
    """The simulation of each seed, as they end; `jobs` processes (None: one for each core).

    Take as many as you want: seeds are drawn only as fast as they are run, and closing the iterator ends the rest.
    """
    jobs = jobs if jobs is not None else os.cpu_count() or 1
    if jobs == 1:
        yield from (simulate(draw_plan(seed, steps)) for seed in seeds)
        return
    left = iter(seeds)
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        try:
            running = {pool.submit(_simulate_each, part, steps) for part in _parts(left, 2 * jobs)}
            while running:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                running |= {pool.submit(_simulate_each, part, steps) for part in _parts(left, len(done))}
                for future in done:
                    yield from future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _parts(seeds: Iterator[int], count: int) -> Iterator[list[int]]:
    """At most `count` handfuls of the seeds that are left."""
    for _ in range(count):
        part = list(islice(seeds, _SEEDS_AT_ONCE))
        if not part:
            return
        yield part


def _simulate_each(seeds: Sequence[int], steps: int) -> list[Outcome]:
    return [simulate(draw_plan(seed, steps)) for seed in seeds]
