"""The local table is only a copy: lost, old, spoiled or somebody else's, the result is the same."""

from collections.abc import Callable

import msgspec
import pytest

from pipeline.core.tasks import DurationMs
from pipeline.service.owner.acquisition import encode_meta
from pipeline.service.owner.status import Phase
from pipeline.testing.memory_cluster import NewRecord
from pipeline.testing.memory_timer_table import DiskTable
from pipeline.testing.simulated_owner import simulated_settings
from pipeline.testing.simulated_world import SimulatedWorld
from pipeline.testing.virtual_time import run_virtual

pytestmark = pytest.mark.simulation

HOUR_MS = 3_600_000
FORGETS_SOON = simulated_settings(
    retention_ms=DurationMs(60_000), offline_max_ms=DurationMs(HOUR_MS), heartbeat_interval_ms=600_000
)

Damage = Callable[[SimulatedWorld, DiskTable], None]


def _lost(world: SimulatedWorld, _old: DiskTable) -> None:
    world.disk.lose(0)


def _old_copy(world: SimulatedWorld, old: DiskTable) -> None:
    world.disk.put_back(0, old)


def _spoiled(world: SimulatedWorld, _old: DiskTable) -> None:
    world.disk.spoil(0)


def _unreadable_meta(world: SimulatedWorld, _old: DiskTable) -> None:
    world.disk.tables[0].meta = b"rubbish"


def _of_another(field: str, value: object) -> Damage:
    def damage(world: SimulatedWorld, _old: DiskTable) -> None:
        meta = world.meta()
        assert meta is not None
        positions = msgspec.structs.replace(meta.positions, **{field: value})
        world.disk.tables[0].meta = encode_meta(msgspec.structs.replace(meta, positions=positions), world.codec)
        world.disk.tables[0].rows.clear()

    return damage


def _ahead_of_the_log(world: SimulatedWorld, _old: DiskTable) -> None:
    meta = world.meta()
    assert meta is not None
    world.disk.tables[0].meta = encode_meta(msgspec.structs.replace(meta, state_position=10_000), world.codec)


@pytest.mark.parametrize("compacted", [False, True])
@pytest.mark.parametrize(
    ("damage", "put_aside"),
    [
        (_lost, False),
        (_old_copy, False),
        (_spoiled, True),
        (_unreadable_meta, True),
        (_of_another("cluster_id", "elsewhere"), True),
        (_of_another("state_topic_id", "another"), True),
        (_of_another("partition", 3), True),
        (_of_another("min_reader", 99), True),
        (_ahead_of_the_log, True),
    ],
)
def test_damaged_table_is_put_aside_and_rebuilt(damage: Damage, *, put_aside: bool, compacted: bool) -> None:
    """Emitted tasks are not emitted again, cancelled ones stay so, pending ones fire: `task-state` knows it all."""

    async def main() -> None:
        world = SimulatedWorld()
        agent = await world.started()
        world.schedule("emitted", due_in_ms=2_000)
        world.schedule("cancelled", due_in_ms=20_000)
        world.schedule("pending", due_in_ms=20_000)
        await world.applied(agent)
        old = world.disk.copy(0)
        await world.until(lambda: world.emitted() == ["emitted"])
        world.cancel("cancelled")
        await world.applied(agent)
        await agent.kill()
        if compacted:
            world.cluster.log("task-state", 0).compact()
            world.cluster.log("task-events", 0).compact(before=world.position())
        damage(world, old)

        await world.started()
        await world.clock.advance(60_000)

        assert world.emitted() == ["emitted", "pending"]
        assert bool(world.disk.aside) is put_aside
        await world.heal_and_check()

    run_virtual(main)


def test_table_older_than_the_tombstones_is_put_aside() -> None:
    """A purged row's tombstone is gone from `task-state`: an old table would bring the row back from the dead."""

    async def main() -> None:
        world = SimulatedWorld()
        agent = await world.started(settings=FORGETS_SOON)
        world.schedule("emitted", due_in_ms=1_000)
        world.schedule("pending", due_in_ms=10 * HOUR_MS)
        await world.until(lambda: world.emitted() == ["emitted"])
        old = world.disk.copy(0)
        await world.clock.advance(3 * HOUR_MS)
        await agent.kill()
        world.cluster.log("task-state", 0).compact(now_ms=world.clock.now_ms(), delete_retention_ms=0)
        world.disk.put_back(0, old)

        await world.started(settings=FORGETS_SOON)

        assert list(world.disk.tables[0].rows) == ["pending"]
        assert len(world.disk.aside) == 1

    run_virtual(main)


def test_table_that_grows_too_old_while_it_is_restored_is_put_aside() -> None:
    """Somebody's open transaction can hold a restore up for long: its age is judged again at the end."""

    async def main() -> None:
        world = SimulatedWorld()
        settings = simulated_settings(offline_max_ms=DurationMs(20_000), heartbeat_interval_ms=600_000)
        agent = await world.started(settings=settings)
        world.schedule("pending", due_in_ms=60_000)
        await world.applied(agent)
        await agent.kill()
        await world.clock.advance(15_000)
        stranger = world.cluster.producer("stranger")
        stranger.init()
        stranger.send(NewRecord(topic="task-state", partition=0, key=b"foreign", value=b"not committed"))

        await world.started(settings=settings)

        assert len(world.disk.aside) == 1
        assert list(world.disk.tables[0].rows) == ["pending"]
        await world.heal_and_check()

    run_virtual(main)


