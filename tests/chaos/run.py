"""One chaos run: start everything, let faults happen under load, heal, demand liveness, judge."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

import msgspec

from pipeline.adapters.avro_codec import AvroCodec
from pipeline.adapters.consumer_codec import AvroConsumerCodec
from pipeline.core.applied import belongs_to
from pipeline.service.owner.fence import FENCE_KEY
from tests.chaos.applier import BATCH_MAX, GROUP
from tests.chaos.faults import PAUSE_S_MAX, Fault, Kind, plan_faults
from tests.chaos.fleet import PARTITIONS, Brokers, Fleet
from tests.chaos.history import clock_ms, read_history
from tests.chaos.nemesis import Nemesis
from tests.chaos.report import Report, make_report
from tests.chaos.verdict import Emitted, Standing, Story, judge, repeated_effects

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tests.acceptance.harness import Record

READY_WITHIN_S: Final = 90.0
EMITTED_WITHIN_S: Final = 120.0
APPLIED_WITHIN_S: Final = 120.0
_CONSUMER_FAULTS: Final = {Kind.CONSUMER_KILLED, Kind.CONSUMER_FROZEN, Kind.LEDGER_COPY_LOST}
_BROKER_FAULTS: Final = {Kind.BROKER_KILLED, Kind.BROKER_FROZEN, Kind.BROKER_BOUNCED}
_BATCHES_OF_BROKER_FAULT: Final = 4
"""Times that a broker that goes and comes may take a batch out of a consumer's hands: commit, session, commit again."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to run: `faults_s` seconds of faults, then `calm_s` of load alone."""

    seed: int
    nodes: int
    faults_s: float
    calm_s: float
    rate: float
    faults: Sequence[Fault]

    @classmethod
    def of(
        cls,
        *,
        seed: int,
        nodes: int,
        faults_s: float,
        calm_s: float,
        rate: float,
        kinds: Sequence[Kind] = tuple(Kind),
        pause_s: float = PAUSE_S_MAX,
    ) -> Plan:
        """With the faults that follow from the seed."""
        faults = plan_faults(seed, faults_s, kinds=kinds, pause_s=pause_s)
        return cls(seed=seed, nodes=nodes, faults_s=faults_s, calm_s=calm_s, rate=rate, faults=faults)


class Run:
    """Carries out a plan in a folder of its own; `other` collects what should not be and is no count of tasks."""

    def __init__(self, plan: Plan, folder: Path, *, cache_dir: Path, on_progress: Callable[[str], None]) -> None:
        self.other: list[str] = []
        self._plan = plan
        self._folder = folder
        self._cache_dir = cache_dir
        self._say = on_progress
        self._codec = AvroCodec()

    def report(self) -> Report:
        """Everything, from the start of the brokers to the verdict; ends all processes whatever happens."""
        brokers = Brokers(
            self._folder / "kafka", cache_dir=self._cache_dir, node_count=self._plan.nodes, on_progress=self._say
        )
        try:
            fleet = Fleet(brokers, self._folder, seed=self._plan.seed, rate=self._plan.rate)
        except BaseException:
            brokers.end()
            raise
        try:
            return self._run(fleet)
        finally:
            fleet.end()

    def _run(self, fleet: Fleet) -> Report:
        plan = self._plan
        self._say("Starting agents, upstreams and consumers")
        fleet.start()
        nemesis = Nemesis(fleet, self._say)
        nemesis.run(list(plan.faults))
        self.other += nemesis.failures
        self._say("Healing")
        self._demand("every partition is active again", lambda: fleet.deployment.await_ready(READY_WITHIN_S))
        calm_from_ms = clock_ms()
        self._say(f"Load without faults for {plan.calm_s:g} s")
        time.sleep(plan.calm_s)
        calm_to_ms = clock_ms()
        fleet.stop_upstreams()
        story = self._come_to_rest(fleet)
        self._look_closer(fleet, nemesis, story)
        self._say("Judging")
        return make_report(
            story,
            judge(story),
            nemesis.injected,
            other=self.other,
            calm_ms=(calm_from_ms, calm_to_ms),
            plan=[str(fault) for fault in plan.faults],
            seed=plan.seed,
            nodes=plan.nodes,
            faults_s=round(plan.faults_s),
            load_per_s=plan.rate,
            partitions_lost=sum(len(agent.logged("partition_lost")) for agent in fleet.deployment.agents),
        )

    def _come_to_rest(self, fleet: Fleet) -> Story:
        """Wait until all that was asked for is out and applied, each within its bound, and read what there is."""
        deployment, topics = fleet.deployment, fleet.deployment.topics
        standing = self._standing(fleet)
        due = [each.event.due_at_ms or each.append_at_ms + (each.event.delay_ms or 0) for each in _schedules(standing)]
        ended_at_ms = max([clock_ms(), *due])
        self._say("Waiting for the last instants, and for the consumers")
        self._demand(
            "everything due is emitted", lambda: deployment.pass_instant(ended_at_ms, within_s=EMITTED_WITHIN_S + 20)
        )
        self._demand(
            "everything emitted is applied",
            lambda: deployment.until(
                lambda: len(self._records(fleet, topics.applied)) >= len(self._records(fleet, topics.due)),
                within_s=APPLIED_WITHIN_S,
                what="a row for each emission",
            ),
        )
        return self._story(fleet, ended_at_ms)

    def _story(self, fleet: Fleet, ended_at_ms: int) -> Story:
        topics = fleet.deployment.topics
        ledger = AvroConsumerCodec(self._codec)
        return Story(
            lines=tuple(read_history(*fleet.history.glob("*.jsonl"))),
            standing=self._standing(fleet),
            emitted=tuple(
                Emitted(
                    place=(record.partition, record.offset),
                    task=self._codec.decode_due(record.value or b""),
                    append_at_ms=record.timestamp_ms,
                )
                for record in self._records(fleet, topics.due)
            ),
            applied=tuple(
                ledger.decode_applied(record.value)
                for record in self._records(fleet, topics.applied)
                if record.key is not None and record.value is not None and belongs_to(GROUP, record.key)
            ),
            outputs=tuple(
                ((record.value or b"") + (record.key or b"")).decode() for record in self._records(fleet, fleet.outputs)
            ),
            ended_at_ms=ended_at_ms,
        )

    def _standing(self, fleet: Fleet) -> tuple[Standing, ...]:
        return tuple(
            Standing(
                place=(record.partition, record.offset),
                event=self._codec.decode_event(record.value or b""),
                append_at_ms=record.timestamp_ms,
            )
            for record in self._records(fleet, fleet.deployment.topics.events)
            if record.key != FENCE_KEY
        )

    def _records(self, fleet: Fleet, topic: str) -> list[Record]:
        return fleet.deployment.reader(topic).catch_up()

    def _look_closer(self, fleet: Fleet, nemesis: Nemesis, story: Story) -> None:
        """What the checkers of the promises do not look at."""
        deployment = fleet.deployment
        self.other += [f"set aside: {dead}" for dead in deployment.dead()]
        self.other += [f"an agent with partitions gave up: {log}" for place in fleet.agents for log in place.gave_up]
        self.other += _unexpected_ends(fleet)
        repeated, allowed = repeated_effects(story), _repeats_allowed(nemesis)
        if repeated > allowed:
            self.other.append(f"{repeated} effects were begun again, {allowed} are allowed by the size of a batch")
        self._demand("the group hears how far all is", lambda: _await_group(fleet))
        self._demand(
            "a table built anew is the same (G7), and says where emissions are", lambda: _rebuild(fleet, story)
        )

    def _demand(self, what: str, wait: Callable[[], Any]) -> None:
        try:
            wait()
        except AssertionError as error:
            self.other.append(f"not so: {what}: {error}")


