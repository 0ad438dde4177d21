"""The incident that duetasks was made for, with real processes killed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.acceptance.harness import cancel, now_ms, schedule

if TYPE_CHECKING:
    from tests.acceptance.harness import Deployment

pytestmark = pytest.mark.acceptance


def test_cancelled_task_stays_cancelled_across_a_kill(deployment: Deployment) -> None:
    """April 1st: schedule, pay, cancel, SIGKILL, restart after the due time; the order must live."""
    agent = deployment.start_agent()
    order = schedule("order-1", in_ms=4_000)
    deployment.send(order, cancel("order-1"))
    deployment.await_status("order-1", "CANCELLED")
    agent.kill()
    deployment.until(lambda: now_ms() > order.due_at_ms, within_s=10, what="the due time has passed")

    agent = deployment.start_agent()

    assert deployment.pass_instant(order.due_at_ms) == []
    assert agent.status("order-1")["status"] == "CANCELLED"
