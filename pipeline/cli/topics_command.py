"""`duetasks topics`: the six topics, as declared against as they are."""

from typing import TYPE_CHECKING

import typer

from pipeline.cli.options import OPERATION, JsonFlag
from pipeline.cli.output import Output
from pipeline.cli.session import connected_settings
from pipeline.core.topic_rules import Finding, Severity, told
from pipeline.errors import EXIT_REFUSED

if TYPE_CHECKING:
    from pipeline.core.topic_plan import Alteration, Creation, TopicPlan

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the group to the command line."""
    group = typer.Typer(
        no_args_is_help=True, help="Set up the topics of a deployment, and see whether they can lose data."
    )
    group.command()(plan)
    group.command()(apply)
    group.command()(verify)
    app.add_typer(group, name="topics", rich_help_panel=OPERATION)


def plan(*, as_json: JsonFlag = False) -> None:
    """Show what `apply` would do, each setting with its reason. Changes nothing."""
    from pipeline.adapters.topic_setup import plan_for, verify_topics  # noqa: PLC0415  # Kafka's client is slow

    output = Output(as_json=as_json)
    settings = connected_settings()
    with output.working("Asking the cluster"):
        found = plan_for(settings)
        left = found.leaves(verify_topics(settings))
    end = "Nothing to do." if found.is_empty else "Nothing was changed. To do this, type: duetasks topics apply"
    value = {
        "create": [_creation_value(creation) for creation in found.creations],
        "alter": [_alteration_value(alteration) for alteration in found.alterations],
        "findings": left,
    }
    output.result(value, "\n".join([*_plan_lines(found, with_reasons=True), *_finding_lines(left), end]))


def apply(*, as_json: JsonFlag = False) -> None:
    """Create missing topics and mend settings; never delete a topic, never add partitions."""
    from pipeline.adapters.topic_setup import apply_topics, verify_topics  # noqa: PLC0415  # slow to import

    output = Output(as_json=as_json)
    settings = connected_settings()
    with output.working("Setting up topics"):
        done = apply_topics(settings)
        left = verify_topics(settings)
    end = "All was as declared already." if done.is_empty else "Done."
    lines = [*_plan_lines(done, with_reasons=False), *_finding_lines(left), end]
    value = {
        "created": [_creation_value(creation) for creation in done.creations],
        "altered": [_alteration_value(alteration) for alteration in done.alterations],
        "findings": left,
    }
    output.result(value, "\n".join(lines))
    _exit_if_unsafe(output, left)


def verify(*, as_json: JsonFlag = False) -> None:
    """Compare the topics with what is declared. Exit code 4 if a difference can lose data."""
    from pipeline.adapters.topic_setup import verify_topics  # noqa: PLC0415  # Kafka's client is slow to import

    output = Output(as_json=as_json)
    settings = connected_settings()
    with output.working("Asking the cluster"):
        found = verify_topics(settings)
    lines = _finding_lines(found) or [f"All topics at {settings.bootstrap_servers} are as declared."]
    output.result({"safe": not _unsafe(found), "findings": found}, "\n".join(lines))
    _exit_if_unsafe(output, found)


def _unsafe(found: list[Finding]) -> list[Finding]:
    return [finding for finding in found if finding.severity is Severity.LOSES_DATA]


def _exit_if_unsafe(output: Output, found: list[Finding]) -> None:
    unsafe = _unsafe(found)
    if unsafe:
        output.say(f"{len(unsafe)} of these can lose data: agents refuse to start until they are mended.")
        raise typer.Exit(EXIT_REFUSED)


def _finding_lines(found: list[Finding]) -> list[str]:
    return [f"{finding.severity:10}  {finding.message}" for finding in found]


def _creation_value(creation: "Creation") -> dict[str, object]:
    return {
        "topic": creation.topic,
        "partitions": creation.partition_count,
        "replicas": creation.replica_count,
        "settings": {required.name: required.value for required in creation.settings},
    }


def _alteration_value(alteration: "Alteration") -> dict[str, object]:
    required = alteration.required
    return {
        "topic": alteration.topic,
        "setting": required.name,
        "from": alteration.present,
        "to": required.value,
        "reason": required.declared.reason,
    }


def _plan_lines(plan: "TopicPlan", *, with_reasons: bool) -> list[str]:
    lines = []
    for creation in plan.creations:
        lines.append(f"+ {creation.topic}  partitions {creation.partition_count}, replicas {creation.replica_count}")
        if with_reasons:
            for required in creation.settings:
                lines += [
                    f"    {required.name} = {told(required.name, required.value)}",
                    f"      {required.declared.reason}",
                ]
    for alteration in plan.alterations:
        required = alteration.required
        lines.append(
            f"~ {alteration.topic}  {required.name}  "
            f"{told(required.name, alteration.present)} -> {told(required.name, required.value)}"
        )
        if with_reasons:
            lines.append(f"      {required.declared.reason}")
    return lines
