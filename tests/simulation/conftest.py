"""What every simulation must not do: let the owner stumble over an error that no rule foresees."""

from collections.abc import Iterator
from typing import Any

import pytest
from structlog.testing import capture_logs

_BUGS = ("owner_raised", "core_raised", "decoding_raised")


@pytest.fixture(autouse=True)
def events() -> Iterator[list[Any]]:
    """What was logged; the test fails if the owner only went on because it catches everything."""
    with capture_logs() as captured:
        yield captured
    assert [entry for entry in captured if entry["event"] in _BUGS] == []
