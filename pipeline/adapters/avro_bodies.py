"""The Avro bodies of the hot path, field by field in the order of `schemas/*.avsc`.

Each function writes or reads exactly what its schema says; a schema that changes must change its function in the same
commit (`AvroCodec` compares fingerprints when it is built, and tests compare bytes with two general codecs).
Decoders raise only `ValueError` (and its kinds), `IndexError` and `KeyError` on bytes that are no such value.
"""

from collections.abc import Mapping
from struct import Struct
from types import MappingProxyType
from typing import Final

from msgspec.structs import replace

from pipeline.adapters.avro_primitives import (
    INSTANT_BYTES,
    LONG_OR_NEGATIVE,
    ZERO,
    MalformedBodyError,
    blob,
    instant_of_pairs,
    int32,
    long,
    read_blob,
    read_int32,
    read_long,
    read_text,
    read_three_longs,
    shared_long,
    text,
    three_pairs,
)
from pipeline.core.effects import DueTask
from pipeline.core.events import Cancel, Event, Schedule
from pipeline.core.tasks import NO_HEADERS, Status, TaskState, Tracking, Verdict, VerdictEntry

__all__ = [
    "FINGERPRINTS",
    "decode_due_body",
    "decode_event_body",
    "decode_state_body",
    "encode_due_body",
    "encode_event_body",
    "encode_state_body",
]

FINGERPRINTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "TaskEvent": "4891dde37c490294",
        "TaskState": "7f1f87565cc9fba1",
        "DueTask": "4a4c8b549a94049d",
    }
)
"""CRC-64-AVRO, as hexadecimal digits in wire order, of the schemas that the functions below were written for."""

# Most tasks leave most fields alone: runs of them are read with one comparison.
_TWO_EMPTY: Final = 2 * ZERO
_THREE_EMPTY: Final = 3 * ZERO
_FOUR_EMPTY: Final = 4 * ZERO

_MORE_FOLLOWS: Final = 0x80
_SEVEN_BITS: Final = 0x7F
_request: Final = Struct("<BBHHHBBB").unpack_from
_REQUEST_BYTES: Final = 11
"""Of a plain request: type, version, due_at_ms, delay_ms, and the payload's length in two bytes."""

_ONE: Final = long(1)
_ONE_ITEM: Final = _ONE[0]
"""The first byte of an array with one item."""
_SCHEDULE, _CANCEL = long(0), long(1)
_NOT_GIVEN: Final = long(-1)
_NOT_FIRED: Final = ZERO + long(-1)
# A cancel's due_at_ms, delay_ms, payload, content_type, headers, target_topic and tracking, none of them given.
_NO_SCHEDULE: Final = ZERO + _NOT_GIVEN + 5 * ZERO

_STATUSES: Final = tuple(Status)
_STATUS_BYTES: Final = MappingProxyType({status: long(n) for n, status in enumerate(Status)})
_VERDICTS: Final = tuple(Verdict)
_VERDICT_BYTES: Final = MappingProxyType({verdict: long(n) for n, verdict in enumerate(Verdict)})


def encode_event_body(header: bytes, event: Event) -> bytes:
    """`header` and a TaskEvent; raises `ValueError` or `TypeError` if a field doesn't fit."""
    if isinstance(event, Cancel):
        return b"".join(
            (
                header,
                text(event.event_id),
                text(event.task_id),
                _CANCEL,
                long(event.version),
                _NO_SCHEDULE,
                text(event.source),
                long(event.created_at_ms),
            )
        )
    return b"".join(
        (
            header,
            text(event.event_id),
            text(event.task_id),
            _SCHEDULE,
            long(event.version),
            ZERO if event.due_at_ms is None else long(event.due_at_ms),
            _NOT_GIVEN if event.delay_ms is None else long(event.delay_ms),
            blob(event.payload),
            text(event.content_type),
            _headers(event.headers),
            text(event.target_topic),
            _tracking(event.tracking) if event.tracking is not None else ZERO,
            text(event.source),
            long(event.created_at_ms),
        )
    )


def decode_event_body(value: bytes, at: int) -> Event:
    """The event in the bytes from `at` to the end."""
    return _plain_schedule(value, at) or _any_event(value, at)


