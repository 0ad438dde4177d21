"""Laws of the core over generated lives of tasks: the state is a fold of the log, and of nothing else."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.core.events import Cancel, Event, Origin, Schedule
from pipeline.core.lifecycle import apply_event, mark_dead, mark_emitted, mark_purged
from pipeline.core.tasks import (
    EVENT_HASHES_MAX,
    FINAL,
    DurationMs,
    Generation,
    InstantMs,
    Offset,
    Status,
    TaskId,
    TaskState,
    Verdict,
    index_entry,
)
from pipeline.testing.plain_codec import PlainCodec

pytestmark = pytest.mark.property

RETENTION_MS = DurationMs(50)
TASKS = [TaskId(name) for name in ("a", "b")]

State = dict[TaskId, TaskState]
Step = Event | int
"""An event that is appended, or an instant at which the owner looks what is due."""

_events = st.one_of(
    st.builds(
        Schedule,
        task_id=st.sampled_from(TASKS),
        event_id=st.sampled_from(["", *"123456"]),
        version=st.integers(0, 4),
        due_at_ms=st.integers(1, 100).map(InstantMs),
        payload=st.binary(max_size=3),
    ),
    st.builds(
        Schedule,
        task_id=st.sampled_from(TASKS),
        event_id=st.sampled_from(["", *"123456"]),
        version=st.integers(0, 4),
        delay_ms=st.integers(0, 50).map(DurationMs),
    ),
    st.builds(
        Cancel,
        task_id=st.sampled_from(TASKS),
        event_id=st.sampled_from(["", *"123456"]),
        version=st.integers(0, 4),
    ),
)
_lives = st.lists(st.one_of(_events, st.integers(0, 200)), max_size=40)


def _fold(life: list[Step]) -> tuple[State, list[Verdict], list[tuple[str, int, int]]]:
    """The table, the verdicts and the emissions (id, generation, instant) after a life."""
    table: State = {}
    verdicts: list[Verdict] = []
    emissions: list[tuple[str, int, int]] = []
    offset = 0
    for at_ms, step in enumerate(life):
        if isinstance(step, int):
            _fire(table, emissions, step)
            continue
        origin = Origin(topic="task-events", partition=0, offset=Offset(offset), append_at_ms=InstantMs(at_ms))
        after = apply_event(
            table.get(step.task_id), step, origin, generation=Generation(offset + 1), retention_ms=RETENTION_MS
        )
        verdicts.append(after.verdict)
        if after.state is not None:
            table[step.task_id] = after.state
        offset += 1
    return table, verdicts, emissions


def _fire(table: State, emissions: list[tuple[str, int, int]], now_ms: int) -> None:
    now = InstantMs(now_ms)
    for entry in sorted(index_entry(state) for state in table.values() if state.wake_at_ms <= now):
        state = table[entry.task_id]
        if state.status in FINAL:
            mark_purged(state, now_ms=now)
            del table[entry.task_id]
        else:
            offset = Offset(len(emissions))
            emissions.append((state.task_id, state.generation, now_ms))
            table[entry.task_id] = mark_emitted(
                state, fired_at_ms=now, emitted_offset=offset, retention_ms=RETENTION_MS
            )


@given(life=_lives)
def test_replaying_the_same_events_gives_the_same_state(life: list[Step]) -> None:
    """G7: nothing in the core reads a clock, a random number or the order of a set."""
    assert _fold(life) == _fold(life)


@given(life=_lives)
def test_state_survives_its_encoding_at_any_point(life: list[Step]) -> None:
    """A crash puts the state through the codec: what comes back must go on in the same way."""
    codec = PlainCodec()
    table, _, _ = _fold(life)

    for state in table.values():
        again = codec.decode_state(codec.encode_state(state))
        assert again == state
        assert index_entry(again) == index_entry(state)


@given(life=_lives)
def test_generation_is_never_used_for_two_emissions(life: list[Step]) -> None:
    """G5: not even after PURGE has removed all memory of the task."""
    _, _, emissions = _fold(life)

    assert len({(task_id, generation) for task_id, generation, _ in emissions}) == len(emissions)


@given(life=_lives)
def test_only_accepted_schedules_are_emitted_and_never_early(life: list[Step]) -> None:
    """Each emission goes back to one SCHEDULE that was accepted, at or after its instant."""
    _, verdicts, emissions = _fold(life)
    events = [(at_ms, step) for at_ms, step in enumerate(life) if not isinstance(step, int)]

    for task_id, generation, fired_at_ms in emissions:
        append_at_ms, event = events[generation - 1]
        assert isinstance(event, Schedule)
        assert event.task_id == task_id
        assert verdicts[generation - 1] in {Verdict.SCHEDULED, Verdict.RESCHEDULED}
        due_at_ms = event.due_at_ms if event.due_at_ms is not None else append_at_ms + (event.delay_ms or 0)
        assert fired_at_ms >= due_at_ms


@given(life=st.lists(_events, max_size=EVENT_HASHES_MAX), data=st.data())
def test_sending_an_event_again_changes_nothing(life: list[Event], data: st.DataObject) -> None:
    """Any event with an id, sent again at any later place, is DUPLICATE and leaves the row bit for bit."""
    table, _, _ = _fold(list(life))
    named = [event for event in life if event.event_id]
    if not named:
        return
    again = data.draw(st.sampled_from(named))
    before = table.get(again.task_id)
    if before is None:
        return  # a cancel without a version of a task that nobody knows leaves nothing, not even its id
    seen = [event for event in life if event.task_id == again.task_id]
    origin = Origin(topic="task-events", partition=0, offset=Offset(len(life)), append_at_ms=InstantMs(99))

    after = apply_event(before, again, origin, generation=Generation(len(life) + 1), retention_ms=RETENTION_MS)

    first_kept = next((at for at, event in enumerate(seen) if isinstance(event, Schedule) or event.version), len(seen))
    if again in seen[first_kept:]:
        assert after.verdict is Verdict.DUPLICATE
        assert after.state is before


@given(life=_lives, data=st.data())
@settings(max_examples=200)
def test_tasks_do_not_touch_each_other(life: list[Step], data: st.DataObject) -> None:
    """However the events of two tasks are interleaved, each task's state depends on its own events alone."""
    offsets = [Offset(at) for at in range(len(life))]
    own: dict[TaskId, list[tuple[Offset, Event]]] = {task_id: [] for task_id in TASKS}
    for offset, step in zip(offsets, life, strict=True):
        if not isinstance(step, int):
            own[step.task_id].append((offset, step))
    queues = {task_id: list(events) for task_id, events in own.items() if events}
    mixed: list[tuple[Offset, Event]] = []
    while queues:
        task_id = data.draw(st.sampled_from(sorted(queues)))
        mixed.append(queues[task_id].pop(0))
        if not queues[task_id]:
            del queues[task_id]

    together = _apply_all(mixed)

    for task_id in TASKS:
        assert together.get(task_id) == _apply_all(own[task_id]).get(task_id)


