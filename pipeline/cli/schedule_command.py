"""`duetasks schedule` and `cancel`: one event, and with `--wait` what became of it."""

import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from pipeline.cli.options import TASKS, JsonFlag, read_duration, read_instant
from pipeline.cli.output import Output
from pipeline.cli.session import connected_settings
from pipeline.core.durations import format_instant
from pipeline.core.events import Cancel, Event, Schedule
from pipeline.core.tasks import DurationMs, InstantMs, Offset, TaskId, Verdict
from pipeline.errors import (
    EXIT_DONE,
    EXIT_NOT_FOUND,
    EXIT_REFUSED,
    EXIT_UNAVAILABLE,
    UnavailableError,
    UsageError,
)

if TYPE_CHECKING:
    from pipeline.config import Settings
    from pipeline.service.receipts import Receipt

__all__ = ["register"]

_WAIT_DEFAULT: Final = "30s"
_POLL_FIRST_S: Final = 0.01
_POLL_MAX_S: Final = 0.5
_SOURCE: Final = "duetasks command"

_EXIT_CODES: Final = {
    Verdict.STALE: EXIT_REFUSED,
    Verdict.TOO_LATE: EXIT_REFUSED,
    Verdict.REJECTED: EXIT_REFUSED,
    Verdict.UNKNOWN_TASK: EXIT_NOT_FOUND,
    "UNKNOWN": EXIT_UNAVAILABLE,
}
_SENTENCES: Final = {
    Verdict.SCHEDULED: "The task is scheduled.",
    Verdict.RESCHEDULED: "The task is scheduled, in place of what was scheduled before.",
    Verdict.DUPLICATE: "An event with this id was applied before: nothing changed.",
    Verdict.STALE: "Refused: an event with this version or a higher one was applied before.",
    Verdict.CANCELLED: "The task is cancelled.",
    Verdict.ALREADY_CANCELLED: "The task was cancelled before.",
    Verdict.TOO_LATE: "Too late: the task was emitted before.",
    Verdict.UNKNOWN_TASK: "There is no such task: it was never scheduled, or is finished and forgotten.",
    "UNKNOWN": "The event was applied; what became of it is not remembered. See: duetasks status",
}

_VersionOption = Annotated[
    int | None, typer.Option("--version", metavar="N", help="Your own rising number for this task, from 1.")
]
_EventIdOption = Annotated[
    str, typer.Option("--event-id", metavar="ID", help="Names this request: sent again, it changes nothing.")
]
_WaitFlag = Annotated[bool, typer.Option("--wait", "-w", help="Wait until an agent has applied it; tell the verdict.")]
_TimeoutOption = Annotated[
    DurationMs,
    typer.Option("--timeout", parser=read_duration, metavar="DURATION", help="How long --wait waits."),
]


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command(rich_help_panel=TASKS)(schedule)
    app.command(rich_help_panel=TASKS)(cancel)


def schedule(
    task_id: Annotated[str, typer.Argument(metavar="ID", help="The task's id; a task of this id is replaced.")],
    *,
    due_at_ms: Annotated[
        InstantMs | None,
        typer.Option("--at", parser=read_instant, metavar="INSTANT", help="When it is due: 2026-04-01T14:30:00Z."),
    ] = None,
    delay_ms: Annotated[
        DurationMs | None,
        typer.Option("--in", parser=read_duration, metavar="DURATION", help="After how long it is due: 30m, 1h30m."),
    ] = None,
    payload: Annotated[
        str, typer.Option("--payload", "-p", metavar="TEXT|@FILE|-", help="What consumers get; - is standard input.")
    ] = "",
    content_type: Annotated[str, typer.Option("--content-type", help="Of the payload.")] = "",
    version: _VersionOption = None,
    headers: Annotated[
        list[str] | None, typer.Option("--header", "-H", metavar="K=V", help="A header of the due task; repeatable.")
    ] = None,
    target_topic: Annotated[str, typer.Option("--target-topic", help="Emit it there instead of due-tasks.")] = "",
    event_id: _EventIdOption = "",
    wait: _WaitFlag = False,
    timeout_ms: _TimeoutOption = _WAIT_DEFAULT,  # type: ignore[assignment]  # typer parses the default too
    as_json: JsonFlag = False,
) -> None:
    """Let a task be due at an instant, or after a delay."""
    if (due_at_ms is None) == (delay_ms is None):
        raise UsageError("When is it due? Give --at INSTANT or --in DURATION, one of the two.")
    event = Schedule(
        task_id=TaskId(task_id),
        event_id=event_id or _new_event_id(),
        version=_version(version),
        due_at_ms=due_at_ms,
        delay_ms=delay_ms,
        payload=_payload(payload),
        content_type=content_type,
        headers=_headers(headers or []),
        target_topic=target_topic,
        source=_SOURCE,
        created_at_ms=_now_ms(),
    )
    _send(event, wait_ms=timeout_ms if wait else None, output=Output(as_json=as_json))


def cancel(
    task_id: Annotated[str, typer.Argument(metavar="ID", help="The task's id.")],
    *,
    version: _VersionOption = None,
    event_id: _EventIdOption = "",
    wait: _WaitFlag = False,
    timeout_ms: _TimeoutOption = _WAIT_DEFAULT,  # type: ignore[assignment]  # typer parses the default too
    as_json: JsonFlag = False,
) -> None:
    """Let a task be forgotten. With --wait, exit code 4 says that it was too late, 3 that there is no such task."""
    event = Cancel(
        task_id=TaskId(task_id),
        event_id=event_id or _new_event_id(),
        version=_version(version),
        source=_SOURCE,
        created_at_ms=_now_ms(),
    )
    _send(event, wait_ms=timeout_ms if wait else None, output=Output(as_json=as_json))


