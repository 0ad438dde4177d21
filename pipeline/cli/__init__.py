"""The `duetasks` command: one file for each group of commands, assembled in `app`."""

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line of this process and exit with its code; the entry point of the package."""
    from pipeline.cli.app import run  # noqa: PLC0415  # importing the package for one of its parts stays cheap

    sys.exit(run(sys.argv[1:]))
