"""Fixtures of the chaos tests: a deployment of one's own on the shared broker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.acceptance.harness import Deployment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.conftest import BrokerUnderTest


@pytest.fixture
def deploy(broker: BrokerUnderTest, tmp_path: Path) -> Iterator[Callable[..., Deployment]]:
    """Make deployments: `deploy()` gives topics of one's own; all their agents end with the test.

    Keyword arguments are settings; `bootstrap_servers` puts it on another broker.
    """
    made: list[Deployment] = []

    def make(**settings: Any) -> Deployment:  # noqa: ANN401 - settings as they are
        servers = settings.pop("bootstrap_servers", broker.bootstrap_servers)
        deployment = Deployment(servers, tmp_path / f"deployment-{len(made)}", **settings)
        made.append(deployment)
        return deployment

    yield make
    for deployment in made:
        deployment.close()


@pytest.fixture
def deployment(deploy: Callable[..., Deployment]) -> Deployment:
    """One deployment with the usual settings."""
    return deploy()
