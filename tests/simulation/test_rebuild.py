"""Rebuilding `task-state` from the other topics: the same tasks, and nothing fires twice."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import msgspec
import pytest

from pipeline.core.positions import POSITIONS_KEY
from pipeline.core.tasks import NO_HEADERS, DurationMs, Offset, Status, TaskState
from pipeline.errors import FencedError, RefusedError, TopicMismatchError
from pipeline.testing.memory_cluster import NewRecord
from pipeline.testing.simulated_owner import simulated_settings
from pipeline.testing.simulated_world import SimulatedWorld
from pipeline.testing.virtual_time import run_virtual
from tests.simulation.recovering import rebuild, rebuilder, settle, states

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.simulation

KEEP = simulated_settings(retention_ms=DurationMs(10**12), heartbeat_interval_ms=2_000, batch_records_max=5, fire_max=3)


async def _history(world: SimulatedWorld, seed: int, *, actions: int = 80) -> None:
    """A busy upstream and agents that come and go; all randomness comes from `seed`."""
    rng = random.Random(seed)
    versions: dict[str, int] = {}
    agent = await world.started(settings=KEEP)
    for number in range(actions):
        task_id = f"task {rng.randrange(8)}"
        version = 0
        if task_id[-1] in "012":
            version = max(1, versions.get(task_id, 0) + rng.choice([-1, 0, 1, 1]))
            versions[task_id] = max(version, versions.get(task_id, 0))
        choice = rng.random()
        if choice < 0.5:
            due_in_ms = rng.choice([-500, 0, 1, 50, 400, 2_000, 50_000])
            world.schedule(task_id, due_in_ms=due_in_ms, version=version, event_id=f"e{seed}-{number}")
        elif choice < 0.8:
            world.cancel(task_id, version=version, event_id=f"e{seed}-{number}")
        elif choice < 0.87 and world.acknowledged:
            world.send(rng.choice(world.acknowledged[-5:]).event)
        elif choice < 0.93:
            world.cluster.send("task-events", b"task 3", rng.choice([None, b"rubbish"]), partition=0)
        elif choice < 0.97:
            await agent.kill()
            await world.clock.advance(rng.choice([0, 1_000]))
            agent = await world.started(settings=KEEP)
        await world.clock.advance(rng.choice([0, 0, 1, 20, 300, 900]))
    await settle(world)


def _told(found: dict[str, TaskState]) -> dict[str, TaskState]:
    """States, without the place of an emission that the owner did not know when it wrote the row."""
    return {
        task_id: msgspec.structs.replace(state, emitted_offset=Offset(-1)) if state.fired_at_ms else state
        for task_id, state in found.items()
    }


def _lose_state(world: SimulatedWorld) -> None:
    world.cluster.create_topic("task-state", 1)
    world.disk.lose(0)


@pytest.mark.parametrize("seed", range(40))
def test_rebuilt_from_topics_alone_equals_the_table(seed: int) -> None:
    """With everything retained, the topics tell the whole state: generations, versions, verdicts, places."""

    async def main() -> None:
        world = SimulatedWorld()
        await _history(world, seed)
        before = states(world)
        _lose_state(world)

        report = await rebuild(world, KEEP)

        assert _told(states(world)) == _told(before)
        assert (report.rows, report.added, report.presumed) == (len(before), len(before), 0)
        await world.heal_and_check(pass_ms=120_000)

    run_virtual(main)


@pytest.mark.parametrize("seed", range(40))
def test_rebuilt_beside_the_state_confirms_every_row(seed: int) -> None:
    """Where nothing is wrong, nothing is corrected, and the memory of event ids is kept too."""

    async def main() -> None:
        world = SimulatedWorld()
        await _history(world, seed)
        before = states(world)

        report = await rebuild(world, KEEP)

        assert _told(states(world)) == _told(before)
        assert (report.corrected, report.added, report.removed, report.presumed) == (0, 0, 0, 0)
        assert report.confirmed == len(before)
        await world.heal_and_check(pass_ms=120_000)

    run_virtual(main)


@pytest.mark.parametrize("seed", range(40))
def test_compaction_does_not_make_anything_fire_twice(seed: int) -> None:
    """The cleaner leaves the last event of a task, which may be a stale one; what `task-state` knows is kept."""

    async def main() -> None:
        world = SimulatedWorld()
        await _history(world, seed)
        before = states(world)
        world.cluster.log("task-events", 0).compact(before=world.position())

        report = await rebuild(world, KEEP)

        assert _told(states(world)) == _told(before)
        assert report.corrected == 0
        await world.heal_and_check(pass_ms=120_000)

    run_virtual(main)


@pytest.mark.parametrize("seed", range(40))
def test_without_state_and_compacted_the_emitted_stays_emitted(seed: int) -> None:
    """With `task-state` lost as well, the emissions still say what must not fire again."""

    async def main() -> None:
        world = SimulatedWorld()
        await _history(world, seed)
        emitted = {(task.task_id, task.generation) for task in world.emissions()}
        world.cluster.log("task-events", 0).compact(before=world.position())
        _lose_state(world)

        await rebuild(world, KEEP)

        rebuilt = states(world)
        again = [task for task in rebuilt.values() if (task.task_id, task.generation) in emitted]
        assert all(task.status is Status.EMITTED for task in again)
        agent = await world.started(settings=KEEP)
        await world.clock.advance(120_000)
        await agent.stop()
        pairs = [(task.task_id, task.generation) for task in world.emissions()]
        assert len(pairs) == len(set(pairs)), "fired twice"

    run_virtual(main)


@pytest.mark.parametrize("seed", range(20))
def test_expired_emissions_do_not_fire_again(seed: int) -> None:
    """Retention removes emissions; those that remain overtook what fired before them."""

    async def main() -> None:
        world = SimulatedWorld()
        await _history(world, seed)
        count = len(world.emitted())
        scheduled = {task.task_id: task.generation for task in states(world).values() if task.status == "SCHEDULED"}
        due_log = world.cluster.log("due-tasks", 0)
        last = due_log.committed()[-1].offset if count else 0
        due_log.delete_before(Offset(random.Random(seed).randint(0, last)))
        _lose_state(world)

        report = await rebuild(world, KEEP)

        rebuilt = {task.task_id: task.generation for task in states(world).values() if task.status == "SCHEDULED"}
        assert rebuilt == scheduled
        assert count == 0 or report.notes

    run_virtual(main)


def test_all_emissions_expired_presumes_what_is_overdue_unless_state_vouches() -> None:
    """Nothing tells fired from waiting then: rather late by a person's hand than twice by ours."""

    async def main() -> None:
        world = SimulatedWorld()
        agent = await world.started(settings=KEEP)
        world.schedule("fired", due_in_ms=100)
        world.schedule("later", due_in_ms=10_000)
        world.schedule("far", due_in_ms=10**8)
        await world.clock.advance(1_000)
        await agent.stop()
        await world.clock.advance(60_000)  # "later" is overdue, and was never emitted
        world.cluster.log("due-tasks", 0).delete_before(world.cluster.log("due-tasks", 0).end_offset)

        with_state = await rebuilder(world, KEEP).plan()
        _lose_state(world)
        without = await rebuild(world, KEEP)

        assert (with_state.presumed, with_state.overdue) == (0, 1)
        assert (without.presumed, without.overdue) == (2, 0)
        assert {task_id: task.status for task_id, task in states(world).items()} == {
            "fired": Status.EMITTED,
            "later": Status.EMITTED,
            "far": Status.SCHEDULED,
        }

    run_virtual(main)


