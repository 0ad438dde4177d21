"""Planted bugs: what is taken away from the real code, and the promise that must break then.

Each is a patch by text. Where the text is not found exactly once, the code has moved on: bring the mutant up to date.
The adapters are not simulated, so what they promise is taken away from their twins in `pipeline/testing`.

`docs/explanation/how-it-is-tested.md`, section "Planted bugs", has the table of the model's thirty-four removals, and
says what is not planted and why.
"""

from typing import Final

import msgspec

__all__ = ["MUTANTS", "Mutant"]


class Mutant(msgspec.Struct, frozen=True, kw_only=True):
    """One planted bug: `edits` are (file below `pipeline`, old text, new text); `breaks` the promises that count.

    `seeds`: how many simulations it may take to be caught, counted from seed 0.
    """

    name: str
    edits: tuple[tuple[str, str, str], ...]
    breaks: tuple[str, ...]
    seeds: int = 60


_FENCE: Final = "service/owner/fence.py"
_TENURE: Final = "service/owner/tenure.py"
_WORK: Final = "service/owner/work.py"
_ACQUIRE: Final = "service/owner/acquisition.py"
_RESTORE: Final = "service/owner/state_restore.py"
_OVERLAY: Final = "service/owner/overlay.py"
_OWNER: Final = "service/owner/partition_owner.py"
_TARGETS: Final = "service/owner/targets.py"
_CURSOR: Final = "service/owner/input_cursor.py"
_TURNS: Final = "service/owner/turns.py"
_LIFE: Final = "core/lifecycle.py"
_POSITIONS: Final = "core/positions.py"
_TASKS: Final = "core/tasks.py"
_FIRING: Final = "core/firing.py"
_EFFECTS: Final = "core/effects.py"
_SESSION: Final = "service/consumer/partition_session.py"
_HANDLING: Final = "service/consumer/task_handling.py"
_BATCH: Final = "service/consumer/batch.py"
_LEDGER: Final = "service/consumer/ledger_restore.py"
_APPLIED: Final = "core/applied.py"
_READERS: Final = "testing/memory_readers.py"
_TWIN_OWNER: Final = "testing/simulated_owner.py"
_TWIN_CONSUMER: Final = "testing/memory_consumers.py"
_NEMESIS: Final = "testing/simulator/nemesis.py"
_WORLD: Final = "testing/simulator/world.py"

_FENCE_MUTANTS: Final = (
    Mutant(
        name="no fence",
        edits=((_FENCE, "return self._reading if position >= self._reading.target else None", "return self._reading"),),
        breaks=("G4",),
    ),
    Mutant(
        name="fence on the last stable offset",
        edits=(
            (
                _READERS,
                """\
        end = self._log(topic, partition).end_offset
""",
                """\
        log = self._log(topic, partition)
        end = log.last_stable_offset if topic == "task-events" else log.end_offset
""",
            ),
        ),
        breaks=("G4",),
    ),
    Mutant(
        name="end asked for before the clock is read",
        edits=(
            (
                _FENCE,
                """\
            clock_ms = self._clock.now_ms()
            target = await self._ask()
""",
                """\
            target = await self._ask()
            clock_ms = self._clock.now_ms()
""",
            ),
        ),
        breaks=("G4",),
    ),
    Mutant(
        name="clock read again when the fence is passed",
        edits=(
            (
                _FENCE,
                "return self._reading if position >= self._reading.target else None",
                """\
reading = FenceReading(clock_ms=self._clock.now_ms(), target=self._reading.target)
        return reading if position >= reading.target else None""",
            ),
        ),
        breaks=("G4",),
    ),
    Mutant(
        name="fired before the inputs of the batch are applied",
        edits=(
            (
                _TENURE,
                """\
        work.apply(inputs.records, self._admit)
        if turn.timers_max:
            await self._fire(work, inputs.end_position, turn.timers_max)
""",
                """\
        if turn.timers_max:
            await self._fire(work, inputs.end_position, turn.timers_max)
        work.apply(inputs.records, self._admit)
""",
            ),
        ),
        breaks=("G4",),
    ),
    Mutant(
        name="due list without the batch in hand",
        edits=(
            (
                _WORK,
                """\
        changed = self.overlay.changed
""",
                """\
        changed = {}
""",
            ),
        ),
        breaks=(
            "G4",
            "bug",
        ),
    ),
    Mutant(
        name="reading of the fence kept after firing",
        edits=(
            (
                _TENURE,
                """\
            self._fence.drop()
""",
                """\
            pass
""",
            ),
        ),
        breaks=(
            "G2",
            "G1, G2",
        ),
    ),
    Mutant(
        name="written fence asks instead of writing",
        edits=(
            (_TWIN_OWNER, "self._written_target if fence_by_writing else self._asked_target", "self._asked_target"),
        ),
        breaks=("G4",),
        seeds=200,
    ),
    Mutant(
        name="written fence taken for passed where the last one was",
        edits=(
            (
                _TWIN_OWNER,
                """\
        return Offset(entry.offset + 1)
""",
                """\
        last, self._last = getattr(self, "_last", 0), entry.offset + 1
        return Offset(last)
""",
            ),
            (
                _FENCE,
                """\
            if position > target:
""",
                """\
            if False:
""",
            ),
        ),
        breaks=("G4",),
    ),
)

