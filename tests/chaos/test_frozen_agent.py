"""An agent that is frozen, taken for dead, and then goes on with what it had in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.acceptance.harness import assert_fired_once, cancel, now_ms, schedule

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.acceptance.harness import Deployment

pytestmark = pytest.mark.chaos

TASKS = 400


@pytest.mark.parametrize("fence", ["offset", "write"])
def test_thawed_agent_emits_nothing_a_second_time(deploy: Callable[..., Deployment], fence: str) -> None:
    """It wakes with due timers in memory, and all of them have fired elsewhere, or were cancelled, in the meantime."""
    deployment = deploy(fence=fence)
    sleeper = deployment.start_agent("sleeper")
    other = deployment.start_agent("other")
    deployment.until(
        lambda: len(sleeper.partitions()) == len(other.partitions()) == 1, within_s=30, what="both own one"
    )
    deployment.await_ready()
    # A stream of due times, so that the frozen one is caught between or within transactions.
    start_ms = now_ms() + 2_000
    kept = [f"kept-{n}" for n in range(TASKS)]
    dropped = [f"dropped-{n}" for n in range(TASKS)]
    deployment.send(*(schedule(task_id, start_ms + 5 * n) for n, task_id in enumerate(kept)))
    deployment.send(*(schedule(task_id, start_ms + 2_500 + n) for n, task_id in enumerate(dropped)))
    deployment.await_clock(start_ms + 1_000)

    sleeper.freeze()
    deployment.send(*(cancel(task_id) for task_id in dropped))
    assert now_ms() < start_ms + 2_500, "the cancels have to be acknowledged before the tasks are due"
    deployment.until(lambda: len(other.partitions()) == 2, within_s=40, what="the other one took over")
    deployment.await_due(kept)
    sleeper.thaw()

    deployment.until(lambda: len(sleeper.partitions()) == 1, within_s=40, what="the thawed one is a member again")
    deployment.await_ready()
    late = [f"late-{n}" for n in range(TASKS)]
    deployment.send(*(schedule(task_id, now_ms()) for task_id in late))
    deployment.await_due(late)
    assert_fired_once(deployment.pass_instant(now_ms()), [*kept, *late])


def test_two_deployments_on_the_same_topics_fence_each_other(deploy: Callable[..., Deployment]) -> None:
    """Two groups each think that every partition is theirs: they may fight over it, and never both fire."""
    deployment = deploy()
    deployment.start_agent("one")
    rival = deployment.start_agent("two", ready=False, group_id=f"rival-{deployment.settings.group_id}")
    deployment.until(lambda: rival.logged("partition_active"), within_s=30, what="the rival owns a partition")
    due_at_ms = now_ms() + 1_000
    kept = [f"kept-{n}" for n in range(TASKS)]
    dropped = [f"dropped-{n}" for n in range(TASKS)]
    deployment.send(*(schedule(task_id, due_at_ms + 5 * n) for n, task_id in enumerate(kept)))
    deployment.send(*(schedule(task_id, due_at_ms + 5_000) for task_id in dropped))
    deployment.send(*(cancel(task_id) for task_id in dropped))

    deployment.await_due(kept, within_s=60)

    assert [line for agent in deployment.agents for line in agent.logged("partition_lost")], "they never met"
    assert_fired_once(deployment.pass_instant(due_at_ms + 5_000), kept)
