"""A `task-events` value that people write: JSON of the fields of `schemas/TaskEvent.avsc`, refused at the first doubt.

Beside the schema's fields: `due_at` (RFC 3339) for `due_at_ms`, `delay` (`30m`) for `delay_ms`, `payload` is text and
`payload_base64` bytes; a header's value is text or `{"base64": ...}`. As in Avro, `due_at_ms` 0 and `delay_ms` -1 mean
that it is not given. What nobody asked for is most likely a typo: an unknown or doubled field is refused.
"""

import binascii
import json
from base64 import b64decode
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

from pipeline.core.durations import parse_duration_ms, parse_instant_ms
from pipeline.core.events import Cancel, Event, Reason, Rejection, Schedule
from pipeline.core.tasks import NO_HEADERS, TaskId, Tracking

__all__ = ["decode_json_event"]

_INT32_END: Final = 1 << 31
_INT64_END: Final = 1 << 63
_DIGITS_MAX: Final = 20
_SHOWN_MAX: Final = 60


class _FaultError(Exception):
    """A field that is not as it should be; never leaves this module."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def _whole_number(digits: str) -> int | float:
    # Python refuses to read numbers of thousands of digits, and takes its time below that; a float is refused later.
    return int(digits) if len(digits) <= _DIGITS_MAX else float("inf")


# Objects become tuples of pairs, so that a doubled name is seen, and so that they differ from arrays.
_decoder: Final = json.JSONDecoder(object_pairs_hook=tuple, parse_int=_whole_number)


def decode_json_event(value: bytes) -> Event | Rejection:
    """The event in `value`, or why it is none: the first fault, in the order of the fields as they stand there."""
    try:
        pairs = _decoder.decode(value.decode())
    except RecursionError:
        return Rejection(reason=Reason.MALFORMED, message="the JSON is nested too deeply: an event has two levels")
    except ValueError as error:  # no UTF-8, or no JSON
        return Rejection(reason=Reason.MALFORMED, message=f"not JSON in UTF-8: {error}")
    if not isinstance(pairs, tuple):
        return Rejection(reason=Reason.MALFORMED, message="not a JSON object: an event is {...}")
    try:
        return _event(_fields(pairs, _READERS, ""))
    except _FaultError as fault:
        return _rejection(fault, pairs)


def _event(fields: dict[str, Any]) -> Event:
    kind = fields.pop("type", None)
    if kind is None or "task_id" not in fields:
        missing = "type (SCHEDULE or CANCEL)" if kind is None else "task_id"
        raise _FaultError(Reason.INVALID_FIELD, f"{missing} is missing")
    _settle_time(fields, "due_at", "due_at_ms", not_given=0)
    _settle_time(fields, "delay", "delay_ms", not_given=-1)
    if "payload_base64" in fields:
        if "payload" in fields:
            raise _FaultError(Reason.DUPLICATE_FIELD, "payload is given as text and as payload_base64: give one")
        fields["payload"] = fields.pop("payload_base64")
    if kind == "CANCEL":
        return Cancel(**{name: fields[name] for name in Cancel.__struct_fields__ if name in fields})
    return Schedule(**fields)


def _settle_time(fields: dict[str, Any], written: str, name: str, *, not_given: int) -> None:
    """Two ways to say one thing become one; what the schema calls "not given" is left out."""
    if fields.get(name) == not_given:
        del fields[name]
    if written in fields:
        if name in fields:
            raise _FaultError(Reason.TWO_TIMES, f"both {written} and {name} are given: give one")
        fields[name] = fields.pop(written)


_Reader = Callable[[object, str], object]


def _fields(pairs: Iterable[tuple[str, object]], readers: Mapping[str, _Reader], within: str) -> dict[str, Any]:
    """The values of an object's fields as their readers give them; `within` names the object in messages."""
    fields: dict[str, Any] = {}
    for name, value in pairs:
        reader = readers.get(name)
        if reader is None:
            known = ", ".join(readers)
            message = f"{within}{_shown(name)} is no field: is it a typo? There are {known}"
            raise _FaultError(Reason.UNKNOWN_FIELD, message)
        if name in fields:
            raise _FaultError(Reason.DUPLICATE_FIELD, f"{within}{name} is given twice: give it once")
        fields[name] = reader(value, within + name)
    return fields


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise _wrong(name, "a string", value)
    if not _is_unicode(value):
        message = f"{name} holds half of a surrogate pair, which is no character: send whole ones"
        raise _FaultError(Reason.INVALID_FIELD, message)
    return value


