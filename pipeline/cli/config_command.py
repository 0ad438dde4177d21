"""`duetasks config`: every setting, its value, and where it came from."""

import typer

from pipeline.cli.options import OPERATION, JsonFlag
from pipeline.cli.output import Output
from pipeline.cli.session import load_settings

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command(rich_help_panel=OPERATION)(config)


def config(*, as_json: JsonFlag = False) -> None:
    """Print all settings, secrets hidden, each with where it came from; with --json, what it means too."""
    from pipeline.config import setting_origins  # noqa: PLC0415  # slow to import

    output = Output(as_json=as_json)
    settings = load_settings()
    origins = setting_origins()
    rows = [
        {"name": name, "value": value, "from": origins[name], "meaning": type(settings).model_fields[name].description}
        for name, value in settings.redacted().items()
    ]
    output.table(rows, {"name": "SETTING", "value": "VALUE", "from": "FROM"})
