"""What the SDK refuses before anything is sent: the same as the agent would, for the same reason, and more besides."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.adapters.avro_codec import AvroCodec
from pipeline.core.events import DAY_MS, Cancel, Event, Limits, Reason, Rejection, Schedule
from pipeline.core.tasks import InstantMs
from pipeline.errors import RejectedTaskError
from pipeline.service.admission import Admission
from pipeline.service.task_requests import CancelRequest, EventMaker, ScheduleRequest

pytestmark = pytest.mark.unit

NOW_MS = InstantMs(1_764_496_800_000)
NOW = datetime.fromtimestamp(NOW_MS / 1000, UTC)


class _Record(msgspec.Struct, frozen=True):
    key: bytes
    value: bytes
    offset: int = 1
    timestamp: int = NOW_MS


def _maker(**limits: Any) -> EventMaker:  # noqa: ANN401  # limits of several kinds
    return EventMaker(
        AvroCodec().encode_event,
        limits=Limits(**limits),
        source="orders",
        now_ms=lambda: NOW_MS,
        new_event_id=lambda: "new-id",
    )


def _refusal(request: ScheduleRequest | CancelRequest, **limits: Any) -> RejectedTaskError:  # noqa: ANN401  # as above
    maker = _maker(**limits)
    with pytest.raises(RejectedTaskError) as caught:
        maker.outgoing(maker.make(request))
    return caught.value


def test_a_request_becomes_an_event_with_an_id_an_author_and_an_instant() -> None:
    """The id makes repeating it harmless; the author and the instant are for whoever looks into it later."""
    request = ScheduleRequest(
        task_id="ordre-é",
        due_at=NOW + timedelta(minutes=30),
        payload="naïve",
        content_type="text/plain",
        version=7,
        headers={"a": "é", "b": b"\xff"},
        target_topic="due-tasks",
    )

    outgoing = _maker().outgoing(_maker().make(request))

    assert outgoing.key == "ordre-é".encode()
    assert outgoing.event == Schedule(
        task_id="ordre-é",
        event_id="new-id",
        version=7,
        due_at_ms=NOW_MS + 1_800_000,
        payload="naïve".encode(),
        content_type="text/plain",
        headers={"a": "é".encode(), "b": b"\xff"},
        target_topic="due-tasks",
        source="orders",
        created_at_ms=NOW_MS,
    )
    assert AvroCodec().decode_event(outgoing.value) == outgoing.event


def test_a_cancel_keeps_the_id_that_it_was_given() -> None:
    """Who repeats a request after an unknown outcome names it himself."""
    assert _maker().make(CancelRequest(task_id="t", version=3, event_id="mine")) == Cancel(
        task_id="t", event_id="mine", version=3, source="orders", created_at_ms=NOW_MS
    )


@pytest.mark.parametrize(
    ("due_at", "expected_ms"),
    [
        (NOW.astimezone(timezone(timedelta(hours=-11))), NOW_MS),
        (NOW + timedelta(microseconds=1), NOW_MS + 1),
        (NOW + timedelta(days=3_650, milliseconds=999), NOW_MS + 3_650 * DAY_MS + 999),
    ],
)
def test_instants_are_whole_milliseconds_and_never_early(due_at: datetime, expected_ms: int) -> None:
    """A part of a millisecond is rounded up: rounded down, the task would fire before its time."""
    event = _maker().make(ScheduleRequest(task_id="t", due_at=due_at))

    assert isinstance(event, Schedule)
    assert event.due_at_ms == expected_ms


@pytest.mark.parametrize("milliseconds", [1, 2**31 - 1, 2**31, 2**32, 2**31 * 100])
def test_long_delays_stay_what_they_are(milliseconds: int) -> None:
    """Elsewhere a delay beyond 24.8 days overflowed, and fired at once."""
    event = _maker().make(ScheduleRequest(task_id="t", delay=timedelta(milliseconds=milliseconds)))

    assert isinstance(event, Schedule)
    assert event.delay_ms == milliseconds


_HOUR = timedelta(hours=1)


@pytest.mark.parametrize(
    ("fields", "reason", "message"),
    [
        ({}, Reason.MISSING_TIME, "give one"),
        ({"due_at": NOW, "delay": _HOUR}, Reason.TWO_TIMES, "give one"),
        ({"due_at": NOW.replace(tzinfo=None)}, Reason.INVALID_FIELD, "has no time zone"),
        ({"due_at": 1_764_496_800}, Reason.INVALID_FIELD, "seconds or milliseconds"),
        ({"due_at": 1_764_496_800_000.0}, Reason.INVALID_FIELD, "seconds or milliseconds"),
        ({"due_at": "2025-11-30T10:00:00Z"}, Reason.INVALID_FIELD, "must be an aware datetime"),
        ({"due_at": NOW.date()}, Reason.INVALID_FIELD, "must be an aware datetime"),
        ({"due_at": datetime.fromtimestamp(NOW_MS / 1_000_000, UTC)}, Reason.IMPLAUSIBLE_TIME, "were these seconds?"),
        ({"due_at": NOW + timedelta(days=3_654)}, Reason.BEYOND_HORIZON, "the horizon"),
        ({"delay": 1_800}, Reason.INVALID_FIELD, "seconds or milliseconds"),
        ({"delay": timedelta(milliseconds=-2)}, Reason.IMPLAUSIBLE_TIME, "before its own beginning"),
        ({"delay": timedelta(days=3_654)}, Reason.BEYOND_HORIZON, "the horizon"),
        ({"delay": timedelta.max}, Reason.BEYOND_HORIZON, "the horizon"),
        ({"delay": _HOUR, "version": 0}, Reason.INVALID_VERSION, "counts from 1"),
        ({"delay": _HOUR, "version": -1}, Reason.INVALID_VERSION, "from 1"),
        ({"delay": _HOUR, "version": 2**63}, Reason.INVALID_VERSION, "from 1"),
        ({"delay": _HOUR, "version": True}, Reason.INVALID_FIELD, "whole number"),
        ({"delay": _HOUR, "version": 1.0}, Reason.INVALID_FIELD, "whole number"),
        ({"delay": _HOUR, "version": math.nan}, Reason.INVALID_FIELD, "whole number"),
        ({"delay": _HOUR, "payload": None}, Reason.INVALID_FIELD, "bytes or a string"),
        ({"delay": _HOUR, "payload": {"a": 1}}, Reason.INVALID_FIELD, "json.dumps"),
        ({"delay": _HOUR, "payload": "\ud800"}, Reason.INVALID_FIELD, "surrogate"),
        ({"delay": _HOUR, "content_type": b"text/plain"}, Reason.INVALID_FIELD, "content_type must be a string"),
        ({"delay": _HOUR, "content_type": "\udfff"}, Reason.INVALID_FIELD, "does not fit"),
        ({"delay": _HOUR, "headers": [("a", "b")]}, Reason.INVALID_FIELD, "headers must be a mapping"),
        ({"delay": _HOUR, "headers": {b"a": "b"}}, Reason.INVALID_FIELD, "must be a string"),
        ({"delay": _HOUR, "headers": {"a": 1}}, Reason.INVALID_FIELD, "bytes or a string"),
        ({"delay": _HOUR, "headers": {"DueTasks-id": "1"}}, Reason.RESERVED_HEADER, "rename it"),
        ({"delay": _HOUR, "target_topic": "elsewhere"}, Reason.UNKNOWN_TARGET, "allow-list"),
        ({"delay": _HOUR, "target_topic": "task-state"}, Reason.UNKNOWN_TARGET, "allow-list"),
        ({"delay": _HOUR, "event_id": "e" * 257}, Reason.EVENT_ID_LENGTH, "shorten it"),
        ({"delay": _HOUR, "event_id": 17}, Reason.INVALID_FIELD, "event_id must be a string"),
        ({"delay": _HOUR, "task_id": ""}, Reason.TASK_ID_LENGTH, "0 bytes"),
        ({"delay": _HOUR, "task_id": "é" * 513}, Reason.TASK_ID_LENGTH, "1026 bytes"),
        ({"delay": _HOUR, "task_id": "\x00t"}, Reason.RESERVED_KEY, "reserved"),
        ({"delay": _HOUR, "task_id": "\ud800"}, Reason.INVALID_KEY, "surrogate"),
        ({"delay": _HOUR, "task_id": 17}, Reason.INVALID_FIELD, "task_id must be a string"),
        ({"delay": _HOUR, "task_id": None}, Reason.INVALID_FIELD, "task_id must be a string"),
        ({"delay": _HOUR, "payload": bytes(1_000_001)}, Reason.TOO_LARGE, "1000001 of payload"),
    ],
)
def test_each_wrong_request_is_refused_with_its_reason(fields: dict[str, Any], reason: Reason, message: str) -> None:
    """The caller learns it at once, in a sentence, instead of from `dead-tasks`."""
    error = _refusal(ScheduleRequest(**{"task_id": "t", **fields}))

    assert error.reason == reason
    assert message in str(error)


def test_a_payload_that_is_too_large_is_told_how_large_it_may_be() -> None:
    """The limit is on the whole event, so the number in the settings is not the one that helps."""
    fields: dict[str, Any] = {"task_id": "t" * 100, "delay": _HOUR, "headers": {"trace": "x" * 50}}
    error = _refusal(ScheduleRequest(**fields, payload=bytes(3_000)), event_bytes_max=2_048)

    room = int(str(error).split("the payload may have ")[1].split(":")[0])

    maker = _maker(event_bytes_max=2_048)
    maker.outgoing(maker.make(ScheduleRequest(**fields, payload=bytes(room))))
    assert (
        _refusal(ScheduleRequest(**fields, payload=bytes(room + 3)), event_bytes_max=2_048).reason is Reason.TOO_LARGE
    )


def test_headers_that_leave_no_room_for_any_payload_say_so() -> None:
    """Headers are counted twice, as the due task carries them twice."""
    error = _refusal(ScheduleRequest(task_id="t", delay=_HOUR, headers={"a": bytes(1_100)}), event_bytes_max=2_048)

    assert error.reason is Reason.TOO_LARGE
    assert "the payload may have 0" in str(error)


def test_target_topics_on_the_allow_list_are_taken() -> None:
    """The same setting lets producers and agents know them."""
    maker = _maker(target_topics=frozenset({"orders-due"}))

    outgoing = maker.outgoing(maker.make(ScheduleRequest(task_id="t", delay=_HOUR, target_topic="orders-due")))

    assert isinstance(outgoing.event, Schedule)
    assert outgoing.event.target_topic == "orders-due"


_TEXTS = st.one_of(st.text(max_size=5), st.sampled_from(["", "é" * 600, "t" * 1_025, "\x00a", "due-tasks", "x"]))
_NUMBERS = st.one_of(st.none(), st.integers(-5, 5), st.sampled_from([NOW_MS, NOW_MS // 1000, NOW_MS * 1000, 2**62]))
_EVENTS = st.one_of(
    st.builds(Cancel, task_id=_TEXTS, event_id=st.text(max_size=300), version=st.integers(-3, 3)),
    st.builds(
        Schedule,
        task_id=_TEXTS,
        event_id=st.sampled_from(["", "e" * 256, "e" * 257]),
        version=st.integers(-3, 3),
        due_at_ms=_NUMBERS.filter(lambda number: number != 0),
        delay_ms=_NUMBERS.filter(lambda number: number != -1),
        payload=st.sampled_from([b"", bytes(300), bytes(2_000)]),
        headers=st.dictionaries(st.sampled_from(["a", "duetasks-", "DUETASKS-x"]), st.binary(max_size=900), max_size=2),
        target_topic=_TEXTS,
    ),
)


@settings(deadline=None, max_examples=1_000)
@given(_EVENTS)
def test_sdk_and_agent_refuse_the_same_events_for_the_same_reason(event: Event) -> None:
    """A producer in another language meets the agent's rules only; they must be the documented ones."""
    admission = Admission(
        AvroCodec().decode_event, limits=Limits(event_bytes_max=2_048), partition=0, partition_count=1
    )
    agent = admission.admit(_Record(event.task_id.encode(), AvroCodec().encode_event(event)))

    try:
        _maker(event_bytes_max=2_048).outgoing(event)
    except RejectedTaskError as error:
        sdk: str | None = error.reason
    else:
        sdk = None

    if isinstance(agent, Rejection):
        # Size is judged first by the agent, which has the bytes, and last by the SDK, which makes them.
        assert sdk is not None
        assert sdk == agent.reason or agent.reason is Reason.TOO_LARGE
    else:
        assert sdk is None
        assert agent == event
