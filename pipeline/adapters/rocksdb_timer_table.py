"""The timer tables of an agent on disk: one RocksDB per partition, all under one memory budget.

Each database has three column families: `timers` (task id -> row), `index` (instant as 8 bytes big-endian, kind byte,
task id -> nothing) and `meta`. Ids are UTF-8, whose byte order is the order of code points, so index keys sort as
`IndexEntry` does. One `write` is one WriteBatch over all three: Kafka is the truth, this is its fast copy.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import psutil
from rocksdict import (
    BlockBasedOptions,
    Cache,
    DBCompressionType,
    Options,
    Rdict,
    WriteBatch,
    WriteBufferManager,
)

from pipeline.core.tasks import IndexEntry, IndexKind, InstantMs, TaskId
from pipeline.errors import CorruptStateError, DuetasksError, NotFoundError, UnavailableError, UsageError
from pipeline.ports import TableRow

__all__ = ["RocksdbTableStore", "RocksdbTimerTable"]

_MEBIBYTE: Final = 1_048_576
_META_KEY: Final = b"meta"
_START: Final = b""
_END: Final = b"\xff" * 9
"""Above every index key: no kind byte is 0xff."""
_KIND_OF_BYTE: Final = {ord(kind.value): kind for kind in IndexKind}
_LOCK_HELD: Final = (
    "LOCK: Resource temporarily unavailable",
    "lock hold by current process",
    "LOCK: No locks available",
)
_SHORTAGES: Final = ("No space left on device", "Too many open files", "Cannot allocate memory")
"""Open errors that are the machine's fault, not the table's: putting a good table aside would cure none of them."""
_BACKOFF_S_MIN: Final = 0.02
_BACKOFF_S_MAX: Final = 0.5


def _index_key(entry: IndexEntry) -> bytes:
    return entry.at_ms.to_bytes(8, "big") + (entry.kind + entry.task_id).encode()


def _index_entry(key: bytes) -> IndexEntry:
    return IndexEntry(InstantMs(int.from_bytes(key[:8], "big")), _KIND_OF_BYTE[key[8]], TaskId(key[9:].decode()))


class RocksdbTimerTable:
    """The timer table of one partition. Not thread-safe: the owner of the partition is its only user.

    `_cursor` is a lower bound of the index: no live entry sorts before it. Scans start there, because a seek from the
    beginning walks over the tombstones of everything that ever fired. `_cursor_is_first` says that the entry at the
    cursor is live (at `_END`: that there is none), so that `next_at_ms` costs nothing between two firings.

    Every method raises `CorruptStateError` if the files can't be trusted, `UnavailableError` if the disk refuses.
    """

    def __init__(self, database: Rdict, partition: int) -> None:
        self._partition = partition
        self._database: Rdict | None = database
        self._timers = database.get_column_family("timers")
        self._index = database.get_column_family("index")
        self._meta = database.get_column_family("meta")
        self._handles: tuple[Any, ...] = tuple(
            database.get_column_family_handle(name) for name in ("timers", "index", "meta")
        )
        self._cursor = _START
        self._cursor_is_first = False
        self._until_ms = InstantMs(0)

    def meta(self) -> bytes | None:
        """The meta bytes of the last write, or None for a new table."""
        with self._translated():
            found: bytes | None = self._meta.get(_META_KEY)
        return found

    def get_many(self, task_ids: Sequence[TaskId]) -> list[bytes | None]:
        """Rows in the order asked for; None where there is none."""
        with self._translated():
            found: list[bytes | None] = self._timers.get([task_id.encode() for task_id in task_ids])
        return found

    def due(self, until_ms: InstantMs, limit: int) -> list[IndexEntry]:
        """The first `limit` index entries with `at_ms <= until_ms`, in order."""
        if until_ms < self._until_ms:
            # The clock was set back. The bound would still hold, but nothing may hang on it then: look from the start.
            self._cursor, self._cursor_is_first = _START, False
        self._until_ms = until_ms
        above = (until_ms + 1).to_bytes(8, "big")
        found: list[IndexEntry] = []
        with self._translated():
            if self._cursor >= above or limit <= 0:
                return found
            for key in self._keys_from_cursor():
                if key >= above:
                    break
                found.append(_index_entry(key))
                if len(found) == limit:
                    break
        return found

    def next_at_ms(self) -> InstantMs | None:
        """The instant of the first index entry, or None if there is no timer."""
        with self._translated():
            if not self._cursor_is_first:
                next(self._keys_from_cursor(), None)
        return None if self._cursor == _END else InstantMs(int.from_bytes(self._cursor[:8], "big"))

    def scan(self, after: TaskId | None, limit: int) -> list[tuple[TaskId, bytes]]:
        """Rows in id order, after `after` (None: from the first), at most `limit`."""
        found: list[tuple[TaskId, bytes]] = []
        last = after.encode() if after is not None else None
        with self._translated():
            if limit <= 0:
                return found
            for key, value in self._timers.items(from_key=last):
                if key == last:
                    continue
                found.append((TaskId(key.decode()), value))
                if len(found) == limit:
                    break
        return found

    def write(self, rows: Sequence[TableRow], meta: bytes) -> None:
        """Apply in one atomic batch, together with the meta bytes; in the write-ahead log, not synced to the disk.

        A power cut may lose the last writes. The meta is lost with them, so restore reads them again from Kafka.
        """
        with self._translated() as database:
            batch = WriteBatch(raw_mode=True)
            try:
                self._fill(batch, rows)
                batch.put(_META_KEY, meta, self._handles[2])
                database.write(batch)
            except BaseException:
                self._cursor, self._cursor_is_first = _START, False
                raise

    def _fill(self, batch: WriteBatch, rows: Sequence[TableRow]) -> None:
        timers, index, _ = self._handles
        put, delete = batch.put, batch.delete
        for row in rows:
            if row.value is None:
                delete(row.task_id.encode(), timers)
            else:
                put(row.task_id.encode(), row.value, timers)
            drop, add = row.drop, row.add
            if drop == add:
                continue
            if drop is not None:
                key = _index_key(drop)
                delete(key, index)
                if key == self._cursor:
                    self._cursor_is_first = False
            if add is not None:
                key = _index_key(add)
                put(key, b"", index)
                if key <= self._cursor:
                    self._cursor, self._cursor_is_first = key, True

    def close(self) -> None:
        """Release the files and their lock; further calls raise. Closing twice does no harm."""
        if self._database is None:
            return
        database, self._database = self._database, None
        # The lock stays held while a column family or an iterator is alive, so they go first.
        for family in (self._timers, self._index, self._meta):
            family.close()
        del self._timers, self._index, self._meta
        self._handles = ()
        database.close()

    def _keys_from_cursor(self) -> Iterator[bytes]:
        """Live index keys from the cursor on; the first one seen becomes the cursor."""
        keys = iter(self._index.keys(from_key=self._cursor))
        first = next(keys, None)
        self._cursor, self._cursor_is_first = (_END if first is None else first), True
        if first is not None:
            yield first
            yield from keys

    @contextlib.contextmanager
    def _translated(self) -> Iterator[Rdict]:
        """The open database; what RocksDB raises within becomes one of our errors."""
        if self._database is None:
            raise UsageError(f"The timer table of partition {self._partition} is closed: open it again.")
        try:
            yield self._database
        except DuetasksError:
            raise
        except Exception as error:  # RocksDB's errors have no class of their own
            where = f"timer table of partition {self._partition}: {error}"
            if str(error).startswith("IO error"):
                raise UnavailableError(f"The disk refuses the {where}. Make room or repair it.") from error
            raise CorruptStateError(f"Can't read the {where}") from error


class RocksdbTableStore:
    """The tables under `folder`, one subfolder per partition.

    `memory_bytes` bounds block cache and write buffers of all partitions together. `lock_wait_ms` is how long `open`
    waits for another process, such as an agent that is just ending, to let go of a table.
    """

    def __init__(self, folder: Path, *, memory_bytes: int, lock_wait_ms: int) -> None:
        self._folder = folder
        self._lock_wait_ms = lock_wait_ms
        # Half of the budget at most for what is not flushed yet. It is charged to the cache: one number bounds both.
        # No stalls: a writer that waits for a flush would freeze the event loop, heartbeats included.
        self._cache = Cache(memory_bytes)
        self._buffers = WriteBufferManager.new_write_buffer_manager_with_cache(memory_bytes // 2, False, self._cache)
        self._write_buffer_bytes = max(_MEBIBYTE, min(16 * _MEBIBYTE, memory_bytes // 16))

    async def open(self, partition: int) -> RocksdbTimerTable:
        """The table of `partition`, new or as it was left.

        Raises `UnavailableError` if another process keeps holding its lock (it says which one), or if the machine is
        out of space or files; `CorruptStateError` if it can't be read: put it aside and restore.
        """
        give_up_at_s = time.monotonic() + self._lock_wait_ms / 1000
        backoff_s = _BACKOFF_S_MIN
        while True:
            try:
                return await asyncio.to_thread(self._open, partition)
            except _LockHeldError as error:
                left_s = give_up_at_s - time.monotonic()
                if left_s <= 0:
                    path = self._path(partition)
                    holder = await asyncio.to_thread(_lock_holder, path / "LOCK")
                    raise UnavailableError(
                        f"The timer table {path} is held by {holder}: stop it, or use another data folder."
                    ) from error
                await asyncio.sleep(min(backoff_s, left_s))
                backoff_s = min(2 * backoff_s, _BACKOFF_S_MAX)

    def put_aside(self, partition: int, reason: str) -> str:
        """Rename the (closed) table out of the way, never delete it; returns where it went.

        Raises `NotFoundError` if there is none, `UnavailableError` if the disk refuses.
        """
        path = self._path(partition)
        if not path.exists():
            raise NotFoundError(f"There is no timer table at {path} to put aside.")
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        number = 1
        while (target := self._folder / f"{partition}.aside-{stamp}-{number}").exists():
            number += 1
        try:
            path.rename(target)
        except OSError as error:
            raise UnavailableError(f"Can't put the timer table {path} aside ({reason}): {error}.") from error
        return str(target)

    def _path(self, partition: int) -> Path:
        return self._folder / str(partition)

    def _open(self, partition: int) -> RocksdbTimerTable:
        path = self._path(partition)
        path.parent.mkdir(parents=True, exist_ok=True)
        families = {"timers": self._timers_options(), "index": self._index_options(), "meta": self._family_options()}
        try:
            return RocksdbTimerTable(Rdict(str(path), self._database_options(), column_families=families), partition)
        except Exception as error:
            message = str(error)
            if any(sign in message for sign in _LOCK_HELD):
                raise _LockHeldError(message) from error
            if any(sign in message for sign in _SHORTAGES):
                raise UnavailableError(
                    f"Can't open the timer table {path}: {message}. Make room, then retry."
                ) from error
            raise CorruptStateError(f"Can't open the timer table {path}: {message}") from error

    def _database_options(self) -> Options:
        options = self._family_options()
        options.create_if_missing(True)
        options.create_missing_column_families(True)
        # All families reach the disk together: else a power cut could keep an index entry and lose its row.
        options.set_atomic_flush(True)
        options.set_write_buffer_manager(self._buffers)
        # An agent may own hundreds of partitions under the usual limit of 1,024 open files.
        options.set_max_open_files(256)
        # Opening replays the log: 64 MiB take well under a second.
        options.set_max_total_wal_size(64 * _MEBIBYTE)
        # Flushes and compactions share the machine with the agent's own thread.
        options.set_max_background_jobs(2)
        # RocksDB's own info log: two files of 1 MiB, no statistics in it every ten minutes.
        options.set_keep_log_file_num(2)
        options.set_max_log_file_size(_MEBIBYTE)
        options.set_stats_dump_period_sec(0)
        options.set_stats_persist_period_sec(0)
        options.set_max_manifest_file_size(4 * _MEBIBYTE)
        return options

    def _family_options(self, *, bloom: bool = False) -> Options:
        options = Options(raw_mode=True)  # keys and values are bytes, no type tags before them
        options.set_write_buffer_size(self._write_buffer_bytes)
        options.set_compression_type(DBCompressionType.lz4())  # payloads shrink, at a speed that no commit notices
        options.set_level_compaction_dynamic_level_bytes(True)  # bounds the garbage on disk to about a tenth
        table = BlockBasedOptions()
        table.set_block_cache(self._cache)
        table.set_block_size(16 * 1_024)  # fewer index blocks than at 4 KiB; rows are a few hundred bytes
        # Index and filter blocks count against the cache too, or memory would grow with the number of timers.
        table.set_cache_index_and_filter_blocks(True)
        table.set_pin_l0_filter_and_index_blocks_in_cache(True)
        if bloom:
            table.set_bloom_filter(10, False)
        options.set_block_based_table_factory(table)
        return options

    def _timers_options(self) -> Options:
        # Most ids looked up are new: 10 bits a key answer 99 of 100 of those without a read.
        return self._family_options(bloom=True)

    def _index_options(self) -> Options:
        options = self._family_options()
        # Everything that fires leaves a tombstone at the front: compact files that are half tombstones at once, so that
        # the first scan after a restart, which starts at the very beginning, stays short.
        options.add_compact_on_deletion_collector_factory(10_000, 5_000, 0.5)
        return options


class _LockHeldError(Exception):
    """Another handle has the table open."""


def _lock_holder(lock: Path) -> str:
    """Which process has `lock` open, for people; best effort: other users' processes can't be looked into."""
    for process in psutil.process_iter():
        try:
            if any(Path(file.path) == lock.resolve() for file in process.open_files()):
                own = " (this very process)" if process.pid == os.getpid() else ""
                return f"process {process.pid}{own}, {' '.join(process.cmdline())[:200] or process.name()}"
        except (psutil.Error, OSError):
            continue  # it ended meanwhile, or is another user's
    return "another process, which could not be identified"
