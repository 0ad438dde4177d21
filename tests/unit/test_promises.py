"""The checkers themselves: a checker that finds nothing proves nothing until it has found what was planted."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from pipeline.core.applied import AppliedTask, Outcome
from pipeline.core.effects import DueTask
from pipeline.core.events import Cancel, Event, Schedule
from pipeline.core.tasks import InstantMs, Offset, TaskId
from pipeline.testing.promises import (
    Acknowledged,
    applied_wrongly,
    check_applied_once,
    check_cancels_count,
    check_emitted_once,
    check_never_early,
    check_nothing_missed,
    fired_wrongly,
    missed,
)

pytestmark = pytest.mark.unit

DUE_MS = 1_000
LATER_MS = InstantMs(9_000)


def schedule(**fields: Any) -> Schedule:  # noqa: ANN401 - handed on
    """A schedule of the one task."""
    return Schedule(**{"task_id": TaskId("task"), "due_at_ms": InstantMs(DUE_MS), **fields})


def cancel(**fields: Any) -> Cancel:  # noqa: ANN401 - handed on
    """A cancel of it."""
    return Cancel(**{"task_id": TaskId("task"), **fields})


def acknowledged(*events: Event, at_ms: int = 0) -> list[Acknowledged]:
    """Events at the offsets 0, 1, ..., all acknowledged at one instant."""
    return [
        Acknowledged(
            event=event, offset=Offset(offset), acknowledged_at_ms=InstantMs(at_ms), append_at_ms=InstantMs(at_ms)
        )
        for offset, event in enumerate(events)
    ]


def emitted(offset: int = 0, *, task_id: str = "task", fired_at_ms: int = DUE_MS) -> DueTask:
    """The emission of the schedule at `offset`."""
    return DueTask(
        task_id=task_id,
        generation=offset + 1,
        occurrence=0,
        attempt=0,
        emission_id=f"0:{offset + 1}:0:0",
        due_at_ms=InstantMs(DUE_MS),
        fired_at_ms=InstantMs(fired_at_ms),
        payload=b"",
    )


def row(offset: int = 0, *, group: str = "billing") -> AppliedTask:
    """The ledger's row of that emission."""
    return AppliedTask(
        group=group,
        task_id="task",
        generation=offset + 1,
        occurrence=0,
        attempt=0,
        due_partition=0,
        due_offset=Offset(0),
        applied_at_ms=InstantMs(0),
        outcome=Outcome.APPLIED,
    )


def test_emission_that_comes_twice_is_found() -> None:
    """G5."""
    check_emitted_once([emitted(0), emitted(1)])

    with pytest.raises(AssertionError, match="G5"):
        check_emitted_once([emitted(0), emitted(0)])


def test_early_emission_is_found() -> None:
    """G3, to the millisecond."""
    check_never_early([emitted()])

    with pytest.raises(AssertionError, match="G3"):
        check_never_early([emitted(fired_at_ms=DUE_MS - 1)])


@pytest.mark.parametrize(
    ("overruled", "events"),
    [
        (0, (schedule(), cancel())),
        (0, (schedule(), schedule())),
        (0, (schedule(version=1), schedule(version=2))),
        (0, (schedule(version=2), cancel(version=2))),
        (1, (schedule(version=2), schedule(version=2))),
    ],
)
def test_emission_of_what_was_overruled_in_time_is_found(overruled: int, events: tuple[Event, ...]) -> None:
    """G4: and only if it was acknowledged before the instant."""
    check_cancels_count([emitted(overruled)], acknowledged(*events, at_ms=DUE_MS))

    with pytest.raises(AssertionError, match="G4"):
        check_cancels_count([emitted(overruled)], acknowledged(*events, at_ms=DUE_MS - 1))


@pytest.mark.parametrize(
    "events",
    [
        (schedule(version=2), cancel(version=1)),
        (schedule(version=2), schedule(version=1)),
        (schedule(event_id="a"), schedule(event_id="a")),
        (cancel(event_id="a"), schedule(), cancel(event_id="a")),
    ],
)
def test_stale_and_repeated_events_overrule_nothing(events: tuple[Event, ...]) -> None:
    """An older version, and an event that was sent again."""
    offset = next(number for number, event in enumerate(events) if isinstance(event, Schedule))

    check_cancels_count([emitted(offset)], acknowledged(*events))


def test_emission_that_nobody_asked_for_is_found() -> None:
    """G4: another task's schedule is none of this one, and neither is another offset."""
    events = acknowledged(schedule())

    assert list(fired_wrongly([emitted()], events)) == []
    assert len(list(fired_wrongly([emitted(task_id="other"), emitted(1)], events))) == 2


def test_schedule_that_never_fires_is_found() -> None:
    """G1 and G2: and it has to fire only if nothing overrules it, and once its instant has passed."""
    check_nothing_missed([emitted()], acknowledged(schedule()), LATER_MS)
    check_nothing_missed([], acknowledged(schedule()), InstantMs(DUE_MS - 1))
    check_nothing_missed([], acknowledged(schedule(), cancel()), LATER_MS)

    with pytest.raises(AssertionError, match="G1, G2"):
        check_nothing_missed([], acknowledged(schedule()), LATER_MS)


def test_repetition_overrules_only_if_its_first_sending_may_be_forgotten() -> None:
    """G1 and G2: a row knows the last 16 events; what comes again after as many others counts as new."""
    others = [schedule(event_id=f"e{number}") for number in range(16)]
    again = [schedule(event_id="a"), *others, schedule(event_id="a")]
    soon_again = [schedule(event_id="a"), *others[1:], schedule(event_id="a")]

    check_nothing_missed([], acknowledged(*again), LATER_MS)
    assert list(missed([], acknowledged(*soon_again), LATER_MS, remembered=15)) == []
    with pytest.raises(AssertionError, match="of offset 15 "):
        check_nothing_missed([], acknowledged(*soon_again), LATER_MS)


def test_task_that_is_applied_twice_or_out_of_nothing_is_found() -> None:
    """G6: for each group by itself."""
    check_applied_once([row(), row(group="mail"), row(1)], [emitted(), emitted(1)])

    assert len(list(applied_wrongly([row(), row()], [emitted()]))) == 1
    with pytest.raises(AssertionError, match="never emitted"):
        check_applied_once([row(1)], [emitted()])


@pytest.mark.timeout(60)
def test_large_histories_are_judged_in_seconds() -> None:
    """A chaos run leaves a hundred thousand events; comparing each with each would take hours."""
    offsets = count()
    events = [
        Acknowledged(
            event=event, offset=Offset(next(offsets)), acknowledged_at_ms=InstantMs(0), append_at_ms=InstantMs(0)
        )
        for number in range(50_000)
        for event in (
            schedule(task_id=TaskId(f"task-{number}"), event_id=f"s{number}"),
            cancel(task_id=TaskId(f"task-{number}"), event_id=f"c{number}"),
        )
    ]

    assert not list(missed([], events, LATER_MS))
    assert sum(1 for _ in fired_wrongly((emitted(2 * n, task_id=f"task-{n}") for n in range(50_000)), events)) == 50_000
