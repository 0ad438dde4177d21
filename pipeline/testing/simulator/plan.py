"""What happens in one simulation, drawn from its seed before it begins: the shape of the world, and the steps.

Each step makes its own choices from `pick`, a number of its own: steps can be left out, when a failure is shrunk,
without changing what the others do.
"""

import random
from collections.abc import Collection, Sequence
from enum import StrEnum
from typing import Final

import msgspec

__all__ = ["NEMESES", "Kind", "Plan", "Shape", "Step", "draw_plan"]


class Kind(StrEnum):
    """The vocabulary: what upstreams do, and what goes wrong."""

    SCHEDULE = "schedule"
    CANCEL = "cancel"
    BURST = "burst"
    SEND_AGAIN = "send again"
    END_TRANSACTION = "end an upstream's transaction"
    CRASH = "crash"
    RESTART = "restart"
    FREEZE = "freeze"
    THAW = "thaw"
    REBALANCE = "rebalance"
    PARTITION_LOST = "partition lost"
    JOIN_OR_LEAVE = "join or leave"
    COMMIT_FAULT = "fault of a commit"
    UNAVAILABLE = "no answer from the brokers"
    OPEN_TRANSACTION = "upstream transaction left open"
    STRANGER = "stranger's transaction in task-state"
    HOLD_MARKERS = "markers held back"
    LAGGING_REPLICAS = "replicas lag"
    LEADER_CHANGE = "leader change"
    DEPOSED_LEADER = "deposed leader answers"
    COMPACTION = "compaction now"
    RETENTION = "retention now"
    TOPIC_RECREATED = "task-events created anew"
    CLOCK_STEP = "clock step"
    CLOCK_DRIFT = "clock drift"
    DISK_FULL = "disk full"
    DISK_LOST = "disk lost"
    DISK_SPOILED = "disk spoiled"
    OLDER_COPY = "older copy of a table"
    POWER_LOSS = "power loss"
    POISON_RECORD = "poison record"
    REFUSED_EVENT = "event that is refused"
    REPLAY = "replay of emissions"
    CONSUMER_CRASH = "consumer crash"
    CONSUMER_FREEZE = "consumer freeze"
    SLOW_CONSUMER = "slow consumer"
    CONSUMER_FAULT = "fault of a consumer's commit"


_WORK: Final[dict[Kind, int]] = {Kind.SCHEDULE: 20, Kind.CANCEL: 14, Kind.BURST: 2, Kind.SEND_AGAIN: 4}
NEMESES: Final[tuple[Kind, ...]] = tuple(
    kind for kind in Kind if kind not in _WORK and kind is not Kind.END_TRANSACTION
)
_THEMES: Final[tuple[tuple[Kind, ...], ...]] = (
    (Kind.CRASH, Kind.FREEZE, Kind.REBALANCE, Kind.PARTITION_LOST, Kind.PARTITION_LOST, Kind.COMMIT_FAULT),
    (Kind.COMMIT_FAULT, Kind.COMMIT_FAULT, Kind.LEADER_CHANGE, Kind.LAGGING_REPLICAS, Kind.POISON_RECORD, Kind.REPLAY),
    (Kind.REBALANCE, Kind.COMPACTION, Kind.CRASH, Kind.OLDER_COPY, Kind.POWER_LOSS, Kind.FREEZE, Kind.DEPOSED_LEADER),
    (Kind.OPEN_TRANSACTION, Kind.HOLD_MARKERS, Kind.REFUSED_EVENT, Kind.COMPACTION, Kind.RETENTION, Kind.STRANGER),
    (Kind.REBALANCE, Kind.COMPACTION, Kind.COMPACTION, Kind.FREEZE, Kind.JOIN_OR_LEAVE),
    (Kind.DEPOSED_LEADER, Kind.TOPIC_RECREATED, Kind.LEADER_CHANGE, Kind.UNAVAILABLE, Kind.REBALANCE),
    (Kind.CONSUMER_CRASH, Kind.CONSUMER_FREEZE, Kind.CONSUMER_FAULT, Kind.CONSUMER_FAULT, Kind.REPLAY, Kind.STRANGER),
)
"""Faults that make each other worse; half of all worlds have one such set and little else, so that they often meet."""
_NEEDS: Final[dict[Kind, tuple[Kind, ...]]] = {
    Kind.CRASH: (Kind.RESTART,),
    Kind.POWER_LOSS: (Kind.RESTART,),
    Kind.FREEZE: (Kind.THAW,),
    Kind.CONSUMER_FREEZE: (Kind.THAW,),
    Kind.OPEN_TRANSACTION: (Kind.END_TRANSACTION,),
}
"""What undoes it is drawn whenever it may be drawn itself."""
_WAITS_MS: Final = (0, 0, 1, 5, 20, 50, 200, 700)
_LONG_WAIT_MS: Final = 4_000
_PICK_MAX: Final = 2**32
_TROUBLE_PERCENT: Final = 35
_SLOW_MS: Final = 200
_SKEW_MS_MAX: Final = 60_000


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """The world of one simulation. With `is_forgetful`, finished tasks are forgotten while others still run.

    `skew_ms`: how far the clocks of two machines may differ, unless they step by hours.
    """

    partitions: int
    machines: int
    consumers: int
    tasks: int
    fence_by_writing: bool
    static_members: bool
    is_forgetful: bool
    long_clock_steps: bool
    batch_records_max: int
    fire_max: int
    fetch_records: int
    retention_ms: int
    offline_max_ms: int
    skew_ms: int
    latencies_ms: tuple[int, ...]
    nemeses: tuple[Kind, ...]


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that happens, after `wait_ms` of virtual time; `number` is its place in the whole plan."""

    number: int
    kind: Kind
    pick: int
    wait_ms: int


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A whole simulation."""

    seed: int
    shape: Shape
    steps: Sequence[Step]

    def only(self, numbers: Collection[int]) -> "Plan":
        """The same with those steps alone."""
        kept = frozenset(numbers)
        return msgspec.structs.replace(self, steps=[step for step in self.steps if step.number in kept])


