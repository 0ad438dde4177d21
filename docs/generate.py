"""Writes the parts of the reference that follow from the code: run `make docs` after changing any of it.

A test fails while a page differs from what this would write.
"""

import json
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from click import Command, Group
from pydantic.fields import FieldInfo

from pipeline.cli.app import build_app
from pipeline.config import Settings
from pipeline.core.audit import PROMISES, RULES, Unprovable
from pipeline.core.events import REASON_REMEDIES, Reason
from pipeline.core.lifecycle import EXTERNAL, MOVES, Trigger
from pipeline.core.tasks import Status

DOCS = Path(__file__).parent
ROOT = DOCS.parent
NOTE = "<!-- Written by docs/generate.py from the code; `make docs` writes it again. -->\n\n"


def pages() -> dict[Path, str]:
    """Each generated page with its text."""
    reference = DOCS / "reference"
    return {
        reference / "settings.md": settings_page(),
        reference / "reason-codes.md": reasons_page(),
        reference / "violation-codes.md": violations_page(),
        reference / "schemas.md": schemas_page(),
        reference / "topics.md": topics_page(),
        reference / "cli.md": cli_page(),
        reference / "task-life.md": life_page(),
    }


def settings_page() -> str:
    """Every setting: variable, default, meaning."""
    rows = [
        f"| `DUETASKS_{name.upper()}` | {_default(field)} | {field.description or ''} |"
        for name, field in Settings.model_fields.items()
    ]
    return (
        "# Settings\n\n" + NOTE + "Variables come first, then the TOML file that `DUETASKS_CONFIG_FILE` names (else "
        "`duetasks.toml` in the working directory), with the same names in lower case and without the prefix.\n"
        "An unknown variable or key is refused: it is most likely a typo.\n"
        "`duetasks config` prints what is in force, and from where.\n\n"
        "| variable | default | meaning |\n|---|---|---|\n" + "\n".join(rows) + "\n"
    )


def _default(field: FieldInfo) -> str:
    if field.default_factory is not None:
        return "the user's data folder"
    if field.default is None:
        return "unset"
    if isinstance(field.default, frozenset):
        return "none"
    return f"`{field.default}`"


def reasons_page() -> str:
    """Every reason code: what it says, what to do."""
    rows = [f"| `{reason}` | {REASON_REMEDIES[reason][0]} | {REASON_REMEDIES[reason][1]} |" for reason in Reason]
    return (
        "# Reason codes\n\n" + NOTE + "The `reason` of a record on `dead-tasks`, of a `REJECTED` verdict, and of a "
        "`RejectedTaskError`.\nNothing else is lost or delayed by what is set aside.\n\n"
        "| code | what happened | what to do |\n|---|---|---|\n" + "\n".join(rows) + "\n"
    )


def violations_page() -> str:
    """Every violation code of the audit: the promise, what was found, what to do."""
    rows = [
        f"| {rule.promise} {PROMISES[rule.promise]} | `{code}` | {rule.meaning} | {rule.remedy} |"
        for code, rule in RULES.items()
    ]
    reasons = [f"- {why[0].upper()}{why[1:]}." for why in Unprovable]
    return (
        "# Violation codes\n\n" + NOTE + "The `code` of each finding of `duetasks verify`; codes are never renamed.\n"
        "[How to verify what happened](../how-to/verify-what-happened.md) tells how to read them.\n\n"
        "| promise | code | what was found | what to do |\n|---|---|---|---|\n" + "\n".join(rows) + "\n\n"
        "Why something is counted as unprovable:\n\n" + "\n".join(reasons) + "\n"
    )


def schemas_page() -> str:
    """Every Avro schema, field by field."""
    parts = [
        "# Schemas\n\n"
        + NOTE
        + "Values are Avro in single-object encoding: the bytes `C3 01`, the schema's CRC-64-AVRO "
        "fingerprint (8 bytes, little-endian), then the body.\nThe files are in `schemas/` and inside the package.\n"
    ]
    for path in sorted((ROOT / "schemas").glob("*.avsc")):
        schema = json.loads(path.read_text("utf-8"))
        parts.append(f"\n## {schema['name']}\n\n{schema['doc']}\n\n| field | type | meaning |\n|---|---|---|")
        parts.extend(f"| `{f['name']}` | {_type_name(f['type'])} | {f['doc']} |" for f in schema["fields"])
    return "\n".join(parts) + "\n"


def _type_name(kind: Any) -> str:  # noqa: ANN401  # an Avro type is a name, a list or an object
    match kind:
        case list():
            name = " or ".join(_type_name(one) for one in kind)
        case {"type": "enum"}:
            name = "one of " + ", ".join(f"`{symbol}`" for symbol in kind["symbols"])
        case {"type": "map"}:
            name = f"map of {_type_name(kind['values'])}"
        case {"type": "array"}:
            name = f"list of {_type_name(kind['items'])}"
        case {"type": "record"}:
            name = f"{kind['name']} (" + ", ".join(f"`{field['name']}`" for field in kind["fields"]) + ")"
        case _:
            name = str(kind)
    return name


