"""An agent that is told to stop while there is no broker to say goodbye to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.acceptance.harness import now_ms

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipeline.embedded import EmbeddedBroker
    from tests.acceptance.harness import Deployment

pytestmark = pytest.mark.chaos


def test_agent_stops_while_the_broker_is_away(
    deploy: Callable[..., Deployment], private_broker: Callable[..., EmbeddedBroker]
) -> None:
    """Who shuts a machine down stops the broker first as often as not; an agent that hangs is killed by the system."""
    broker = private_broker()
    deployment = deploy(bootstrap_servers=broker.start().bootstrap_servers)
    agents = [deployment.start_agent(f"agent-{number}", ready=False) for number in range(2)]
    deployment.await_ready()
    broker.kill()
    deployment.await_clock(now_ms() + 2_000)  # its fetches fail now, and are tried again and again

    codes = [agent.stop() for agent in agents]

    assert codes == [0, 0], deployment.logs()
