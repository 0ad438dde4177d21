"""duetasks: a reliable delay queue on Kafka."""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pipeline.async_producer import AsyncTaskProducer
    from pipeline.consumer import ConsumerStopError, DueTaskConsumer, TaskContext
    from pipeline.core.effects import DueTask
    from pipeline.producer import CancelRequest, Outcome, Receipt, ScheduleRequest, TaskProducer

__all__ = [
    "AsyncTaskProducer",
    "CancelRequest",
    "ConsumerStopError",
    "DueTask",
    "DueTaskConsumer",
    "Outcome",
    "Receipt",
    "ScheduleRequest",
    "TaskContext",
    "TaskProducer",
]

_HOMES: Final = {
    "AsyncTaskProducer": "pipeline.async_producer",
    "DueTask": "pipeline.core.effects",
    **dict.fromkeys(("ConsumerStopError", "DueTaskConsumer", "TaskContext"), "pipeline.consumer"),
    **dict.fromkeys(("CancelRequest", "Outcome", "Receipt", "ScheduleRequest", "TaskProducer"), "pipeline.producer"),
}


def __getattr__(name: str) -> Any:  # noqa: ANN401  # classes of several kinds
    """Import on first use: whoever needs one of them should not wait for the Kafka clients of the others."""
    if name not in _HOMES:
        raise AttributeError(f"module 'pipeline' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
