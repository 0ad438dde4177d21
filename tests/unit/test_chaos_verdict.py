"""The judgement of a chaos run: each kind of violation, written by hand, is found and counted where it belongs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pipeline.core.applied import AppliedTask, Outcome
from pipeline.core.effects import DueTask
from pipeline.core.events import Cancel, Event, Schedule
from pipeline.core.tasks import InstantMs, Offset, TaskId
from tests.chaos.faults import Kind
from tests.chaos.history import HistoryFile, Line, What, read_history
from tests.chaos.nemesis import Injected
from tests.chaos.report import Waits, make_report, rows, write_page
from tests.chaos.verdict import Emitted, Standing, Story, Violations, doubled_by_client, judge

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.unit

DUE_MS = 1_000
SCHEDULE = Schedule(task_id=TaskId("task"), event_id="e0", due_at_ms=InstantMs(DUE_MS))
CANCEL = Cancel(task_id=TaskId("task"), event_id="e1")


def emitted(*, append_at_ms: int = DUE_MS + 5, **fields: Any) -> Emitted:  # noqa: ANN401 - handed on
    """The emission of the schedule at offset 0."""
    usual: dict[str, Any] = {
        "task_id": "task",
        "generation": 1,
        "occurrence": 0,
        "attempt": 0,
        "emission_id": "0:1:0:0",
        "due_at_ms": InstantMs(DUE_MS),
        "fired_at_ms": InstantMs(DUE_MS),
        "payload": b"",
        "fence_clock_ms": InstantMs(DUE_MS),
        "fence_offset": Offset(1),
        "applied_offset": Offset(1),
    }
    return Emitted(place=(0, 0), task=DueTask(**{**usual, **fields}), append_at_ms=append_at_ms)


ROW = AppliedTask(
    group="billing",
    task_id="task",
    generation=1,
    occurrence=0,
    attempt=0,
    due_partition=0,
    due_offset=Offset(0),
    applied_at_ms=InstantMs(0),
    outcome=Outcome.APPLIED,
)
APPLYING = Line(what=What.APPLYING, task_id="task", generation=1)


def standing(*events: Event) -> tuple[Standing, ...]:
    """Events in the log, from offset 0 on."""
    return tuple(Standing(place=(0, number), event=event, append_at_ms=500) for number, event in enumerate(events))


def told(*events: Event, at_ms: int = 500) -> tuple[Line, ...]:
    """Their senders' lines: sent, and acknowledged."""
    return tuple(
        line
        for number, event in enumerate(events)
        for line in (
            Line(what=What.SENDING, attempt=f"a{number}", event_id=event.event_id, task_id=event.task_id),
            Line(
                what=What.ACKNOWLEDGED,
                attempt=f"a{number}",
                event_id=event.event_id,
                partition=0,
                offset=number,
                at_ms=InstantMs(at_ms),
            ),
        )
    )


RIGHT = Story(
    lines=(*told(SCHEDULE), APPLYING),
    standing=standing(SCHEDULE),
    emitted=(emitted(),),
    applied=(ROW,),
    outputs=("0:1:0:0task",),
    ended_at_ms=9_000,
)


UNSENT = (
    Line(what=What.SENDING, attempt="a0", event_id="e0", task_id="task"),
    Line(what=What.UNSENT, attempt="a0", event_id="e0"),
)


def counts(violations: Violations) -> dict[str, int]:
    """How many of each, without those that there are none of."""
    found = {name: len(getattr(violations, name)) for name in Violations.__struct_fields__}
    return {name: count for name, count in found.items() if count}


def test_story_in_which_all_went_well_is_judged_so() -> None:
    """Else nothing below shows anything."""
    assert counts(judge(RIGHT)) == {}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"emitted": (), "applied": (), "outputs": ()}, {"lost": 1}),
        ({"applied": (), "outputs": ()}, {"lost": 1}),
        ({"standing": (), "emitted": (), "applied": (), "outputs": ()}, {"lost": 1}),
        ({"emitted": (emitted(), emitted())}, {"doubled": 1}),
        ({"lines": (*UNSENT, APPLYING)}, {"doubled": 1}),
        ({"emitted": (emitted(append_at_ms=DUE_MS - 1),)}, {"early": 1}),
        ({"emitted": (emitted(fired_at_ms=InstantMs(999), fence_clock_ms=InstantMs(999)),)}, {"early": 1}),
        ({"lines": (*told(SCHEDULE, CANCEL), APPLYING), "standing": standing(SCHEDULE, CANCEL)}, {"wrongly_fired": 1}),
        ({"emitted": (emitted(applied_offset=Offset(0)),)}, {"wrongly_fired": 2}),
        ({"applied": (ROW, ROW), "outputs": ("0:1:0:0task",) * 2}, {"applied_wrongly": 1}),
        ({"outputs": ()}, {"applied_wrongly": 1}),
        ({"outputs": ("0:1:0:0task",) * 2}, {"applied_wrongly": 1}),
        ({"lines": told(SCHEDULE)}, {"applied_wrongly": 1}),
    ],
)
def test_each_violation_is_counted_where_it_belongs(changed: dict[str, Any], expected: dict[str, int]) -> None:
    """A report of four zeros is worth what its counters can find."""
    assert counts(judge(msgspec.structs.replace(RIGHT, **changed))) == expected


