"""The planted bugs of `tests/simulation/mutants.py` must follow the code; told here in a second, not after minutes."""

from pathlib import Path

import pytest

import pipeline
from tests.simulation.mutants import MUTANTS, Mutant

pytestmark = pytest.mark.unit

PACKAGE = Path(pipeline.__file__).parent


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_edit_finds_its_place(mutant: Mutant) -> None:
    """An edit that fits nowhere, or twice, plants something else than its name says."""
    found = [(file, (PACKAGE / file).read_text("utf-8").count(old)) for file, old, _ in mutant.edits]

    assert found == [(file, 1) for file, _, _ in mutant.edits]
