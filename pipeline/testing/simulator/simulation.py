"""Runs one plan from beginning to end, and says what became of it."""

import asyncio
import contextlib
import hashlib
from collections import Counter
from typing import Any, Final

import msgspec
from structlog.testing import capture_logs

from pipeline.testing.simulated_process import SimulatedCrashError
from pipeline.testing.simulator.audit import audit
from pipeline.testing.simulator.judge import BrokenPromiseError
from pipeline.testing.simulator.nemesis import perform
from pipeline.testing.simulator.plan import Kind, Plan
from pipeline.testing.simulator.world import World
from pipeline.testing.virtual_time import StuckError, run_virtual

__all__ = ["Failure", "Outcome", "simulate"]

_VIRTUAL_S_MAX: Final = 3_600.0
_BUGS: Final = frozenset({"owner_raised", "core_raised", "decoding_raised"})
"""Log events of errors that no rule foresees: the production code survives them, and they are bugs all the same."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """What broke, and after which step (0: when everything was healed)."""

    what: str
    step: int

    @property
    def promise(self) -> str:
        """Its first word: the promise that was broken."""
        return self.what.partition(":")[0]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One simulation, and how it went; `digest` is the same whenever the same thing happened."""

    seed: int
    failure: Failure | None
    history: tuple[str, ...]
    virtual_ms: int
    faults: dict[str, int]
    events: int
    emissions: int
    applied: int
    digest: str


def simulate(plan: Plan) -> Outcome:
    """Run it. The same plan gives the same outcome, on any machine."""
    with capture_logs() as logged:
        run = _Run(plan)
        try:
            run_virtual(run.main, until_s=_VIRTUAL_S_MAX)
        except StuckError as error:
            run.failed(f"stuck: {error}")
        bug = next((entry for entry in logged if entry["event"] in _BUGS), None)
        if bug is not None and run.failure is None:
            run.failed(f"bug: {bug['event']}: {bug.get('exception') or bug}")
    return run.outcome()


class _Run:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.failure: Failure | None = None
        self._step = 0
        self._world: World | None = None
        self._faults: Counter[str] = Counter()

    async def main(self) -> None:
        asyncio.get_running_loop().set_exception_handler(self._unhandled)
        world = self._world = World(self.plan.shape, self.plan.seed)
        try:
            world.start()
            await self._perform(world)
            self._step = 0
            await world.heal_and_conclude()
            await audit(world)
        except (BrokenPromiseError, AssertionError) as error:
            self.failed(str(error) or repr(error))
        finally:
            with contextlib.suppress(StuckError):
                await world.close()

    async def _perform(self, world: World) -> None:
        for step in self.plan.steps:
            if step.wait_ms:
                await asyncio.sleep(step.wait_ms / 1_000)
            self._step = step.number
            before = len(world.history)
            await perform(world, step)
            if len(world.history) > before and step.kind not in {Kind.SCHEDULE, Kind.CANCEL, Kind.BURST}:
                self._faults[step.kind.value] += 1
            world.judge.look()

    def _unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A task that nobody waits for ended in an error: fine if its process was killed."""
        del loop
        if not isinstance(context.get("exception"), SimulatedCrashError):
            self.failed(f"bug: {context['message']}: {context.get('exception')!r}")

    def failed(self, what: str) -> None:
        """Keep the first failure."""
        if self.failure is None:
            self.failure = Failure(what=what, step=self._step)

    def outcome(self) -> Outcome:
        world = self._world
        assert world is not None, "it ran"
        what = self.failure.what if self.failure is not None else ""
        trace = [*world.history, *(repr(task) for task in world.judge.emissions), what]
        return Outcome(
            seed=self.plan.seed,
            failure=self.failure,
            history=tuple(world.history),
            virtual_ms=world.clock.monotonic_ms(),
            faults=dict(self._faults),
            events=len(world.upstream.sent),
            emissions=len(world.judge.emissions),
            applied=len(world.judge.applied),
            digest=hashlib.sha256("\n".join(trace).encode()).hexdigest()[:16],
        )