def _apply_all(events: list[tuple[Offset, Event]]) -> State:
    table: State = {}
    for offset, event in events:
        origin = Origin(topic="task-events", partition=0, offset=offset, append_at_ms=InstantMs(offset))
        after = apply_event(
            table.get(event.task_id), event, origin, generation=Generation(offset + 1), retention_ms=RETENTION_MS
        )
        if after.state is not None:
            table[event.task_id] = after.state
    return table


@given(life=_lives)
def test_index_entry_is_a_function_of_the_state(life: list[Step]) -> None:
    """Index and rows can be compared, and the index rebuilt: nothing stands in it that the row does not say."""
    table, _, _ = _fold(life)

    for state in table.values():
        entry = index_entry(state)
        assert (entry.at_ms, entry.task_id) == (state.wake_at_ms, state.task_id)
        if state.status is Status.SCHEDULED:
            assert entry.at_ms == state.due_at_ms


@given(life=st.lists(_events, max_size=30))
def test_known_version_never_falls(life: list[Event]) -> None:
    """Else an event that was overruled once could come back."""
    known: dict[TaskId, int] = dict.fromkeys(TASKS, 0)
    for count in range(len(life) + 1):
        table, _, _ = _fold(list(life[:count]))
        for task_id, state in table.items():
            assert state.version >= known[task_id]
            known[task_id] = state.version


@given(life=st.lists(_events, max_size=20))
def test_dead_task_differs_from_an_emitted_one_in_nothing_that_decides_later_events(life: list[Event]) -> None:
    """Undeliverable or emitted, what comes afterwards is judged alike: versions, ids, generation."""
    table, _, _ = _fold(list(life))
    for state in table.values():
        if state.status is not Status.SCHEDULED:
            continue
        emitted = mark_emitted(state, fired_at_ms=state.due_at_ms, emitted_offset=Offset(1), retention_ms=RETENTION_MS)
        dead = mark_dead(state, now_ms=state.due_at_ms, retention_ms=RETENTION_MS)
        assert (emitted.version, emitted.event_hashes, emitted.generation, emitted.verdicts) == (
            dead.version,
            dead.event_hashes,
            dead.generation,
            dead.verdicts,
        )
        assert index_entry(emitted) == index_entry(dead)