_OWNERSHIP: Final = (
    Mutant(
        name="fences after the end was captured",
        edits=(
            (
                _ACQUIRE,
                """\
            await transaction.acquire()
            table, owned = await self._restore(transaction, identity)
""",
                """\
            table, owned = await self._restore(transaction, identity)
            await transaction.acquire()
""",
            ),
            (_TENURE, "self._is_restore_proven = False", "self._is_restore_proven = True"),
        ),
        breaks=(
            "G5",
            "G7",
            "G4",
            "G1",
            "G2",
            "G1, G2",
        ),
    ),
    Mutant(
        name="restore not proven by the first record",
        edits=((_TENURE, "self._is_restore_proven = False", "self._is_restore_proven = True"),),
        breaks=(
            "G5",
            "G7",
            "G1",
            "G4",
        ),
    ),
    Mutant(
        name="restore proven after the first commit",
        edits=(
            (
                _TENURE,
                """\
                self._prove_restore(raw)
""",
                """\
                pass
""",
            ),
            (
                _TENURE,
                """\
        self._is_restore_proven = True
""",
                """\
        if not self._is_restore_proven and committed.last_state_offset != self._owned.state_position:
            raise RetryableError("restored too short")
        self._is_restore_proven = True
""",
            ),
        ),
        breaks=(
            "G5",
            "G1",
        ),
    ),
    Mutant(
        name="transactional.id of the process",
        edits=(
            (
                _ACQUIRE,
                'f"duetasks-{state_id}-{settings.partition}")',
                'f"duetasks-{state_id}-{settings.partition}-{settings.owner}")',
            ),
            (_TENURE, "self._is_restore_proven = False", "self._is_restore_proven = True"),
        ),
        breaks=(
            "G5",
            "G7",
            "G4",
            "G1",
        ),
    ),
    Mutant(
        name="transactional.id of the deployment",
        edits=(
            (
                _ACQUIRE,
                'f"duetasks-{state_id}-{settings.partition}")',
                "f\"duetasks-{settings.partition}-{settings.owner.partition('.')[0]}\")",
            ),
            (_TENURE, "self._is_restore_proven = False", "self._is_restore_proven = True"),
        ),
        breaks=(
            "G5",
            "G7",
            "G4",
            "G1",
        ),
    ),
    Mutant(
        name="membership not proved",
        edits=(
            (
                _ACQUIRE,
                """\
        await outside.membership.prove(settings.partition)
""",
                "",
            ),
        ),
        breaks=("G2",),
    ),
    Mutant(
        name="stops for good when fenced",
        edits=(
            (
                _OWNER,
                """\
        except (FencedError, UnknownOutcomeError, UnavailableError, RetryableError) as error:
""",
                """\
        except FencedError:
            self._stop.set()
        except (UnknownOutcomeError, UnavailableError, RetryableError) as error:
""",
            ),
        ),
        breaks=("G2",),
    ),
    Mutant(
        name="stops for good after an unknown outcome",
        edits=(
            (
                _OWNER,
                """\
        except (FencedError, UnknownOutcomeError, UnavailableError, RetryableError) as error:
""",
                """\
        except UnknownOutcomeError:
            self._stop.set()
        except (FencedError, UnavailableError, RetryableError) as error:
""",
            ),
        ),
        breaks=("G2",),
    ),
    Mutant(
        name="no heartbeat",
        edits=(
            (
                _TENURE,
                """\
        if idle and silent_ms < self._settings.heartbeat_interval_ms:
""",
                """\
        if idle and silent_ms < 3_600_000:
""",
            ),
            (
                _TENURE,
                """\
        wait_ms = min(IDLE_WAIT_MS_MAX, max(0, heartbeat))
""",
                """\
        wait_ms = min(IDLE_WAIT_MS_MAX, max(100, heartbeat))
""",
            ),
        ),
        breaks=("claim",),
    ),
)

