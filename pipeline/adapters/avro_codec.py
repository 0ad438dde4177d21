"""Avro single-object encoding of everything that travels: `C3 01`, 8-byte little-endian CRC-64-AVRO fingerprint, body.

Source: Avro specification 1.12, "Single-object encoding" and "Schema fingerprints". Fastavro does the hot path; the
tests hold it against the `avro` package. Decoding never raises on bad input: it returns a `Rejection`.
"""

import io
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

import fastavro
import msgspec
from fastavro.schema import fingerprint, parse_schema, to_parsing_canonical_form

from pipeline.core.effects import DeadTask, DueTask
from pipeline.core.events import Cancel, Event, Origin, Reason, Rejection, Schedule
from pipeline.core.positions import InputPosition, Positions
from pipeline.core.tasks import NO_HEADERS, Status, TaskState, Tracking, Verdict, VerdictEntry
from pipeline.errors import CorruptStateError
from pipeline.package_files import package_folder

__all__ = ["MAGIC", "SCHEMA_NAMES", "AvroCodec", "SchemaCoder", "load_schema"]

MAGIC: Final = b"\xc3\x01"
HEADER_BYTES: Final = 10
SCHEMA_NAMES: Final = (
    "TaskEvent",
    "TaskState",
    "Positions",
    "DueTask",
    "DeadTask",
    "TaskProgress",
    "AppliedTask",
)

_STATUS: Final[Mapping[str, Status]] = {status.value: status for status in Status}
_VERDICT: Final[Mapping[str, Verdict]] = {verdict.value: verdict for verdict in Verdict}


@cache
def load_schema(name: str) -> Any:  # noqa: ANN401  # a parsed schema is fastavro's own shape
    """The parsed schema of `schemas/<name>.avsc`."""
    return parse_schema(json.loads(Path(package_folder("schemas"), f"{name}.avsc").read_text("utf-8")))


class SchemaCoder:
    """Encodes and decodes one schema, as plain mappings."""

    def __init__(self, name: str) -> None:
        self.schema = load_schema(name)
        digest = fingerprint(to_parsing_canonical_form(self.schema), "CRC-64-AVRO")
        self.header = MAGIC + bytes.fromhex(digest)

    def encode(self, fields: Mapping[str, Any]) -> bytes:
        """The single-object encoding of `fields`; raises `ValueError` or `TypeError` if they don't fit the schema."""
        out = io.BytesIO()
        out.write(self.header)
        fastavro.schemaless_writer(out, self.schema, fields)
        return out.getvalue()

    def decode(self, value: bytes) -> dict[str, Any]:
        """The fields of a value that this schema wrote; raises `CorruptStateError` on anything else."""
        if value[:HEADER_BYTES] != self.header:
            raise CorruptStateError(f"not a {self.schema['name']}: it starts with {value[:HEADER_BYTES].hex()}")
        body = io.BytesIO(value)
        body.seek(HEADER_BYTES)
        try:
            fields = fastavro.schemaless_reader(body, self.schema, None)
        except (EOFError, ValueError, IndexError, UnicodeDecodeError, OverflowError, MemoryError) as error:
            raise CorruptStateError(
                f"a {self.schema['name']} of {len(value)} bytes can't be decoded: {error}"
            ) from error
        if body.tell() != len(value):
            raise CorruptStateError(f"a {self.schema['name']} has {len(value) - body.tell()} bytes too many")
        assert isinstance(fields, dict)
        return fields


