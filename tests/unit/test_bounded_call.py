"""A call into a client library that never comes back must not take the process with it."""

import threading

import pytest

from pipeline.adapters import bounded_call
from pipeline.adapters.bounded_call import bounded
from pipeline.errors import UnknownOutcomeError

pytestmark = pytest.mark.unit


def test_what_the_call_returns_or_raises_comes_back() -> None:
    """The bound changes nothing for a call that keeps its own."""
    assert bounded(lambda: 7, 1.0, "count") == 7
    with pytest.raises(ZeroDivisionError):
        bounded(lambda: 1 // 0, 1.0, "divide")


def test_a_call_that_does_not_come_back_has_no_known_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chaos on three nodes showed it: a consumer waited for ever inside of librdkafka, and its partitions with it."""
    monkeypatch.setattr(bounded_call, "GRACE_S", 0.0)
    never = threading.Event()

    with pytest.raises(UnknownOutcomeError, match="add the offset"):
        bounded(never.wait, 0.01, "add the offset")

    never.set()