_COMMITS: Final = (
    Mutant(
        name="table written before the commit",
        edits=(
            (
                _TENURE,
                """\
        committed = await transaction.commit()
""",
                """\
        before = TableMeta(positions=positions, state_position=self._owned.state_position)
        self._owned.table.write(rows, encode_meta(before, self._outside.codec))
        committed = await transaction.commit()
""",
            ),
        ),
        breaks=(
            "G7",
            "G5",
            "G4",
            "G2",
            "G1",
            "G1, G2",
            "bug",
        ),
    ),
    Mutant(
        name="unknown outcome sent again",
        edits=(
            (
                _TENURE,
                """\
        except RetryableError as error:
            self._try_again(error)
""",
                """\
        except (RetryableError, UnknownOutcomeError) as error:
            self._try_again(error)
""",
            ),
            (
                _TENURE,
                """\
from pipeline.errors import PoisonedBatchError, RetryableError, UnavailableError
""",
                """\
from pipeline.errors import PoisonedBatchError, RetryableError, UnavailableError, UnknownOutcomeError
""",
            ),
        ),
        breaks=("G5",),
    ),
    Mutant(
        name="unknown outcome taken for committed",
        edits=(
            (
                _TENURE,
                """\
        committed = await transaction.commit()
""",
                """\
        from pipeline.errors import UnknownOutcomeError
        from pipeline.ports import Commit
        try:
            committed = await transaction.commit()
        except UnknownOutcomeError:
            committed = Commit(last_state_offset=self._owned.state_position, last_offsets={})
""",
            ),
        ),
        breaks=(
            "G1",
            "G7",
            "G5",
            "G1, G2",
            "G4",
        ),
    ),
    Mutant(
        name="emission outside of the transaction",
        edits=(
            (
                _TENURE,
                """\
            self._produce_emissions(work.emissions)
""",
                """\
            self._produce_emissions(work.emissions)
            if work.emissions:
                await transaction.commit()
                transaction.begin()
""",
            ),
        ),
        breaks=(
            "G5",
            "G4",
        ),
    ),
    Mutant(
        name="positions not in the transaction",
        edits=(
            (
                _TENURE,
                """\
            transaction.produce_last(POSITIONS_KEY, raw)
""",
                """\
            stale = self._outside.codec.encode_positions(self._first)
            transaction.produce_last(POSITIONS_KEY, stale)
""",
            ),
            (
                _TENURE,
                """\
        self._is_restore_proven = False
""",
                """\
        self._is_restore_proven = False
        self._first = owned.positions
""",
            ),
        ),
        breaks=(
            "G1",
            "G5",
        ),
    ),
    Mutant(
        name="input advanced though the commit failed",
        edits=(
            (
                _TENURE,
                """\
        except RetryableError as error:
            self._try_again(error)
""",
                """\
        except RetryableError as error:
            self._try_again(error)
            self._cursor.advance(inputs)
""",
            ),
        ),
        breaks=(
            "G1",
            "G4",
            "G1, G2",
            "G6",
            "audit",
        ),
        seeds=150,
    ),
    Mutant(
        name="recent rows noted before the commit",
        edits=(
            (
                _TENURE,
                """\
        self._recent.note(work.overlay.changed, self._outside.clock.now_ms())
""",
                "",
            ),
            (
                _TENURE,
                """\
        committed = await transaction.commit()
""",
                """\
        self._recent.note(work.overlay.changed, self._outside.clock.now_ms())
        committed = await transaction.commit()
""",
            ),
        ),
        breaks=(
            "G1",
            "G2",
            "G4",
            "G7",
            "G1, G2",
            "bug",
        ),
    ),
    Mutant(
        name="recent rows never replaced",
        edits=(
            (
                _OVERLAY,
                """\
            rows.pop(task_id, None)
""",
                "",
            ),
        ),
        breaks=(
            "G4",
            "G5",
            "G2",
            "bug",
            "G1",
        ),
    ),
    Mutant(
        name="tombstone not sent",
        edits=(
            (
                _TENURE,
                "[(row.task_id.encode(), row.value) for row in rows])",
                "[(row.task_id.encode(), row.value) for row in rows if row.value is not None])",
            ),
        ),
        breaks=("G7",),
    ),
    Mutant(
        name="offset of an emission not checked",
        edits=(
            (
                _TENURE,
                """\
            first, last = self._targets.expect(topic, len(outs))
""",
                """\
            first, last = None, None
""",
            ),
        ),
        breaks=("G4",),
    ),
    Mutant(
        name="offset of an emission kept after an abort",
        edits=(
            (
                _TARGETS,
                """\
            self._next[topic] = UNKNOWN_OFFSET
""",
                """\
            pass
""",
            ),
            (
                _TENURE,
                """\
            first, last = self._targets.expect(topic, len(outs))
""",
                """\
            first, last = None, None
""",
            ),
        ),
        breaks=("G4",),
    ),
)

