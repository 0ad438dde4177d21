"""The figures of a chaos run, as a table for people, as JSON, and as a page of the documents."""

from __future__ import annotations

import os
import platform
import re
from collections import defaultdict
from typing import TYPE_CHECKING, Final

import msgspec

from pipeline.cli.bench.figures import percentile
from pipeline.embedded import KAFKA_VERSION
from tests.chaos.history import What
from tests.chaos.verdict import doubled_by_client, repeated_effects

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.chaos.nemesis import Injected
    from tests.chaos.verdict import Story, Violations

PATIENCE_MS: Final = 1_000
"""A fault is over when nothing that is due waits for longer than this."""
STORM: Final = "everything at once"
SENTENCES_MAX: Final = 20
_SENTENCE_MAX: Final = 300
_BREAK: Final = "\\n---"
"""Where the log of a process begins in the sentence about it; a page has no room for that."""


class Lateness(msgspec.Struct, frozen=True, kw_only=True):
    """Of emissions, by the broker's append time; milliseconds."""

    count: int
    p50: int
    p99: int
    max: int


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """From the end of a fault until nothing that was due waited for longer than a second."""

    fault: str
    count: int
    median_ms: int
    max_ms: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    seed: int
    nodes: int
    faults_s: int
    load_per_s: float
    machine: str
    faults: int
    partitions_lost: int
    """How often an agent noticed that a partition was another's, or could not know what became of a transaction."""
    tasks: int
    events: int
    schedules: int
    cancels: int
    sent_again: int
    aborted: int
    unknown_outcomes: int
    emitted: int
    applied: int
    lost: int
    doubled: int
    early: int
    wrongly_fired: int
    applied_wrongly: int
    other: int
    repeated_effects: int
    doubled_by_client: int
    lateness_under_faults: Lateness
    lateness_after_fault: Lateness
    lateness_when_calm: Lateness
    recovery: Sequence[Recovery]
    plan: Sequence[str]
    sentences: Sequence[str]

    @property
    def is_right(self) -> bool:
        """Whether every promise held."""
        return not (self.lost or self.doubled or self.early or self.wrongly_fired or self.applied_wrongly or self.other)


def make_report(
    story: Story,
    violations: Violations,
    injected: Sequence[Injected],
    *,
    other: Sequence[str],
    calm_ms: tuple[int, int],
    plan: Sequence[str],
    seed: int,
    nodes: int,
    faults_s: int,
    load_per_s: float,
    partitions_lost: int,
) -> Report:
    """Count and measure; `calm_ms` is the time of load after everything was healed."""
    outcomes = Waits(story, injected)
    found = [
        *violations.lost,
        *violations.doubled,
        *violations.early,
        *violations.wrongly_fired,
        *violations.applied_wrongly,
    ]
    kinds = [type(each.event).__name__ for each in story.standing]
    sent = {(line.attempt, line.event_id) for line in story.lines if line.what is What.SENDING}
    whats = [line.what for line in story.lines]
    return Report(
        seed=seed,
        nodes=nodes,
        faults_s=faults_s,
        load_per_s=load_per_s,
        machine=f"{os.cpu_count()} cores, Python {platform.python_version()}, Kafka {KAFKA_VERSION}",
        faults=len(injected),
        partitions_lost=partitions_lost,
        tasks=len({each.event.task_id for each in story.standing}),
        events=len(story.standing),
        schedules=kinds.count("Schedule"),
        cancels=kinds.count("Cancel"),
        sent_again=len(sent) - len({event_id for _, event_id in sent}),
        aborted=whats.count(What.ABORTED),
        unknown_outcomes=_unknown_count(story),
        emitted=len(story.emitted),
        applied=len(story.applied),
        lost=len(violations.lost),
        doubled=len(violations.doubled),
        early=len(violations.early),
        wrongly_fired=len(violations.wrongly_fired),
        applied_wrongly=len(violations.applied_wrongly),
        other=len(other),
        repeated_effects=repeated_effects(story),
        doubled_by_client=doubled_by_client(story),
        lateness_under_faults=outcomes.lateness(0, calm_ms[0]),
        lateness_after_fault=outcomes.lateness(0, calm_ms[0], excused=True),
        lateness_when_calm=outcomes.lateness(*calm_ms),
        recovery=outcomes.recoveries(),
        plan=plan,
        sentences=[*other[:SENTENCES_MAX], *found[:SENTENCES_MAX]],
    )


