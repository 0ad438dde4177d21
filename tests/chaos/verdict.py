"""Judges what a chaos run left: its history files and its topics. Reads no clock; the checkers are the simulator's."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Final

import msgspec

from pipeline.core.tasks import InstantMs, Offset
from pipeline.testing.promises import Acknowledged, applied_wrongly, fired_wrongly, missed
from tests.chaos.history import Line, What

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from pipeline.core.applied import AppliedTask
    from pipeline.core.effects import DueTask
    from pipeline.core.events import Event

NEVER_MS: Final = InstantMs(2**62)
"""When an event is said to be acknowledged whose sender never heard so: it may overrule others, but need not."""

Place = tuple[int, int]
"""Partition and offset."""


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """An event as it stands in `task-events` for readers of committed records."""

    place: Place
    event: Event
    append_at_ms: int


class Emitted(msgspec.Struct, frozen=True, kw_only=True):
    """An emission as it stands in `due-tasks`, and when the broker appended it."""

    place: Place
    task: DueTask
    append_at_ms: int


class Story(msgspec.Struct, frozen=True, kw_only=True):
    """All that a run left."""

    lines: Sequence[Line]
    standing: Sequence[Standing]
    emitted: Sequence[Emitted]
    applied: Sequence[AppliedTask]
    outputs: Sequence[str]
    """Emission ids that consumers produced, each in the transaction of its row."""
    ended_at_ms: int
    """Everything that was due by then had its turn."""

    @property
    def emissions(self) -> list[DueTask]:
        """The emissions alone."""
        return [each.task for each in self.emitted]


class Violations(msgspec.Struct, frozen=True, kw_only=True):
    """A sentence for each, by the promise that it breaks."""

    lost: Sequence[str]
    doubled: Sequence[str]
    early: Sequence[str]
    wrongly_fired: Sequence[str]
    applied_wrongly: Sequence[str]


def judge(story: Story) -> Violations:
    """Hold the story against the promises G1 to G6."""
    events = acknowledged(story)
    return Violations(
        lost=[*_vanished(story), *missed(story.emissions, events, InstantMs(story.ended_at_ms)), *_unapplied(story)],
        doubled=[*_doubled(story.emissions), *_phantoms(story)],
        early=list(_early(story.emitted)),
        wrongly_fired=[*fired_wrongly(story.emissions, events), *_fired_against_evidence(story.emissions, events)],
        applied_wrongly=[*applied_wrongly(story.applied, story.emissions), *_output_faults(story)],
    )


def acknowledged(story: Story) -> list[Acknowledged]:
    """The log, each event with the instant at which its sender knew of it, or never."""
    known = {place: at_ms for place, (_, at_ms) in _told(story.lines).items()}
    return [
        Acknowledged(
            event=each.event,
            offset=Offset(each.place[1]),
            acknowledged_at_ms=InstantMs(known.get(each.place, NEVER_MS)),
            append_at_ms=InstantMs(each.append_at_ms),
        )
        for each in story.standing
    ]


def repeated_effects(story: Story) -> int:
    """How often consumers began an effect outside of Kafka again: allowed, within what the bound of a batch says."""
    effects = Counter(
        (line.task_id, line.generation, line.occurrence) for line in story.lines if line.what is What.APPLYING
    )
    return sum(effects.values()) - len(effects)


def doubled_by_client(story: Story) -> int:
    """Records beyond what was sent: librdkafka, idempotent or not, may write an event again after a broker failed.

    When an event of its queue timed out it goes on under a new epoch, and what the broker had of the old one is no
    longer recognised. The copies have the same `event_id`, so they change nothing.
    """
    maybe = _sendings(story)
    return sum(max(0, count - max(1, maybe[event_id])) for event_id, count in _standing_counts(story).items())


def _sendings(story: Story) -> Counter[str]:
    """How often each event was sent without its sender being told for certain that it is not in the log."""
    maybe: Counter[str] = Counter()
    sent_in: defaultdict[str, list[str]] = defaultdict(list)
    for line in story.lines:
        if line.what is What.SENDING:
            maybe[line.event_id] += 1
            sent_in[line.attempt].append(line.event_id)
        elif line.what in {What.UNSENT, What.ABORTED}:
            maybe.subtract(sent_in.pop(line.attempt, []))
    return maybe


def _standing_counts(story: Story) -> Counter[str]:
    return Counter(each.event.event_id for each in story.standing if each.event.event_id)


def _told(lines: Iterable[Line]) -> dict[Place, tuple[str, int]]:
    """What senders were told: where an event stands for good, which one, and when they knew."""
    told: dict[Place, tuple[str, int]] = {}
    placed: defaultdict[str, list[Line]] = defaultdict(list)
    for line in lines:
        if line.what is What.ACKNOWLEDGED and line.offset >= 0:
            told[line.partition, line.offset] = (line.event_id, line.at_ms)
        elif line.what is What.PLACED:
            placed[line.attempt].append(line)
        elif line.what is What.COMMITTED:
            for each in placed.pop(line.attempt, []):
                told[each.partition, each.offset] = (each.event_id, line.at_ms)
    return told


def _vanished(story: Story) -> Iterator[str]:
    """G1, Kafka's part: what was acknowledged is in the log."""
    log = {each.place: each.event.event_id for each in story.standing}
    for place, (event_id, _) in _told(story.lines).items():
        if log.get(place) != event_id:
            yield f"G1: {event_id} was acknowledged at {place}, and there is {log.get(place)}"
    somewhere = frozenset(log.values())
    for line in story.lines:  # "I had that already": acknowledged, and no one told where
        if line.what is What.ACKNOWLEDGED and line.offset < 0 and line.event_id not in somewhere:
            yield f"G1: {line.event_id} was acknowledged, and is nowhere"


