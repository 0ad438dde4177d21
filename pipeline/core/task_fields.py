"""A due task as plain fields, for JSON lines and for the environment of commands."""

from base64 import b64encode
from collections.abc import Mapping

from pipeline.core.effects import DueTask

__all__ = ["task_fields"]


def task_fields(task: DueTask, *, partition: int, offset: int, replay: bool) -> dict[str, object]:
    """What a consumer may want to know of `task` and of where its record stands, ready for JSON.

    Bytes are given as text where they are UTF-8: `payload`, else `payload_base64`; `headers`, those that are not in
    `headers_base64`. `lateness_ms` is how long after its due time the task fired, by the clock of its owner.
    """
    fields: dict[str, object] = {
        "task_id": task.task_id,
        "generation": task.generation,
        "occurrence": task.occurrence,
        "attempt": task.attempt,
        "emission_id": task.emission_id,
        "due_at_ms": task.due_at_ms,
        "fired_at_ms": task.fired_at_ms,
        "lateness_ms": task.fired_at_ms - task.due_at_ms,
    }
    payload = _text(task.payload)
    if payload is not None:
        fields["payload"] = payload
    else:
        fields["payload_base64"] = _base64(task.payload)
    if task.content_type:
        fields["content_type"] = task.content_type
    fields |= _header_fields(task.headers)
    return fields | {"partition": partition, "offset": offset, "replay": replay}


def _header_fields(headers: Mapping[str, bytes]) -> dict[str, object]:
    texts = {name: _text(value) for name, value in headers.items()}
    fields: dict[str, object] = {"headers": {name: text for name, text in texts.items() if text is not None}}
    binary = {name: _base64(headers[name]) for name, text in texts.items() if text is None}
    return fields | {"headers_base64": binary} if binary else fields


def _text(value: bytes) -> str | None:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return None


def _base64(value: bytes) -> str:
    return b64encode(value).decode()
