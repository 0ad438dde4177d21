"""The facts of an audit on a scratch disk: one RocksDB that sorts them within a bound of memory, then thrown away."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from rocksdict import BlockBasedOptions, Cache, DBCompressionType, Options, Rdict, WriteBatch, WriteOptions

from pipeline.errors import UnavailableError

__all__ = ["RocksdbFactStore"]

_MEBIBYTE: Final = 1_048_576
_WRITE_BUFFER_BYTES_MAX: Final = 64 * _MEBIBYTE


class RocksdbFactStore:
    """Implements `FactStore`. Used by one thread; `close` it before the folder is removed."""

    def __init__(self, folder: Path, *, memory_bytes: int) -> None:
        """Make a new one in `folder`; raises `UnavailableError` if the disk refuses."""
        options = Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_write_buffer_size(min(_WRITE_BUFFER_BYTES_MAX, memory_bytes // 4))
        options.set_max_write_buffer_number(2)
        options.set_compression_type(DBCompressionType.lz4())  # neighbours are alike, it halves what is written
        options.set_max_background_jobs(2)
        options.set_max_open_files(256)
        options.set_keep_log_file_num(1)
        options.set_stats_dump_period_sec(0)
        table = BlockBasedOptions()
        table.set_block_cache(Cache(memory_bytes // 2))
        table.set_block_size(32 * 1_024)  # it is read from end to end
        table.set_cache_index_and_filter_blocks(True)
        table.set_bloom_filter(10, False)  # most looked up are not there: which events were refused
        options.set_block_based_table_factory(table)
        # A crash ends the audit, which begins anew: nothing here must outlive the process.
        self._unlogged = WriteOptions()
        self._unlogged.disable_wal = True
        try:
            self._database: Any = Rdict(str(folder), options)
        except Exception as error:
            raise UnavailableError(
                f"Can't open the scratch folder {folder}: {error}. Make room, then retry."
            ) from error

    def put(self, facts: Sequence[tuple[bytes, bytes]]) -> None:
        """Add facts; raises `UnavailableError` if the disk is full."""
        batch = WriteBatch(raw_mode=True)
        for key, value in facts:
            batch.put(key, value)
        try:
            self._database.write(batch, self._unlogged)
        except Exception as error:
            raise UnavailableError(f"The scratch disk refuses to write: {error}. Make room, then retry.") from error

    def get(self, key: bytes) -> bytes | None:
        """One fact, or None."""
        found: bytes | None = self._database.get(key)
        return found

    def scan(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """The facts whose keys begin so, in the order of their keys."""
        for key, value in self._database.items(from_key=prefix):
            if not key.startswith(prefix):
                return
            yield key, value

    def close(self) -> None:
        """Let go of the files."""
        self._database.close()
