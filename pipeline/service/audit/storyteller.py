"""Collects the story of one task from the topics: what `duetasks why` prints.

Requests and emissions are told in the order in which the owner met them, then everything by its time.
"""

from collections import deque
from collections.abc import Sequence

import msgspec

from pipeline.core.events import Origin, Reason, Rejection
from pipeline.core.partitioning import partition_for_key
from pipeline.core.positions import InputPosition
from pipeline.core.rebuild import REPLAY_HEADER, Burial, Emission
from pipeline.core.story import Chapter, Narrator, What
from pipeline.core.tasks import Generation, InstantMs, Offset, TaskId, TaskState
from pipeline.errors import CorruptStateError, NotFoundError, TopicMismatchError
from pipeline.service.audit.admission import AuditAdmission
from pipeline.service.audit.facts import RefusalFact
from pipeline.service.audit.log import Progress
from pipeline.service.audit.ports import AuditOutside, AuditRequest
from pipeline.service.audit.story_reading import StoryReading, StoryRecords
from pipeline.service.recovery.ports import LogRecord

__all__ = ["Story", "Storyteller"]


class Story(msgspec.Struct, frozen=True, kw_only=True):
    """One task: its present row if there is one, the chapters in the order of their time, and what is out of reach."""

    task_id: TaskId
    partition: int
    state: TaskState | None
    chapters: Sequence[Chapter]
    notes: Sequence[str]