def test_event_that_the_client_wrote_twice_is_counted_and_breaks_nothing() -> None:
    """An idempotent producer may do it after a broker failed; the same id makes it harmless."""
    story = msgspec.structs.replace(RIGHT, standing=standing(SCHEDULE, SCHEDULE))

    assert counts(judge(story)) == {}
    assert doubled_by_client(story) == 1
    assert doubled_by_client(RIGHT) == 0


def test_cancel_of_unknown_outcome_may_win_and_may_lose() -> None:
    """Its sender heard nothing: the task may have fired, or not."""
    lines = (*told(SCHEDULE), Line(what=What.SENDING, attempt="a1", event_id="e1", task_id="task"), APPLYING)
    fired = msgspec.structs.replace(RIGHT, lines=lines, standing=standing(SCHEDULE, CANCEL))
    stopped = msgspec.structs.replace(fired, emitted=(), applied=(), outputs=())

    assert counts(judge(fired)) == counts(judge(stopped)) == {}


def test_cancel_below_the_fence_convicts_without_any_clock() -> None:
    """G4 by the emission's own evidence: it says that the cancel had been applied."""
    story = msgspec.structs.replace(
        RIGHT,
        lines=(*told(SCHEDULE, CANCEL, at_ms=DUE_MS + 500), APPLYING),
        standing=standing(SCHEDULE, CANCEL),
        emitted=(emitted(applied_offset=Offset(2), fence_offset=Offset(2)),),
    )

    assert counts(judge(story)) == {"wrongly_fired": 1}


@pytest.mark.parametrize(("event", "lost"), [(SCHEDULE, {}), (CANCEL, {"lost": 1})])
def test_event_acknowledged_at_a_place_that_nobody_told_must_be_somewhere(event: Event, lost: dict[str, int]) -> None:
    """The broker had it already, says the client: then it is in the log, or it is lost."""
    line = Line(what=What.ACKNOWLEDGED, attempt="a9", event_id=event.event_id, partition=0, offset=-1)

    assert counts(judge(msgspec.structs.replace(RIGHT, lines=(*RIGHT.lines, line)))) == lost


def test_transaction_counts_from_its_commit_and_not_at_all_once_aborted() -> None:
    """For a transactional upstream "acknowledged" is that its commit returned."""
    placed = Line(what=What.PLACED, attempt="t1", event_id="e1", partition=0, offset=1, at_ms=InstantMs(600))
    sending = Line(what=What.SENDING, attempt="t1", event_id="e1", task_id="task")

    def story(end: What, at_ms: int) -> Story:
        lines = (*told(SCHEDULE), sending, placed, Line(what=end, attempt="t1", at_ms=InstantMs(at_ms)), APPLYING)
        return msgspec.structs.replace(RIGHT, lines=lines, standing=standing(SCHEDULE, CANCEL))

    assert counts(judge(story(What.COMMITTED, DUE_MS - 1))) == {"wrongly_fired": 1}
    assert counts(judge(story(What.COMMITTED, DUE_MS))) == {}
    assert counts(judge(story(What.ABORTED, DUE_MS - 1))) == {"doubled": 1}  # it stands there, and must not


def test_history_of_a_killed_writer_is_read_up_to_its_last_whole_line(tmp_path: Path) -> None:
    """A torn line is a step that may have happened."""
    path = tmp_path / "history.jsonl"
    HistoryFile(path).sending("a0", SCHEDULE, b"avro")
    with path.open("ab") as torn:
        torn.write(b'{"what":"acknowl')

    assert [line.what for line in read_history(path)] == [What.SENDING]


def fault(began_ms: int, ended_ms: int) -> Injected:
    """A fault of that time."""
    return Injected(kind=Kind.AGENT_KILLED, victim="agent-0", began_ms=began_ms, ended_ms=ended_ms)


def test_recovery_ends_when_nothing_due_waits_for_longer_than_a_second() -> None:
    """Due at 1,000, out at 6,000; the fault ended at 3,000: three seconds, and two of them excused."""
    waits = Waits(msgspec.structs.replace(RIGHT, emitted=(emitted(append_at_ms=6_000),)), [fault(500, 3_000)])

    assert [(each.fault, each.count, each.max_ms) for each in waits.recoveries()] == [("agent killed", 1, 3_000)]
    assert waits.lateness(0, 9_000).max == 5_000
    assert waits.lateness(0, 9_000, excused=True).max == 3_000
    assert waits.lateness(5_000, 9_000).count == 0


def test_page_keeps_one_section_for_each_number_of_nodes(tmp_path: Path) -> None:
    """A new run replaces the old one of its kind, and leaves the other."""
    page = tmp_path / "report.md"
    options: dict[str, Any] = {
        "other": [],
        "calm_ms": (0, 9_000),
        "plan": ["a fault"],
        "faults_s": 1,
        "load_per_s": 1.0,
    }
    for seed, nodes in ((1, 3), (2, 1), (3, 3)):
        report = make_report(RIGHT, judge(RIGHT), [fault(0, 1)], seed=seed, nodes=nodes, partitions_lost=0, **options)
        assert report.is_right
        assert {row["value"] for row in rows(report) if row["what"] in {"lost", "doubled", "early"}} == {"0"}
        write_page(report, page)

    text = page.read_text("utf-8")
    assert text.count("# Chaos report") == 1
    assert [line for line in text.splitlines() if line.startswith("## ")] == ["## 1 node", "## 3 nodes"]
    assert "--seed 2" in text
    assert "--seed 3" in text
    assert "--seed 1'" not in text