def test_restore_from_nothing_that_takes_longer_than_deletions_are_kept_begins_again() -> None:
    """What it read first has been deleted meanwhile, and the deletion is forgotten: the task would fire once more."""

    async def main() -> None:
        world = SimulatedWorld()
        agent = await world.started(settings=FORGETS_SOON)
        world.schedule("emitted", due_in_ms=1_000)
        pending = [f"pending {number:03}" for number in range(200)]
        for task_id in pending:
            world.schedule(task_id, due_in_ms=10 * HOUR_MS)
        await world.until(lambda: world.emitted() == ["emitted"])
        await world.until(lambda: "emitted" not in world.disk.tables[0].rows)
        await agent.kill()
        world.disk.lose(0)
        slow = world.agent(settings=FORGETS_SOON)
        slow.process.on_step = lambda _: (
            slow.process.freeze() if slow.process.steps.count("state_log.read") > 1 else None
        )
        slow.start()
        await world.until(lambda: not slow.process.responds)
        assert "emitted" in world.disk.tables[0].rows

        state_log = world.cluster.log("task-state", 0)
        state_log.compact(now_ms=world.clock.now_ms(), delete_retention_ms=HOUR_MS)
        await world.clock.advance(HOUR_MS + 1)
        state_log.compact(now_ms=world.clock.now_ms(), delete_retention_ms=HOUR_MS)
        slow.process.on_step = None
        slow.process.thaw()
        await world.clock.advance(HOUR_MS)

        assert sorted(world.disk.tables[0].rows) == pending
        assert world.emitted() == ["emitted"]
        assert len(world.disk.aside) == 1

    run_virtual(main)


def test_crash_in_the_middle_of_a_restore_is_repaired_by_the_next_one() -> None:
    """The half-restored table must not be taken for a whole one."""

    async def main() -> None:
        world = SimulatedWorld()
        agent = await world.started()
        for number in range(350):
            world.schedule(f"task {number:03}", due_in_ms=60_000)
        await world.applied(agent)
        for number in range(0, 350, 2):
            world.cancel(f"task {number:03}")
        await world.applied(agent)
        await agent.kill()
        world.disk.lose(0)
        for step in range(1, 16):
            dying = world.agent()
            dying.process.crash_before_step(step)
            dying.start()
            await world.until(lambda: not dying.process.alive)  # noqa: B023  # awaited within the loop
            await dying.ended()

        await world.started()
        await world.clock.advance(120_000)

        assert sorted(world.emitted()) == [f"task {number:03}" for number in range(1, 350, 2)]
        await world.heal_and_check()

    run_virtual(main)


def test_table_that_rots_under_a_running_owner_is_replaced_by_itself() -> None:
    """A bad block is found when it is read: put aside, restored, and the timers go on."""

    async def main() -> None:
        world = SimulatedWorld()
        agent = await world.started()
        world.schedule("pending", due_in_ms=30_000)
        await world.applied(agent)
        world.disk.spoil(0)
        await world.until(lambda: world.emitted() == ["pending"])

        assert len(world.disk.aside) == 1
        await world.heal_and_check()

    run_virtual(main)


def test_owner_lives_on_while_its_rotten_table_cannot_be_put_aside() -> None:
    """A disk that refuses even that must not end the owner: the partition would be orphaned when it is mended."""

    async def main() -> None:
        world = SimulatedWorld()
        agent = await world.started()
        world.schedule("pending", due_in_ms=30_000)
        await world.applied(agent)
        world.disk.refuses_renames = True
        world.disk.spoil(0)
        await world.clock.advance(100_000)
        assert world.emitted() == []
        world.disk.refuses_renames = False

        await world.until(lambda: world.emitted() == ["pending"])

        await world.heal_and_check()

    run_virtual(main)


def test_rubbish_in_task_state_is_refused_and_piles_up_no_tables() -> None:
    """The changelog itself can't be read: no local table is at fault, and each attempt must not put one aside."""

    async def main() -> None:
        world = SimulatedWorld()
        agent = await world.started()
        world.schedule("pending", due_in_ms=30_000)
        await world.applied(agent)
        await agent.kill()
        world.cluster.send("task-state", b"pending", b"rubbish", partition=0)

        refused = world.agent()
        refused.start()
        await world.clock.advance(600_000)

        assert refused.owner.status.phase is Phase.REFUSED
        assert "task-state" in refused.owner.status.message
        assert len(world.disk.aside) <= 1
        assert world.emitted() == []

    run_virtual(main)


def test_purged_task_leaves_nothing_behind() -> None:
    """After the retention, row, index entry and changelog record are gone, and so is the memory of the task."""

    async def main() -> None:
        world = SimulatedWorld()
        await world.started(settings=simulated_settings(retention_ms=DurationMs(10_000)))
        world.schedule("emitted", due_in_ms=1_000)
        world.schedule("cancelled", due_in_ms=2_000)
        world.cancel("cancelled")
        await world.clock.advance(30_000)

        assert world.emitted() == ["emitted"]
        assert world.disk.tables[0].rows == {}
        assert world.disk.tables[0].index == []
        await world.heal_and_check()

    run_virtual(main)