class Waits:
    """How long each emission waited: from when it was due, and its schedule in the log, to when it was in the log."""

    def __init__(self, story: Story, injected: Sequence[Injected]) -> None:
        asked = {(each.event.task_id, each.place[1] + 1): each.append_at_ms for each in story.standing}
        self._waits = [
            (max(each.task.due_at_ms, asked.get((each.task.task_id, each.task.generation), 0)), each.append_at_ms)
            for each in story.emitted
        ]
        self._injected = injected

    def lateness(self, from_ms: int, to_ms: int, *, excused: bool = False) -> Lateness:
        """Of what was due in that time; `excused`: from the end of the last fault that it met, if that was later."""
        waits = [wait for wait in self._waits if from_ms <= wait[0] < to_ms]
        values = sorted(float(until - (self._excuse(since, until) if excused else since)) for since, until in waits)
        if not values:
            return Lateness(count=0, p50=0, p99=0, max=0)
        return Lateness(
            count=len(values),
            p50=round(percentile(values, 50)),
            p99=round(percentile(values, 99)),
            max=round(values[-1]),
        )

    def recoveries(self) -> list[Recovery]:
        """For each kind of fault."""
        ends: defaultdict[str, list[int]] = defaultdict(list)
        storms: defaultdict[int, list[int]] = defaultdict(list)
        for fault in self._injected:
            if fault.storm:
                storms[fault.storm].append(fault.ended_ms)
            else:
                ends[fault.kind].append(fault.ended_ms)
        if storms:
            ends[STORM] = [max(of_storm) for of_storm in storms.values()]
        overdue = sorted((since + PATIENCE_MS, until) for since, until in self._waits if until > since + PATIENCE_MS)
        found = []
        for kind, instants in sorted(ends.items()):
            took = sorted(_calm_after(end_ms, overdue) - end_ms for end_ms in instants)
            found.append(Recovery(fault=kind, count=len(took), median_ms=took[len(took) // 2], max_ms=took[-1]))
        return found

    def _excuse(self, since: int, until: int) -> int:
        met = [fault.ended_ms for fault in self._injected if fault.began_ms <= until and fault.ended_ms >= since]
        return min(until, max([since, *met]))


def _calm_after(instant_ms: int, overdue: Sequence[tuple[int, int]]) -> int:
    """The first instant from there on that lies in none of these spans, which are sorted by their beginnings."""
    for since, until in overdue:
        if since > instant_ms:
            break
        instant_ms = max(instant_ms, until)
    return instant_ms


def _unknown_count(story: Story) -> int:
    """Sendings whose sender never heard what became of them."""
    open_attempts: defaultdict[str, int] = defaultdict(int)
    for line in story.lines:
        if line.what is What.SENDING:
            open_attempts[line.attempt] += 1
        elif line.what in {What.ACKNOWLEDGED, What.UNSENT, What.COMMITTED, What.ABORTED}:
            open_attempts.pop(line.attempt, None)
    return sum(open_attempts.values())


def rows(report: Report) -> list[dict[str, str]]:
    """The table."""

    def row(what: str, value: object) -> dict[str, str]:
        return {"what": what, "value": f"{value:,}" if isinstance(value, int) else str(value)}

    return [
        row("seed", str(report.seed)),
        row("faults", report.faults),
        *(row(f"  {each.fault}", f"{each.count}, recovery {_span(each)}") for each in report.recovery),
        row("partitions that agents had to give up and acquire again", report.partitions_lost),
        row("tasks", report.tasks),
        row("events in the log", f"{report.events:,} ({report.schedules:,} schedules, {report.cancels:,} cancels)"),
        row("sent again / unknown outcome / aborted transactions", _three(report)),
        row("emitted", report.emitted),
        row("applied", report.applied),
        row("lost", report.lost),
        row("doubled", report.doubled),
        row("early", report.early),
        row("wrongly fired", report.wrongly_fired),
        row("applied twice, or out of nothing", report.applied_wrongly),
        row("anything else that should not be", report.other),
        row("effects outside of Kafka begun again (allowed)", report.repeated_effects),
        row("events that the Kafka client wrote twice by itself (same id: no effect)", report.doubled_by_client),
        row("lateness while faults ran, p50 / p99 / max", _lateness(report.lateness_under_faults)),
        row("  counted from the end of the fault", _lateness(report.lateness_after_fault)),
        row("lateness after they stopped", _lateness(report.lateness_when_calm)),
    ]


def _three(report: Report) -> str:
    return f"{report.sent_again:,} / {report.unknown_outcomes:,} / {report.aborted:,}"


def _span(each: Recovery) -> str:
    return f"{each.median_ms / 1000:.1f} s (max {each.max_ms / 1000:.1f} s)"


def _lateness(of: Lateness) -> str:
    return f"{of.p50:,} / {of.p99:,} / {of.max:,} ms"


_HEAD: Final = """\
# Chaos report

<!-- Written by `make chaos ARGS='... --report FILE'`; each run replaces the section of its number of nodes. -->

Real processes under load, killed and frozen as a seed says.
What was promised is then held against what they wrote down and against the topics, by the checkers of the simulator.
Lateness and recovery are those of the machine named below, which ran everything at once.
It may have had other work beside it.
Recovery is the time from the end of a fault until nothing that was due waited for longer than a second.
Faults overlap, so it includes what came after.
Faults named "everything at once" are four that began together.
"""


def write_page(report: Report, path: Path) -> None:
    """Put the run into the page, in the place of the last one with as many nodes."""
    title = f"## {report.nodes} node{'s' if report.nodes > 1 else ''}"
    text = path.read_text("utf-8") if path.exists() else _HEAD
    kept = [part for part in re.split(r"(?m)^(?=## )", text)[1:] if not part.startswith(f"{title}\n")]
    sections = sorted([*kept, f"{title}\n\n{_section(report)}\n"])
    path.write_text(_HEAD + "\n" + "\n".join(part.strip() + "\n" for part in sections), "utf-8")


def _section(report: Report) -> str:
    command = f"make chaos ARGS='--for {report.faults_s}s --nodes {report.nodes} --seed {report.seed}'"
    table = "\n".join(f"| {each['what'].replace('  ', '&nbsp;&nbsp;')} | {each['value']} |" for each in rows(report))
    plan = "\n".join(report.plan)
    found = "\n".join(f"- {sentence.partition(_BREAK)[0][:_SENTENCE_MAX]}" for sentence in report.sentences)
    return (
        f"`{command}`, {report.machine}, {report.load_per_s:g} new events a second.\n\n"
        f"| | |\n|---|---|\n{table}\n"
        + (f"\nFound:\n\n{found}\n" if found else "")
        + f"\n<details><summary>The faults, as the seed gave them</summary>\n\n```\n{plan}\n```\n\n</details>\n"
    )