def _unapplied(story: Story) -> Iterator[str]:
    """G6, the other half: what was emitted was applied."""
    applied = {(row.task_id, row.generation, row.occurrence) for row in story.applied}
    for task in story.emissions:
        if (task.task_id, task.generation, task.occurrence) not in applied:
            yield f"G6: {task.task_id!r} of generation {task.generation} was emitted and never applied"


def _doubled(emissions: Iterable[DueTask]) -> Iterator[str]:
    """G5."""
    counted = Counter((task.task_id, task.generation, task.occurrence, task.attempt) for task in emissions)
    for emission, count in counted.items():
        if count > 1:
            yield f"G5: {emission} was emitted {count} times"


def _phantoms(story: Story) -> Iterator[str]:
    """Events that stand in the log although each time that they were sent their sender was told that they don't."""
    maybe = _sendings(story)
    for event_id, count in _standing_counts(story).items():
        if maybe[event_id] < 1:
            yield f"{event_id} stands {count} times in the log, and was never sent, or not sent as its sender was told"


def _early(emitted: Iterable[Emitted]) -> Iterator[str]:
    """G3, by what the owner says of its clock and by the broker's clock, which is the same here."""
    for each in emitted:
        if min(each.task.fired_at_ms, each.append_at_ms) < each.task.due_at_ms:
            yield f"G3: due at {each.task.due_at_ms}, in the log at {each.append_at_ms}: {each.task}"


def _fired_against_evidence(emissions: Iterable[DueTask], events: Iterable[Acknowledged]) -> Iterator[str]:
    """G4 without any clock: nothing that stood below the fence overrules what fired behind it."""
    by_task: defaultdict[str, list[Acknowledged]] = defaultdict(list)
    for each in events:
        by_task[each.event.task_id].append(each)
    for task in emissions:
        if task.applied_offset < task.fence_offset or task.fence_clock_ms != task.fired_at_ms:
            yield f"G4: fired ahead of its fence: {task}"
        below = [
            msgspec.structs.replace(each, acknowledged_at_ms=InstantMs(-1))
            for each in by_task[task.task_id]
            if each.offset < task.applied_offset
        ]
        yield from (f"by its own evidence, {fault}" for fault in fired_wrongly([task], below))


def _output_faults(story: Story) -> Iterator[str]:
    """What consumers produce in the transaction of the row is there as often as the row: once."""
    produced = Counter(story.outputs)
    emitted: Mapping[tuple[str, int, int], str] = {
        (task.task_id, task.generation, task.occurrence): task.emission_id + task.task_id for task in story.emissions
    }
    expected = Counter(
        emitted.get((row.task_id, row.generation, row.occurrence), "never emitted") for row in story.applied
    )
    for name in produced | expected:
        if produced[name] != expected[name]:
            yield f"G6: {name} was applied {expected[name]} times, its record was produced {produced[name]} times"
    begun = {(line.task_id, line.generation, line.occurrence) for line in story.lines if line.what is What.APPLYING}
    for row in story.applied:
        if (row.task_id, row.generation, row.occurrence) not in begun:
            yield f"G6: {row.task_id!r} has a row, and its consumer never began its effect"
