"""The folder that a rebuild works in: whatever happened to the one before."""

from pathlib import Path

import pytest

from pipeline.adapters.scratch_folder import scratch_folder
from pipeline.errors import UnavailableError

pytestmark = pytest.mark.unit


def test_it_is_empty_and_leaves_nothing(tmp_path: Path) -> None:
    """A rebuild that was killed left gigabytes: the next one must neither use nor keep them."""
    (tmp_path / "data" / "rebuild").mkdir(parents=True)
    (tmp_path / "data" / "rebuild" / "old").write_text("x")

    with scratch_folder(tmp_path / "data", "rebuild") as folder:
        assert list(folder.iterdir()) == []
        (folder / "new").write_text("x")

    assert not (tmp_path / "data" / "rebuild").exists()


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    """The second would remove what the first is reading."""
    with scratch_folder(tmp_path, "rebuild") as folder:
        (folder / "mine").write_text("x")
        with pytest.raises(UnavailableError, match="Another process"), scratch_folder(tmp_path, "rebuild"):
            pass
        assert (folder / "mine").exists()

    with scratch_folder(tmp_path, "rebuild"):
        pass
