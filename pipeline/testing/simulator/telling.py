"""What became of a simulation, in words."""

from pipeline.testing.simulator.plan import Plan
from pipeline.testing.simulator.simulation import Outcome

__all__ = ["tell"]

_MS_A_SECOND = 1_000


def tell(plan: Plan, outcome: Outcome) -> str:
    """One sentence, or the whole story of a failure with the command that repeats it."""
    failure = outcome.failure
    if failure is None:
        return f"Seed {outcome.seed}: no promise was broken in {outcome.virtual_ms / _MS_A_SECOND:.0f} s."
    where = f"after step {failure.step}" if failure.step else "when all faults had ended"
    numbers = [step.number for step in plan.steps]
    command = f"duetasks simulate --seed {outcome.seed} --steps {max(numbers, default=1)}"
    if numbers != list(range(1, len(numbers) + 1)):
        command += f" --only {','.join(map(str, numbers))}"
    history = "\n".join(outcome.history)
    return (
        f"Seed {outcome.seed}, {where}: {failure.what}\n\n{len(numbers)} steps that show it:\n{history}\n\n"
        f"Again: {command}"
    )
