"""A process that tests may kill or freeze between any two effects.

Every twin of a port belongs to one process and tells it the name of each effect before it happens.
"""

import asyncio
from collections.abc import Callable

__all__ = ["SimulatedCrashError", "SimulatedProcess"]


class SimulatedCrashError(BaseException):
    """The process is gone. Not an `Exception`, so that no handler of the code under test takes it for an error."""


class SimulatedProcess:
    """The life of one agent. Once dead, none of its twins does anything: clean-up code can't do what SIGKILL can't.

    `steps` are the effects so far; `on_step` is called before each, and may raise, kill or freeze. `latency_ms` says
    how long each effect that waits takes to reach the broker.
    """

    def __init__(
        self, name: str, *, on_step: Callable[[str], None] | None = None, latency_ms: Callable[[], int] | None = None
    ) -> None:
        self.name = name
        self.steps: list[str] = []
        self.on_step = on_step
        self.latency_ms = latency_ms
        self.alive = True
        self._crash_at: int | None = None
        self._freeze_at: int | None = None
        self._thawed = asyncio.Event()
        self._thawed.set()

    def crash_before_step(self, number: int) -> None:
        """Die instead of doing the effect of that number, counted from 1."""
        self._crash_at = number

    def freeze_after_step(self, number: int) -> None:
        """Stand still after the effect of that number, counted from 1: before its answer, or before the next effect."""
        self._freeze_at = number

    def spare(self) -> None:
        """Take back `crash_before_step` and `freeze_after_step`."""
        self._crash_at = self._freeze_at = None

    def kill(self) -> None:
        """SIGKILL now: whatever it tries next fails with `SimulatedCrashError`."""
        self.alive = False
        self._thawed.set()

    def freeze(self) -> None:
        """SIGSTOP: it stands still at its next waiting point, believing what it believed."""
        self._thawed.clear()

    def thaw(self) -> None:
        """SIGCONT."""
        self._thawed.set()

    @property
    def responds(self) -> bool:
        """Neither dead nor frozen."""
        return self.alive and self._thawed.is_set()

    def step(self, name: str) -> None:
        """Called before an effect that does not wait; raises `SimulatedCrashError` if the process is or falls dead."""
        self.check()
        self.steps.append(name)
        if self.on_step is not None:
            self.on_step(name)
        if len(self.steps) == self._crash_at:
            self.kill()
        elif self._freeze_at is not None and len(self.steps) > self._freeze_at:
            self._freeze_now()
        self.check()

    async def reach(self, name: str) -> None:
        """Called before an effect that waits: others may run first; a process that is or gets frozen stands here."""
        self.check()
        await asyncio.sleep(self.latency_ms() / 1_000 if self.latency_ms is not None else 0)
        self.step(name)
        await self.stand()

    async def answered(self) -> None:
        """Called after a question was answered: the answer travels too, and may find the process frozen or dead."""
        if self.latency_ms is not None:
            await asyncio.sleep(self.latency_ms() / 1_000)
        if self._freeze_at is not None and len(self.steps) >= self._freeze_at:
            self._freeze_now()
        await self.stand()

    async def stand(self) -> None:
        """Stand still while frozen; raises `SimulatedCrashError` if the process is dead then."""
        await self._thawed.wait()
        self.check()

    def _freeze_now(self) -> None:
        self._freeze_at = None
        self.freeze()

    def check(self) -> None:
        """Raise `SimulatedCrashError` if the process is dead."""
        if not self.alive:
            raise SimulatedCrashError(f"{self.name} was killed")
