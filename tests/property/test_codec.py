"""The codec against two general ones, over generated values: whoever reads our topics must find what we wrote."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import avro.io
import avro.schema
import fastavro
import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeline.adapters.avro_bodies import decode_event_body
from pipeline.adapters.avro_codec import HEADER_BYTES, SCHEMA_NAMES, AvroCodec, SchemaCoder
from pipeline.adapters.avro_primitives import long, read_long, read_three_longs
from pipeline.core.effects import DeadTask, DueTask
from pipeline.core.events import Cancel, Event, Origin, Reason, Rejection, Schedule
from pipeline.core.positions import InputPosition, Positions
from pipeline.core.tasks import DurationMs, Status, TaskId, TaskState, Tracking, Verdict, VerdictEntry
from pipeline.errors import CorruptStateError

pytestmark = pytest.mark.property

_SCHEMAS = Path(__file__).parents[2] / "schemas"
_CODEC = AvroCodec()
_Plain = Any
"""Mappings, lists, numbers, strings and bytes, as general codecs take and give them."""
_often = settings(deadline=None, max_examples=300)

_EDGES = sorted({sign * (1 << bits) + step for bits in range(64) for sign in (1, -1) for step in (-1, 0)})
int64s = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.sampled_from([edge for edge in _EDGES if -(2**63) <= edge < 2**63]),
    st.integers(1_600_000_000_000, 2_200_000_000_000),  # instants of this age
    st.integers(-1, 300_000),
)
int32s = st.one_of(st.integers(-(2**31), 2**31 - 1), st.just(0))
texts = st.one_of(st.just(""), st.text(max_size=200), st.integers(60, 9_000).map(lambda length: "é" * length))
blobs = st.one_of(st.just(b""), st.binary(max_size=200), st.integers(60, 20_000).map(bytes))
header_maps = st.one_of(st.just({}), st.dictionaries(texts, blobs, max_size=4))
trackings = st.one_of(st.none(), st.builds(Tracking, lease_ms=int64s, attempts_max=int32s, backoff_ms=int64s))
verdict_entries = st.builds(
    VerdictEntry, event_id=texts, offset=int64s, verdict=st.sampled_from(Verdict), reason=st.one_of(st.just(""), texts)
)

cancels = st.builds(Cancel, task_id=texts, event_id=texts, version=int64s, source=texts, created_at_ms=int64s)
schedules = st.builds(
    Schedule,
    task_id=texts,
    event_id=texts,
    version=int64s,
    due_at_ms=st.one_of(st.none(), int64s.filter(bool)),
    delay_ms=st.one_of(st.none(), int64s.filter(lambda number: number != -1)),
    payload=blobs,
    content_type=texts,
    headers=header_maps,
    target_topic=texts,
    tracking=trackings,
    source=texts,
    created_at_ms=int64s,
)
_short_texts = st.one_of(st.text(max_size=8), st.integers(60, 66).map(lambda length: "i" * length))
_instants = st.one_of(
    st.integers(1_600_000_000_000, 2_200_000_000_000), st.integers(33, 42).map(lambda bits: 1 << bits)
)
plain_schedules = st.builds(
    Schedule,
    task_id=_short_texts,
    event_id=_short_texts,
    version=st.integers(-66, 66),
    due_at_ms=_instants,
    delay_ms=st.one_of(st.none(), st.integers(-66, 66).filter(lambda number: number != -1)),
    payload=st.one_of(st.integers(0, 66), st.integers(8_190, 8_194)).map(bytes),
    source=_short_texts,
    created_at_ms=_instants,
)
"""Around the bounds of what is read in one piece."""
_bare = {
    "task_id": _short_texts,
    "event_id": _short_texts,
    "version": st.one_of(st.just(0), int64s),
    "source": st.one_of(st.just(""), _short_texts),
    "created_at_ms": st.one_of(st.just(0), _instants),
}
bare_schedules = st.builds(
    Schedule,
    **_bare,
    due_at_ms=st.one_of(st.none(), int64s.filter(bool)),
    delay_ms=st.one_of(st.none(), int64s.filter(lambda number: number != -1)),
    payload=st.binary(max_size=4),
)
bare_cancels = st.builds(Cancel, **_bare)
"""As writers send them that leave most fields alone: whatever is misread may be followed by noughts to the very end."""
events = st.one_of(schedules, plain_schedules, bare_schedules, cancels, bare_cancels)
states = st.builds(
    TaskState,
    task_id=texts,
    status=st.sampled_from(Status),
    generation=int64s,
    occurrence=int32s,
    attempt=int32s,
    version=int64s,
    due_at_ms=int64s,
    wake_at_ms=int64s,
    changed_at_ms=int64s,
    payload=blobs,
    content_type=texts,
    headers=header_maps,
    target_topic=texts,
    source=texts,
    created_at_ms=int64s,
    tracking=trackings,
    event_hashes=blobs,
    verdicts=st.lists(verdict_entries, max_size=4).map(tuple),
    fired_at_ms=int64s,
    emitted_offset=int64s,
)
due_tasks = st.builds(
    DueTask,
    task_id=texts,
    generation=int64s,
    occurrence=int32s,
    attempt=int32s,
    emission_id=texts,
    due_at_ms=int64s,
    fired_at_ms=int64s,
    payload=blobs,
    content_type=texts,
    headers=header_maps,
    source=texts,
    version=int64s,
    scheduled_offset=int64s,
    applied_offset=int64s,
    fence_offset=int64s,
    fence_clock_ms=int64s,
)
dead_tasks = st.builds(
    DeadTask,
    reason=st.sampled_from(Reason),
    message=texts,
    origin=st.builds(Origin, topic=texts, partition=int32s, offset=int64s, append_at_ms=int64s),
    key=st.one_of(st.none(), blobs),
    value=st.one_of(st.none(), blobs),
    value_size=int64s,
    value_sha256=blobs,
    task_id=texts,
    generation=int64s,
    dead_at_ms=int64s,
)
positions = st.builds(
    Positions,
    cluster_id=texts,
    state_topic_id=texts,
    partition=int32s,
    partition_count=int32s,
    inputs=st.dictionaries(
        texts, st.builds(InputPosition, topic_id=texts, position=int64s, generation_base=int64s), max_size=3
    ),
    stamp_ms=int64s,
    owner=texts,
    format_version=int32s,
    min_reader=int32s,
)


def _of_schema(schema: _Plain) -> st.SearchStrategy[Any]:
    """Values that a parsed schema allows."""
    if isinstance(schema, list):
        return st.one_of([_of_schema(branch) for branch in schema])
    kind = schema["type"] if isinstance(schema, dict) else schema
    if kind == "record":
        return st.fixed_dictionaries({field["name"]: _of_schema(field["type"]) for field in schema["fields"]})
    if kind == "map":
        return st.dictionaries(texts, _of_schema(schema["values"]), max_size=3)
    if kind == "array":
        return st.lists(_of_schema(schema["items"]), max_size=3)
    if kind == "enum":
        return st.sampled_from(schema["symbols"])
    return {"null": st.none(), "long": int64s, "int": int32s, "string": texts, "bytes": blobs}[kind]


def _apache_schema(name: str) -> avro.schema.Schema:
    return avro.schema.parse((_SCHEMAS / f"{name}.avsc").read_text("utf-8"))


def _apache_encode(name: str, fields: _Plain) -> bytes:
    out = io.BytesIO()
    avro.io.DatumWriter(_apache_schema(name)).write(fields, avro.io.BinaryEncoder(out))
    return out.getvalue()


def _apache_decode(name: str, body: bytes) -> _Plain:
    stream = io.BytesIO(body)
    fields = avro.io.DatumReader(_apache_schema(name)).read(avro.io.BinaryDecoder(stream))
    assert stream.tell() == len(body)
    return fields


def _plain(value: msgspec.Struct) -> _Plain:
    """A struct as the mapping that general codecs take."""
    fields = msgspec.structs.asdict(value)
    if "tracking" in fields and fields["tracking"] is not None:
        fields["tracking"] = msgspec.structs.asdict(fields["tracking"])
    if "headers" in fields:
        fields["headers"] = dict(fields["headers"])
    if "verdicts" in fields:
        fields["verdicts"] = [
            {**msgspec.structs.asdict(entry), "verdict": entry.verdict.value} for entry in fields["verdicts"]
        ]
    if "status" in fields:
        fields["status"] = fields["status"].value
    return fields


def _plain_event(event: Event) -> _Plain:
    fields = {**_plain(Schedule(task_id=event.task_id)), **_plain(event)}
    fields["type"] = "CANCEL" if isinstance(event, Cancel) else "SCHEDULE"
    fields["due_at_ms"] = 0 if fields["due_at_ms"] is None else fields["due_at_ms"]
    fields["delay_ms"] = -1 if fields["delay_ms"] is None else fields["delay_ms"]
    return fields


@pytest.mark.parametrize("name", SCHEMA_NAMES)
def test_every_schema_is_written_and_read_like_apache_avro_does(name: str) -> None:
    """The `avro` package is the reference implementation: consumers in other languages agree with it."""
    coder = SchemaCoder(name)

    @_often
    @given(_of_schema(json.loads((_SCHEMAS / f"{name}.avsc").read_text("utf-8"))))
    def check(fields: _Plain) -> None:
        body = _apache_encode(name, fields)

        assert coder.encode(fields) == coder.header + body
        assert coder.decode(coder.header + body) == fields
        assert _apache_decode(name, body) == fields

    check()


@_often
@given(events)
@example(
    Schedule(task_id="t", headers={"a": b"", "": b"x"}, tracking=Tracking(lease_ms=1, attempts_max=2, backoff_ms=3))
)
@example(Schedule(task_id=TaskId("task-1"), event_id="e", delay_ms=DurationMs(3_600_000)))
@example(Cancel(task_id=TaskId("task-1"), event_id="e", version=2_000_000))
def test_events_are_written_by_hand_as_the_general_codecs_write_them(event: Event) -> None:
    """The body is put together by hand for speed; it must stay plain Avro."""
    value = _CODEC.encode_event(event)

    assert value == _CODEC.coder("TaskEvent").encode(_plain_event(event))
    assert value[HEADER_BYTES:] == _apache_encode("TaskEvent", _plain_event(event))
    assert _CODEC.decode_event(value) == event


@_often
@given(states)
@example(TaskState(task_id="t", status=Status.DEAD))
def test_states_are_written_by_hand_as_the_general_codecs_write_them(state: TaskState) -> None:
    """Other programs read `task-state` as the public status of tasks."""
    value = _CODEC.encode_state(state)

    assert value == _CODEC.coder("TaskState").encode(_plain(state))
    assert value[HEADER_BYTES:] == _apache_encode("TaskState", _plain(state))
    assert _CODEC.decode_state(value) == state


@_often
@given(due_tasks)
def test_due_tasks_are_written_by_hand_as_the_general_codecs_write_them(task: DueTask) -> None:
    """Consumers in every language read them."""
    value = _CODEC.encode_due(task)

    assert value == _CODEC.coder("DueTask").encode(_plain(task))
    assert value[HEADER_BYTES:] == _apache_encode("DueTask", _plain(task))
    assert _CODEC.decode_due(value) == task


@_often
@given(dead_tasks)
def test_dead_tasks_come_back_as_they_were(task: DeadTask) -> None:
    """What was set aside must be readable for as long as somebody may ask."""
    assert _CODEC.decode_dead(_CODEC.encode_dead(task)) == task


@given(dead_tasks)
def test_a_dead_task_with_a_reason_of_a_later_release_is_told_apart_from_a_bug(task: DeadTask) -> None:
    """A rebuild or an audit that reads on `dead-tasks` must not fall over what a newer agent wrote there."""
    value = _CODEC.encode_dead(task)
    code = task.reason.value.encode()

    with pytest.raises(CorruptStateError, match="unknown reason code"):
        _CODEC.decode_dead(value.replace(code, b"X" * len(code)))


@_often
@given(positions)
def test_positions_come_back_as_they_were(place: Positions) -> None:
    """Everything an owner does begins with them."""
    assert _CODEC.decode_positions(_CODEC.encode_positions(place)) == place


@_often
@given(st.data())
def test_maps_in_several_sized_blocks_are_read(data: st.DataObject) -> None:
    """Other languages write maps in blocks, with a negative count and the block's size before each."""
    headers = data.draw(st.dictionaries(texts, blobs, min_size=1, max_size=6))
    at = data.draw(st.integers(0, len(headers)))
    pairs = list(headers.items())
    blocks = b"".join(_sized_block(block) for block in (pairs[:at], pairs[at:]) if block) + b"\x00"
    plain = _CODEC.encode_event(Schedule(task_id="t", headers={"-": b"-"}))

    event = _CODEC.decode_event(plain.replace(b"\x02\x02-\x02-\x00", blocks))

    assert isinstance(event, Schedule)
    assert event.headers == headers


