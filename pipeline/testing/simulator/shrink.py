"""Makes a failing simulation small: leaves steps out as long as the same promise still breaks.

The algorithm is Zeller's and Hildebrandt's ddmin ("Simplifying and Isolating Failure-Inducing Input", 2002).
"""

from collections.abc import Callable, Sequence
from typing import Final

from pipeline.testing.simulator.plan import Plan, Step
from pipeline.testing.simulator.simulation import Outcome, simulate

__all__ = ["TRIES_MAX", "shrink"]

TRIES_MAX: Final = 300


def shrink(plan: Plan, outcome: Outcome, *, on_try: Callable[[int], None] = lambda _: None) -> tuple[Plan, Outcome]:
    """The smallest plan that was found to break the same promise as `outcome`, and how it ends.

    Runs at most `TRIES_MAX` simulations; `on_try` hears how many steps are left.
    """
    assert outcome.failure is not None, "there is nothing to shrink"
    promise = outcome.failure.promise
    # What comes after the step that failed can't matter, if it failed at a step.
    last = outcome.failure.step or plan.steps[-1].number if plan.steps else 0
    steps: Sequence[Step] = [step for step in plan.steps if step.number <= last]
    best, tries, parts = outcome, 0, 2
    while len(steps) > 1 and tries < TRIES_MAX:
        size = -(-len(steps) // parts)
        for start in range(0, len(steps), size):
            fewer = [*steps[:start], *steps[start + size :]]
            tries += 1
            found = simulate(plan.only([step.number for step in fewer]))
            if found.failure is not None and found.failure.promise == promise:
                steps, best, parts = fewer, found, max(2, parts - 1)
                on_try(len(steps))
                break
            if tries >= TRIES_MAX:
                break
        else:
            if size == 1:
                break
            parts = min(len(steps), 2 * parts)
    return plan.only([step.number for step in steps]), best