_RESTORES: Final = (
    Mutant(
        name="restore by the last record seen",
        edits=(
            (
                _READERS,
                """\
            if stable == position:
""",
                """\
            if not entries:
""",
            ),
            (
                _READERS,
                """\
            position = stable
""",
                """\
            position = Offset(entries[-1].offset + 1)
""",
            ),
        ),
        breaks=("G2",),
    ),
    Mutant(
        name="local table trusted without a restore",
        edits=(
            (
                _ACQUIRE,
                """\
            positions, position = await self._replay(table, meta, end, stamp_ms)
""",
                """\
            positions, position = (
                (meta.positions, end) if meta is not None else await self._replay(table, None, end, stamp_ms)
            )
""",
            ),
        ),
        breaks=(
            "G5",
            "G7",
            "G1",
            "G2",
            "G4",
            "bug",
        ),
    ),
    Mutant(
        name="restore to the last stable offset",
        edits=(
            (
                _READERS,
                """\
        end = self._log(topic, partition).end_offset
""",
                """\
        log = self._log(topic, partition)
        end = log.last_stable_offset if topic == "task-state" else log.end_offset
""",
            ),
            (_TENURE, "self._is_restore_proven = False", "self._is_restore_proven = True"),
        ),
        breaks=(
            "G5",
            "G7",
            "G1",
            "G4",
        ),
    ),
    Mutant(
        name="tombstones of a restore ignored",
        edits=(
            (
                _RESTORE,
                """\
        if old is None and new is None:
""",
                """\
        if new is None:
""",
            ),
        ),
        breaks=(
            "G7",
            "G5",
        ),
    ),
    Mutant(
        name="positions of a restore not taken over",
        edits=(
            (
                _RESTORE,
                "positions = positions if found is None else found",
                "positions = found if positions is None else positions",
            ),
        ),
        breaks=(
            "G1",
            "G2",
            "G5",
        ),
    ),
    Mutant(
        name="index entry not dropped in a restore",
        edits=(
            (
                _RESTORE,
                "        rows.append(TableRow(task_id, new, drop, add))",
                "        rows.append(TableRow(task_id, new, None, add))",
            ),
        ),
        breaks=("G2",),
    ),
    Mutant(
        name="index entry not dropped on a change",
        edits=(
            (
                _OVERLAY,
                "None if after is None else encode(after), drop, add)",
                "None if after is None else encode(after), None, add)",
            ),
        ),
        breaks=("G2",),
    ),
    Mutant(
        name="index entry not added on a change",
        edits=(
            (
                _OVERLAY,
                "None if after is None else encode(after), drop, add)",
                "None if after is None else encode(after), drop, None)",
            ),
        ),
        breaks=("G2",),
    ),
    Mutant(
        name="unreadable table not put aside",
        edits=(
            (
                _OWNER,
                """\
            self._put_aside(str(error))
""",
                """\
            pass
""",
            ),
            (
                _ACQUIRE,
                """\
        except CorruptStateError as error:
            place = self._outside""",
                """\
        except ZeroDivisionError as error:
            place = self._outside""",
            ),
        ),
        breaks=("G2",),
    ),
    Mutant(
        name="age of the table not checked",
        edits=(
            (
                _POSITIONS,
                """\
    if now_ms - local.stamp_ms > offline_max_ms:
""",
                """\
    if False:
""",
            ),
            (
                _ACQUIRE,
                "until_ms=InstantMs(good_ms + self._settings.offline_max_ms),",
                "until_ms=InstantMs(2**62),",
            ),
        ),
        breaks=(
            "G7",
            "G5",
            "G1",
        ),
    ),
    Mutant(
        name="tombstones cleaned away too early",
        edits=(
            (
                _WORLD,
                "delete_retention_ms=self._deletions_kept_ms)",
                "delete_retention_ms=0)",
            ),
        ),
        breaks=(
            "G7",
            "G5",
        ),
        seeds=150,
    ),
)