def draw_plan(seed: int, steps: int) -> Plan:
    """The simulation of a seed: the same for ever, and its first steps the same however many are asked for."""
    choices = random.Random(f"shape {seed}")  # noqa: S311  # to be repeated, not to be secret
    shape = _draw_shape(choices)
    weights = dict(_WORK)
    trouble = [*shape.nemeses, *(kind for nemesis in shape.nemeses for kind in _NEEDS.get(nemesis, ()))]
    if shape.is_forgetful:
        del weights[Kind.SEND_AGAIN]
    steps_of = random.Random(f"steps {seed}")  # noqa: S311  # the same
    return Plan(
        seed=seed,
        shape=shape,
        steps=[_draw_step(steps_of, number, weights, trouble) for number in range(1, steps + 1)],
    )


def _draw_shape(choices: random.Random) -> Shape:
    nemeses = _draw_nemeses(choices)
    # Where tables are away while rows are deleted and cleaned, there should be something to delete.
    short_memory = _chance(choices, 70 if {Kind.COMPACTION, Kind.REBALANCE} <= set(nemeses) else 25)
    one_by_one = _chance(choices, 15)
    long_clock_steps = Kind.CLOCK_STEP in nemeses and _chance(choices, 30)
    has_good_clocks = not {Kind.CLOCK_STEP, Kind.CLOCK_DRIFT} & set(nemeses)
    shape = Shape(
        partitions=choices.choice([1, 1, 2, 3]),
        machines=choices.choice([1, 2, 2, 3]),
        consumers=choices.choice([1, 2]) if Kind.CONSUMER_FAULT in nemeses else choices.choice([0, 1, 2]),
        tasks=choices.choice([3, 6, 12]),
        fence_by_writing=_chance(choices, 40),
        static_members=_chance(choices, 50),
        is_forgetful=short_memory or long_clock_steps,
        long_clock_steps=long_clock_steps,
        batch_records_max=1 if one_by_one else choices.choice([1, 3, 5, 20]),
        fire_max=1 if one_by_one else choices.choice([1, 3, 20]),
        fetch_records=choices.choice([1, 3, 100]),
        retention_ms=choices.choice([1_000, 4_000]) if short_memory else 600_000,
        # Where all clocks agree, deletions may be cleaned away after seconds, and tables are soon too old ...
        offline_max_ms=choices.choice([500, 1_500, 604_800_000] if has_good_clocks else [20_000, 604_800_000]),
        skew_ms=0 if has_good_clocks else _SKEW_MS_MAX,
        latencies_ms=choices.choice([(0,), (0, 0, 0, 1, 3, 20), (1, 5, 50, _SLOW_MS), (1, 5, 50, _SLOW_MS)]),
        nemeses=nemeses,
    )
    if _SLOW_MS not in shape.latencies_ms:
        return shape
    # ... but there must be time for a restore from nothing, of a topic that is short or long.
    restore_ms = 4_000 if Kind.COMPACTION in nemeses else 15_000
    return msgspec.structs.replace(shape, offline_max_ms=max(shape.offline_max_ms, restore_ms))


def _draw_nemeses(choices: random.Random) -> tuple[Kind, ...]:
    """What goes wrong; who stands there twice happens twice as often."""
    if _chance(choices, 60):
        theme = choices.choice(_THEMES)
        few = tuple(kind for kind in NEMESES if kind not in theme and _chance(choices, 5))
        return (*(kind for kind in theme if _chance(choices, 75)), *few)
    # A random part of the vocabulary: two faults that hide each other are sometimes apart, and rare ones get room.
    share = choices.choice([10, 20, 40, 70])
    return tuple(kind for kind in NEMESES if _chance(choices, share))


def _draw_step(choices: random.Random, number: int, weights: dict[Kind, int], trouble: Sequence[Kind]) -> Step:
    is_trouble = bool(trouble) and _chance(choices, _TROUBLE_PERCENT)
    kind = choices.choice(trouble) if is_trouble else choices.choices(list(weights), list(weights.values()))[0]
    wait_ms = _LONG_WAIT_MS if _chance(choices, 2) else choices.choice(_WAITS_MS)
    return Step(number=number, kind=kind, pick=choices.randrange(_PICK_MAX), wait_ms=wait_ms)


def _chance(choices: random.Random, percent: int) -> bool:
    return choices.randrange(100) < percent
