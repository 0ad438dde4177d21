"""JSON events: what people type by hand is understood, and what they mistype is refused with a reason."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeline.adapters.avro_codec import AvroCodec
from pipeline.adapters.event_json import _HEADER_READERS, _READERS, _TRACKING_READERS, decode_json_event
from pipeline.core.events import Cancel, Reason, Rejection, Schedule
from pipeline.core.tasks import Tracking

pytestmark = pytest.mark.unit


def _decode(text: str) -> Schedule | Cancel | Rejection:
    return AvroCodec().decode_event(text.encode())


def test_all_fields_are_understood() -> None:
    """JSON has the same fields as Avro, so that any Kafka command line can do what the SDK does."""
    event = _decode(
        json.dumps(
            {
                "event_id": "e1",
                "task_id": "ordre-é",
                "type": "SCHEDULE",
                "version": 7,
                "due_at_ms": 1_764_496_800_000,
                "payload": "naïve",
                "content_type": "text/plain",
                "headers": {"trace": "abc", "raw": {"base64": "AP8="}},
                "target_topic": "orders-due",
                "tracking": {"lease_ms": 1, "attempts_max": 2, "backoff_ms": 3},
                "source": "by hand",
                "created_at_ms": 5,
            }
        )
    )

    assert event == Schedule(
        event_id="e1",
        task_id="ordre-é",
        version=7,
        due_at_ms=1_764_496_800_000,
        payload="naïve".encode(),
        content_type="text/plain",
        headers={"trace": b"abc", "raw": b"\x00\xff"},
        target_topic="orders-due",
        tracking=Tracking(lease_ms=1, attempts_max=2, backoff_ms=3),
        source="by hand",
        created_at_ms=5,
    )


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ('"due_at": "2025-11-30T10:00:00Z"', {"due_at_ms": 1_764_496_800_000}),
        ('"due_at": "2025-11-30T12:00:00.5+02:00"', {"due_at_ms": 1_764_496_800_500}),
        ('"delay": "30m"', {"delay_ms": 1_800_000}),
        ('"delay_ms": 0', {"delay_ms": 0}),
        ('"due_at_ms": 17, "delay_ms": -1', {"due_at_ms": 17}),
        ('"due_at_ms": 0, "delay": "1s"', {"delay_ms": 1_000}),
        ('"payload_base64": "AP8="', {"payload": b"\x00\xff"}),
        ('"tracking": null', {}),
        ('"headers": {}', {}),
    ],
)
def test_each_way_to_say_it_gives_the_same_event(fields: str, expected: dict[str, Any]) -> None:
    """What is written by people and what is written by programs must not mean two things."""
    assert _decode(f'{{"task_id": "t", "type": "SCHEDULE", {fields}}}') == Schedule(task_id="t", **expected)


def test_a_cancel_may_say_what_a_cancel_has() -> None:
    """A cancel is a value with an author and an instant."""
    event = _decode('{"task_id": "t", "type": "CANCEL", "version": 3, "source": "s", "created_at_ms": 1}')

    assert event == Cancel(task_id="t", version=3, source="s", created_at_ms=1)


_WRONG = [
    ('"due_at_ms": 1.5', Reason.INVALID_FIELD, "due_at_ms must be a whole number"),
    ('"due_at_ms": 1e3', Reason.INVALID_FIELD, "due_at_ms must be a whole number"),
    ('"due_at_ms": NaN', Reason.INVALID_FIELD, "due_at_ms must be a whole number"),
    ('"due_at_ms": -Infinity', Reason.INVALID_FIELD, "due_at_ms must be a whole number"),
    ('"due_at_ms": true', Reason.INVALID_FIELD, "not true"),
    ('"due_at_ms": null', Reason.INVALID_FIELD, "not null"),
    ('"due_at_ms": "1764496800000"', Reason.INVALID_FIELD, "due_at_ms must be a whole number"),
    (f'"due_at_ms": {10**21}', Reason.INVALID_FIELD, "a number of that size"),
    (f'"created_at_ms": {2**63}', Reason.INVALID_FIELD, "64 bits"),
    (f'"version": {"9" * 5_000}', Reason.INVALID_FIELD, "a number of that size"),
    ('"version": [1]', Reason.INVALID_FIELD, "not an array"),
    ('"delay_ms": {}', Reason.INVALID_FIELD, "not an object"),
    ('"delay": 1800', Reason.INVALID_FIELD, "delay must be a string"),
    ('"delay": "soon"', Reason.INVALID_FIELD, "is not a duration"),
    ('"due_at": "tomorrow"', Reason.INVALID_FIELD, "is not an instant"),
    ('"due_at": "2025-11-30T10:00:00"', Reason.INVALID_FIELD, "has no offset"),
    ('"due_at": 1764496800', Reason.INVALID_FIELD, "due_at must be a string"),
    ('"payload": {"a": 1}', Reason.INVALID_FIELD, "payload must be a string, not an object"),
    ('"payload": null', Reason.INVALID_FIELD, "payload must be a string, not null"),
    ('"payload": "\\ud800"', Reason.INVALID_FIELD, "surrogate"),
    ('"payload_base64": "AP8"', Reason.INVALID_FIELD, "base64"),
    ('"payload_base64": "AP 8="', Reason.INVALID_FIELD, "base64"),
    ('"payload_base64": "é==="', Reason.INVALID_FIELD, "base64"),
    ('"headers": [["a", "b"]]', Reason.INVALID_FIELD, "headers must be an object"),
    ('"headers": {"a": 1}', Reason.INVALID_FIELD, "a string or"),
    ('"headers": {"a": {}}', Reason.INVALID_FIELD, "a string or"),
    ('"headers": {"a": {"base64": 1}}', Reason.INVALID_FIELD, "must be a string"),
    ('"headers": {"\\udfff": "b"}', Reason.INVALID_FIELD, "surrogate"),
    ('"headers": {"a": {"base65": ""}}', Reason.UNKNOWN_FIELD, "base65"),
    ('"headers": {"a": "1", "a": "2"}', Reason.DUPLICATE_FIELD, "given twice"),
    ('"tracking": "yes"', Reason.INVALID_FIELD, "an object or null"),
    ('"tracking": {"lease_ms": 1}', Reason.INVALID_FIELD, "attempts_max is missing"),
    ('"tracking": {"lease_ms": 1, "attempts_max": 2147483648, "backoff_ms": 1}', Reason.INVALID_FIELD, "32 bits"),
    ('"tracking": {"lease": 1}', Reason.UNKNOWN_FIELD, "lease"),
    ('"due_at_m": 1', Reason.UNKNOWN_FIELD, "is it a typo"),
    ('"Payload": ""', Reason.UNKNOWN_FIELD, "is it a typo"),
    ('"payload": "", "payload": ""', Reason.DUPLICATE_FIELD, "payload is given twice"),
    ('"payload": "", "payload_base64": ""', Reason.DUPLICATE_FIELD, "give one"),
    ('"due_at": "2025-11-30T10:00:00Z", "due_at_ms": 5', Reason.TWO_TIMES, "give one"),
    ('"delay": "1m", "delay_ms": 5', Reason.TWO_TIMES, "give one"),
    ('"source": 5', Reason.INVALID_FIELD, "source must be a string"),
]


@pytest.mark.parametrize(("fields", "reason", "message"), _WRONG)
def test_a_wrong_field_is_refused_with_what_is_legible(fields: str, reason: Reason, message: str) -> None:
    """The author finds the verdict in the task's row: for that, task, event and version must survive the refusal."""
    identity = '"task_id": "t", "type": "SCHEDULE", "event_id": "e"'
    if '"version"' not in fields:
        identity += ', "version": 4'

    rejection = _decode(f"{{{identity}, {fields}}}")

    assert isinstance(rejection, Rejection)
    assert (rejection.reason, rejection.task_id, rejection.event_id) == (reason, "t", "e")
    assert message in rejection.message
    assert rejection.version == (4 if '"version"' not in fields else 0)