def _sized_block(pairs: list[tuple[str, bytes]]) -> bytes:
    out = io.BytesIO()
    encoder = avro.io.BinaryEncoder(out)
    for name, value in pairs:
        encoder.write_utf8(name)
        encoder.write_bytes(value)
    block = io.BytesIO()
    encoder = avro.io.BinaryEncoder(block)
    encoder.write_long(-len(pairs))
    encoder.write_long(len(out.getvalue()))
    return block.getvalue() + out.getvalue()


@st.composite
def _damaged(draw: st.DrawFn, values: st.SearchStrategy[bytes]) -> bytes:
    """A value with some bytes changed, cut, doubled or put in; the header often left alone, or all would end there."""
    value = bytearray(draw(values))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(draw(st.sampled_from([0, HEADER_BYTES])), max(HEADER_BYTES, len(value))))
        match draw(st.sampled_from(["set", "cut", "insert", "end"])):
            case "set":
                value[at : at + 1] = draw(st.binary(min_size=1, max_size=1))
            case "cut":
                del value[at : at + draw(st.integers(1, 8))]
            case "insert":
                value[at:at] = draw(st.binary(min_size=1, max_size=12))
            case "end":
                del value[at:]
    return bytes(value)


@settings(deadline=None, max_examples=1_000)
@given(st.one_of(_damaged(events.map(_CODEC.encode_event)), st.binary(max_size=300)))
@example(b"")
@example(b"\xc3")
@example(b"\xc3\x01")
@example(_CODEC.coder("TaskEvent").header)
@example(_CODEC.coder("TaskEvent").header + b"\xff" * 40)
@example(_CODEC.coder("TaskEvent").header + b"\xfe\xff\xff\xff\xff\xff\xff\xff\xff\x01" * 13)
def test_no_bytes_make_event_decoding_raise_or_disagree_with_apache_avro(value: bytes) -> None:
    """One bad record must not stop a partition, nor be taken for an event that nobody sent."""
    event = _CODEC.decode_event(value)

    if isinstance(event, Rejection):
        assert event.message
        assert event.reason in {Reason.MALFORMED, Reason.UNKNOWN_SCHEMA, *_JSON_REASONS}
        if value[:HEADER_BYTES] == _CODEC.coder("TaskEvent").header:
            with pytest.raises(Exception):  # noqa: B017, PT011  # whatever it raises, and be it for bytes that are left
                _apache_decode("TaskEvent", value[HEADER_BYTES:])
    elif value[:1] == b"\xc3":
        fields = _apache_decode("TaskEvent", value[HEADER_BYTES:])
        said = Cancel.__struct_fields__ if isinstance(event, Cancel) else fields
        assert {name: fields[name] for name in said} == {name: _plain_event(event)[name] for name in said}
        assert _CODEC.decode_event(_CODEC.encode_event(event)) == event


