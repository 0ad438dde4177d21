"""`duetasks verify`: proves or refutes the promises from the topics alone."""

from typing import TYPE_CHECKING, Annotated, Final

import typer

from pipeline.cli.options import PROOF, JsonFlag, read_duration, read_instant
from pipeline.cli.output import Output
from pipeline.cli.recovery_session import ProgressBars
from pipeline.cli.session import connected_settings
from pipeline.core.audit import PROMISES, RULES, Finding
from pipeline.core.durations import format_instant
from pipeline.core.tasks import DurationMs, InstantMs
from pipeline.errors import EXIT_VIOLATED

if TYPE_CHECKING:
    from pipeline.service.audit.auditor import AuditReport

__all__ = ["register"]

_PROMISE_COLUMNS: Final = {
    "promise": "PROMISE",
    "name": "",
    "checked": "CHECKED",
    "violations": "VIOLATIONS",
    "unprovable": "UNPROVABLE",
}
_FINDING_COLUMNS: Final = {
    "code": "VIOLATION",
    "place": "RECORD",
    "task_id": "TASK",
    "at": "AT",
    "detail": "WHAT",
}
_SHOWN: Final = 20
_OVERDUE_MS: Final = DurationMs(300_000)


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command(rich_help_panel=PROOF)(verify)


def verify(
    *,
    from_ms: Annotated[
        InstantMs | None,
        typer.Option("--from", parser=read_instant, metavar="INSTANT", help="Judge what was appended then or later."),
    ] = None,
    to_ms: Annotated[
        InstantMs | None,
        typer.Option("--to", parser=read_instant, metavar="INSTANT", help="Judge what was appended before then."),
    ] = None,
    partitions: Annotated[
        list[int] | None, typer.Option("--partition", min=0, help="Only this one; repeatable. Else all.")
    ] = None,
    groups: Annotated[
        list[str] | None,
        typer.Option("--group", help="Only this consumer group's ledger; repeatable. Else all that have rows."),
    ] = None,
    overdue_ms: Annotated[
        DurationMs | None,
        typer.Option(
            "--overdue", parser=read_duration, metavar="DURATION", help="How late a task may be; 5m unless given."
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Prove or refute the promises from the topics alone, beside running agents or after an incident.

    Everything that is retained is read, and nothing is changed. Exit code 1 if any promise was found broken.
    """
    from pipeline.wiring.audit import AuditChoice, audit  # noqa: PLC0415  # slow imports stay out of --help

    output = Output(as_json=as_json)
    settings = connected_settings()
    choice = AuditChoice(
        overdue_ms=_OVERDUE_MS if overdue_ms is None else overdue_ms,
        from_ms=from_ms,
        to_ms=to_ms,
        partitions=tuple(partitions or ()),
        groups=tuple(groups or ()),
    )
    with ProgressBars(output) as bars:
        report = audit(settings, choice, on_progress=bars)
    if as_json:
        output.result(_document(report), "")
    else:
        _print(output, report)
    if not report.is_clean:
        raise typer.Exit(EXIT_VIOLATED)


def _document(report: "AuditReport") -> dict[str, object]:
    return {
        "clean": report.is_clean,
        "at_ms": report.at_ms,
        "partitions": report.partitions,
        "records": report.records,
        "promises": report.promises,
        "outcomes": report.outcomes,
        "violations": report.violations,
        "findings": [_described(finding) for finding in report.findings],
        "findings_left_out": report.findings_left_out,
        "notes": report.notes,
    }


def _described(finding: Finding) -> dict[str, object]:
    rule = RULES[finding.code]
    return {
        "promise": rule.promise,
        "code": finding.code,
        "topic": finding.topic,
        "partition": finding.partition,
        "offset": finding.offset,
        "task_id": finding.task_id,
        "at_ms": finding.at_ms,
        "detail": finding.detail,
        "meaning": rule.meaning,
        "remedy": rule.remedy,
    }


def _print(output: Output, report: "AuditReport") -> None:
    output.table(
        [
            {
                "promise": promise.promise,
                "name": PROMISES[promise.promise],
                "checked": promise.checked,
                "violations": promise.violations,
                "unprovable": sum(promise.unprovable.values()),
            }
            for promise in report.promises
        ],
        _PROMISE_COLUMNS,
    )
    for promise in report.promises:
        for why, count in promise.unprovable.items():
            output.say(f"{promise.promise}: {count} can't be proved: {why}.")
    for note in report.notes:
        output.say(f"Note: {note}.")
    counts = ", ".join(f"{count} {outcome}" for outcome, count in report.outcomes.items())
    output.say(f"Schedules by outcome: {counts or 'none'}.")
    if report.is_clean:
        output.say("No violation found.")
        return
    shown = report.findings[:_SHOWN]
    output.table([_row(finding) for finding in shown], _FINDING_COLUMNS)
    total = sum(report.violations.values())
    if total > len(shown):
        output.say(f"And {total - len(shown)} more; --json has up to {len(report.findings)}.")
    for code, count in report.violations.items():
        rule = next(rule for name, rule in RULES.items() if name == code)
        output.say(f"{rule.promise} {code}: {count} found. {rule.meaning} {rule.remedy}")


def _row(finding: Finding) -> dict[str, object]:
    offset = "" if finding.offset < 0 else f"@{finding.offset}"
    return {
        "code": finding.code,
        "place": f"{finding.topic}-{finding.partition}{offset}",
        "task_id": finding.task_id if finding.task_id.isprintable() else repr(finding.task_id),
        "at": format_instant(finding.at_ms) if finding.at_ms else "",
        "detail": finding.detail,
    }
