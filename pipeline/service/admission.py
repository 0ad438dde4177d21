"""Admission: from a record of `task-events` to an event that may be applied, or to the reason why it may not.

The order of the rules is part of the contract, as the first that is broken is the one reported: key and value present,
key legible, value legible, key and `task_id` the same, size, then the rules of `core.events.check_event` judged
against the record's append time. The producer SDK applies the same rules before it sends.
"""

from collections.abc import Callable, Mapping
from typing import Final

from pipeline.core.events import Event, Limits, Reason, Rejection, Schedule, check_event
from pipeline.core.partitioning import partition_for_key
from pipeline.core.tasks import InstantMs, TaskId
from pipeline.ports import InputRecord

__all__ = ["Admission", "event_size", "stray_rejection"]

_MESSAGE_LENGTH_MAX: Final = 500
_VERSION_END: Final = 1 << 63


def event_size(key_bytes: int, value_bytes: int, headers: Mapping[str, bytes]) -> int:
    """Bytes that an event is taken for: key and value, and the headers again, as the due task carries them twice."""
    size = key_bytes + value_bytes
    for name, value in headers.items():
        size += len(name.encode("utf-8", "surrogatepass")) + len(value)
    return size


class Admission:
    """Judges the records of one partition; `decode` turns a value into an event or a rejection and never raises.

    With `check_partition` every key must belong to the partition; an owner that checks the keys that are new to it
    leaves it out.
    """

    def __init__(
        self,
        decode: Callable[[bytes], Event | Rejection],
        *,
        limits: Limits,
        partition: int,
        partition_count: int,
        check_partition: bool = False,
    ) -> None:
        self._decode = decode
        self._limits = limits
        self._bytes_max = limits.event_bytes_max
        self._partition = partition
        self._partition_count = partition_count
        self._check_partition = check_partition

    def admit(self, record: InputRecord) -> Event | Rejection:  # noqa: PLR0911  # one for each rule, in their order
        """The event that may be applied, or a rejection; the hot path has no more than it needs.

        A rejection carries a `task_id` only if the key is a possible id of this partition and the value names no other
        task: then the verdict may be noted in the task's row.
        """
        key, value = record.key, record.value
        if key is None or value is None:
            return self._refused(_absent(key), key)
        try:
            task_id = key.decode()
        except UnicodeDecodeError:
            return Rejection(reason=Reason.INVALID_KEY, message="the key is not UTF-8: the key is the task's id")
        if task_id[:1] == "\x00":
            return Rejection(
                reason=Reason.RESERVED_KEY,
                message="the key starts with a zero byte, which is reserved: choose another id",
            )
        event = self._decode(value)
        if isinstance(event, Rejection):
            return self._refused(event, key)
        if event.task_id != task_id:
            return self._refused(_mismatch(event), key)
        size = len(key) + len(value)
        if isinstance(event, Schedule) and event.headers:
            size = event_size(len(key), len(value), event.headers)
        if size > self._bytes_max:
            return self._refused(self._too_large(event, size), key)
        rejection = check_event(event, append_at_ms=InstantMs(record.timestamp), limits=self._limits)
        if rejection is not None:
            return self._refused(rejection, key)
        if self._check_partition and not self._is_ours(key):
            return stray_rejection(event, self._partition, self._partition_count)
        return event

    def _is_ours(self, key: bytes) -> bool:
        return partition_for_key(key, self._partition_count) == self._partition

    def _refused(self, rejection: Rejection, key: bytes | None) -> Rejection:
        """The rejection with the task whose row may note it, and everything in it bounded."""
        event_id = rejection.event_id
        return Rejection(
            reason=rejection.reason,
            message=rejection.message[:_MESSAGE_LENGTH_MAX],
            task_id=self._task_of(rejection, key),
            event_id=event_id if len(event_id) <= self._limits.event_id_bytes_max else "",
            version=rejection.version if 0 <= rejection.version < _VERSION_END else 0,
        )

    def _task_of(self, rejection: Rejection, key: bytes | None) -> TaskId | None:
        if key is None or rejection.reason is Reason.KEY_MISMATCH or not 0 < len(key) <= self._limits.task_id_bytes_max:
            return None
        try:
            task_id = TaskId(key.decode())
        except UnicodeDecodeError:
            return None
        if task_id[0] == "\x00" or rejection.task_id not in {None, task_id} or not self._is_ours(key):
            return None
        return task_id

    def _too_large(self, event: Event, size: int) -> Rejection:
        return Rejection(
            reason=Reason.TOO_LARGE,
            message=(
                f"the event has {size} bytes (key, value, and headers once more); "
                f"at most {self._bytes_max} are taken: send a reference instead of the content"
            ),
            event_id=event.event_id,
            version=event.version,
        )


def stray_rejection(event: Event, partition: int, partition_count: int) -> Rejection:
    """Why an event in a partition where its task does not belong is refused; no row is touched by it."""
    return Rejection(
        reason=Reason.WRONG_PARTITION,
        message=(
            f"partition {partition} is not the one that murmur2 gives this key among "
            f"{partition_count}: use the murmur2_random partitioner (Java's default)"
        ),
        event_id=event.event_id,
    )


def _absent(key: bytes | None) -> Rejection:
    if key is None:
        return Rejection(reason=Reason.NULL_KEY, message="the record has no key: the key is the task's id")
    return Rejection(
        reason=Reason.NULL_VALUE, message="the record has no value: to cancel a task, send an event of type CANCEL"
    )


def _mismatch(event: Event) -> Rejection:
    return Rejection(
        reason=Reason.KEY_MISMATCH,
        message="the key and task_id differ, so two tasks could be meant: send the task's id as both",
        event_id=event.event_id,
    )
