"""What can be asked of an owner from outside: its phase, its counters, verdicts that leave no row."""

from collections import OrderedDict
from enum import StrEnum
from typing import Final

import msgspec

from pipeline.core.tasks import Offset, Verdict

__all__ = ["OwnerStatus", "PassingVerdicts", "Phase"]

PASSING_MAX: Final = 10_000


class Phase(StrEnum):
    """What an owner is doing, for readiness and for people."""

    ACQUIRING = "ACQUIRING"
    ACTIVE = "ACTIVE"
    REFUSED = "REFUSED"
    STOPPED = "STOPPED"


class OwnerStatus(msgspec.Struct, kw_only=True):
    """A partition as `/readyz` shows it. `moved_at_ms`: when `position` came to be what it is, by the owner's clock."""

    partition: int
    phase: Phase = Phase.ACQUIRING
    message: str = ""
    restored: int = 0
    restore_end: int = 0
    position: int = 0
    moved_at_ms: int = 0
    applied: int = 0
    fired: int = 0
    refused: int = 0
    purged: int = 0
    transactions: int = 0
    acquisitions: int = 0
    lateness_ms_max: int = 0
    fence_waiting_ms: int = 0
    clock_jumped_ms: int = 0


class PassingVerdicts:
    """Verdicts on events that leave no row (unknown task, refused, duplicate): the last ten thousand, in memory."""

    def __init__(self) -> None:
        self._verdicts: OrderedDict[Offset, tuple[Verdict, str]] = OrderedDict()

    def get(self, offset: Offset) -> tuple[Verdict, str] | None:
        """Verdict and reason code for the event at `offset`, while remembered."""
        return self._verdicts.get(offset)

    def add(self, offset: Offset, verdict: Verdict, reason: str) -> None:
        """Remember one, forget the oldest."""
        self._verdicts[offset] = (verdict, reason)
        if len(self._verdicts) > PASSING_MAX:
            self._verdicts.popitem(last=False)

    def clear(self) -> None:
        """Forget all: another tenure begins."""
        self._verdicts.clear()