def _plain_schedule(value: bytes, at: int) -> Schedule | None:  # noqa: PLR0911  # as soon as it is not plain
    """The event if it is a SCHEDULE as most are; None if it has to be read field by field. In one piece, for speed.

    As most are: ids and source shorter than 64 bytes, version and delay in a byte each, both instants of this age, the
    payload shorter than 8 KiB, nothing else given.
    """
    size = value[at]
    if size & LONG_OR_NEGATIVE:
        return None
    start = at + 1
    at = start + (size >> 1)
    event_id = value[start:at]
    size = value[at]
    start = at + 1
    at = start + (size >> 1)
    if size & LONG_OR_NEGATIVE or len(value) < at + _REQUEST_BYTES:
        return None
    task_id = value[start:at]
    kind, version, due_low, due_mid, due_high, delay, size, more = _request(value, at)
    if size & 1:
        return None
    if size & _MORE_FOLLOWS:
        start = at + _REQUEST_BYTES
        at = start + ((size & _SEVEN_BITS | more << 7) >> 1)
    else:
        start = at + _REQUEST_BYTES - 1
        at = start + (size >> 1)
        more = 0
    payload = value[start:at]
    start = at + len(_FOUR_EMPTY) + 1
    if len(value) < start or value[at : start - 1] != _FOUR_EMPTY:
        return None
    size = value[start - 1]
    at = start + (size >> 1)
    if size & LONG_OR_NEGATIVE or len(value) != at + INSTANT_BYTES:
        return None
    due_at_ms = instant_of_pairs(due_low, due_mid, due_high)
    created_at_ms = instant_of_pairs(*three_pairs(value, at))
    if kind != _SCHEDULE[0] or due_at_ms <= 0 or created_at_ms < 0:
        return None
    if version & LONG_OR_NEGATIVE or (delay | more) & _MORE_FOLLOWS:
        return None
    return Schedule(
        task_id=task_id.decode(),  # type: ignore[arg-type]  # admission judges it
        event_id=event_id.decode(),
        version=version >> 1,
        due_at_ms=due_at_ms,  # type: ignore[arg-type]  # what the field means
        delay_ms=None if delay == _NOT_GIVEN[0] else (delay >> 1) ^ -(delay & 1),
        payload=payload,
        source=value[start:at].decode(),
        created_at_ms=created_at_ms,  # type: ignore[arg-type]  # the same
    )


def _any_event(value: bytes, at: int) -> Event:
    event_id, at = read_text(value, at)
    task_id, at = read_text(value, at)
    kind, at = read_long(value, at)
    version, at = read_long(value, at)
    due_at_ms, at = read_long(value, at)
    delay_ms, at = read_long(value, at)
    payload, at = read_blob(value, at)
    content_type = target_topic = ""
    headers, tracking = NO_HEADERS, None
    if value[at : at + 4] == _FOUR_EMPTY:
        at += 4
    else:
        content_type, at = read_text(value, at)
        headers, at = _read_headers(value, at)
        target_topic, at = read_text(value, at)
        tracking, at = _read_tracking(value, at)
    source, at = read_text(value, at)
    created_at_ms, at = read_long(value, at)
    _check_end(value, at)
    if kind == 1:
        return Cancel(
            task_id=task_id,  # type: ignore[arg-type]  # admission judges it
            event_id=event_id,
            version=version,
            source=source,
            created_at_ms=created_at_ms,  # type: ignore[arg-type]  # what the field means
        )
    if kind != 0:
        raise MalformedBodyError(f"type is number {kind} of SCHEDULE, CANCEL")
    return Schedule(
        task_id=task_id,  # type: ignore[arg-type]  # admission judges it
        event_id=event_id,
        version=version,
        due_at_ms=due_at_ms or None,  # type: ignore[arg-type]  # what the field means
        delay_ms=None if delay_ms == -1 else delay_ms,  # type: ignore[arg-type]  # what the field means
        payload=payload,
        content_type=content_type,
        headers=headers,
        target_topic=target_topic,
        tracking=tracking,
        source=source,
        created_at_ms=created_at_ms,  # type: ignore[arg-type]  # what the field means
    )


def encode_state_body(header: bytes, state: TaskState) -> bytes:
    """`header` and a TaskState; raises `ValueError` or `TypeError` if a field doesn't fit."""
    due_at, wake_at = state.due_at_ms, state.wake_at_ms
    due_at_bytes = long(due_at)
    fired_at = state.fired_at_ms
    is_plain = not (state.occurrence or state.attempt or state.version)
    has_only_payload = not (state.content_type or state.headers or state.target_topic)
    return b"".join(
        (
            header,
            text(state.task_id),
            _STATUS_BYTES[state.status],
            long(state.generation),
            _THREE_EMPTY if is_plain else int32(state.occurrence) + int32(state.attempt) + long(state.version),
            due_at_bytes,
            due_at_bytes if wake_at == due_at else long(wake_at),
            shared_long(state.changed_at_ms),
            blob(state.payload) if state.payload else ZERO,
            _THREE_EMPTY
            if has_only_payload
            else text(state.content_type) + _headers(state.headers) + text(state.target_topic),
            text(state.source) if state.source else ZERO,
            shared_long(state.created_at_ms),
            _tracking(state.tracking) if state.tracking is not None else ZERO,
            blob(state.event_hashes) if state.event_hashes else ZERO,
            _verdicts(state.verdicts),
            _NOT_FIRED if not fired_at and state.emitted_offset == -1 else long(fired_at) + long(state.emitted_offset),
        )
    )