def test_cancel_after_the_emission_is_too_late_in_the_rebuilt_table() -> None:
    """How far the events had been applied when it fired stands on the emission: the order is not guessed."""

    async def main() -> None:
        world = SimulatedWorld()
        agent = await world.started(settings=KEEP)
        world.schedule("x", due_in_ms=100)
        await world.clock.advance(1_000)
        world.cancel("x")
        world.schedule("y", due_in_ms=100)
        world.cancel("y")
        await world.applied(agent)
        await world.clock.advance(1_000)
        await agent.stop()
        _lose_state(world)

        await rebuild(world, KEEP)

        rebuilt = states(world)
        assert (rebuilt["x"].status, [entry.verdict for entry in rebuilt["x"].verdicts]) == (
            Status.EMITTED,
            ["SCHEDULED", "TOO_LATE"],
        )
        assert rebuilt["y"].status is Status.CANCELLED
        assert world.emitted() == ["x"]

    run_virtual(main)


def test_undeliverable_tasks_stay_dead() -> None:
    """What was set aside must not be tried again by a rebuild."""

    async def main() -> None:
        world = SimulatedWorld()
        small = simulated_settings(retention_ms=KEEP.retention_ms, emit_bytes_max=2_000)
        agent = await world.started(settings=small)
        world.schedule("large", due_in_ms=100, payload=bytes(3_000))
        world.schedule("small", due_in_ms=100)
        await world.clock.advance(1_000)
        world.cancel("large")
        await world.applied(agent)
        await agent.stop()
        before = states(world)
        _lose_state(world)

        await rebuild(world, small)

        assert before["large"].status is Status.DEAD
        assert _told(states(world)) == _told(before)

    run_virtual(main)


