"""The documents say what is true now, as far as code can tell."""

import re
import runpy
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_generated_pages_are_what_the_code_says() -> None:
    """A setting, command or reason code that changes must change its page: `make docs`."""
    pages = runpy.run_path(str(ROOT / "docs" / "generate.py"))["pages"]()

    differing = [str(path.relative_to(ROOT)) for path, text in pages.items() if path.read_text("utf-8") != text]

    assert differing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """A link that leads nowhere is worse than none."""
    text = page.read_text("utf-8")

    broken = [
        target
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
        if "://" not in target and not (page.parent / target).exists()
    ]

    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_anchors_are_headings(page: Path) -> None:
    """A link into a page must name a heading that is there."""
    missing = []
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#([^)]+)\)", page.read_text("utf-8")):
        other = page if not target else page.parent / target
        if "://" not in target and other.exists() and anchor not in _anchors(other):
            missing.append(f"{target}#{anchor}")

    assert missing == []


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