def _send(event: Event, *, wait_ms: DurationMs | None, output: Output) -> None:
    from pipeline.producer import TaskProducer  # noqa: PLC0415  # slow imports stay out of --help

    settings = connected_settings()
    with TaskProducer(settings) as producer:
        receipt = producer.send_event(event)
    result = _receipt_fields(event, receipt)
    if wait_ms is None:
        output.result(result, "\n".join([*_receipt_lines(event, receipt), f"Next: duetasks status {event.task_id}"]))
        return
    with output.working("Waiting for the verdict"):
        answer = _await_verdict(settings, event, receipt, wait_ms)
    result |= {name: answer[name] for name in ("verdict", "reason", "emission")}
    output.result(result, "\n".join([*_receipt_lines(event, receipt), *_verdict_lines(answer)]))
    code = _EXIT_CODES.get(answer["verdict"], EXIT_DONE)
    if code:
        raise typer.Exit(code)


class NoVerdictError(UnavailableError):
    """The event is sent, and nobody told what became of it."""

    def __init__(self, message: str, *, receipt: dict[str, Any]) -> None:
        super().__init__(message)
        self.receipt = receipt


def _await_verdict(settings: "Settings", event: Event, receipt: "Receipt", wait_ms: DurationMs) -> dict[str, Any]:
    """The agent's answer once the event was applied; raises `UnavailableError` when the time is over."""
    from pipeline.adapters.agent_client import AgentClient  # noqa: PLC0415  # slow imports stay out of --help

    if not receipt.is_placed:
        raise NoVerdictError(
            "The event is sent and stays so, but the broker did not tell where it stands, so its verdict can't be "
            f"waited for: see `duetasks why {event.task_id}`",
            receipt=_receipt_fields(event, receipt),
        )
    until_s, pause_s = time.monotonic() + wait_ms / 1000, _POLL_FIRST_S
    fault = "no agent has come to it yet"
    with closing(AgentClient(settings, patience_s=wait_ms / 1000)) as agent:
        while time.monotonic() < until_s:
            try:
                answer = agent.verdict(
                    partition=receipt.partition, offset=Offset(receipt.offset), task_id=event.task_id
                )
            except UnavailableError as error:
                fault = str(error)
                break
            if answer["passed"]:
                return answer
            time.sleep(min(pause_s, max(0.0, until_s - time.monotonic())))
            pause_s = min(2 * pause_s, _POLL_MAX_S)
    raise NoVerdictError(
        f"The event is sent (partition {receipt.partition}, offset {receipt.offset}) and stays so, "
        f"but there is no verdict: {fault}",
        receipt=_receipt_fields(event, receipt),
    )


def _receipt_fields(event: Event, receipt: "Receipt") -> dict[str, Any]:
    return {
        "task_id": event.task_id,
        "event_id": receipt.event_id,
        "topic": receipt.topic,
        "partition": receipt.partition,
        "offset": receipt.offset,
        "timestamp_ms": receipt.timestamp_ms,
        "due_at_ms": _due_at_ms(event, receipt),
    }


def _receipt_lines(event: Event, receipt: "Receipt") -> list[str]:
    offset = f"offset {receipt.offset}" if receipt.is_placed else "at an offset that the broker did not tell"
    place = f"{receipt.topic}, partition {receipt.partition}, {offset}"
    due_at_ms = _due_at_ms(event, receipt)
    due = "" if due_at_ms is None else f", to be due {format_instant(InstantMs(due_at_ms))}"
    asked = "cancel" if isinstance(event, Cancel) else "schedule"
    return [f"Sent: {asked} {event.task_id!r}{due} ({place})."]


def _verdict_lines(answer: dict[str, Any]) -> list[str]:
    verdict, emission = answer["verdict"], answer["emission"]
    lines = [_SENTENCES.get(verdict, f"Refused: {answer['reason']}.") + f" [{verdict}]"]
    if emission and verdict == Verdict.TOO_LATE:
        lines.append(
            f"It fired {format_instant(InstantMs(emission['fired_at_ms']))}: {emission['topic']}, "
            f"partition {emission['partition']}, offset {emission['offset']}."
        )
    return lines


def _due_at_ms(event: Event, receipt: "Receipt") -> int | None:
    if isinstance(event, Cancel):
        return None
    if event.delay_ms is None:
        return event.due_at_ms
    return receipt.timestamp_ms + event.delay_ms if receipt.is_placed else None


def _payload(text: str) -> bytes:
    if text == "-":
        return sys.stdin.buffer.read()
    if not text.startswith("@"):
        return text.encode("utf-8", "surrogateescape")
    try:
        return Path(text[1:]).read_bytes()
    except OSError as error:
        raise UsageError(f"--payload {text}: {error.strerror or error}.") from error


def _headers(options: Sequence[str]) -> dict[str, bytes]:
    headers: dict[str, bytes] = {}
    for option in options:
        name, equals, value = option.partition("=")
        if not equals or not name:
            raise UsageError(f"--header {option!r} is not NAME=VALUE.")
        if name in headers:
            raise UsageError(f"--header {name} is given twice.")
        headers[name] = value.encode("utf-8", "surrogateescape")
    return headers


def _version(version: int | None) -> int:
    if version is not None and version < 1:
        raise UsageError(f"--version {version}: versions count from 1.")
    return version or 0


def _new_event_id() -> str:
    from pipeline.producer import new_event_id  # noqa: PLC0415  # slow imports stay out of --help

    return new_event_id()


def _now_ms() -> InstantMs:
    return InstantMs(time.time_ns() // 1_000_000)
