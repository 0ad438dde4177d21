"""What a consumer counts, and the bounds of its batches."""

import msgspec

from pipeline.service.consumer.task_handling import Result

__all__ = ["BatchRules", "ConsumerCounts"]


class BatchRules(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one transaction and of what is fetched ahead.

    A batch is committed at `batch_max` records, at `batch_bytes_max` of their values, `batch_time_max_ms` after its
    first handler call, or when nothing more is at hand. Of each partition, `buffer_max` records and `buffer_bytes_max`
    bytes may be fetched ahead. `idle_commit_ms` after the last commit, a position that only moved over transaction
    markers is committed too, so that lag ends at 0.
    """

    batch_max: int = 100
    batch_bytes_max: int = 8_388_608
    batch_time_max_ms: int = 1_000
    buffer_max: int = 4_000
    buffer_bytes_max: int = 16_777_216
    idle_commit_ms: int = 5_000


class ConsumerCounts(msgspec.Struct, kw_only=True):
    """What a consumer did since it was made.

    `applied`, `duplicates`, `failed` and `malformed` count records whose transaction is committed, `batches` those
    transactions. `given_up` counts records that were handled without a certain commit: they are read again, and those
    that were committed after all are duplicates then. `acquisitions` counts how often a partition was taken.
    """

    applied: int = 0
    duplicates: int = 0
    failed: int = 0
    malformed: int = 0
    batches: int = 0
    given_up: int = 0
    acquisitions: int = 0

    def add(self, result: Result) -> None:
        """Count one committed record."""
        match result:
            case Result.APPLIED:
                self.applied += 1
            case Result.DUPLICATE:
                self.duplicates += 1
            case Result.FAILED:
                self.failed += 1
            case Result.MALFORMED:
                self.malformed += 1
