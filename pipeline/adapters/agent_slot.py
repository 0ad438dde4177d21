"""The folder of one agent in the data folder: its tables, and where it can be reached.

Agents that share a data folder take the first free slot, held by a lock that dies with the process: an agent that was
killed finds its own tables again, and two never open the same one.
"""

import fcntl
import json
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import IO, Self

import msgspec

from pipeline.errors import RefusedError, UnavailableError

__all__ = ["AgentAddress", "AgentSlot", "running_agents"]

SLOTS_MAX = 64


class AgentAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a running agent answers."""

    url: str
    pid: int


class AgentSlot:
    """A slot that this process holds until it ends."""

    def __init__(self, folder: Path, lock: IO[bytes]) -> None:
        self.folder = folder
        self._lock = lock

    @classmethod
    def take(cls, data_dir: Path) -> Self:
        """The first free slot of the data folder; raises `UnavailableError` if all are taken."""
        for number in range(SLOTS_MAX):
            folder = data_dir / "agents" / str(number)
            folder.mkdir(parents=True, exist_ok=True)
            lock = (folder / "lock").open("wb")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.close()
                continue
            (folder / "agent.json").unlink(missing_ok=True)
            return cls(folder, lock)
        raise UnavailableError(f"{SLOTS_MAX} agents already run on {data_dir}: use another DUETASKS_DATA_DIR")

    @classmethod
    def hold_all(cls, data_dir: Path) -> list[Self]:
        """Every slot that was ever used on the data folder, so that no agent can start on one of them.

        Raises `RefusedError` if an agent holds one.
        """
        held: list[Self] = []
        for folder in sorted(data_dir.glob("agents/*")):
            lock = (folder / "lock").open("ab")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                lock.close()
                for slot in held:
                    slot.release()
                raise RefusedError(f"An agent runs on {folder}: stop the agents of this data folder first.") from error
            held.append(cls(folder, lock))
        return held

    @property
    def tables(self) -> Path:
        """Where this agent's timer tables are, a folder for each partition."""
        return self.folder / "tables"

    @property
    def member(self) -> str:
        """This slot's name in the group, the same at each start."""
        return self._kept("member", lambda: f"duetasks-{uuid.uuid4()}")

    def port(self, free: Callable[[int], int]) -> int:
        """The port of the last start if `free` still gives it, else the one that it gives for 0; kept for the next."""
        last = self.folder / "port"
        wanted = int(last.read_text("ascii")) if last.exists() else 0
        try:
            port = free(wanted)
        except UnavailableError:
            port = free(0)
        last.write_text(str(port), "ascii")
        return port

    def _kept(self, name: str, make: Callable[[], str]) -> str:
        kept = self.folder / name
        if not kept.exists():
            draft = self.folder / f"{name}.new"
            draft.write_text(make(), "ascii")
            draft.replace(kept)
        return kept.read_text("ascii")

    def announce(self, url: str) -> None:
        """Write down where this agent answers, for commands on the same data folder."""
        draft = self.folder / "agent.json.new"
        draft.write_text(json.dumps({"url": url, "pid": os.getpid()}), "utf-8")
        draft.replace(self.folder / "agent.json")

    def release(self) -> None:
        """Give the slot back."""
        (self.folder / "agent.json").unlink(missing_ok=True)
        self._lock.close()


def running_agents(data_dir: Path) -> list[AgentAddress]:
    """The agents that announced themselves on this data folder and still hold their slots."""
    found = []
    for announced in sorted(data_dir.glob("agents/*/agent.json")):
        if not _is_held(announced.parent / "lock"):
            continue
        try:
            found.append(msgspec.json.decode(announced.read_bytes(), type=AgentAddress))
        except (OSError, msgspec.DecodeError):
            continue  # it ended, or is just being replaced
    return found


def _is_held(lock_file: Path) -> bool:
    try:
        with lock_file.open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
