"""Avro single-object encoding of everything that travels: `C3 01`, 8-byte little-endian CRC-64-AVRO fingerprint, body.

Source: Avro specification 1.12, "Single-object encoding" and "Schema fingerprints". The values of the hot path are
written and read by `avro_bodies.py`, the others by fastavro; tests hold all of them against fastavro and the `avro`
package. Decoding an event never raises on bad input: it returns a `Rejection`.
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

from pipeline.adapters.avro_bodies import (
    FINGERPRINTS,
    decode_due_body,
    decode_event_body,
    decode_state_body,
    encode_due_body,
    encode_event_body,
    encode_state_body,
)
from pipeline.adapters.event_json import decode_json_event
from pipeline.core.effects import DeadTask, DueTask
from pipeline.core.events import Event, Origin, Reason, Rejection
from pipeline.core.positions import InputPosition, Positions
from pipeline.core.tasks import TaskState
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
        self.check_header(value)
        body = io.BytesIO(value)
        body.seek(HEADER_BYTES)
        try:
            fields = fastavro.schemaless_reader(body, self.schema, None)
        except (EOFError, ValueError, IndexError, OverflowError, MemoryError) as error:
            raise self.corrupt(value, error) from error
        if body.tell() != len(value):
            raise self.corrupt(value, f"it has {len(value) - body.tell()} bytes too many")
        assert isinstance(fields, dict)
        return fields

    def check_header(self, value: bytes) -> None:
        """Raise `CorruptStateError` unless `value` says that this schema wrote it."""
        if value[:HEADER_BYTES] != self.header:
            raise CorruptStateError(f"not a {self.schema['name']}: it starts with {value[:HEADER_BYTES].hex()}")

    def corrupt(self, value: bytes, fault: object) -> CorruptStateError:
        """The error for a value of this schema that can't be read."""
        return CorruptStateError(f"a {self.schema['name']} of {len(value)} bytes can't be decoded: {fault}")


class AvroCodec:
    """The codec port over Avro: values of the core to bytes and back. Stateless once built; safe to share."""

    def __init__(self) -> None:
        self._coders = {name: SchemaCoder(name) for name in SCHEMA_NAMES}
        for name, expected in FINGERPRINTS.items():
            found = self._coders[name].header[len(MAGIC) :].hex()
            assert found == expected, f"{name} was changed without avro_bodies.py: {found}, not {expected}"
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
        """The value of a `task-events` record; raises `ValueError` or `TypeError` if a field doesn't fit."""
        return encode_event_body(self._event.header, event)

    def decode_event(self, value: bytes) -> Event | Rejection:
        """The event in a `task-events` value, Avro or JSON, or why it is none; never raises, whatever the bytes."""
        if value[:HEADER_BYTES] != self._event.header:
            return _decode_other_framing(value)
        try:
            return decode_event_body(value, HEADER_BYTES)
        except (ValueError, IndexError) as error:
            message = f"a TaskEvent of {len(value)} bytes can't be decoded ({error}): send it as schemas/ has it"
            return Rejection(reason=Reason.MALFORMED, message=message)

    # -- state -------------------------------------------------------------------------------------------------

    def encode_state(self, state: TaskState) -> bytes:
        """The value of a `task-state` record and of a row of the timer table; raises `ValueError` or `TypeError`."""
        return encode_state_body(self._state.header, state)

    def decode_state(self, value: bytes) -> TaskState:
        """The state in a row; raises `CorruptStateError` if the bytes are not one."""
        self._state.check_header(value)
        try:
            return decode_state_body(value, HEADER_BYTES)
        except (ValueError, IndexError) as error:
            raise self._state.corrupt(value, error) from error

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
        """The value of a `due-tasks` record; raises `ValueError` or `TypeError` if a field doesn't fit."""
        return encode_due_body(self._due.header, task)

    def decode_due(self, value: bytes) -> DueTask:
        """The due task in a record; raises `CorruptStateError` if the bytes are not one."""
        self._due.check_header(value)
        try:
            return decode_due_body(value, HEADER_BYTES)
        except (ValueError, IndexError) as error:
            raise self._due.corrupt(value, error) from error

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
        try:
            fields["reason"] = Reason(fields["reason"])
        except ValueError as error:
            raise CorruptStateError(f"a dead task with an unknown reason code: {error}") from error
        return DeadTask(origin=origin, **fields)


def _decode_other_framing(value: bytes) -> Event | Rejection:
    if value[:1] == b"{":
        return decode_json_event(value)
    if value[:1] == b"\x00":
        return Rejection(
            reason=Reason.UNKNOWN_SCHEMA,
            message="this is the Confluent framing (00 ...), and no schema registry is configured: "
            "send Avro single-object encoding (C3 01 ...) or JSON ({...})",
        )
    if value[:2] == MAGIC and len(value) >= HEADER_BYTES:
        return Rejection(
            reason=Reason.UNKNOWN_SCHEMA,
            message=f"schema {value[2:HEADER_BYTES].hex()} is none of ours: send a TaskEvent as schemas/ has it",
        )
    return Rejection(
        reason=Reason.MALFORMED,
        message="neither Avro single-object encoding (C3 01 ...) nor JSON ({...}): see docs/reference/topics.md",
    )
