"""What an audit finds: the promises by name, a stable code for each kind of violation, and the tally of an audit.

A code is part of the interface: scripts may match on it, so it is never renamed, and each belongs to one promise.
"""

from collections import Counter
from collections.abc import Mapping
from enum import StrEnum
from typing import Final

import msgspec

from pipeline.core.tasks import InstantMs

__all__ = ["PROMISES", "RULES", "Code", "Finding", "Outcome", "Promise", "Rule", "Tally", "Unprovable"]


class Promise(StrEnum):
    """The seven promises; `docs/explanation/guarantees.md` says what each one means."""

    G1 = "G1"
    G2 = "G2"
    G3 = "G3"
    G4 = "G4"
    G5 = "G5"
    G6 = "G6"
    G7 = "G7"


PROMISES: Final[Mapping[Promise, str]] = {
    Promise.G1: "no loss",
    Promise.G2: "no miss",
    Promise.G3: "never early",
    Promise.G4: "a cancel counts",
    Promise.G5: "emitted once",
    Promise.G6: "applied once",
    Promise.G7: "replay is the same",
}


class Outcome(StrEnum):
    """What became of a SCHEDULE that Kafka holds; every one has exactly one."""

    EMITTED = "EMITTED"
    REPLACED = "REPLACED"
    CANCELLED = "CANCELLED"
    REFUSED = "REFUSED"
    UNDELIVERABLE = "UNDELIVERABLE"
    STALE = "STALE"
    DUPLICATE = "DUPLICATE"
    PENDING = "PENDING"
    WAITING = "WAITING"  # not applied yet when the audit began


class Unprovable(StrEnum):
    """Why something can be neither proved nor refuted."""

    EVENTS_GONE = "events of the task may be gone by retention or compaction"
    EMISSIONS_GONE = "its emission may have expired"
    DEAD_TASKS_GONE = "the record that set it aside may have expired"
    FORGOTTEN = "the task may have been forgotten and begun anew in between"
    TOO_TANGLED = "its records allow too many histories"
    CHANGED_MEANWHILE = "its row changed while the audit ran"
    LEDGER_GONE = "rows of the ledger are gone"


class Code(StrEnum):
    """The kinds of violation."""

    SCHEDULE_LOST = "SCHEDULE_LOST"
    REFUSAL_MISSING = "REFUSAL_MISSING"
    STRAY_NOT_REFUSED = "STRAY_NOT_REFUSED"
    TWO_OUTCOMES = "TWO_OUTCOMES"
    EMISSION_MISSING = "EMISSION_MISSING"
    BURIAL_MISSING = "BURIAL_MISSING"
    UNDECODABLE = "UNDECODABLE"
    OVERDUE = "OVERDUE"
    EARLY = "EARLY"
    EVIDENCE_WRONG = "EVIDENCE_WRONG"
    DUE_TIME_DIFFERS = "DUE_TIME_DIFFERS"
    OVERRULED = "OVERRULED"
    EMITTED_WITHOUT_SCHEDULE = "EMITTED_WITHOUT_SCHEDULE"
    CONTENT_DIFFERS = "CONTENT_DIFFERS"
    EMITTED_TWICE = "EMITTED_TWICE"
    GENERATION_REUSED = "GENERATION_REUSED"
    APPLIED_TWICE = "APPLIED_TWICE"
    APPLIED_UNKNOWN = "APPLIED_UNKNOWN"
    APPLY_MISSED = "APPLY_MISSED"
    STATE_DIFFERS = "STATE_DIFFERS"
    STATE_MISSING = "STATE_MISSING"
    STATE_UNFOUNDED = "STATE_UNFOUNDED"
    STATE_UNREADABLE = "STATE_UNREADABLE"
    POSITIONS_WRONG = "POSITIONS_WRONG"

    @property
    def promise(self) -> Promise:
        """The promise that is broken."""
        return RULES[self].promise


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """What a code means, for people: the promise that is broken, what was found, and what to do now."""

    promise: Promise
    meaning: str
    remedy: str


_REPORT: Final = "Keep the topics and report it: it is a bug."
_STATE: Final = "Stop the agents, then `duetasks rebuild --from events`; see docs/how-to/recover.md."

