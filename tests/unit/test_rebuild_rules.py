"""The rules of `core/rebuild.py`, one by one: what overrules what where the topics and `task-state` differ."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.effects import DueTask
from pipeline.core.rebuild import (
    Burial,
    Emission,
    Overtaking,
    Source,
    forgotten_by,
    generation_base_of,
    presume_emitted,
    reconcile,
    with_burial,
    with_emission,
)
from pipeline.core.tasks import (
    DurationMs,
    Generation,
    InstantMs,
    Offset,
    Status,
    TaskId,
    TaskState,
    Verdict,
    VerdictEntry,
)

pytestmark = pytest.mark.unit

KEPT_MS = DurationMs(1_000)


def _state(
    status: Status = Status.SCHEDULED, *, generation: int = 6, due_at_ms: int = 100, **more: object
) -> TaskState:
    fields: dict[str, object] = {"wake_at_ms": due_at_ms, "payload": b"p", **more}
    return TaskState(
        task_id=TaskId("x"),
        status=status,
        generation=Generation(generation),
        due_at_ms=InstantMs(due_at_ms),
        **fields,  # type: ignore[arg-type]  # as the test gives them
    )


def _emission(
    *, generation: int = 6, applied: int = 9, due_at_ms: int = 100, task_id: str = "x", base: int = 0
) -> Emission:
    task = DueTask(
        task_id=task_id,
        generation=generation,
        occurrence=0,
        attempt=0,
        emission_id="e",
        due_at_ms=InstantMs(due_at_ms),
        fired_at_ms=InstantMs(due_at_ms + 5),
        payload=b"p",
        version=3,
        scheduled_offset=Offset(generation - 1 - base),
        applied_offset=Offset(applied),
    )
    return Emission(task=task, target_topic="", offset=Offset(40))


@pytest.mark.parametrize(
    "state",
    [
        None,
        _state(generation=2),
        _state(generation=8, version=7),
        _state(Status.CANCELLED),
        _state(due_at_ms=10**6),
    ],
    ids=["compacted away", "older", "refused then", "cancel refused then", "another due time"],
)
def test_an_emission_overrules_what_the_fold_says(state: TaskState | None) -> None:
    """It stands on the topic: whatever is missing or wrong, this generation has fired and none is waiting."""
    after = with_emission(state, _emission(), retention_ms=KEPT_MS)

    assert (after.status, after.generation, after.emitted_offset) == (Status.EMITTED, 6, 40)
    assert (after.fired_at_ms, after.wake_at_ms, after.payload) == (105, 1_105, b"")
    assert after.version == max(3, state.version if state is not None else 0)


def test_an_emission_of_the_waiting_generation_is_the_ordinary_move() -> None:
    """Where the fold has the timer, the state is what the owner wrote."""
    after = with_emission(_state(source="s", version=3), _emission(), retention_ms=KEPT_MS)

    assert (after.status, after.source, after.fired_at_ms, after.emitted_offset) == (Status.EMITTED, "s", 105, 40)


def test_a_burial_concerns_its_own_generation_only() -> None:
    """A task that was scheduled again after it was set aside lives."""
    burial = Burial(task_id=TaskId("x"), generation=Generation(6), dead_at_ms=InstantMs(7), append_at_ms=InstantMs(8))

    buried = with_burial(_state(), burial, retention_ms=KEPT_MS)
    assert buried is not None
    assert (buried.status, buried.wake_at_ms, buried.payload) == (Status.DEAD, 1_007, b"")
    assert with_burial(_state(generation=9), burial, retention_ms=KEPT_MS) == _state(generation=9)
    assert with_burial(None, burial, retention_ms=KEPT_MS) is None


def test_generations_tell_their_base() -> None:
    """So positions of two creations of a topic can be put in one order."""
    emission = _emission(generation=106, applied=9, base=100)

    assert generation_base_of(emission.task) == 100
    assert emission.position == 109


@pytest.mark.parametrize(
    ("generation", "due_at_ms", "overtaken"),
    [
        (6, 99, True),
        (9, 99, True),
        (10, 99, False),
        (6, 101, False),
        (6, 100, True),  # the same instant, and "x" sorts before "y"
    ],
    ids=["due before", "applied just before", "applied after", "due after", "same instant"],
)
def test_a_timer_is_overtaken_by_what_fired_later_although_due_later(
    generation: int, due_at_ms: int, *, overtaken: bool
) -> None:
    """Timers of a partition fire in the order of instant and id, once their schedule is applied."""
    overtaking = Overtaking()
    overtaking.add(_emission(applied=9, due_at_ms=100, task_id="y"))

    assert overtaking.has_overtaken(_state(generation=generation, due_at_ms=due_at_ms)) is overtaken


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30), st.sampled_from("axz")), max_size=30),
    st.integers(1, 30),
    st.integers(0, 30),
)
def test_overtaking_is_what_looking_at_all_emissions_says(
    found: list[tuple[int, int, str]], generation: int, due_at_ms: int
) -> None:
    """What is remembered in a few numbers answers as if all were kept."""
    emissions = [
        _emission(applied=applied, due_at_ms=due, task_id=name) for applied, due, name in sorted(found, key=_first)
    ]
    overtaking = Overtaking()
    for emission in emissions:
        overtaking.add(emission)

    expected = any(
        emission.position >= generation and (emission.task.due_at_ms, emission.task.task_id) > (due_at_ms, "x")
        for emission in emissions
    )
    assert overtaking.has_overtaken(_state(generation=generation, due_at_ms=due_at_ms)) is expected


def _first(item: tuple[int, int, str]) -> int:
    return item[0]


def test_a_presumed_emission_has_no_place() -> None:
    """It is said that it fired, not where: nobody may be sent to a record that is not there."""
    after = presume_emitted(_state(), retention_ms=KEPT_MS)

    assert (after.status, after.emitted_offset, after.fired_at_ms) == (Status.EMITTED, -1, 100)


def test_only_finished_tasks_are_forgotten() -> None:
    """A timer that is overdue is late, not gone."""
    assert forgotten_by(_state(Status.EMITTED, wake_at_ms=50), InstantMs(50))
    assert not forgotten_by(_state(Status.EMITTED, wake_at_ms=50), InstantMs(49))
    assert not forgotten_by(_state(wake_at_ms=50), InstantMs(10**9))


@pytest.mark.parametrize(
    ("folded", "known", "accepted", "status", "generation", "source"),
    [
        (None, _state(), False, Status.SCHEDULED, 6, Source.KEPT),
        (_state(), _state(), True, Status.SCHEDULED, 6, Source.CONFIRMED),
        (_state(), _state(Status.EMITTED), True, Status.EMITTED, 6, Source.KEPT),
        (_state(), _state(Status.CANCELLED), True, Status.CANCELLED, 6, Source.KEPT),
        (_state(Status.CANCELLED), _state(), True, Status.CANCELLED, 6, Source.CORRECTED),
        (_state(Status.EMITTED), _state(Status.CANCELLED), True, Status.EMITTED, 6, Source.CORRECTED),
        (_state(Status.CANCELLED), _state(Status.EMITTED), True, Status.EMITTED, 6, Source.KEPT),
        (_state(generation=9), _state(), True, Status.SCHEDULED, 9, Source.CORRECTED),
        (_state(generation=9), _state(), False, Status.SCHEDULED, 6, Source.KEPT),
        (_state(Status.EMITTED, generation=9), _state(), False, Status.EMITTED, 9, Source.CORRECTED),
        (_state(due_at_ms=7), _state(), True, Status.SCHEDULED, 6, Source.CORRECTED),
    ],
    ids=[
        "only the row",
        "both agree",
        "emission expired",
        "cancel lost from events",
        "cancel lost from state",
        "fired after all",
        "too late then",
        "row is behind",
        "schedule compacted away",
        "row is behind an emission",
        "other content",
    ],
)
def test_rows_and_topics_are_reconciled(
    folded: TaskState | None, known: TaskState, status: Status, generation: int, source: Source, *, accepted: bool
) -> None:
    """What is over for one of them is over; where only one can know, it is believed."""
    row, found = reconcile(folded, known, accepted=accepted, generation_base=0)

    assert (row.status, row.generation, found) == (status, generation, source)


def test_a_row_that_notes_the_refusal_is_believed() -> None:
    """The owner knew a version that compaction has removed; it said so in the row."""
    entry = VerdictEntry(event_id="", offset=Offset(8), verdict=Verdict.STALE)

    row, found = reconcile(_state(generation=9), _state(verdicts=(entry,), version=5), accepted=True, generation_base=0)

    assert (row.generation, found) == (6, Source.KEPT)


def test_a_version_once_seen_stays_seen() -> None:
    """Else an event that was stale would be fresh again after a rebuild."""
    row, _ = reconcile(_state(generation=9, version=2), _state(version=5), accepted=True, generation_base=0)

    assert row.version == 5
