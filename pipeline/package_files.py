"""Where the schemas and topic declarations are: inside the wheel, or beside the package in a checkout."""

from pathlib import Path

__all__ = ["package_folder"]


def package_folder(name: str) -> Path:
    """The folder `schemas` or `topics`; raises `FileNotFoundError` if the installation is broken."""
    inside = Path(__file__).parent
    for folder in (inside / name, inside.parent / name):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"{name}/ is missing from this installation of duetasks: install it again")
