"""Bytes that were written once, and must be read and written the same for ever: rows outlive every release."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import avro.io
import avro.schema
import pytest
from avro.compatibility import ReaderWriterCompatibilityChecker, SchemaCompatibilityType

from pipeline.adapters.avro_bodies import FINGERPRINTS
from pipeline.adapters.avro_codec import HEADER_BYTES, MAGIC, SCHEMA_NAMES, AvroCodec, SchemaCoder

pytestmark = pytest.mark.unit

_ROOT = Path(__file__).parents[2]
_GOLDEN = _ROOT / "tests" / "golden"
_Json = Any


def _golden(name: str) -> list[tuple[dict[str, Any], bytes]]:
    """The examples of a schema: fields (bytes as Avro's JSON has them: one character for each) and the value."""
    lines = (_GOLDEN / f"{name}.jsonl").read_text("utf-8").splitlines()
    schema = json.loads((_ROOT / "schemas" / "landed" / f"{name}.avsc").read_text("utf-8"))
    examples = [json.loads(line) for line in lines]
    return [(_with_bytes(example["fields"], schema), bytes.fromhex(example["hex"])) for example in examples]


def _with_bytes(value: _Json, schema: _Json) -> _Json:
    """Strings become bytes where the schema says so."""
    if isinstance(schema, list):
        return None if value is None else _with_bytes(value, schema[1])
    kind = schema["type"] if isinstance(schema, dict) else schema
    match kind:
        case "record":
            types = {field["name"]: field["type"] for field in schema["fields"]}
            return {field: _with_bytes(content, types[field]) for field, content in value.items()}
        case "map":
            return {key: _with_bytes(content, schema["values"]) for key, content in value.items()}
        case "array":
            return [_with_bytes(item, schema["items"]) for item in value]
        case "bytes":
            return value.encode("latin-1")
        case _:
            return value


def _schema(folder: str, name: str) -> avro.schema.Schema:
    return avro.schema.parse((_ROOT / "schemas" / folder / f"{name}.avsc").read_text("utf-8"))


@pytest.mark.parametrize("name", SCHEMA_NAMES)
def test_golden_bytes_are_written_and_read_the_same(name: str) -> None:
    """A change of a byte here means that tables and topics of every deployment can't be read any more."""
    coder = SchemaCoder(name)
    examples = _golden(name)

    assert len(examples) >= 2
    for fields, value in examples:
        assert coder.encode(fields) == value
        assert coder.decode(value) == fields


@pytest.mark.parametrize(
    ("name", "decode", "encode"),
    [
        ("TaskEvent", "decode_event", "encode_event"),
        ("TaskState", "decode_state", "encode_state"),
        ("DueTask", "decode_due", "encode_due"),
        ("DeadTask", "decode_dead", "encode_dead"),
        ("Positions", "decode_positions", "encode_positions"),
    ],
)
def test_golden_bytes_pass_through_the_core_s_values_unchanged(name: str, decode: str, encode: str) -> None:
    """The functions of the hot path are bound by the same bytes."""
    codec = AvroCodec()

    for _, value in _golden(name):
        assert getattr(codec, encode)(getattr(codec, decode)(value)) == value


@pytest.mark.parametrize("name", SCHEMA_NAMES)
def test_fingerprints_are_those_that_apache_avro_computes(name: str) -> None:
    """Readers in other languages look the schema up by it."""
    header = SchemaCoder(name).header

    assert header == MAGIC + _schema("", name).fingerprint("CRC-64-AVRO")
    assert len(header) == HEADER_BYTES
    for _, value in _golden(name):
        assert value.startswith(header)


def test_the_hot_path_is_written_for_the_schemas_as_they_are() -> None:
    """A schema that changes without its function would be written wrongly, in silence."""
    assert {name: SchemaCoder(name).header[len(MAGIC) :].hex() for name in FINGERPRINTS} == FINGERPRINTS


@pytest.mark.parametrize("name", SCHEMA_NAMES)
def test_schemas_are_compatible_with_their_landed_predecessors(name: str) -> None:
    """In a rolling upgrade old and new agents, producers and consumers read each other's records."""
    new, landed = _schema("", name), _schema("landed", name)
    checker = ReaderWriterCompatibilityChecker()

    for reader, writer in ((new, landed), (landed, new)):
        assert checker.get_compatibility(reader, writer).compatibility is SchemaCompatibilityType.compatible
        for _, value in _golden(name):
            body = avro.io.BinaryDecoder(io.BytesIO(value[HEADER_BYTES:]))
            assert avro.io.DatumReader(landed, reader).read(body) is not None


@pytest.mark.parametrize("name", SCHEMA_NAMES)
def test_fields_keep_their_place_and_type(name: str) -> None:
    """A schema only ever gets new fields, at the end and with a default: then nobody has to upgrade first."""
    new = json.loads((_ROOT / "schemas" / f"{name}.avsc").read_text("utf-8"))["fields"]
    landed = json.loads((_ROOT / "schemas" / "landed" / f"{name}.avsc").read_text("utf-8"))["fields"]

    assert [field["name"] for field in new[: len(landed)]] == [field["name"] for field in landed]
    assert all("default" in field for field in new[len(landed) :])