def topics_page() -> str:
    """Every topic with its settings and their reasons."""
    parts = [
        "# Topics\n\n"
        + NOTE
        + "All have the same number of partitions, and everything of a task stands in the same one.\n"
        "`duetasks topics plan` shows what is missing, `apply` creates and mends, `verify` tells what is wrong; "
        "an agent refuses to start where a difference could lose data.\n"
        "A value of `task-events` is Avro (see [schemas](schemas.md)) or JSON: see "
        "[producing in any language](../how-to/produce-from-any-language.md).\n"
    ]
    files = sorted((ROOT / "topics").glob("*.toml"), key=lambda path: tomllib.loads(path.read_text("utf-8"))["order"])
    for path in files:
        topic = tomllib.loads(path.read_text("utf-8"))
        parts.append(f"\n## {path.stem}\n\nNeeded because {topic['purpose']}.\n")
        parts.append("| setting | needed | why | otherwise |\n|---|---|---|---|")
        for name, rule in topic["settings"].items():
            parts.append(f"| `{name}` | {_needed(rule)} | {rule['reason']} | {rule['otherwise']} |")
    return "\n".join(parts) + "\n"


def _needed(rule: dict[str, Any]) -> str:
    match rule:
        case {"event_bytes_max_plus": int(room)}:
            value = f"`DUETASKS_EVENT_BYTES_MAX` + {room}"
        case {"task_events_plus": int(room)}:
            value = f"that of `task-events` + {room}"
        case _:
            value = rule["value"]
    replicas = f", with {rule['only_with_replicas']} replicas" if "only_with_replicas" in rule else ""
    return f"{rule['rule'].replace('_', ' ')} {value}{replicas}"


def cli_page() -> str:
    """Every command with its options."""
    root = typer.main.get_command(build_app())
    parts = [
        "# Command line\n\n" + NOTE + "Exit codes: 0 done, 1 a promise was found broken (`verify`, "
        "`demo`, `simulate`) or a bug was met, 2 usage, 3 not found, 4 refused, 5 unavailable.\n"
        "Every command takes `--json` (that of `bench` names a file).\n"
        "Durations are `30m`, `1h30m`, `2d`; instants are RFC 3339 with an offset.\n"
    ]
    for path, command in _commands(root, ["duetasks"]):
        usage = " ".join([*path, *filter(None, map(_usage, command.params))])
        parts.append(f"\n## `{' '.join(path)}`\n\n{(command.help or '').strip()}\n\n```\n{usage}\n```\n")
        rows = [
            f"| `{_name(parameter)}` | {getattr(parameter, 'help', None) or ''} |"
            for parameter in command.params
            if getattr(parameter, "help", None)
        ]
        if rows:
            parts.append("| option | meaning |\n|---|---|\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def _commands(command: Command, path: list[str]) -> Iterator[tuple[list[str], Command]]:
    if hasattr(command, "commands"):
        group: Group = command  # type: ignore[assignment]  # typer's own group has the same attribute
        for name, child in group.commands.items():
            yield from _commands(child, [*path, name])
    else:
        yield path, command


def _usage(parameter: Any) -> str:  # noqa: ANN401  # click's parameter
    name = (parameter.metavar or parameter.name or "").upper()
    if _is_argument(parameter):
        return name if parameter.required else f"[{name}]"
    return f"{parameter.opts[0]} {name}" if parameter.required else ""


def _name(parameter: Any) -> str:  # noqa: ANN401  # click's parameter
    return _usage(parameter) if _is_argument(parameter) else ", ".join(parameter.opts)


def _is_argument(parameter: Any) -> bool:  # noqa: ANN401  # click's parameter
    return bool(parameter.param_type_name == "argument")


def life_page() -> str:
    """The life of a task: diagram and table, from the table of moves."""
    lines = ["stateDiagram-v2"]
    arrows: dict[tuple[str, str], list[str]] = {}
    for (before, trigger), move in MOVES.items():
        if before == move.to:
            continue
        source = before or "[*]"
        target = move.to or "[*]"
        if (source, target) != ("[*]", "[*]"):
            arrows.setdefault((source, target), []).append(trigger)
    lines += [f"    {source} --> {target}: {', '.join(names)}" for (source, target), names in arrows.items()]
    header = "| status | " + " | ".join(Trigger) + " |\n|---|" + "---|" * len(Trigger)
    rows = [
        f"| {status or '(none)'} | " + " | ".join(_cell(status, t) for t in Trigger) + " |"
        for status in (None, *Status)
    ]
    return (
        "# The life of a task\n\n" + NOTE + "```mermaid\n" + "\n".join(lines) + "\n```\n\n"
        "Each cell: the status afterwards, and the verdict that the author of the event is told. "
        f"{' and '.join(EXTERNAL)} come from outside, the others from the owner; an empty cell is an internal move "
        "that would be a bug: it raises and changes nothing.\n\n" + header + "\n" + "\n".join(rows) + "\n"
    )


def _cell(status: Status | None, trigger: Trigger) -> str:
    move = MOVES.get((status, trigger))
    if move is None:
        return ""
    return (move.to or "(forgotten)") + (f", `{move.verdict}`" if move.verdict else "")


def main() -> int:
    """Write the pages; with `--check`, only tell which differ."""
    differing = [path for path, text in pages().items() if not path.exists() or path.read_text("utf-8") != text]
    for path in differing:
        if "--check" not in sys.argv:
            path.write_text(pages()[path], "utf-8")
        sys.stdout.write(f"{path.relative_to(ROOT)}\n")
    return int(bool(differing) and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
