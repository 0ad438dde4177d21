"""Compares figures of `duetasks bench --json`: `python bench/compare.py before.json after.json`."""

import json
import sys
from pathlib import Path


def main(before_file: str, after_file: str) -> None:
    """Print each figure of both runs and how much it changed."""
    before = json.loads(Path(before_file).read_text("utf-8"))
    after = json.loads(Path(after_file).read_text("utf-8"))
    print(f"{'':24}{'before':>12}{'after':>12}{'change':>10}")
    for name in [*before, *(name for name in after if name not in before)]:
        old, new = before.get(name), after.get(name)
        change = f"{(new - old) / old:+.1%}" if old and new is not None else ""
        print(f"{name:24}{_shown(old):>12}{_shown(new):>12}{change:>10}")


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:,}"


if __name__ == "__main__":
    if len(sys.argv) != len(("program", "before", "after")):
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2])
