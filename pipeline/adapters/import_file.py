"""A file of JSON lines that is imported, and how far: an import that was interrupted goes on where it was.

The state file in the data folder names the lines that were answered without a gap, and a digest of them: a file that
was changed before that place is begun anew. An event's id is made of file, line and content, so that lines that are
sent again (the state is written once a second) are recognised by the agent as the same events.
"""

from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import IO, Final

import msgspec

from pipeline.errors import UsageError

__all__ = ["ImportFile", "ImportPlace", "ImportedLine"]

_DIGEST_BYTES: Final = 16
_CHUNK_BYTES: Final = 1_048_576


class ImportPlace(msgspec.Struct, frozen=True, kw_only=True):
    """How far a file was imported: all lines before were sent or refused. `digest` is of all of them, chained.

    `run` counts the times that the whole file was sent on purpose; it is part of the events' ids.
    """

    path: str
    lines: int = 0
    bytes: int = 0
    digest: str = ""
    refused: int = 0
    run: int = 0


class ImportedLine(msgspec.Struct, frozen=True):
    """One line that is not empty, and the place after it."""

    number: int
    value: bytes
    place: ImportPlace


class ImportFile:
    """One file on its way; `data_dir` keeps how far.

    Raises `UsageError` if there is no such file.
    """

    def __init__(self, path: Path, data_dir: Path, *, line_bytes_max: int) -> None:
        self._path = path.resolve()
        if not self._path.is_file():
            raise UsageError(f"There is no file {path}.")
        self._line_bytes_max = line_bytes_max
        name = blake2b(str(self._path).encode("utf-8", "surrogateescape"), digest_size=_DIGEST_BYTES).hexdigest()
        self._state_file = data_dir / "imports" / f"{name}.json"

    def line_count(self) -> int:
        """Lines in the file, the last one also without its end."""
        count, last = 0, b"\n"
        with self._path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                count += chunk.count(b"\n")
                last = chunk[-1:]
        return count + (last != b"\n")

    def place(self) -> ImportPlace:
        """Where to go on: after what was imported before, or at the beginning if the file was changed there."""
        start = ImportPlace(path=str(self._path))
        try:
            saved = msgspec.json.decode(self._state_file.read_bytes(), type=ImportPlace)
        except (FileNotFoundError, msgspec.DecodeError):
            return start
        place = start
        with self._path.open("rb") as file:
            while place.lines < saved.lines and (line := self._read_line(file)) is not None:
                place = _after(place, *line)
        if (place.lines, place.digest) != (saved.lines, saved.digest):
            return msgspec.structs.replace(start, run=saved.run)
        # The bytes may be others: the last line may have got its end since.
        return msgspec.structs.replace(saved, bytes=place.bytes)

    def lines(self, place: ImportPlace) -> Iterator[ImportedLine]:
        """The lines after `place` that are not empty."""
        with self._path.open("rb") as file:
            file.seek(place.bytes)
            while (line := self._read_line(file)) is not None:
                place = _after(place, *line)
                value = line[0].strip()
                if value:
                    yield ImportedLine(place.lines, value, place)

    def event_id(self, line: ImportedLine) -> str:
        """The id of the event in a line that names none: the same whenever this line of this file is sent again."""
        place = line.place
        name = f"{place.path}\0{place.run}\0{line.number}\0".encode("utf-8", "surrogateescape")
        return "import-" + blake2b(name + line.value, digest_size=_DIGEST_BYTES).hexdigest()

    def save(self, place: ImportPlace) -> None:
        """Write down how far it is; atomically, as the process may be killed at any moment."""
        self._state_file.parent.mkdir(parents=True, exist_ok=True)
        draft = self._state_file.with_suffix(".new")
        draft.write_bytes(msgspec.json.encode(place))
        draft.replace(self._state_file)

    def _read_line(self, file: IO[bytes]) -> tuple[bytes, int] | None:
        """The next line, cut where it is longer than any event can be, and the bytes that it takes in the file."""
        line = file.readline(self._line_bytes_max)
        size = len(line)
        rest = line
        while rest and not rest.endswith(b"\n"):
            rest = file.readline(_CHUNK_BYTES)
            size += len(rest)
        return (line, size) if line else None


def _after(place: ImportPlace, line: bytes, size: int) -> ImportPlace:
    return ImportPlace(
        path=place.path,
        lines=place.lines + 1,
        bytes=place.bytes + size,
        digest=blake2b(place.digest.encode() + line.rstrip(b"\r\n"), digest_size=_DIGEST_BYTES).hexdigest(),
        refused=place.refused,
        run=place.run,
    )