@pytest.mark.parametrize(
    ("text", "reason", "message", "task_id"),
    [
        ('{"type": "SCHEDULE", "delay": "1m"}', Reason.INVALID_FIELD, "task_id is missing", None),
        ('{"task_id": "t", "delay": "1m"}', Reason.INVALID_FIELD, "type (SCHEDULE or CANCEL) is missing", "t"),
        ('{"task_id": "t", "type": "schedule"}', Reason.INVALID_FIELD, "type must be SCHEDULE or CANCEL", "t"),
        ('{"task_id": "t", "type": 1}', Reason.INVALID_FIELD, "type must be SCHEDULE or CANCEL", "t"),
        ('{"task_id": 1, "type": "CANCEL"}', Reason.INVALID_FIELD, "task_id must be a string", None),
        ('{"task_id": "\\ud83d", "type": "CANCEL"}', Reason.INVALID_FIELD, "surrogate", None),
        ('{"task_id": "t", "task_id": "t", "type": "CANCEL"}', Reason.DUPLICATE_FIELD, "task_id is given twice", None),
        ("{}", Reason.INVALID_FIELD, "type (SCHEDULE or CANCEL) is missing", None),
        ("{", Reason.MALFORMED, "not JSON", None),
        ("{} {}", Reason.MALFORMED, "not JSON", None),
        ('{"a":' * 100_000, Reason.MALFORMED, "nested too deeply", None),
        ('{"task_id":' + "[" * 100_000, Reason.MALFORMED, "nested too deeply", None),
    ],
)
def test_the_task_is_told_only_where_it_is_legible(
    text: str, reason: Reason, message: str, task_id: str | None
) -> None:
    """A verdict must not be noted for a task that was perhaps not meant."""
    rejection = _decode(text)

    assert isinstance(rejection, Rejection)
    assert (rejection.reason, rejection.task_id) == (reason, task_id)
    assert message in rejection.message


