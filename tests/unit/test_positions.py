"""Which table may be trusted, where reading goes on, and which number a schedule gets."""

import msgspec
import pytest

from pipeline.core.positions import (
    FORMAT_VERSION,
    InputPosition,
    Positions,
    generation_of,
    resume_input,
    table_fault,
)
from pipeline.core.tasks import InstantMs, Offset

pytestmark = pytest.mark.unit

NOW_MS = InstantMs(10_000_000)
OFFLINE_MAX_MS = 1_000_000
GOOD = Positions(
    cluster_id="cluster",
    state_topic_id="state",
    partition=3,
    partition_count=8,
    inputs={"task-events": InputPosition(topic_id="events", position=Offset(40))},
    stamp_ms=NOW_MS,
)


def _fault(local: Positions) -> str | None:
    fault = table_fault(
        local,
        cluster_id="cluster",
        state_topic_id="state",
        partition=3,
        now_ms=NOW_MS,
        offline_max_ms=OFFLINE_MAX_MS,
    )
    return None if fault is None else fault.message


def test_table_of_this_partition_is_used() -> None:
    """Else every restart would be a cold one."""
    assert _fault(GOOD) is None


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"cluster_id": "other"}, ["other", "cluster"]),
        ({"state_topic_id": "old"}, ["old", "state"]),
        ({"partition": 4}, ["4", "3"]),
        ({"format_version": FORMAT_VERSION + 1}, [str(FORMAT_VERSION + 1)]),
        ({"min_reader": FORMAT_VERSION + 1}, [str(FORMAT_VERSION)]),
        ({"stamp_ms": NOW_MS - OFFLINE_MAX_MS - 1}, ["1000 s"]),
    ],
)
def test_table_of_another_or_of_another_time_is_named_as_such(changes: dict[str, object], named: list[str]) -> None:
    """Each of these, taken for ours, would fire what is not due here or bring the deleted back."""
    message = _fault(msgspec.structs.replace(GOOD, **changes))

    assert message is not None
    assert all(word in message for word in named)


@pytest.mark.parametrize("age_ms", [-5_000, 0, OFFLINE_MAX_MS])
def test_table_within_the_offline_time_is_used(age_ms: int) -> None:
    """The boundary itself is inside; a stamp from a clock that was ahead is no fault."""
    assert _fault(msgspec.structs.replace(GOOD, stamp_ms=InstantMs(NOW_MS - age_ms))) is None


def test_input_never_read_starts_at_zero() -> None:
    """The first start reads everything that is there."""
    assert resume_input(None, "events") == InputPosition(topic_id="events", position=Offset(0))


def test_input_goes_on_at_its_recorded_position() -> None:
    """Not at the group's offset, not at the end."""
    recorded = InputPosition(topic_id="events", position=Offset(40), generation_base=7)

    assert resume_input(recorded, "events") == recorded


def test_topic_created_anew_starts_at_zero_above_all_old_generations() -> None:
    """Offsets begin again, generations must not: a consumer's ledger would take the new task for the old one."""
    position = InputPosition(topic_id="first", position=Offset(40))
    highest = generation_of(position, Offset(39))
    for topic_id in ("second", "third"):
        position = resume_input(position, topic_id)
        assert position.position == 0
        assert position.topic_id == topic_id
        assert generation_of(position, Offset(0)) > highest
        position = msgspec.structs.replace(position, position=Offset(100))
        highest = generation_of(position, Offset(99))


def test_generation_rises_with_the_offset_and_is_never_zero() -> None:
    """0 stands for a task that was never scheduled."""
    position = InputPosition(topic_id="events", position=Offset(0))

    assert [generation_of(position, Offset(offset)) for offset in range(3)] == [1, 2, 3]