_JSON_REASONS = {Reason.UNKNOWN_FIELD, Reason.DUPLICATE_FIELD, Reason.INVALID_FIELD, Reason.TWO_TIMES}


@settings(deadline=None, max_examples=1_000)
@given(_damaged(states.map(_CODEC.encode_state)))
def test_no_bytes_make_state_decoding_raise_anything_but_corrupt_state(value: bytes) -> None:
    """The owner puts a table aside for that error, and for no other."""
    try:
        state = _CODEC.decode_state(value)
    except CorruptStateError:
        return
    assert _apache_decode("TaskState", value[HEADER_BYTES:]) == _plain(state)


@settings(deadline=None, max_examples=500)
@given(_damaged(due_tasks.map(_CODEC.encode_due)))
def test_no_bytes_make_due_task_decoding_raise_anything_but_corrupt_state(value: bytes) -> None:
    """A consumer must be able to set a bad record aside."""
    try:
        _CODEC.decode_due(value)
    except CorruptStateError:
        return


@_often
@given(events, st.integers(1, 400))
def test_every_cut_of_an_event_is_refused(event: Event, keep: int) -> None:
    """A value cut short is the usual damage; it must never pass for a shorter one."""
    body = _CODEC.encode_event(event)[HEADER_BYTES:]

    with pytest.raises((ValueError, IndexError)):
        decode_event_body(body[: len(body) - 1 - keep % len(body)], 0)