def test_refused_events_stay_refused_under_wider_limits() -> None:
    """What `dead-tasks` says was refused is not accepted years later because a limit was raised."""

    async def main() -> None:
        world = SimulatedWorld()
        strict = msgspec.structs.replace(KEEP, limits=msgspec.structs.replace(KEEP.limits, event_bytes_max=1_000))
        agent = await world.started(settings=strict)
        world.schedule("x", due_in_ms=10**7)
        world.schedule("x", due_in_ms=10**7, payload=bytes(2_000), event_id="too large")
        await world.applied(agent)
        await agent.stop()
        before = states(world)
        _lose_state(world)

        await rebuild(world, KEEP)

        assert [entry.verdict for entry in before["x"].verdicts] == ["SCHEDULED", "REJECTED"]
        assert states(world) == before

    run_virtual(main)


def test_generations_go_on_above_those_used_after_events_were_recreated() -> None:
    """A generation that is used again would be taken for applied by every ledger."""

    async def main() -> None:
        world = SimulatedWorld()
        agent = await world.started(settings=KEEP)
        for number in range(5):
            world.schedule(f"old {number}", due_in_ms=10)
        await world.clock.advance(1_000)
        await agent.stop()
        used = {task.generation for task in world.emissions()}
        world.recreate_events()
        world.schedule("new", due_in_ms=10)
        _lose_state(world)

        report = await rebuild(world, KEEP)
        agent = await world.started(settings=KEEP)
        await world.clock.advance(1_000)
        await agent.stop()

        assert report.generation_base >= max(used)
        assert [task.generation > max(used) for task in world.emissions() if task.task_id == "new"] == [True]
        assert sorted(world.emitted()) == ["new", *(f"old {number}" for number in range(5))]

    run_virtual(main)


def test_events_recreated_with_state_keeps_the_old_timers() -> None:
    """Timers of before stand in `task-state` alone: they are kept, and fire."""

    async def main() -> None:
        world = SimulatedWorld()
        agent = await world.started(settings=KEEP)
        world.schedule("old", due_in_ms=60_000)
        world.schedule("gone", due_in_ms=10)
        await world.clock.advance(1_000)
        await agent.stop()
        world.recreate_events()
        world.schedule("new", due_in_ms=60_000)

        report = await rebuild(world, KEEP)

        assert (report.kept, report.corrected) == (1, 0)
        await world.heal_and_check(pass_ms=120_000)
        assert sorted(world.emitted()) == ["gone", "new", "old"]

    run_virtual(main)


def test_timers_whose_events_expired_are_kept() -> None:
    """A task due in a year outlives its event; only its row knows it."""

    async def main() -> None:
        world = SimulatedWorld()
        agent = await world.started(settings=KEEP)
        world.schedule("in a year", due_in_ms=60_000)
        world.schedule("other", due_in_ms=60_000)
        await world.applied(agent)
        await agent.stop()
        before = states(world)
        world.cluster.log("task-events", 0).delete_before(Offset(1))

        report = await rebuild(world, KEEP)

        assert (report.kept, report.confirmed) == (1, 1)
        assert states(world) == before

    run_virtual(main)


def test_lost_tail_of_state_is_mended_from_the_topics() -> None:
    """An unclean election took the last rows: the cancel is still an event, the emission still stands on its topic."""

    async def main() -> None:
        world = SimulatedWorld()
        agent = await world.started(settings=KEEP)
        world.schedule("fires", due_in_ms=5_000)
        world.schedule("cancelled", due_in_ms=20_000)
        await world.applied(agent)
        kept = world.cluster.log("task-state", 0).end_offset
        world.cancel("cancelled")
        await world.clock.advance(6_000)
        await agent.stop()
        log = world.cluster.log("task-state", 0)
        log.entries = [entry for entry in log.entries if entry.offset < kept]
        log.log_end_offset = kept
        world.disk.lose(0)

        await rebuild(world, KEEP)

        assert {task_id: task.status for task_id, task in states(world).items()} == {
            "fires": Status.EMITTED,
            "cancelled": Status.CANCELLED,
        }
        await world.heal_and_check(pass_ms=120_000)
        assert world.emitted() == ["fires"]

    run_virtual(main)