_INPUTS: Final = (
    Mutant(
        name="positions from the group, committed after",
        edits=(
            (
                _ACQUIRE,
                """\
        place = resume_input(recorded, identity.topics[topic].topic_id)
""",
                """\
        place = resume_input(recorded, identity.topics[topic].topic_id)
        told = await outside.membership.committed(settings.partition)
        place = msgspec.structs.replace(place, position=told or Offset(0))
""",
            ),
        ),
        breaks=(
            "G1",
            "G5",
            "G2",
        ),
    ),
    Mutant(
        name="positions from the group, committed early",
        edits=(
            (
                _ACQUIRE,
                """\
        place = resume_input(recorded, identity.topics[topic].topic_id)
""",
                """\
        place = resume_input(recorded, identity.topics[topic].topic_id)
        told = await outside.membership.committed(settings.partition)
        place = msgspec.structs.replace(place, position=told or Offset(0))
""",
            ),
            (
                _TENURE,
                """\
        position = self._owned.positions.inputs[settings.events_topic].position
""",
                """\
        position = self._cursor._fetched
""",
            ),
        ),
        breaks=(
            "G1",
            "G5",
            "G2",
        ),
    ),
    Mutant(
        name="group told more than the table has",
        edits=(
            (
                _TENURE,
                """\
        position = self._owned.positions.inputs[settings.events_topic].position
""",
                """\
        position = self._cursor._fetched
""",
            ),
        ),
        breaks=("G1",),
    ),
    Mutant(
        name="group told with each cycle",
        edits=(
            (
                _TENURE,
                "        inputs = self._cursor.peek(",
                """\
        await self._outside.membership.commit(self._settings.partition, self._cursor._fetched)
        inputs = self._cursor.peek(""",
            ),
        ),
        breaks=("G1",),
    ),
    Mutant(
        name="events compacted before they are read",
        edits=(
            (
                _WORLD,
                "self.cluster.log(EVENTS, partition).compact(before=position)",
                "self.cluster.log(EVENTS, partition).compact()",
            ),
        ),
        breaks=(
            "G1",
            "G4",
            "G5",
            "G1, G2",
        ),
        seeds=60,
    ),
    Mutant(
        name="events expired before they are read",
        edits=(
            (
                _NEMESIS,
                "world.cluster.log(EVENTS, partition).delete_before(world.position(partition))",
                ("world.cluster.log(EVENTS, partition).delete_before(world.cluster.log(EVENTS, partition).end_offset)"),
            ),
        ),
        breaks=(
            "G1",
            "G2",
            "G1, G2",
            "G4",
        ),
    ),
    Mutant(
        name="generation is a count",
        edits=(
            (
                _LIFE,
                """\
        generation=generation,
        version=version,""",
                """\
        generation=(state.generation if state else 0) + 1,
        version=version,""",
            ),
        ),
        breaks=("G5",),
    ),
    Mutant(
        name="generation of the offset alone",
        edits=((_POSITIONS, "generation_base=recorded.generation_base + recorded.position", "generation_base=0"),),
        breaks=(
            "G5",
            "G1",
            "G1, G2",
        ),
    ),
    Mutant(
        name="input topic taken for the old one",
        edits=(
            (
                _POSITIONS,
                """\
    if recorded.topic_id == topic_id:
        return recorded
""",
                """\
    if recorded.topic_id:
        return InputPosition(
            topic_id=topic_id, position=recorded.position, generation_base=recorded.generation_base
        )
""",
            ),
        ),
        breaks=(
            "G1",
            "G2",
            "G1, G2",
        ),
    ),
    Mutant(
        name="input skipped over without notice",
        edits=(
            (
                _CURSOR,
                """\
            if batch.start_position != self._fetched:
""",
                """\
            if False:
""",
            ),
            (
                _READERS,
                "        batch = InputBatch(start_position=self._position,",
                """\
        entries = entries[1:] if self._position % 11 == 10 else entries
        batch = InputBatch(start_position=Offset(self._position + (self._position % 11 == 10)),""",
            ),
        ),
        breaks=(
            "G1",
            "G1, G2",
            "G4",
        ),
    ),
    Mutant(
        name="refusal without a dead record",
        edits=(
            (
                _WORK,
                """\
        self._set_aside(rejection.reason, rejection.message, self._origin(record), key, value, rejection.task_id or "")
""",
                "",
            ),
        ),
        breaks=("G1",),
    ),
    Mutant(
        name="dead record without its origin",
        edits=(
            (
                _WORK,
                """\
            origin=origin,
            key=key,""",
                """\
            origin=Origin(topic="", partition=0, offset=Offset(-1), append_at_ms=InstantMs(0)),
            key=key,""",
            ),
        ),
        breaks=("G1",),
    ),
    Mutant(
        name="stray taken in",
        edits=(
            (
                _WORK,
                "return keys_of_other_partitions(new, self._settings.partition, self._partition_count)",
                "return frozenset()",
            ),
        ),
        breaks=(
            "G5",
            "G1",
        ),
    ),
    Mutant(
        name="strays told by another partitioner",
        edits=(
            (
                _WORK,
                "return keys_of_other_partitions(new, self._settings.partition, self._partition_count)",
                "return frozenset(key for key in new if sum(key) % self._partition_count != self._settings.partition)",
            ),
        ),
        breaks=(
            "G1",
            "G1, G2",
        ),
    ),
    Mutant(
        name="poisoned record never set aside",
        edits=(
            (
                _TENURE,
                """\
            self._quarantine = Quarantine(task_id=next(iter(work.overlay.changed)), message=str(error))
""",
                """\
            pass
""",
            ),
        ),
        breaks=(
            "G2",
            "G1, G2",
            "stuck",
        ),
    ),
    Mutant(
        name="refused transaction not halved",
        edits=(
            (
                _TURNS,
                """\
        half = max(1, items // 2)
""",
                """\
        half = items
""",
            ),
        ),
        breaks=(
            "G2",
            "G1, G2",
        ),
    ),
)