@pytest.mark.parametrize("number", [2**63, -(2**63) - 1, 2**70])
def test_numbers_beyond_64_bits_are_not_written(number: int) -> None:
    """They would be read back as something else."""
    with pytest.raises(ValueError, match="64 bits"):
        _CODEC.encode_state(TaskState(task_id="t", status=Status.SCHEDULED, due_at_ms=number))
    with pytest.raises(ValueError, match="64 bits"):
        _CODEC.encode_event(Schedule(task_id="t", delay_ms=number))


@pytest.mark.parametrize("number", [2**31, -(2**31) - 1])
def test_numbers_beyond_32_bits_are_not_written_where_the_schema_says_int(number: int) -> None:
    """Java would refuse the record for ever."""
    with pytest.raises(ValueError, match="32 bits"):
        _CODEC.encode_state(TaskState(task_id="t", status=Status.SCHEDULED, attempt=number))


def test_fastavro_reads_what_the_codec_writes() -> None:
    """The general codec of the cold path must go on reading the hot one's values."""
    state = TaskState(task_id="t", status=Status.EMITTED, due_at_ms=1_764_400_000_000)
    body = io.BytesIO(_CODEC.encode_state(state)[HEADER_BYTES:])

    assert fastavro.schemaless_reader(body, _CODEC.coder("TaskState").schema, None) == _plain(state)