def _schedules(standing: Sequence[Standing]) -> list[Any]:
    return [each for each in standing if hasattr(each.event, "due_at_ms")]


def _unexpected_ends(fleet: Fleet) -> list[str]:
    """Consumers and upstreams may only end by themselves when they are started while the brokers are away."""
    return [end for child in fleet.children for end in child.ended_by_itself if "did not answer" not in end]


def _repeats_allowed(nemesis: Nemesis) -> int:
    interruptions = sum(
        1 if fault.kind in _CONSUMER_FAULTS else _BATCHES_OF_BROKER_FAULT
        for fault in nemesis.injected
        if fault.kind in _CONSUMER_FAULTS | _BROKER_FAULTS
    )
    return BATCH_MAX * PARTITIONS * interruptions


def _await_group(fleet: Fleet) -> None:
    fleet.deployment.until(fleet.deployment.group_is_at_the_end, within_s=15, what="the group is at the end")


def _listed(fleet: Fleet) -> dict[str, dict[str, Any]]:
    """All tasks, as soon as an agent can tell: one that is ready may not have heard yet who else is."""
    found: dict[str, dict[str, Any]] = {}

    def can_tell() -> bool:
        try:
            found.update(fleet.agents[0].agent.tasks())
        except AssertionError:
            found.clear()
            return False
        return True

    fleet.deployment.until(can_tell, within_s=READY_WITHIN_S, what="an agent lists all tasks")
    return found


def _rebuild(fleet: Fleet, story: Story) -> None:
    """Compare the tables that lived through all of it with those restored from `task-state`, and with `due-tasks`."""
    lived = _listed(fleet)
    for place in fleet.agents:
        with place.turn:
            place.kill()
            place.lose_tables()
            place.start()
    fleet.deployment.await_ready(READY_WITHIN_S)
    rebuilt = _listed(fleet)
    differing = [task_id for task_id in lived.keys() | rebuilt.keys() if lived.get(task_id) != rebuilt.get(task_id)]
    assert not differing, f"{len(differing)} tasks, such as {lived.get(differing[0])} and {rebuilt.get(differing[0])}"
    places = {(each.task.task_id, each.task.generation): each.place for each in story.emitted}
    for task_id, task in lived.items():
        emission = task["emission"]
        if emission is not None and emission["offset"] is not None:
            found = places.get((task_id, task["generation"]))
            assert (emission["partition"], emission["offset"]) == found, f"{task_id}: {emission}, it is at {found}"