def _number(value: object, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise _wrong(name, "a whole number", value)
    return value


def _int64(value: object, name: str) -> int:
    number = _number(value, name)
    if not -_INT64_END <= number < _INT64_END:
        raise _wrong(name, "a whole number of at most 64 bits", value)
    return number


def _int32(value: object, name: str) -> int:
    number = _number(value, name)
    if not -_INT32_END <= number < _INT32_END:
        raise _wrong(name, "a whole number of at most 32 bits", value)
    return number


def _bytes_of_text(value: object, name: str) -> bytes:
    return _text(value, name).encode()


def _bytes_of_base64(value: object, name: str) -> bytes:
    try:
        return b64decode(_text(value, name), validate=True)
    except (binascii.Error, ValueError) as error:
        raise _FaultError(Reason.INVALID_FIELD, f"{name} is not base64 (RFC 4648, padded): {error}") from error


def _instant(value: object, name: str) -> int:
    try:
        return parse_instant_ms(_text(value, name))
    except ValueError as error:
        raise _FaultError(Reason.INVALID_FIELD, f"{name}: {error}") from error


def _duration(value: object, name: str) -> int:
    try:
        return parse_duration_ms(_text(value, name))
    except ValueError as error:
        raise _FaultError(Reason.INVALID_FIELD, f"{name}: {error}") from error


def _kind(value: object, name: str) -> str:
    if value not in ("SCHEDULE", "CANCEL"):
        raise _wrong(name, "SCHEDULE or CANCEL", value)
    return _text(value, name)


def _headers(value: object, name: str) -> Mapping[str, bytes]:
    if not isinstance(value, tuple):
        raise _wrong(name, "an object", value)
    headers: dict[str, bytes] = {}
    for header, content in value:
        within = f"{name}.{_shown(_text(header, f'a name in {name}'))}"
        if header in headers:
            raise _FaultError(Reason.DUPLICATE_FIELD, f"{within} is given twice: give it once")
        headers[header] = _header_value(content, within)
    return headers or NO_HEADERS


def _header_value(value: object, name: str) -> bytes:
    if isinstance(value, str):
        return _bytes_of_text(value, name)
    if not isinstance(value, tuple):
        raise _wrong(name, 'a string or {"base64": "..."}', value)
    fields = _fields(value, _HEADER_READERS, f"{name}.")
    if not fields:
        raise _wrong(name, 'a string or {"base64": "..."}', value)
    content: bytes = fields["base64"]
    return content


def _tracking(value: object, name: str) -> Tracking | None:
    if value is None:
        return None
    if not isinstance(value, tuple):
        raise _wrong(name, "an object or null", value)
    fields = _fields(value, _TRACKING_READERS, f"{name}.")
    missing = [field for field in _TRACKING_READERS if field not in fields]
    if missing:
        raise _FaultError(Reason.INVALID_FIELD, f"{name}.{missing[0]} is missing")
    return Tracking(**fields)


_READERS: Final[Mapping[str, _Reader]] = MappingProxyType(
    {
        "event_id": _text,
        "task_id": _text,
        "type": _kind,
        "version": _number,  # admission judges these three, and says more than that they are too long
        "due_at": _instant,
        "due_at_ms": _number,
        "delay": _duration,
        "delay_ms": _number,
        "payload": _bytes_of_text,
        "payload_base64": _bytes_of_base64,
        "content_type": _text,
        "headers": _headers,
        "target_topic": _text,
        "tracking": _tracking,
        "source": _text,
        "created_at_ms": _int64,
    }
)
_HEADER_READERS: Final[Mapping[str, _Reader]] = MappingProxyType({"base64": _bytes_of_base64})
_TRACKING_READERS: Final[Mapping[str, _Reader]] = MappingProxyType(
    {"lease_ms": _int64, "attempts_max": _int32, "backoff_ms": _int64}
)


def _rejection(fault: _FaultError, pairs: tuple[tuple[str, object], ...]) -> Rejection:
    """Why it is refused, with what is legible in spite of that: what is given once and is right in itself."""
    found: dict[str, object] = {}
    for name, value in pairs:
        found[name] = None if name in found else value
    task_id, event_id, version = found.get("task_id"), found.get("event_id"), found.get("version")
    return Rejection(
        reason=fault.reason,
        message=str(fault),
        task_id=TaskId(task_id) if isinstance(task_id, str) and _is_unicode(task_id) else None,
        event_id=event_id if isinstance(event_id, str) and _is_unicode(event_id) else "",
        version=version if isinstance(version, int) and not isinstance(version, bool) else 0,
    )


def _is_unicode(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _wrong(name: str, wanted: str, value: object) -> _FaultError:
    return _FaultError(Reason.INVALID_FIELD, f"{name} must be {wanted}, not {_described(value)}")


def _described(value: object) -> str:
    if isinstance(value, tuple):
        return "an object"
    if isinstance(value, list):
        return "an array"
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    if value == float("inf"):
        return "a number of that size"
    return _shown(value)


def _shown(value: object) -> str:
    """`value` for a message, short and in one line whatever it holds."""
    if isinstance(value, str) and len(value) > _SHOWN_MAX:
        return repr(value[:_SHOWN_MAX]) + "..."
    return repr(value)
