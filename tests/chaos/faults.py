"""Which faults a chaos run has, and when: everything follows from the seed, and can be read before it happens."""

from __future__ import annotations

import random
from enum import StrEnum
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence


class Kind(StrEnum):
    """What is done to one process, or to the fleet."""

    AGENT_KILLED = "agent killed"
    AGENT_FROZEN = "agent frozen"
    AGENT_RESTARTED = "agent restarted"
    TABLES_LOST = "agent killed, its tables lost"
    REBALANCES = "rebalances in a row"
    CONSUMER_KILLED = "consumer killed"
    CONSUMER_FROZEN = "consumer frozen"
    LEDGER_COPY_LOST = "consumer killed, its ledger copy lost"
    UPSTREAM_KILLED = "upstream killed"
    UPSTREAM_FROZEN = "upstream frozen"
    BROKER_KILLED = "broker killed"
    BROKER_FROZEN = "broker frozen"
    BROKER_BOUNCED = "broker bounced"


_HOLD_S: Final[dict[Kind, tuple[float, float]]] = {
    Kind.AGENT_KILLED: (0.0, 6.0),  # some longer than the session time-out, so that others take over
    Kind.AGENT_FROZEN: (0.5, 9.0),  # the same
    Kind.AGENT_RESTARTED: (0.0, 1.0),
    Kind.TABLES_LOST: (0.0, 3.0),
    Kind.REBALANCES: (0.2, 2.0),  # between joining and leaving, several times
    Kind.CONSUMER_KILLED: (0.0, 5.0),
    Kind.CONSUMER_FROZEN: (0.5, 8.0),
    Kind.LEDGER_COPY_LOST: (0.0, 2.0),
    Kind.UPSTREAM_KILLED: (0.0, 2.0),
    Kind.UPSTREAM_FROZEN: (0.5, 8.0),  # longer than the time-out of its transaction
    Kind.BROKER_KILLED: (0.2, 5.0),
    Kind.BROKER_FROZEN: (2.0, 8.0),  # longer than the time-outs of transactions and of the broker's session
    Kind.BROKER_BOUNCED: (0.0, 1.0),
}
PAUSE_S_MAX: Final = 7.0
_PAUSE_S_MIN: Final = 0.2
_FIRST_AT_S: Final = 2.0
STORM_FAULTS: Final = 4
"""How many faults begin at one instant when everything happens at once."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault of the plan: what, to the how-manieth of its sort (modulo how many there are), when, for how long.

    Those that begin together have the same number of `storm`; 0: it comes alone.
    """

    at_s: float
    kind: Kind
    victim: int
    hold_s: float
    storm: int = 0

    def __str__(self) -> str:
        storm = ", all at once" if self.storm else ""
        return f"{self.at_s:6.1f} s  {self.kind} ({self.victim}) for {self.hold_s:.1f} s{storm}"


def plan_faults(
    seed: int, length_s: float, *, kinds: Sequence[Kind] = tuple(Kind), pause_s: float = PAUSE_S_MAX
) -> list[Fault]:
    """Faults for a run of that length, by their instants; each of `kinds` comes once before any comes again.

    After a fault at most `pause_s` pass until the next one begins: often before all has recovered.
    """
    rng = random.Random(seed)
    planned: list[Fault] = []
    deck: list[Kind | None] = []
    at_s = _FIRST_AT_S
    storms = 0
    while at_s < length_s:
        if not deck:
            deck = [*kinds, None, None]  # None: everything at once
            rng.shuffle(deck)
        drawn = deck.pop()
        group = [drawn] if drawn is not None else rng.sample(kinds, min(STORM_FAULTS, len(kinds)))
        storms += drawn is None
        faults = [_fault(rng, kind, at_s, storm=storms if drawn is None else 0) for kind in group]
        planned += faults
        at_s += max(fault.hold_s for fault in faults) + rng.uniform(_PAUSE_S_MIN, max(_PAUSE_S_MIN, pause_s))
    return planned


def _fault(rng: random.Random, kind: Kind, at_s: float, *, storm: int) -> Fault:
    return Fault(
        at_s=round(at_s, 1),
        kind=kind,
        victim=rng.randrange(60),
        hold_s=round(rng.uniform(*_HOLD_S[kind]), 1),
        storm=storm,
    )