RULES: Final[Mapping[Code, Rule]] = {
    Code.SCHEDULE_LOST: Rule(
        promise=Promise.G1,
        meaning="A schedule was applied, but it neither waits nor came to any end.",
        remedy="Schedule the task again if it is still wanted. " + _STATE,
    ),
    Code.REFUSAL_MISSING: Rule(
        promise=Promise.G1,
        meaning="An event that can't be applied was passed over, and is not on dead-tasks.",
        remedy="Send a correct event in its place. " + _REPORT,
    ),
    Code.STRAY_NOT_REFUSED: Rule(
        promise=Promise.G1,
        meaning="An event in a partition where its task does not belong was passed over, and is not on dead-tasks.",
        remedy="Set the producer's partitioner to murmur2 (`murmur2_random`), and send the event again.",
    ),
    Code.TWO_OUTCOMES: Rule(
        promise=Promise.G1,
        meaning="A schedule was set aside on dead-tasks and emitted as well.",
        remedy="See that nobody else writes to these topics. " + _REPORT,
    ),
    Code.EMISSION_MISSING: Rule(
        promise=Promise.G1,
        meaning="task-state says that the task was emitted, and its due record is not there.",
        remedy="Schedule the task again if its consumers have not seen it. " + _STATE,
    ),
    Code.BURIAL_MISSING: Rule(
        promise=Promise.G1,
        meaning="task-state says that the task can't be delivered, and it is not on dead-tasks.",
        remedy="Schedule the task again. " + _STATE,
    ),
    Code.UNDECODABLE: Rule(
        promise=Promise.G1,
        meaning="A record of a topic that only duetasks writes to can't be read.",
        remedy="Find out who wrote it, by its offset and time, and take that right away.",
    ),
    Code.OVERDUE: Rule(
        promise=Promise.G2,
        meaning="A task is due for longer than the limit, its event is applied, and it was not emitted.",
        remedy="Look at `/readyz` of the agents: a partition without an owner, a fence that waits, or a full disk.",
    ),
    Code.EARLY: Rule(
        promise=Promise.G3,
        meaning="A task was emitted before it was due.",
        remedy="Tell those who consume it. " + _REPORT,
    ),
    Code.EVIDENCE_WRONG: Rule(
        promise=Promise.G3,
        meaning="The evidence in a due record does not allow that it was fired, or contradicts itself.",
        remedy="See that nobody else writes to due-tasks. " + _REPORT,
    ),
    Code.DUE_TIME_DIFFERS: Rule(
        promise=Promise.G3,
        meaning="A due record names another due time than the schedule that it stems from.",
        remedy="See that nobody else writes to due-tasks. " + _REPORT,
    ),
    Code.OVERRULED: Rule(
        promise=Promise.G4,
        meaning="A task was emitted although an event that had been applied cancelled or replaced it.",
        remedy="Undo what consumers did with it. " + _REPORT,
    ),
    Code.EMITTED_WITHOUT_SCHEDULE: Rule(
        promise=Promise.G4,
        meaning="A task was emitted that no event asks for.",
        remedy="See that nobody else writes to due-tasks. " + _REPORT,
    ),
    Code.CONTENT_DIFFERS: Rule(
        promise=Promise.G4,
        meaning="A due record carries another content than its schedule.",
        remedy="See that nobody else writes to due-tasks. " + _REPORT,
    ),
    Code.EMITTED_TWICE: Rule(
        promise=Promise.G5,
        meaning="The same emission stands on the topic twice, and the second one is no marked replay.",
        remedy="Consumers with a ledger skip it; the others have to be told. " + _REPORT,
    ),
    Code.GENERATION_REUSED: Rule(
        promise=Promise.G5,
        meaning="Two tasks were emitted under the same generation.",
        remedy="See that nobody else writes to due-tasks. " + _REPORT,
    ),
    Code.APPLIED_TWICE: Rule(
        promise=Promise.G6,
        meaning="A group's ledger has two committed rows for one occurrence, and was not made to forget the first.",
        remedy="Undo the second effect. " + _REPORT,
    ),
    Code.APPLIED_UNKNOWN: Rule(
        promise=Promise.G6,
        meaning="A group's ledger has a row for something that was never emitted.",
        remedy="See that nobody else writes to applied-tasks, and undo the effect.",
    ),
    Code.APPLY_MISSED: Rule(
        promise=Promise.G6,
        meaning="The group's offset has passed a due record that is neither in its ledger nor set aside.",
        remedy="`duetasks replay --group` emits it again; see that nobody sets the group's offsets by hand.",
    ),
    Code.STATE_DIFFERS: Rule(
        promise=Promise.G7,
        meaning="A row of task-state is not what the events and emissions of its task amount to.",
        remedy=_STATE,
    ),
    Code.STATE_MISSING: Rule(
        promise=Promise.G7,
        meaning="task-state has no row for a task that should be known.",
        remedy=_STATE,
    ),
    Code.STATE_UNFOUNDED: Rule(
        promise=Promise.G7,
        meaning="task-state has a row for a task that no event speaks of.",
        remedy=_STATE,
    ),
    Code.STATE_UNREADABLE: Rule(
        promise=Promise.G7,
        meaning="A record of task-state can't be read, or stands under another task's key.",
        remedy=_STATE,
    ),
    Code.POSITIONS_WRONG: Rule(
        promise=Promise.G7,
        meaning="The positions of task-state are missing, go back, or lie beyond what they speak of.",
        remedy=_STATE,
    ),
}
"""Each code once; the reference page is written from this."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One violation: the record that shows it, the task, the instant of the record, and what is wrong with it."""

    code: Code
    topic: str
    partition: int
    offset: int
    at_ms: InstantMs
    detail: str
    task_id: str = ""


class Tally:
    """Counts all of an audit, and keeps the first `findings_max` violations; the rest is only counted."""

    def __init__(self, findings_max: int) -> None:
        self._findings_max = findings_max
        self.findings: list[Finding] = []
        self.checked: Counter[Promise] = Counter()
        self.violations: Counter[Code] = Counter()
        self.unprovable: Counter[tuple[Promise, Unprovable]] = Counter()
        self.outcomes: Counter[Outcome] = Counter()

    def violated(self, finding: Finding) -> None:
        """One more violation."""
        self.violations[finding.code] += 1
        if len(self.findings) < self._findings_max:
            self.findings.append(finding)

    def doubt(self, promise: Promise, why: Unprovable) -> None:
        """One more thing that can't be proved."""
        self.unprovable[promise, why] += 1
