"""Whether a failed send certainly never left the process: every doubt must count as "perhaps it did"."""

from __future__ import annotations

import json

import pytest

from pipeline.adapters.transmissions import Transmissions

pytestmark = pytest.mark.unit


def _statistics(**transmitted: int) -> str:
    partitions = {number.removeprefix("p"): {"partition": 0, "txmsgs": count} for number, count in transmitted.items()}
    return json.dumps({"name": "rdkafka#producer-1", "topics": {"task-events": {"partitions": partitions}}})


def test_nothing_is_certain_before_the_first_statistics() -> None:
    """An event that may have arrived must never be called unsent."""
    assert not Transmissions("task-events").never_sent(0)


def test_an_event_without_a_partition_was_never_sent() -> None:
    """It waited for metadata that never came."""
    assert Transmissions("task-events").never_sent(-1)


def test_a_failed_event_was_never_sent_if_all_that_was_transmitted_is_acknowledged() -> None:
    """There is no transmitted message left that it could be."""
    transmissions = Transmissions("task-events")
    for partition in (0, 0, 1):
        transmissions.acknowledged(partition)

    transmissions.update(_statistics(p0=2, p1=2, p2=0), idle=False)

    assert transmissions.never_sent(0)
    assert not transmissions.never_sent(1), "one of two is not acknowledged: it could be this one"
    assert transmissions.never_sent(2)
    assert not transmissions.never_sent(3), "no statistics tell of it"


def test_repeats_of_acknowledged_messages_are_forgotten_once_nothing_is_under_way() -> None:
    """Else a single retry would make every later failure a doubtful one."""
    transmissions = Transmissions("task-events")
    transmissions.acknowledged(0)
    transmissions.update(_statistics(p0=3), idle=False)
    assert not transmissions.never_sent(0)

    transmissions.update(_statistics(p0=3), idle=True)
    assert transmissions.never_sent(0)

    transmissions.update(_statistics(p0=4), idle=False)
    assert not transmissions.never_sent(0)


def test_other_topics_tell_nothing() -> None:
    """The statistics may hold more than ours."""
    transmissions = Transmissions("other")

    transmissions.update(_statistics(p0=0), idle=False)

    assert not transmissions.never_sent(0)
