"""The chaos tests deploy as the acceptance tests do."""

from tests.acceptance.conftest import deploy, deployment

__all__ = ["deploy", "deployment"]
