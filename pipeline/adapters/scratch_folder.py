"""A folder for what a rebuild works on: empty at its start, gone at its end, one rebuild at a time."""

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.errors import UnavailableError

__all__ = ["scratch_folder"]


@contextmanager
def scratch_folder(data_dir: Path, name: str) -> Iterator[Path]:
    """The folder `name` in the data folder; what a killed process left there is removed first.

    Raises `UnavailableError` if another process uses it.
    """
    data_dir.mkdir(parents=True, exist_ok=True)
    folder = data_dir / name
    with (data_dir / f"{name}.lock").open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UnavailableError(f"Another process works in {folder}: wait until it has ended.") from error
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
