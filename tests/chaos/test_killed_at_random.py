"""Agents that are killed at random moments: while they start, restore, fire and commit."""

from __future__ import annotations

import random
import secrets
import shutil
from typing import TYPE_CHECKING

import pytest

from tests.acceptance.harness import now_ms
from tests.chaos.load import Load

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.acceptance.harness import Deployment

pytestmark = pytest.mark.chaos

KILLS = 20


def test_twenty_kills_lose_nothing_double_nothing_and_fire_nothing_early(deploy: Callable[..., Deployment]) -> None:
    """Two agents share the partitions, and one after the other dies without a word, at any step of its work."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")  # noqa: T201 - shown by pytest when it fails
    rng = random.Random(seed)
    deployment = deploy(partitions=4)
    # Static members: one that comes back gets its partitions at once, and does not wait for the dead one's time-out.
    names = ["left", "right"]
    agents = {name: deployment.start_agent(name, group_instance_id=name) for name in names}
    with Load(deployment, rng) as load:
        for number in range(KILLS):
            name = names[number % 2] if rng.random() < 0.5 else rng.choice(names)
            deployment.await_clock(now_ms() + rng.randrange(300, 4_000))
            agents[name].kill()
            agents[name] = deployment.start_agent(name, ready=False, group_instance_id=name)
        load.stop()
    deployment.await_ready()

    deployment.await_due(load.must_fire(), within_s=60)
    load.check(deployment.pass_instant(load.last_due_at_ms()))
    assert len(load.must_fire()) > 1_000, "a load that shows nothing"
    assert load.unknown == set(), "Kafka itself was well all the time"
    assert deployment.dead() == []

    # A table that is rebuilt from task-state equals the one that lived through all of this.
    lived = agents["left"].tasks()
    for name in names:
        agents[name].kill()
        shutil.rmtree(agents[name].tables)
    agents = {name: deployment.start_agent(name, ready=False, group_instance_id=name) for name in names}
    deployment.await_ready()
    assert agents["left"].tasks() == lived
