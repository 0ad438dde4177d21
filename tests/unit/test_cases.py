"""`tests/cases.md` says which test shows which case: it must not name tests that are gone."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

TESTS = Path(__file__).parent.parent
CASES = (TESTS / "cases.md").read_text("utf-8")


def test_every_case_is_answered_in_order() -> None:
    """Fifty-four faults, each with a test or with the reason why it can't happen here."""
    numbered = re.findall(r"^(\d+)\. (.+)$", CASES, re.MULTILINE)

    assert [int(number) for number, _ in numbered] == list(range(1, 55))
    assert [number for number, line in numbered if "::" not in line and "Does not apply" not in line] == []


def test_named_tests_exist() -> None:
    """A renamed test takes its line along."""
    named = re.findall(r"`([a-z_/]+\.py)::(test_\w+)`", CASES)

    gone = [f"{file}::{test}" for file, test in named if f"def {test}(" not in (TESTS / file).read_text("utf-8")]

    assert gone == []
