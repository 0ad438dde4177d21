"""Proves or refutes the promises from the topics alone, while the system runs or after an incident.

Everything is read once into facts on a scratch disk, which sorts them; then they are judged task by task and generation
by generation. `reading.py` tells why what was read is one moment of a running system; `core/audit_task.py` and
`core/audit_emissions.py` have the rules.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from pipeline.core.audit import Finding, Promise, Tally
from pipeline.core.tasks import InstantMs
from pipeline.errors import TopicMismatchError, UnavailableError, UsageError
from pipeline.ports import ClusterIdentity
from pipeline.service.audit.admission import AuditAdmission
from pipeline.service.audit.judging import PartitionJudging
from pipeline.service.audit.ledger import READ_AT_ONCE, LedgerReading
from pipeline.service.audit.log import Progress
from pipeline.service.audit.ports import AuditOutside, AuditRequest, FactStore
from pipeline.service.audit.reading import PartitionReading

if TYPE_CHECKING:
    from pipeline.core.audit_emissions import LedgerView
    from pipeline.core.audit_view import PartitionView

__all__ = ["AuditReport", "Auditor", "PromiseReport"]


class PromiseReport(msgspec.Struct, frozen=True, kw_only=True):
    """One promise: how much was checked, how often it was found broken, and what can't be proved, by reason."""

    promise: Promise
    checked: int
    violations: int
    unprovable: dict[str, int]


class AuditReport(msgspec.Struct, frozen=True, kw_only=True):
    """What an audit found. `findings` are the first ones; `violations` counts all, by code.

    `outcomes` counts the schedules by what became of them; `notes` say what is out of reach, and where.
    """

    at_ms: InstantMs
    partitions: Sequence[int]
    records: dict[str, int]
    promises: Sequence[PromiseReport]
    outcomes: dict[str, int]
    violations: dict[str, int]
    findings: Sequence[Finding]
    findings_left_out: int
    notes: Sequence[str]

    @property
    def is_clean(self) -> bool:
        """Whether no promise was found broken."""
        return not self.violations


class Auditor:
    """One audit; `facts` is its own and empty. `on_progress` hears (what, done, all)."""

    def __init__(
        self, request: AuditRequest, outside: AuditOutside, facts: FactStore, *, on_progress: Progress
    ) -> None:
        self._request = request
        self._outside = outside
        self._facts = facts
        self._on_progress = on_progress
        self._tally = Tally(request.findings_max)
        self._records: Counter[str] = Counter()
        self._notes: list[str] = []

    async def run(self) -> AuditReport:
        """Read and judge; changes nothing.

        Raises `TopicMismatchError` (a topic is missing, partition counts differ), `UsageError` (no such partition),
        `UnavailableError`.
        """
        request, topics = self._request, self._request.topics
        at_ms = self._outside.clock.now_ms()
        identity = await self._identify()
        partitions = self._partitions(identity)
        ledgers: Mapping[int, LedgerView] = {}
        if topics.applied in identity.topics:
            ledger = LedgerReading(request, self._outside, self._facts, self._tally, on_progress=self._on_progress)
            ledgers = await ledger.read(partitions, [name for name in topics.emitted_to if name in identity.topics])
            self._records[topics.applied] += ledger.records
            self._notes += ledger.notes
        for first in range(0, len(partitions), READ_AT_ONCE):
            some = partitions[first : first + READ_AT_ONCE]
            readings = [self._reading(partition, identity) for partition in some]
            views = await asyncio.gather(*(reading.read() for reading in readings))
            if await self._describe() != identity:
                raise UnavailableError("Topics were created anew or changed while they were read: verify again.")
            for partition, reading, view in zip(some, readings, views, strict=True):
                self._records.update(reading.log.records)
                self._notes += [f"partition {partition}: {note}" for note in reading.log.notes]
                self._judge(view, ledgers.get(partition), identity, 2 * sum(reading.log.records.values()))
        return self._report(at_ms, partitions)

    def _reading(self, partition: int, identity: ClusterIdentity) -> PartitionReading:
        return PartitionReading(
            partition, self._request, self._outside, self._facts, identity, self._tally, on_progress=self._on_progress
        )

    def _judge(self, view: "PartitionView", ledger: "LedgerView | None", identity: ClusterIdentity, facts: int) -> None:
        topics, codec = self._request.topics, self._outside.codec
        admission = AuditAdmission(
            codec,
            limits=self._request.limits,
            partition=view.partition,
            partition_count=identity.topics[topics.events].partition_count,
        )
        PartitionJudging(
            view,
            ledger,
            topics=topics,
            store=self._facts,
            codec=codec,
            admission=admission,
            tally=self._tally,
            on_judged=partial(self._told_judged, view.partition, facts),
        ).run()

    def _told_judged(self, partition: int, total: int, done: int) -> None:
        self._on_progress(f"Judging partition {partition}", done, total)

    async def _describe(self) -> ClusterIdentity:
        topics = self._request.topics
        own = [topics.events, topics.progress, topics.state, topics.due, topics.dead, topics.applied]
        return await self._outside.cluster.describe([*own, *topics.targets])

    async def _identify(self) -> ClusterIdentity:
        topics = self._request.topics
        needed = [topics.events, topics.state, topics.due, topics.dead]
        identity = await self._describe()
        missing = [name for name in needed if name not in identity.topics]
        if missing:
            raise TopicMismatchError(f"Topic {', '.join(missing)} does not exist: there is nothing to verify.")
        counts = {name: identity.topics[name].partition_count for name in needed}
        if len(set(counts.values())) > 1:
            raise TopicMismatchError(
                f"Partition counts differ ({counts}): records of one task lie in different partitions, and nothing "
                "can be verified until they are equal."
            )
        return identity

    def _partitions(self, identity: ClusterIdentity) -> list[int]:
        count = identity.topics[self._request.topics.events].partition_count
        wanted = self._request.partitions
        if wanted is None:
            return list(range(count))
        unknown = sorted(number for number in wanted if not 0 <= number < count)
        if unknown:
            raise UsageError(f"There is no partition {unknown[0]}: {self._request.topics.events} has {count}.")
        return sorted(set(wanted))

    def _report(self, at_ms: InstantMs, partitions: Sequence[int]) -> AuditReport:
        tally = self._tally
        broken: Counter[Promise] = Counter()
        for finding_code, count in tally.violations.items():
            broken[finding_code.promise] += count
        return AuditReport(
            at_ms=at_ms,
            partitions=partitions,
            records=dict(self._records),
            promises=[
                PromiseReport(
                    promise=promise,
                    checked=tally.checked[promise],
                    violations=broken[promise],
                    unprovable={
                        why.value: count for (about, why), count in tally.unprovable.items() if about is promise
                    },
                )
                for promise in Promise
            ],
            outcomes={outcome.value: count for outcome, count in sorted(tally.outcomes.items())},
            violations={code.value: count for code, count in sorted(tally.violations.items())},
            findings=tally.findings,
            findings_left_out=sum(tally.violations.values()) - len(tally.findings),
            notes=self._notes,
        )