def decode_state_body(value: bytes, at: int) -> TaskState:
    """The state in the bytes from `at` to the end."""
    task_id, at = read_text(value, at)
    status, at = read_long(value, at)
    generation, at = read_long(value, at)
    counts = content = None
    if value[at : at + 3] == _THREE_EMPTY:
        at += 3
    else:
        counts, at = _read_counts(value, at)
    due_at_ms, wake_at_ms, changed_at_ms, at = read_three_longs(value, at)
    payload, at = read_blob(value, at)
    if value[at : at + 3] == _THREE_EMPTY:
        at += 3
    else:
        content, at = _read_content(value, at)
    source, at = read_text(value, at)
    created_at_ms, at = read_long(value, at)
    tracking, at = _read_tracking(value, at) if value[at] else (None, at + 1)
    event_hashes, at = read_blob(value, at)
    verdicts, at = _read_verdicts(value, at)
    fired_at_ms, emitted_offset = 0, -1
    if value[at:] != _NOT_FIRED:
        fired_at_ms, at = read_long(value, at)
        emitted_offset, at = read_long(value, at)
        _check_end(value, at)
    if status < 0:
        raise MalformedBodyError(f"status is number {status}")
    state = TaskState(
        task_id=task_id,  # type: ignore[arg-type]  # as it was encoded, like all below
        status=_STATUSES[status],
        generation=generation,  # type: ignore[arg-type]
        due_at_ms=due_at_ms,  # type: ignore[arg-type]
        wake_at_ms=wake_at_ms,  # type: ignore[arg-type]
        changed_at_ms=changed_at_ms,  # type: ignore[arg-type]
        payload=payload,
        source=source,
        created_at_ms=created_at_ms,  # type: ignore[arg-type]
        tracking=tracking,
        event_hashes=event_hashes,
        verdicts=verdicts,
        fired_at_ms=fired_at_ms,  # type: ignore[arg-type]
        emitted_offset=emitted_offset,  # type: ignore[arg-type]
    )
    return replace(state, **(counts or {}), **(content or {})) if counts or content else state


def _read_counts(value: bytes, at: int) -> tuple[dict[str, int], int]:
    """The fields between `generation` and `due_at_ms`, by name."""
    occurrence, at = read_int32(value, at)
    attempt, at = read_int32(value, at)
    version, at = read_long(value, at)
    return {"occurrence": occurrence, "attempt": attempt, "version": version}, at


def _read_content(value: bytes, at: int) -> tuple[dict[str, object], int]:
    """The fields between `payload` and `source`, by name."""
    content_type, at = read_text(value, at)
    headers, at = _read_headers(value, at)
    target_topic, at = read_text(value, at)
    return {"content_type": content_type, "headers": headers, "target_topic": target_topic}, at


def encode_due_body(header: bytes, task: DueTask) -> bytes:
    """`header` and a DueTask; raises `ValueError` or `TypeError` if a field doesn't fit."""
    fired_at, fence_at = task.fired_at_ms, task.fence_clock_ms
    fired_at_bytes = long(fired_at)
    return b"".join(
        (
            header,
            text(task.task_id),
            long(task.generation),
            int32(task.occurrence) if task.occurrence else ZERO,
            int32(task.attempt) if task.attempt else ZERO,
            text(task.emission_id),
            long(task.due_at_ms),
            fired_at_bytes,
            blob(task.payload),
            text(task.content_type) if task.content_type else ZERO,
            _headers(task.headers),
            text(task.source) if task.source else ZERO,
            long(task.version) if task.version else ZERO,
            long(task.scheduled_offset),
            long(task.applied_offset),
            long(task.fence_offset),
            fired_at_bytes if fence_at == fired_at else long(fence_at),
        )
    )