_RULES: Final = (
    Mutant(
        name="cancel does nothing",
        edits=(
            (
                _LIFE,
                """\
    if move.to is Status.CANCELLED and state.status is not Status.CANCELLED:
""",
                """\
    if False:
""",
            ),
        ),
        breaks=("G4",),
    ),
    Mutant(
        name="cancel of what has fired is taken for one in time",
        edits=(
            (
                _LIFE,
                "    (Status.EMITTED, Trigger.CANCEL): _too_late(Status.EMITTED),",
                ("    (Status.EMITTED, Trigger.CANCEL): Move(to=Status.CANCELLED, verdict=Verdict.CANCELLED),"),
            ),
        ),
        breaks=("G4",),
    ),
    Mutant(
        name="versioned cancel of an unknown task forgotten",
        edits=(
            (
                _LIFE,
                """\
        if not event.version:
            return Transition(None, move.verdict)
""",
                """\
        if True:
            return Transition(None, move.verdict)
""",
            ),
        ),
        breaks=("G4",),
    ),
    Mutant(
        name="one event id remembered",
        edits=((_TASKS, "EVENT_HASHES_MAX: Final = 16", "EVENT_HASHES_MAX: Final = 1"),),
        breaks=(
            "G5",
            "G4",
        ),
    ),
    Mutant(
        name="event ids not remembered at all",
        edits=(
            (
                _LIFE,
                """\
    if state is not None and digest and has_seen(state.event_hashes, digest):
""",
                """\
    if False:
""",
            ),
        ),
        breaks=(
            "G5",
            "G4",
        ),
    ),
    Mutant(
        name="event ids forgotten on a reschedule",
        edits=(
            (
                _LIFE,
                "event_hashes=digest if state is None else _remember(state.event_hashes, digest),",
                "event_hashes=digest,",
            ),
        ),
        breaks=(
            "G5",
            "G4",
            "audit",
        ),
    ),
    Mutant(
        name="late cancel does not raise the version",
        edits=(
            (
                _LIFE,
                """\
    return _noted(state, event, origin, digest, version, move.verdict)


def _memory""",
                """\
    return _noted(state, event, origin, digest, state.version, move.verdict)


def _memory""",
            ),
        ),
        breaks=("G4",),
    ),
    Mutant(
        name="refused event does not raise the version",
        edits=(
            (
                _LIFE,
                """\
        version=max(state.version, rejection.version),
""",
                "",
            ),
        ),
        breaks=("G4",),
        seeds=150,
    ),
    Mutant(
        name="version forgotten by an event without one",
        edits=(
            (
                _LIFE,
                """\
    version = max(known, event.version)
""",
                """\
    version = event.version
""",
            ),
        ),
        breaks=("G4",),
    ),
    Mutant(
        name="stale schedule accepted",
        edits=(
            (
                _LIFE,
                """\
        if event.version and event.version <= known:
""",
                """\
        if False:
""",
            ),
        ),
        breaks=("G4",),
    ),
    Mutant(
        name="stale cancel accepted",
        edits=(
            (
                _LIFE,
                """\
    if event.version and event.version < known:
""",
                """\
    if False:
""",
            ),
        ),
        breaks=("G1, G2",),
    ),
    Mutant(
        name="equal versions by the order of the log",
        edits=(
            (
                _LIFE,
                """\
        if event.version and event.version <= known:
""",
                """\
        if event.version and event.version < known:
""",
            ),
        ),
        breaks=(
            "G4",
            "G1, G2",
        ),
    ),
    Mutant(
        name="cancel of an equal version loses",
        edits=(
            (
                _LIFE,
                """\
    if event.version and event.version < known:
""",
                """\
    if event.version and event.version <= known:
""",
            ),
        ),
        breaks=("G4",),
    ),
    Mutant(
        name="delay counted from the second",
        edits=(
            (
                _LIFE,
                "InstantMs(origin.append_at_ms + event.delay_ms)",
                "InstantMs(origin.append_at_ms // 1000 * 1000 + event.delay_ms)",
            ),
        ),
        breaks=("G1",),
    ),
    Mutant(
        name="content of the schedule before",
        edits=(
            (
                _LIFE,
                """\
        payload=event.payload,
""",
                """\
        payload=state.payload if state is not None and state.payload else event.payload,
""",
            ),
        ),
        breaks=("G1",),
    ),
    Mutant(
        name="bucket rounding fires early",
        edits=(
            (
                _TASKS,
                "    return IndexEntry(state.wake_at_ms, ",
                "    return IndexEntry(InstantMs(state.wake_at_ms // 1000 * 1000), ",
            ),
            (_LIFE, "    assert state.due_at_ms <= fired_at_ms,", "    assert fired_at_ms,"),
            (_LIFE, "    assert state.wake_at_ms <= now_ms,", "    assert now_ms,"),
        ),
        breaks=("G3",),
    ),
    Mutant(
        name="owner's own check against early fires in the way of rounding",
        edits=(
            (
                _TASKS,
                "    return IndexEntry(state.wake_at_ms, ",
                "    return IndexEntry(InstantMs(state.wake_at_ms // 1000 * 1000), ",
            ),
        ),
        breaks=("bug",),
    ),
    Mutant(
        name="fires half a second early",
        edits=(
            (
                _FIRING,
                "entry for entry in indexed if entry.at_ms <= now_ms and",
                "entry for entry in indexed if entry.at_ms <= now_ms + 500 and",
            ),
            (
                _WORK,
                "self._table.due(reading.clock_ms, limit",
                "self._table.due(InstantMs(reading.clock_ms + 500), limit",
            ),
            (_LIFE, "    assert state.due_at_ms <= fired_at_ms,", "    assert fired_at_ms,"),
            (_LIFE, "    assert state.wake_at_ms <= now_ms,", "    assert now_ms,"),
        ),
        breaks=("G3",),
    ),
    Mutant(
        name="tick of a second that can be missed",
        edits=(
            (
                _FIRING,
                "entry for entry in indexed if entry.at_ms <= now_ms and",
                "entry for entry in indexed if now_ms - 1000 < entry.at_ms <= now_ms and",
            ),
        ),
        breaks=(
            "G1, G2",
            "G2",
        ),
    ),
    Mutant(
        name="what became due in the batch in hand is not fired",
        edits=(
            (
                _FIRING,
                """\
    if fresh:
""",
                """\
    if False:
""",
            ),
            (
                _FIRING,
                "and entry.task_id not in changed]",
                "and entry.task_id not in changed and entry.at_ms > now_ms - 2000]",
            ),
        ),
        breaks=(
            "G1, G2",
            "G2",
        ),
    ),
    Mutant(
        name="finished tasks forgotten at once",
        edits=(
            (
                _LIFE,
                """\
        wake_at_ms=InstantMs(at_ms + retention_ms),
        changed_at_ms=at_ms,""",
                """\
        wake_at_ms=at_ms,
        changed_at_ms=at_ms,""",
            ),
        ),
        breaks=(
            "G4",
            "G5",
        ),
    ),
    Mutant(
        name="cancelled task forgotten before its due time",
        edits=(
            (
                _LIFE,
                "InstantMs(max(origin.append_at_ms, state.due_at_ms) + retention_ms)",
                "InstantMs(origin.append_at_ms + retention_ms)",
            ),
        ),
        breaks=("G4",),
    ),
    Mutant(
        name="bound of a transaction ignored",
        edits=(
            (_CURSOR, "batch.records[skip : skip + records_max - len(taken)]", "batch.records[skip:]"),
            (_CURSOR, "    if whole <= bytes_max:\n", "    if True:\n"),
        ),
        breaks=("bound",),
    ),
    Mutant(
        name="bound of a firing ignored",
        edits=(
            (
                _WORK,
                """\
        planned = plan_due(indexed, changed, reading.clock_ms, limit + 1)
""",
                """\
        limit = 10_000
        indexed = self._table.due(reading.clock_ms, limit)
        planned = plan_due(indexed, changed, reading.clock_ms, limit + 1)
""",
            ),
        ),
        breaks=("bound",),
    ),
)

