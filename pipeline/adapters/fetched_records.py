"""Takes the records out of a fetch of aiokafka, a record batch at a time.

aiokafka's own way (0.14, `PartitionRecords._unpack_records`) makes a `ConsumerRecord` of each record and hands it
through a generator, which takes three times as long as reading it. The records of its C extension have what an owner
looks at. Which batches count, and where the position moves, is decided exactly as there; a test holds both together.
"""

from typing import Any

from aiokafka.consumer.fetcher import READ_COMMITTED, FetchResult
from aiokafka.errors import CorruptRecordException

from pipeline.ports import InputRecord

__all__ = ["all_records"]


def all_records(result: FetchResult) -> list[InputRecord]:
    """As `FetchResult.getall`: all records that a reader of this isolation level may see; moves the position.

    Raises `CorruptRecordException` if a checksum is wrong; the position does not move then.
    """
    unpacking = result._partition_records  # noqa: SLF001  # no public way leads there
    if not result.check_assignment(result._topic_partition) or unpacking is None:  # noqa: SLF001  # the same
        return []
    records: list[InputRecord] = []
    batches = unpacking._records  # noqa: SLF001  # the same
    while batches.has_next():
        batch = batches.next_batch()
        if unpacking._check_crcs and not batch.validate_crc():  # noqa: SLF001  # the same
            raise CorruptRecordException(f"Invalid CRC - {result._topic_partition}")  # noqa: SLF001  # the same
        if not _is_hidden(unpacking, batch):
            _take(records, batch, unpacking.next_fetch_offset)
        # Also over what compaction, an abort or a marker left empty.
        unpacking.next_fetch_offset = batch.next_offset
    result._update_position()  # noqa: SLF001  # the same
    result._partition_records = None  # noqa: SLF001  # the same
    return records


def _take(records: list[InputRecord], batch: Any, position: int) -> None:  # noqa: ANN401  # aiokafka's, in C
    if getattr(batch, "base_offset", -1) >= position:
        records.extend(batch)
    else:  # a batch is fetched whole, even if the position lies within it; old formats do not say where they begin
        records.extend(record for record in batch if record.offset >= position)


def _is_hidden(unpacking: Any, batch: Any) -> bool:  # noqa: ANN401  # aiokafka's, partly in C
    """Whether it is a marker, or belongs to a transaction that was aborted."""
    if unpacking._isolation_level == READ_COMMITTED and batch.producer_id is not None:  # noqa: SLF001  # as there
        unpacking._consume_aborted_up_to(batch.base_offset)  # noqa: SLF001  # the same
        aborted = unpacking._aborted_producers  # noqa: SLF001  # the same
        if batch.is_control_batch and unpacking._contains_abort_marker(batch):  # noqa: SLF001  # the same
            aborted.discard(batch.producer_id)
        if batch.is_transactional and batch.producer_id in aborted:
            return True
    return bool(batch.is_control_batch)