def test_replayed_emissions_are_no_evidence() -> None:
    """A copy stands at another place, and may be of any age."""

    async def main() -> None:
        world = SimulatedWorld()
        agent = await world.started(settings=KEEP)
        world.schedule("x", due_in_ms=10)
        await world.clock.advance(1_000)
        await agent.stop()
        before = states(world)
        original = world.cluster.committed("due-tasks")[0]
        producer = world.cluster.producer("replay")
        producer.init()
        producer.send(
            NewRecord(
                topic="due-tasks",
                partition=0,
                key=original.key,
                value=original.value,
                headers={**NO_HEADERS, "duetasks-replay": b"1"},
            )
        )
        producer.commit()
        _lose_state(world)

        report = await rebuild(world, KEEP)

        assert report.emissions == 1
        assert _told(states(world)) == _told(before)
        assert states(world)["x"].emitted_offset == original.offset

    run_virtual(main)


def test_finished_tasks_past_their_retention_are_not_brought_back() -> None:
    """The table forgets them after a while; so does a rebuild, which writes the tombstones."""

    async def main() -> None:
        short = simulated_settings(retention_ms=DurationMs(5_000))
        world = SimulatedWorld()
        agent = await world.started(settings=short)
        world.schedule("x", due_in_ms=10)
        world.schedule("y", due_in_ms=10**8)
        await world.clock.advance(1_000)
        await agent.stop()
        await world.clock.advance(10_000)

        report = await rebuild(world, short)

        assert (report.removed, report.rows) == (1, 1)
        assert set(states(world)) == {"y"}
        await world.heal_and_check(pass_ms=1_000)

    run_virtual(main)


@pytest.mark.parametrize("seed", range(5))
def test_planning_changes_nothing(seed: int) -> None:
    """`--dry-run` is safe beside running agents: not a record, not an epoch."""

    async def main() -> None:
        world = SimulatedWorld()
        await _history(world, seed, actions=30)
        before = {topic: list(log.logs[0].entries) for topic, log in world.cluster.topics().items()}
        work = rebuilder(world, KEEP)

        first = await work.plan()
        second = await work.plan()
        work.close()

        assert first == second
        assert {topic: list(log.logs[0].entries) for topic, log in world.cluster.topics().items()} == before

    run_virtual(main)


def test_an_agent_that_ran_meanwhile_refuses_the_plan() -> None:
    """What fired between plan and write is not in the plan."""

    async def main() -> None:
        world = SimulatedWorld()
        agent = await world.started(settings=KEEP)
        world.schedule("x", due_in_ms=60_000)
        await world.applied(agent)
        await agent.stop()
        work = rebuilder(world, KEEP)
        report = await work.plan()
        agent = await world.started(settings=KEEP)
        await world.clock.advance(61_000)
        await agent.stop()
        before = states(world)

        with pytest.raises(RefusedError, match="changed while"):
            await work.write(report)
        work.close()

        assert states(world) == before
        await world.heal_and_check(pass_ms=1_000)

    run_virtual(main)


def test_an_agent_that_starts_fences_the_rebuild() -> None:
    """The rebuild writes under the owner's own id: all of it or nothing."""

    async def main() -> None:
        world = SimulatedWorld()
        agent = await world.started(settings=KEEP)
        world.schedule("x", due_in_ms=60_000)
        await world.applied(agent)
        await agent.stop()
        before = states(world)
        work = rebuilder(world, KEEP)
        report = await work.plan()
        started = []
        replace_all = work._replace_all

        async def late(*arguments: object) -> None:
            started.append(await world.started(settings=KEEP))
            await replace_all(*arguments)  # type: ignore[arg-type]  # handed on

        work._replace_all = late  # type: ignore[method-assign]  # the moment between acquiring and writing

        with pytest.raises(FencedError):
            await work.write(report)
        work.close()

        assert states(world) == before
        await world.heal_and_check(pass_ms=120_000)

    run_virtual(main)