_CONSUMERS: Final = (
    Mutant(
        name="offsets committed before the row",
        edits=(
            (
                _SESSION,
                """\
            row_offsets = self._transaction.commit(batch)
""",
                """\
            self._transaction.commit(LedgerBatch(rows=(), dead=(), outputs=(), position=batch.position))
            row_offsets = self._transaction.commit(batch)
""",
            ),
        ),
        breaks=("G6",),
    ),
    Mutant(
        name="ledger not asked",
        edits=(
            (
                _SESSION,
                "return self._batch.holds(digest) or self._table.contains(digest)",
                "return self._batch.holds(digest)",
            ),
        ),
        breaks=("G6",),
    ),
    Mutant(
        name="batch in hand not asked",
        edits=(
            (
                _SESSION,
                "return self._batch.holds(digest) or self._table.contains(digest)",
                "return self._table.contains(digest)",
            ),
        ),
        breaks=("G6",),
    ),
    Mutant(
        name="ledger restored to the last stable offset",
        edits=(
            (
                _TWIN_CONSUMER,
                "return LedgerBounds(start=log.start_offset, end=log.end_offset)",
                "return LedgerBounds(start=log.start_offset, end=log.last_stable_offset)",
            ),
        ),
        breaks=("G6",),
        seeds=100,
    ),
    Mutant(
        name="rows of another group taken for ours",
        edits=((_APPLIED, 'f"{group}\\0{task.generation}', 'f"group\\0{task.generation}'),),
        breaks=("G6",),
        seeds=60,
    ),
    Mutant(
        name="group not proved",
        edits=(
            (
                _SESSION,
                """\
        self._subscription.prove(self.partition)
""",
                "",
            ),
        ),
        breaks=("G2",),
    ),
    Mutant(
        name="consumer takes an unknown commit for committed",
        edits=(
            (
                _SESSION,
                """\
            self._batch.shrink(error)
        else:
""",
                """\
            self._batch.shrink(error)
        except UnknownOutcomeError:
            self._note(batch, [self._table.position()] * len(batch.rows))
        else:
""",
            ),
        ),
        breaks=("G6",),
    ),
    Mutant(
        name="consumer sends again what may be committed",
        edits=(
            (
                _SESSION,
                """\
        except RetryableError as error:
            self._commit_tries += 1
""",
                """\
        except (RetryableError, UnknownOutcomeError) as error:
            self._commit_tries += 1
""",
            ),
        ),
        breaks=("G6",),
    ),
    Mutant(
        name="batch committed twice",
        edits=(
            (
                _BATCH,
                """\
        del self._handled[: len(part)]
""",
                """\
        self._twice = not getattr(self, "_twice", False)
        if not self._twice:
            del self._handled[: len(part)]
""",
            ),
        ),
        breaks=("G6",),
    ),
    Mutant(
        name="ledger's table written before the commit",
        edits=(
            (
                _SESSION,
                """\
            row_offsets = self._transaction.commit(batch)
""",
                """\
            digests = [handled.digest for handled in self._batch.part() if handled.digest is not None]
            self._table.write(TableRows(added=digests), self._table.position())
            row_offsets = self._transaction.commit(batch)
""",
            ),
        ),
        breaks=("G6",),
    ),
    Mutant(
        name="dead task without a row",
        edits=(
            (
                _HANDLING,
                """\
            digest=ledger_digest(key),
            row=(key, self._row(task, record, Outcome.FAILED)),
""",
                "",
            ),
        ),
        breaks=("G6",),
    ),
    Mutant(
        name="group moved over what is buffered",
        edits=(
            (
                _SESSION,
                "self._batch.transaction(None if self._queue else self._position)",
                "self._batch.transaction(self._position)",
            ),
        ),
        breaks=("G6",),
    ),
    Mutant(
        name="full buffer does not stop the fetching",
        edits=(
            (
                _SESSION,
                """\
            self._subscription.pause(self.partition)
""",
                "",
            ),
        ),
        breaks=("bound",),
    ),
    Mutant(
        name="outputs of a failed handler sent",
        edits=(
            (
                _HANDLING,
                """\
            handled = self.failed(record, task, f"{type(failure).__name__}: {failure}")
""",
                """\
            handled = msgspec.structs.replace(
                self.failed(record, task, str(failure)),
                outputs=(Output(topic="outputs", key=b"", value=task.emission_id.encode()),),
            )
""",
            ),
        ),
        breaks=("G6",),
    ),
)

MUTANTS: Final = (*_FENCE_MUTANTS, *_OWNERSHIP, *_COMMITS, *_RESTORES, *_INPUTS, *_RULES, *_CONSUMERS)
"""Every planted bug."""