class Storyteller:
    """Tells the story of one task. `on_progress` hears (what, done, all)."""

    def __init__(self, task_id: TaskId, request: AuditRequest, outside: AuditOutside, *, on_progress: Progress) -> None:
        self._task_id = task_id
        self._key = task_id.encode()
        self._request = request
        self._outside = outside
        self._on_progress = on_progress
        self._notes: list[str] = []
        self._chapters: list[Chapter] = []

    async def tell(self) -> Story:
        """Read and tell; raises `NotFoundError` if nothing is known of it, `TopicMismatchError`, `UnavailableError`."""
        topics = self._request.topics
        identity = await self._outside.cluster.describe(
            [topics.events, topics.state, topics.dead, topics.applied, *topics.emitted_to]
        )
        if topics.events not in identity.topics or topics.state not in identity.topics:
            raise TopicMismatchError(f"Topic {topics.events} or {topics.state} does not exist: nothing can be told.")
        count = identity.topics[topics.events].partition_count
        partition = partition_for_key(self._key, count)
        reading = StoryReading(self._task_id, self._request, self._outside, on_progress=self._on_progress)
        found = await reading.read(partition, identity)
        self._notes += reading.notes
        state = self._state(found.row, partition)
        self._tell_requests(found, state, partition, count)
        self._tell_ledger(found, partition)
        if not self._chapters and state is None:
            raise NotFoundError(
                f"Nothing is known of task {self._task_id!r}: no topic has a record of it, or they have expired."
            )
        if state is not None and state.generation and found.place is not None:
            self._note_gone(state.generation - 1 - found.place.generation_base, found)
        chapters = sorted(self._chapters, key=lambda chapter: chapter.at_ms)
        return Story(
            task_id=self._task_id, partition=partition, state=state, chapters=chapters, notes=tuple(self._notes)
        )

    def _state(self, row: LogRecord | None, partition: int) -> TaskState | None:
        if row is None:
            return None
        topic = self._request.topics.state
        if row.value is None:
            self._add(row, What.FORGOTTEN, topic, partition, "finished long enough ago: nothing of it is remembered")
            return None
        try:
            return self._outside.codec.decode_state(row.value)
        except CorruptStateError as error:
            self._notes.append(f"its row, {topic}-{partition}@{row.offset}, can't be read: {error}")
            return None

    # -- telling -----------------------------------------------------------------------------------------------

    def _tell_requests(self, found: StoryRecords, state: TaskState | None, partition: int, count: int) -> None:
        """Events and emissions, in the order in which the owner met them."""
        place = found.place or InputPosition(topic_id="", position=Offset(0))
        narrator = Narrator(
            state,
            applied=place.position,
            generation_base=place.generation_base,
            retention_ms=self._request.retention_ms,
        )
        admission = AuditAdmission(
            self._outside.codec, limits=self._request.limits, partition=partition, partition_count=count
        )
        refusals = self._tell_dead(found, partition, narrator)
        emissions = self._tell_emissions(found, partition)
        for record in found.events:
            while emissions and emissions[0][0].position <= place.generation_base + record.offset:
                self._tell_emission(*emissions.popleft(), partition, narrator)
            self._chapters.append(self._event(record, refusals.get(record.offset), partition, admission, narrator))
        while emissions:
            self._tell_emission(*emissions.popleft(), partition, narrator)

    def _event(
        self,
        record: LogRecord,
        refusal: RefusalFact | None,
        partition: int,
        admission: AuditAdmission,
        narrator: Narrator,
    ) -> Chapter:
        origin = Origin(
            topic=self._request.topics.events,
            partition=partition,
            offset=Offset(record.offset),
            append_at_ms=InstantMs(record.timestamp),
        )
        if refusal is not None and refusal.append_at_ms != record.timestamp:
            refusal = None
        event = admission.judge(record, refusal)
        if isinstance(event, Rejection):
            return narrator.refusal(event, origin, What.UNREADABLE)
        return narrator.event(event, origin)

    def _tell_dead(self, found: StoryRecords, partition: int, narrator: Narrator) -> dict[int, RefusalFact]:
        """What was set aside; refusals are returned by the offsets of their events, whose chapters tell them."""
        topics = self._request.topics
        refusals: dict[int, RefusalFact] = {}
        for number, record, dead in found.dead:
            origin = dead.origin
            here = (origin.topic, origin.partition, dead.generation) == (topics.events, partition, 0)
            if here:
                refusals[origin.offset] = RefusalFact(
                    append_at_ms=origin.append_at_ms, reason=dead.reason, task_id=dead.task_id
                )
            elif dead.reason is Reason.UNDELIVERABLE and dead.generation:
                narrator.burial(
                    Burial(
                        task_id=self._task_id,
                        generation=Generation(dead.generation),
                        dead_at_ms=dead.dead_at_ms,
                        append_at_ms=InstantMs(record.timestamp),
                    )
                )
            why = f"{dead.reason}: {dead.message} (from {origin.topic}-{origin.partition}@{origin.offset})"
            self._add(record, What.SET_ASIDE, topics.dead, number, why)
        return refusals

    def _tell_emissions(self, found: StoryRecords, partition: int) -> deque[tuple[Emission, str, LogRecord]]:
        """Emissions in their order; copies are told at once."""
        emissions: list[tuple[Emission, str, LogRecord]] = []
        for topic, record in found.dues:
            try:
                task = self._outside.codec.decode_due(record.value or b"")
            except CorruptStateError as error:
                self._notes.append(f"{topic}-{partition}@{record.offset} can't be read: {error}")
                continue
            replay = dict(record.headers).get(REPLAY_HEADER)
            if replay is not None:
                why = f"generation {task.generation} once more, by replay {replay.decode(errors='replace')}"
                self._add(record, What.REPLAYED, topic, partition, why)
                continue
            name = "" if topic == self._request.topics.due else topic
            emissions.append((Emission(task=task, target_topic=name, offset=Offset(record.offset)), topic, record))
        return deque(sorted(emissions, key=lambda one: one[0].position))

    def _tell_emission(
        self, emission: Emission, topic: str, record: LogRecord, partition: int, narrator: Narrator
    ) -> None:
        self._add(record, What.EMITTED, topic, partition, narrator.emission(emission))

    def _tell_ledger(self, found: StoryRecords, partition: int) -> None:
        topic = self._request.topics.applied
        for record in found.applied:
            parts = (record.key or b"").split(b"\0", 3)
            if len(parts) != 4 or parts[3] != self._key:  # noqa: PLR2004  # group, generation, occurrence, task
                continue
            group, generation = parts[0].decode(errors="replace"), parts[1].decode(errors="replace")
            if record.value is None:
                why = f"group {group} was made to forget generation {generation}, so that it applies it again"
                self._add(record, What.LEDGER_FORGETS, topic, partition, why)
                continue
            try:
                row = self._outside.codec.decode_applied(record.value)
            except (CorruptStateError, ValueError) as error:
                self._notes.append(f"{topic}-{partition}@{record.offset} can't be read: {error}")
                continue
            why = f"by group {group}, generation {generation}, due record at offset {row.due_offset}"
            self._add(record, What(row.outcome), topic, partition, why)

    def _note_gone(self, offset: int, found: StoryRecords) -> None:
        if offset not in {record.offset for record in found.events}:
            self._notes.append(
                f"its schedule, {self._request.topics.events} offset {offset}, is gone by retention or compaction, or "
                "lies before --from"
            )

    def _add(self, record: LogRecord, what: What, topic: str, partition: int, why: str) -> None:
        self._chapters.append(
            Chapter(
                at_ms=InstantMs(record.timestamp),
                what=what,
                topic=topic,
                partition=partition,
                offset=record.offset,
                why=why,
            )
        )