@settings(deadline=None, max_examples=2_000)
@given(st.tuples(int64s, int64s, int64s), st.binary(max_size=20))
@example((2**33, 1, 1_764_400_000_000), long(1_764_400_000_000))
@example((1_764_400_000_000, 2**33, 1), long(1_764_400_000_000))
def test_longs_are_read_back_alone_and_three_at_a_time(numbers: tuple[int, int, int], rest: bytes) -> None:
    """Each length has a branch of its own, alone and at the end of a value; instants in a row have one too."""
    encoded = b"".join(long(number) for number in numbers)

    at, found = 0, []
    for _ in numbers:
        number, at = read_long(encoded + rest, at)
        found.append(number)

    assert (tuple(found), at) == (numbers, len(encoded))
    assert read_three_longs(encoded + rest, 0) == (*numbers, len(encoded))


@pytest.mark.parametrize("number", [-1, 7, 2**40])
def test_a_status_or_verdict_that_nobody_defined_is_corrupt(number: int) -> None:
    """Counted from the end of a list, -1 would pass for a status."""
    entry = VerdictEntry(event_id="", offset=1, verdict=Verdict.SCHEDULED)
    value = _CODEC.encode_state(TaskState(task_id="t", status=Status.SCHEDULED, verdicts=(entry,)))
    status, verdict = value.index(b"\x02t\x00") + 2, value.index(b"\x02\x00\x02\x00\x00") + 3

    for at in (status, verdict):
        with pytest.raises(CorruptStateError):
            _CODEC.decode_state(value[:at] + long(number + 2 * (at == verdict and number == 7)) + value[at + 1 :])
