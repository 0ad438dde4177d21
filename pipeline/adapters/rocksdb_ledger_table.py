"""Local copies of a group's ledger rows: one small RocksDB per partition, so that memory does not grow with the ledger.

A row is its 16-byte digest; meta (whose table it is, and how far the topic is in it) stands under a key of another
length, in the same write batch. Kafka is the truth: a copy that is lost, old or foreign costs a longer restore only.

Several consumers on one machine may share the folder. A copy is used by whoever holds its lock; who finds it held
takes the next slot, so a partition that moves to a neighbour finds its rows there once the neighbour let go.
"""

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import msgspec
import structlog
from rocksdict import BlockBasedOptions, Cache, Options, Rdict, WriteBatch

from pipeline.core.applied import DIGEST_BYTES
from pipeline.core.events import DAY_MS
from pipeline.core.tasks import InstantMs, Offset
from pipeline.errors import CorruptStateError, UnavailableError
from pipeline.service.consumer.ports import TableIdentity, TableRows

__all__ = ["RocksdbLedgerTable", "RocksdbLedgerTables"]

log = structlog.get_logger(__name__)

_META_KEY: Final = b"meta"
_FORMAT_VERSION: Final = 1
_SLOTS_MAX: Final = 16
_OFFLINE_MAX_MS: Final = 5 * DAY_MS
"""Under the seven days of the topic's `delete.retention.ms`: a copy that is older may have missed deleted rows."""
_NAME_MAX: Final = 120
_MEBIBYTE: Final = 1_048_576
_LOCK_HELD: Final = ("LOCK: Resource temporarily unavailable", "lock hold by current process")
_SHORTAGES: Final = ("No space left on device", "Too many open files", "Cannot allocate memory", "No locks available")

assert len(_META_KEY) != DIGEST_BYTES, "meta must not be taken for a row"


class _Meta(msgspec.Struct, frozen=True, kw_only=True):
    identity: TableIdentity
    position: Offset
    stamp_ms: InstantMs
    format_version: int = _FORMAT_VERSION


class RocksdbLedgerTable:
    """One partition's rows. Used by one thread."""

    def __init__(self, database: Any, identity: TableIdentity, path: Path, now_ms: Callable[[], InstantMs]) -> None:  # noqa: ANN401  # rocksdict's
        """Read the meta; raises `CorruptStateError` if it is unreadable, another table's, or too old."""
        self.path = path
        self._database = database
        self._identity = identity
        self._now_ms = now_ms
        with _translated(path):
            found = database.get(_META_KEY)
        self._position = Offset(0) if found is None else self._checked(found).position

    def _checked(self, found: bytes) -> _Meta:
        try:
            meta = msgspec.json.decode(found, type=_Meta)
        except msgspec.DecodeError as error:
            raise CorruptStateError(f"The meta of the local ledger {self.path} can't be read: {error}") from error
        if meta.format_version != _FORMAT_VERSION:
            raise CorruptStateError(f"The local ledger {self.path} has format {meta.format_version}")
        if meta.identity != self._identity:
            raise CorruptStateError(f"The local ledger {self.path} is that of {meta.identity}")
        if self._now_ms() - meta.stamp_ms > _OFFLINE_MAX_MS:
            raise CorruptStateError(f"The local ledger {self.path} was not used for {_OFFLINE_MAX_MS // DAY_MS} days")
        return meta

    def position(self) -> Offset:
        """How far the ledger partition is in this table; 0 for a new one."""
        return self._position

    def contains(self, digest: bytes) -> bool:
        """Whether the row is there."""
        with _translated(self.path):
            return self._database.get(digest) is not None

    def write(self, rows: TableRows, position: Offset) -> None:
        """Apply rows and position, both or neither; a power cut may lose both, and restore reads them again."""
        batch = WriteBatch(raw_mode=True)
        for digest in rows.added:
            batch.put(digest, b"")
        for digest in rows.removed:
            batch.delete(digest)
        meta = _Meta(identity=self._identity, position=position, stamp_ms=self._now_ms())
        batch.put(_META_KEY, msgspec.json.encode(meta))
        with _translated(self.path):
            self._database.write(batch)
        self._position = position

    def close(self) -> None:
        """Release files and lock; a failure is only told, this is a copy. Closing twice does no harm."""
        database, self._database = self._database, None
        if database is None:
            return
        try:
            with _translated(self.path):
                database.close()
        except (CorruptStateError, UnavailableError) as error:
            log.warning("ledger_table_close_failed", error=str(error))