def decode_due_body(value: bytes, at: int) -> DueTask:
    """The due task in the bytes from `at` to the end."""
    task_id, at = read_text(value, at)
    generation, at = read_long(value, at)
    occurrence = attempt = 0
    if value[at : at + 2] == _TWO_EMPTY:
        at += 2
    else:
        occurrence, at = read_int32(value, at)
        attempt, at = read_int32(value, at)
    emission_id, at = read_text(value, at)
    due_at_ms, at = read_long(value, at)
    fired_at_ms, at = read_long(value, at)
    payload, at = read_blob(value, at)
    content_type, at = read_text(value, at)
    headers, at = _read_headers(value, at)
    source, at = read_text(value, at)
    version, at = read_long(value, at)
    scheduled_offset, applied_offset, fence_offset, at = read_three_longs(value, at)
    fence_clock_ms, at = read_long(value, at)
    _check_end(value, at)
    return DueTask(
        task_id=task_id,
        generation=generation,
        occurrence=occurrence,
        attempt=attempt,
        emission_id=emission_id,
        due_at_ms=due_at_ms,  # type: ignore[arg-type]  # as it was encoded, like all below
        fired_at_ms=fired_at_ms,  # type: ignore[arg-type]
        payload=payload,
        content_type=content_type,
        headers=headers,
        source=source,
        version=version,
        scheduled_offset=scheduled_offset,  # type: ignore[arg-type]
        applied_offset=applied_offset,  # type: ignore[arg-type]
        fence_offset=fence_offset,  # type: ignore[arg-type]
        fence_clock_ms=fence_clock_ms,  # type: ignore[arg-type]
    )


def _headers(headers: Mapping[str, bytes]) -> bytes:
    if not headers:
        return ZERO
    parts = [long(len(headers))]
    for name, value in headers.items():
        parts += (text(name), blob(value))
    return b"".join(parts) + ZERO


def _read_headers(value: bytes, at: int) -> tuple[Mapping[str, bytes], int]:
    if value[at] == 0:
        return NO_HEADERS, at + 1
    headers: dict[str, bytes] = {}
    count, at = _read_block(value, at)
    while count:
        for _ in range(count):
            name, at = read_text(value, at)
            headers[name], at = read_blob(value, at)
        count, at = _read_block(value, at)
    return headers or NO_HEADERS, at


def _tracking(tracking: Tracking) -> bytes:
    return _ONE + long(tracking.lease_ms) + int32(tracking.attempts_max) + long(tracking.backoff_ms)


def _read_tracking(value: bytes, at: int) -> tuple[Tracking | None, int]:
    branch, at = read_long(value, at)
    if branch == 0:
        return None, at
    if branch != 1:
        raise MalformedBodyError(f"tracking is branch {branch} of null, Tracking")
    lease_ms, at = read_long(value, at)
    attempts_max, at = read_int32(value, at)
    backoff_ms, at = read_long(value, at)
    return Tracking(lease_ms=lease_ms, attempts_max=attempts_max, backoff_ms=backoff_ms), at  # type: ignore[arg-type]  # as encoded


def _verdicts(verdicts: tuple[VerdictEntry, ...]) -> bytes:
    if not verdicts:
        return ZERO
    raw = _ONE if len(verdicts) == 1 else long(len(verdicts))
    for entry in verdicts:
        reason = text(entry.reason) if entry.reason else ZERO
        raw += text(entry.event_id) + long(entry.offset) + _VERDICT_BYTES[entry.verdict] + reason
    return raw + ZERO


def _read_verdicts(value: bytes, at: int) -> tuple[tuple[VerdictEntry, ...], int]:
    if value[at] == _ONE_ITEM:  # as most tasks have it
        entry, end = _read_verdict(value, at + 1)
        if value[end] == 0:
            return (entry,), end + 1
    entries = []
    count, at = _read_block(value, at)
    while count:
        for _ in range(count):
            entry, at = _read_verdict(value, at)
            entries.append(entry)
        count, at = _read_block(value, at)
    return tuple(entries), at


def _read_verdict(value: bytes, at: int) -> tuple[VerdictEntry, int]:
    event_id, at = read_text(value, at)
    offset, at = read_long(value, at)
    verdict, at = read_long(value, at)
    reason, at = read_text(value, at) if value[at] else ("", at + 1)
    if verdict < 0:
        raise MalformedBodyError(f"a verdict is number {verdict}")
    return VerdictEntry(event_id=event_id, offset=offset, verdict=_VERDICTS[verdict], reason=reason), at  # type: ignore[arg-type]  # as encoded


def _read_block(value: bytes, at: int) -> tuple[int, int]:
    """How many items follow; a negative count, which other writers use, is followed by the block's size in bytes."""
    count, at = read_long(value, at)
    if count < 0:
        _, at = read_long(value, at)
        return -count, at
    return count, at


def _check_end(value: bytes, at: int) -> None:
    if at != len(value):
        raise MalformedBodyError(f"it has {len(value) - at} bytes too many")