class AvroCodec:
    """The codec port over Avro: values of the core to bytes and back. Stateless once built; safe to share."""

    def __init__(self) -> None:
        self._coders = {name: SchemaCoder(name) for name in SCHEMA_NAMES}
        self._event = self._coders["TaskEvent"]
        self._state = self._coders["TaskState"]
        self._positions = self._coders["Positions"]
        self._due = self._coders["DueTask"]
        self._dead = self._coders["DeadTask"]

    def coder(self, name: str) -> SchemaCoder:
        """The plain-mapping coder of one schema, for tools that read topics."""
        return self._coders[name]

    # -- events ------------------------------------------------------------------------------------------------

    def encode_event(self, event: Event) -> bytes:
        """The value of a `task-events` record."""
        if isinstance(event, Cancel):
            return self._event.encode(
                {
                    "event_id": event.event_id,
                    "task_id": event.task_id,
                    "type": "CANCEL",
                    "version": event.version,
                    "source": event.source,
                    "created_at_ms": event.created_at_ms,
                }
            )
        return self._event.encode(
            {
                "event_id": event.event_id,
                "task_id": event.task_id,
                "type": "SCHEDULE",
                "version": event.version,
                "due_at_ms": event.due_at_ms if event.due_at_ms is not None else 0,
                "delay_ms": event.delay_ms if event.delay_ms is not None else -1,
                "payload": event.payload,
                "content_type": event.content_type,
                "headers": event.headers,
                "target_topic": event.target_topic,
                "tracking": _tracking_fields(event.tracking),
                "source": event.source,
                "created_at_ms": event.created_at_ms,
            }
        )

    def decode_event(self, value: bytes) -> Event | Rejection:
        """The event in an Avro value, or why it is not one. JSON and other framings are told apart before this."""
        if value[:HEADER_BYTES] != self._event.header:
            return _unknown_encoding(value)
        try:
            fields = self._event.decode(value)
        except CorruptStateError as error:
            return Rejection(reason=Reason.MALFORMED, message=f"{error}: send a TaskEvent as schemas/ has it")
        if fields["type"] == "CANCEL":
            return Cancel(
                task_id=fields["task_id"],
                event_id=fields["event_id"],
                version=fields["version"],
                source=fields["source"],
                created_at_ms=fields["created_at_ms"],
            )
        tracking = fields["tracking"]
        return Schedule(
            task_id=fields["task_id"],
            event_id=fields["event_id"],
            version=fields["version"],
            due_at_ms=fields["due_at_ms"] or None,
            delay_ms=fields["delay_ms"] if fields["delay_ms"] != -1 else None,
            payload=fields["payload"],
            content_type=fields["content_type"],
            headers=fields["headers"] or NO_HEADERS,
            target_topic=fields["target_topic"],
            tracking=Tracking(**tracking) if tracking is not None else None,
            source=fields["source"],
            created_at_ms=fields["created_at_ms"],
        )

    # -- state -------------------------------------------------------------------------------------------------

    def encode_state(self, state: TaskState) -> bytes:
        """The value of a `task-state` record and of a row of the timer table."""
        return self._state.encode(
            {
                "task_id": state.task_id,
                "status": state.status,
                "generation": state.generation,
                "occurrence": state.occurrence,
                "attempt": state.attempt,
                "version": state.version,
                "due_at_ms": state.due_at_ms,
                "wake_at_ms": state.wake_at_ms,
                "changed_at_ms": state.changed_at_ms,
                "payload": state.payload,
                "content_type": state.content_type,
                "headers": state.headers,
                "target_topic": state.target_topic,
                "source": state.source,
                "created_at_ms": state.created_at_ms,
                "tracking": _tracking_fields(state.tracking),
                "event_hashes": state.event_hashes,
                "verdicts": [
                    {"event_id": v.event_id, "offset": v.offset, "verdict": v.verdict, "reason": v.reason}
                    for v in state.verdicts
                ],
                "fired_at_ms": state.fired_at_ms,
                "emitted_offset": state.emitted_offset,
            }
        )

    def decode_state(self, value: bytes) -> TaskState:
        """The state in a row; raises `CorruptStateError` if the bytes are not one."""
        fields = self._state.decode(value)
        fields["status"] = _STATUS[fields["status"]]
        fields["headers"] = fields["headers"] or NO_HEADERS
        fields["verdicts"] = tuple(
            VerdictEntry(event_id=v["event_id"], offset=v["offset"], verdict=_VERDICT[v["verdict"]], reason=v["reason"])
            for v in fields["verdicts"]
        )
        if fields["tracking"] is not None:
            fields["tracking"] = Tracking(**fields["tracking"])
        return TaskState(**fields)

    def encode_positions(self, positions: Positions) -> bytes:
        """The value of a positions record and of the table's meta."""
        return self._positions.encode(msgspec.to_builtins(positions))

    def decode_positions(self, value: bytes) -> Positions:
        """The positions in a record; raises `CorruptStateError` if the bytes are not one."""
        fields = self._positions.decode(value)
        fields["inputs"] = {name: InputPosition(**position) for name, position in fields["inputs"].items()}
        return Positions(**fields)

    # -- emissions ---------------------------------------------------------------------------------------------

    def encode_due(self, task: DueTask) -> bytes:
        """The value of a `due-tasks` record."""
        return self._due.encode(msgspec.structs.asdict(task))

    def decode_due(self, value: bytes) -> DueTask:
        """The due task in a record; raises `CorruptStateError` if the bytes are not one."""
        fields = self._due.decode(value)
        fields["headers"] = fields["headers"] or NO_HEADERS
        return DueTask(**fields)

    def encode_dead(self, task: DeadTask) -> bytes:
        """The value of a `dead-tasks` record."""
        fields = msgspec.structs.asdict(task)
        origin: Origin = fields.pop("origin")
        fields["origin_topic"] = origin.topic
        fields["origin_partition"] = origin.partition
        fields["origin_offset"] = origin.offset
        fields["origin_append_at_ms"] = origin.append_at_ms
        return self._dead.encode(fields)

    def decode_dead(self, value: bytes) -> DeadTask:
        """The dead task in a record; raises `CorruptStateError` if the bytes are not one."""
        fields = self._dead.decode(value)
        origin = Origin(
            topic=fields.pop("origin_topic"),
            partition=fields.pop("origin_partition"),
            offset=fields.pop("origin_offset"),
            append_at_ms=fields.pop("origin_append_at_ms"),
        )
        fields["reason"] = Reason(fields["reason"])
        return DeadTask(origin=origin, **fields)


def _tracking_fields(tracking: Tracking | None) -> dict[str, Any] | None:
    return None if tracking is None else msgspec.structs.asdict(tracking)


def _unknown_encoding(value: bytes) -> Rejection:
    if value[:2] == MAGIC and len(value) >= HEADER_BYTES:
        return Rejection(
            reason=Reason.UNKNOWN_SCHEMA,
            message=f"schema {value[2:HEADER_BYTES].hex()} is none of ours: send a TaskEvent as schemas/ has it",
        )
    return Rejection(
        reason=Reason.MALFORMED,
        message="neither Avro single-object encoding (C3 01 ...) nor JSON ({...}): see docs/reference/topics.md",
    )