class RocksdbLedgerTables:
    """The copies of one group under `folder`; without a folder they are temporary, and every start restores in full."""

    def __init__(
        self,
        folder: Path | None,
        *,
        group: str,
        identity: Callable[[int], TableIdentity],
        now_ms: Callable[[], InstantMs],
    ) -> None:
        self._temporary = folder is None
        root = Path(tempfile.mkdtemp(prefix="duetasks-ledger-")) if folder is None else folder
        self._folder = root / "consumers" / _folder_name(group)
        self._root = root
        self._identity = identity
        self._now_ms = now_ms
        self._cache = Cache(16 * _MEBIBYTE)  # of all partitions together
        self._in_use: dict[int, Path] = {}

    def open(self, partition: int) -> RocksdbLedgerTable:
        """The table of `partition`, as it was left or new.

        One that is of another identity, too old, or can't be read is put aside first. Raises `UnavailableError`.
        """
        identity = self._identity(partition)
        for slot in range(_SLOTS_MAX):
            path = self._folder / f"{partition}.{slot}"
            try:
                table = self._open(path, identity)
            except _LockHeldError:
                continue
            self._in_use[partition] = path
            return table
        raise UnavailableError(
            f"All {_SLOTS_MAX} local ledgers of partition {partition} in {self._folder} are in use: give this "
            "consumer another data folder."
        )

    def put_aside(self, partition: int, reason: str) -> None:
        """Rename the (closed) table that was opened last out of the way; nothing if there is none."""
        path = self._in_use.pop(partition, None)
        if path is not None and path.exists():
            _put_aside(path, reason)

    def close(self) -> None:
        """Remove temporary tables."""
        if self._temporary:
            shutil.rmtree(self._root, ignore_errors=True)

    def _open(self, path: Path, identity: TableIdentity) -> RocksdbLedgerTable:
        try:
            return self._open_as_it_is(path, identity)
        except CorruptStateError as error:
            _put_aside(path, str(error))
            return self._open_as_it_is(path, identity)

    def _open_as_it_is(self, path: Path, identity: TableIdentity) -> RocksdbLedgerTable:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _translated(path):
            database = Rdict(str(path), self._options())
        try:
            return RocksdbLedgerTable(database, identity, path, self._now_ms)
        except BaseException:
            database.close()  # its lock would outlive the failure
            raise

    def _options(self) -> Options:
        options = Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_write_buffer_size(4 * _MEBIBYTE)
        options.set_max_open_files(64)
        options.set_max_total_wal_size(16 * _MEBIBYTE)
        options.set_keep_log_file_num(2)
        table = BlockBasedOptions()
        table.set_block_cache(self._cache)
        table.set_cache_index_and_filter_blocks(True)
        table.set_bloom_filter(10, False)  # nearly every digest asked for is new
        options.set_block_based_table_factory(table)
        return options


def _folder_name(group: str) -> str:
    """A name of at most 255 bytes that stays in its folder, whatever the group is called."""
    name = quote(group, safe="")
    return name if len(name) <= _NAME_MAX and name.strip(".") else sha256(group.encode()).hexdigest()


class _LockHeldError(Exception):
    """Another consumer uses this copy."""


@contextlib.contextmanager
def _translated(path: Path) -> Iterator[None]:
    """What RocksDB raises within becomes one of our errors; its own have no class."""
    try:
        yield
    except (CorruptStateError, UnavailableError):
        raise
    except Exception as error:
        message = f"The local ledger {path} failed: {error}"
        if any(sign in str(error) for sign in _LOCK_HELD):
            raise _LockHeldError(message) from error
        if any(sign in str(error) for sign in _SHORTAGES):
            raise UnavailableError(f"{message}. Make room, then start again.") from error
        raise CorruptStateError(message) from error


def _put_aside(path: Path, reason: str) -> None:
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    number = 1
    while (target := path.with_name(f"{path.name}.aside-{stamp}-{number}")).exists():
        number += 1
    path.rename(target)
    log.warning("ledger_table_put_aside", reason=reason, moved_to=str(target))
