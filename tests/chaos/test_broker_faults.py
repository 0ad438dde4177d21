"""A broker that stops answering, or dies, under agents that are at work."""

from __future__ import annotations

import random
import secrets
from typing import TYPE_CHECKING

import pytest

from tests.acceptance.harness import now_ms
from tests.chaos.load import Load

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipeline.embedded import EmbeddedBroker
    from tests.acceptance.harness import Deployment

pytestmark = pytest.mark.chaos


def test_agents_outlive_a_broker_that_pauses_and_one_that_dies(
    deploy: Callable[..., Deployment], private_broker: Callable[..., EmbeddedBroker]
) -> None:
    """A pause longer than the transaction time-out fences every owner at once: all must acquire again by themselves."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")  # noqa: T201 - shown by pytest when it fails
    broker = private_broker()
    deployment = deploy(bootstrap_servers=broker.start().bootstrap_servers, partitions=4, transaction_timeout_ms=2_000)
    first = deployment.start_agent("first")
    second = deployment.start_agent("second")
    with Load(deployment, random.Random(seed)) as load:
        deployment.await_clock(now_ms() + 3_000)
        broker.pause()
        deployment.await_clock(now_ms() + 7_000)
        broker.resume()
        deployment.await_ready()
        paused_ms = now_ms()
        deployment.await_clock(paused_ms + 3_000)
        broker.kill()
        deployment.await_clock(now_ms() + 2_000)
        broker.start()
        deployment.await_ready()
        deployment.await_clock(now_ms() + 2_000)
        load.stop()

    deployment.await_due(load.must_fire(), within_s=60)
    load.check(deployment.pass_instant(load.last_due_at_ms()))
    assert first.is_running
    assert second.is_running
    assert first.logged("partition_lost") + second.logged("partition_lost"), "nobody was fenced: it showed nothing"