def _add_partition(world: SimulatedWorld) -> None:
    for topic in world.cluster.topics():
        world.cluster.add_partitions(topic, 2)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda world: world.cluster.delete_topic("dead-tasks"), "does not exist"),
        (lambda world: world.cluster.add_partitions("due-tasks", 2), "counts differ"),
        (_add_partition, "were placed with"),
    ],
)
def test_topics_that_do_not_fit_refuse(spoil: Callable[[SimulatedWorld], None], message: str) -> None:
    """Events of one task in two partitions can't be folded apart."""

    async def main() -> None:
        world = SimulatedWorld()
        agent = await world.started(settings=KEEP)
        world.schedule("x", due_in_ms=60_000)
        await world.applied(agent)
        await agent.stop()
        spoil(world)

        with pytest.raises(TopicMismatchError, match=message):
            await rebuilder(world, KEEP).plan()

    run_virtual(main)


def test_emissions_of_recreated_events_are_placed_by_their_base() -> None:
    """Offsets start again with a new topic; how far it was applied counts from where the old one ended."""

    async def main() -> None:
        world = SimulatedWorld()
        agent = await world.started(settings=KEEP)
        for number in range(5):
            world.schedule(f"old {number}", due_in_ms=10)
        await world.clock.advance(1_000)
        await agent.stop()
        world.recreate_events()
        agent = await world.started(settings=KEEP)
        world.schedule("filler", due_in_ms=10**8)
        world.schedule("new", due_in_ms=10)
        await world.clock.advance(1_000)
        world.cancel("new")
        await world.applied(agent)
        await agent.stop()
        before = states(world)
        _lose_state(world)

        await rebuild(world, KEEP)

        rebuilt = _told(states(world))
        assert rebuilt["new"] == _told(before)["new"]
        assert {task_id: (task.status, task.generation) for task_id, task in rebuilt.items()} == {
            task_id: (task.status, task.generation) for task_id, task in before.items()
        }
        agent = await world.started(settings=KEEP)
        await world.clock.advance(1_000)
        await agent.stop()
        assert sorted(world.emitted()) == ["new", *(f"old {number}" for number in range(5))]

    run_virtual(main)


def test_a_cancel_that_nobody_has_read_yet_stops_a_kept_timer() -> None:
    """A row that only `task-state` knows meets the events that came after it."""

    async def main() -> None:
        world = SimulatedWorld()
        agent = await world.started(settings=KEEP)
        world.schedule("order", due_in_ms=60_000)
        await world.applied(agent)
        await agent.stop()
        world.cancel("order")
        world.cluster.log("task-events", 0).delete_before(Offset(1))

        report = await rebuild(world, KEEP)

        assert report.kept == 1
        assert states(world)["order"].status is Status.CANCELLED
        agent = await world.started(settings=KEEP)
        await world.clock.advance(120_000)
        await agent.stop()
        assert world.emitted() == []

    run_virtual(main)


def test_a_row_that_went_back_in_time_is_corrected() -> None:
    """Somebody's tool wrote an old row over the present one; the events know better."""

    async def main() -> None:
        world = SimulatedWorld()
        agent = await world.started(settings=KEEP)
        world.schedule("x", due_in_ms=60_000)
        await world.applied(agent)
        old = states(world)["x"]
        world.schedule("x", due_in_ms=90_000)
        await world.applied(agent)
        await agent.stop()
        before = states(world)
        world.cluster.send("task-state", b"x", world.codec.encode_state(old), partition=0)
        assert states(world) != before

        report = await rebuild(world, KEEP)

        assert (report.corrected, report.confirmed, report.kept) == (1, 0, 0)
        assert states(world) == before

    run_virtual(main)


def test_a_task_that_was_forgotten_in_between_begins_anew() -> None:
    """After its retention not even its version is remembered: a schedule with a lower one is accepted, then as now."""

    async def main() -> None:
        short = simulated_settings(retention_ms=DurationMs(5_000))
        world = SimulatedWorld()
        agent = await world.started(settings=short)
        world.schedule("x", due_in_ms=10, version=5)
        await world.clock.advance(30_000)
        world.schedule("x", due_in_ms=10**6, version=3)
        await world.applied(agent)
        await agent.stop()
        before = states(world)
        _lose_state(world)

        await rebuild(world, short)

        assert before["x"].version == 3
        assert states(world) == before

    run_virtual(main)


