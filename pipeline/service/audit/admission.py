"""Judges events as their owner did, whatever its settings were: what `dead-tasks` says was refused is taken so.

Limits are settings and may have changed since: an event that only they would refuse now, and that is not on
`dead-tasks`, was accepted then. What breaks a rule that nobody can set must be there.
"""

from typing import Final

import msgspec

from pipeline.core.events import Event, Limits, Reason, Rejection, check_event
from pipeline.core.partitioning import partition_for_key
from pipeline.core.tasks import DurationMs, InstantMs, TaskId
from pipeline.ports import Codec
from pipeline.service.admission import Admission
from pipeline.service.audit.facts import RefusalFact
from pipeline.service.recovery.ports import LogRecord

__all__ = ["AuditAdmission"]

_ANY: Final = 1 << 62


class AuditAdmission:
    """The admission of one partition, looking back."""

    def __init__(self, codec: Codec, *, limits: Limits, partition: int, partition_count: int) -> None:
        self._codec = codec
        self._partition = partition
        self._partition_count = partition_count
        self._admission = Admission(
            codec.decode_event, limits=limits, partition=partition, partition_count=partition_count
        )
        self._widest = msgspec.structs.replace(
            limits,
            horizon_ms=DurationMs(_ANY),
            past_max_ms=DurationMs(_ANY),
            task_id_bytes_max=_ANY,
            event_id_bytes_max=_ANY,
            event_bytes_max=_ANY,
        )

    def judge(self, record: LogRecord, refusal: RefusalFact | None) -> Event | Rejection:
        """The event as it was taken, or why it was refused."""
        try:
            judged = self._admission.admit(record)
        except Exception as error:  # noqa: BLE001  # whatever it makes the decoder do, the owner set it aside
            judged = Rejection(reason=Reason.INTERNAL_ERROR, message=f"decoding raised {error!r}")
        if refusal is not None:
            return judged if isinstance(judged, Rejection) else _as_refused(judged, refusal)
        return self._as_taken(record, judged) if isinstance(judged, Rejection) else judged

    def is_stray(self, key: bytes) -> bool:
        """Whether a task of this key does not belong here."""
        return partition_for_key(key, self._partition_count) != self._partition

    def _as_taken(self, record: LogRecord, judged: Rejection) -> Event | Rejection:
        """The event, if only settings are against it."""
        if judged.reason in {Reason.NULL_KEY, Reason.NULL_VALUE, Reason.INVALID_KEY, Reason.RESERVED_KEY}:
            return judged
        event = self._codec.decode_event(record.value or b"")
        if isinstance(event, Rejection) or event.task_id.encode("utf-8", "surrogatepass") != record.key:
            return judged
        limits = msgspec.structs.replace(self._widest, target_topics=frozenset({getattr(event, "target_topic", "")}))
        refused = check_event(event, append_at_ms=InstantMs(record.timestamp), limits=limits)
        return event if refused is None else judged


def _as_refused(event: Event, refusal: RefusalFact) -> Rejection:
    """A sound event that was refused then, under narrower limits or as a stray."""
    return Rejection(
        reason=Reason(refusal.reason),
        message="refused by the settings of then",
        task_id=TaskId(event.task_id) if refusal.task_id == event.task_id else None,
        event_id=event.event_id,
        version=event.version,
    )