def test_bytes_that_are_no_utf_8_are_malformed() -> None:
    """Latin-1 from an old program must not be guessed at."""
    rejection = AvroCodec().decode_event(b'{"task_id": "caf\xe9", "type": "CANCEL"}')

    assert isinstance(rejection, Rejection)
    assert rejection.reason is Reason.MALFORMED


def test_messages_stay_short_whatever_the_event_holds() -> None:
    """They travel on `dead-tasks` beside the event itself, which may be as large as the topic takes."""
    rejection = _decode(f'{{"{"x" * 500_000}": 1}}')

    assert isinstance(rejection, Rejection)
    assert len(rejection.message) < 500


_KEYS = st.sampled_from([*_READERS, *_TRACKING_READERS, *_HEADER_READERS, "x"])
_JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(st.characters(), max_size=8))
    | st.sampled_from(["SCHEDULE", "CANCEL", "30m", "2025-11-30T10:00:00Z", "AP8=", "t"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS | st.text(max_size=5), inner, max_size=5),
    max_leaves=12,
)


@settings(deadline=None, max_examples=1_500)
@given(st.dictionaries(_KEYS, _JSON, max_size=8), st.binary(max_size=3), st.integers(0, 400), st.booleans())
@example({}, b"", 0, True)
def test_no_json_makes_decoding_raise(fields: dict[str, Any], noise: bytes, at: int, surrogates: bool) -> None:  # noqa: FBT001  # hypothesis passes by position
    """One bad record must not stop a partition; and what is taken for an event can be kept and sent on."""
    fields.setdefault("type", "SCHEDULE")
    fields.setdefault("task_id", "t")
    raw = json.dumps(fields, ensure_ascii=surrogates).encode("utf-8", "surrogatepass")
    value = raw[:at] + noise + raw[at:] if noise else raw

    event = decode_json_event(value)

    if isinstance(event, Rejection):
        assert event.message
        assert len(event.message.encode("utf-8", "backslashreplace")) < 1_000
    elif event.version < 2**63 and (isinstance(event, Cancel) or _is_storable(event)):
        codec = AvroCodec()
        assert codec.decode_event(codec.encode_event(event)) == event


def _is_storable(event: Schedule) -> bool:
    """Times beyond 64 bits are left to admission, which says that they are beyond the horizon."""
    return all(abs(number or 0) < 2**63 for number in (event.due_at_ms, event.delay_ms, event.version))