def test_a_cancel_after_an_emission_that_has_expired_is_too_late() -> None:
    """That it fired follows from what fired after it; the cancel can't have stopped it."""

    async def main() -> None:
        world = SimulatedWorld()
        agent = await world.started(settings=KEEP)
        world.schedule("first", due_in_ms=10)
        await world.clock.advance(1_000)
        world.schedule("second", due_in_ms=10)
        await world.clock.advance(1_000)
        world.cancel("first")
        await world.applied(agent)
        await agent.stop()
        second = world.cluster.committed("due-tasks")[1]
        world.cluster.log("due-tasks", 0).delete_before(second.offset)
        _lose_state(world)

        report = await rebuild(world, KEEP)

        assert report.presumed == 1
        first = states(world)["first"]
        assert (first.status, first.verdicts[-1].verdict) == (Status.EMITTED, "TOO_LATE")

    run_virtual(main)


@pytest.mark.parametrize("seed", range(20))
def test_life_goes_on_between_rebuilds(seed: int) -> None:
    """Rebuilt with and without the state, again and again in one history: every promise still holds at its end."""

    async def main() -> None:
        world = SimulatedWorld()
        for part in range(4):
            await _history(world, 10 * seed + part, actions=25)
            before = states(world)
            if part % 2:
                _lose_state(world)
            await rebuild(world, KEEP)
            assert _told(states(world)) == _told(before)
            world.check()
        await world.heal_and_check(pass_ms=120_000)

    run_virtual(main)


def test_rows_that_cannot_be_read_are_replaced_or_removed() -> None:
    """Agents refuse a rotten changelog; a rebuild makes it anew, or nobody could."""

    async def main() -> None:
        world = SimulatedWorld()
        agent = await world.started(settings=KEEP)
        world.schedule("x", due_in_ms=60_000)
        world.schedule("y", due_in_ms=60_000)
        await world.applied(agent)
        await agent.stop()
        before = states(world)
        for key, value in [(b"x", b"rot"), (b"\xff", b"rot"), (b"nobody", b"rot"), (b"y2", before["y"])]:
            raw = value if isinstance(value, bytes) else world.codec.encode_state(value)
            world.cluster.send("task-state", key, raw, partition=0)

        report = await rebuild(world, KEEP)

        assert (report.rows, report.removed, report.added, report.confirmed) == (2, 3, 0, 1)
        assert "4 rows of task-state can't be read" in report.notes[-1]
        assert _readable(world) == before
        await world.heal_and_check(pass_ms=120_000)
        assert sorted(world.emitted()) == ["x", "y"]

    run_virtual(main)


@pytest.mark.parametrize("seed", range(20))
def test_lost_positions_are_derived_and_no_row_is_lost(seed: int) -> None:
    """Without the positions record the rows still count: those that no event explains any more are kept."""

    async def main() -> None:
        world = SimulatedWorld()
        await _history(world, seed)
        before = states(world)
        world.cluster.log("task-events", 0).compact(before=world.position())
        world.cluster.send("task-state", POSITIONS_KEY, b"rot", partition=0)
        world.disk.lose(0)

        report = await rebuild(world, KEEP)

        rebuilt = states(world)
        assert {task_id: (task.status, task.generation) for task_id, task in rebuilt.items()} == {
            task_id: (task.status, task.generation) for task_id, task in before.items()
        }
        assert any("derived from emissions" in note for note in report.notes) or not before
        await world.heal_and_check(pass_ms=120_000)

    run_virtual(main)


def test_truncated_events_are_told_from_new_ones() -> None:
    """The end of the log was lost, and the state too: what fired is recognised by the events that are left."""

    async def main() -> None:
        world = SimulatedWorld()
        agent = await world.started(settings=KEEP)
        for number in range(4):
            world.schedule(f"t{number}", due_in_ms=10)
            await world.clock.advance(100)
        await agent.stop()
        used = max(task.generation for task in world.emissions())
        log = world.cluster.log("task-events", 0)
        log.entries = [entry for entry in log.entries if entry.offset < 2]
        log.log_end_offset = Offset(2)
        _lose_state(world)

        report = await rebuild(world, KEEP)
        agent = await world.started(settings=KEEP)
        world.schedule("next", due_in_ms=10)
        await world.clock.advance(1_000)
        await agent.stop()

        assert any("events were lost" in note for note in report.notes)
        assert sorted(world.emitted()) == ["next", "t0", "t1", "t2", "t3"]
        assert world.emissions()[-1].generation > used

    run_virtual(main)


def _readable(world: SimulatedWorld) -> dict[str, TaskState]:
    """The rows of `task-state` by keys that are text."""
    rows = {entry.key: entry.value for entry in world.cluster.committed("task-state") if entry.key}
    rows.pop(POSITIONS_KEY, None)
    return {key.decode(): world.codec.decode_state(value) for key, value in rows.items() if value is not None}
