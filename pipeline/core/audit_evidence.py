"""What a due record must say so that firing it was right, and what it must carry."""

from typing import Final

from pipeline.core.audit import Code
from pipeline.core.effects import DueTask
from pipeline.core.events import Schedule
from pipeline.core.tasks import InstantMs

__all__ = ["Fault", "content_fault", "evidence_fault"]

NOWHERE: Final = -1
Fault = tuple[Code, str]
"""A code and what is wrong, in a sentence."""


def evidence_fault(task: DueTask, *, key: bytes | None, partition: int, generation_base: int) -> Fault | None:
    """None if the record's own evidence allows the emission, else the first thing that does not.

    `generation_base` is above 0 if `task-events` was created anew: a schedule of before has no offset any more.
    """
    if task.fired_at_ms < task.due_at_ms:
        return Code.EARLY, f"fired {task.due_at_ms - task.fired_at_ms} ms before it was due"
    wrong = _contradiction(task, generation_base) or _misnomer(task, key, partition)
    return None if wrong is None else (Code.EVIDENCE_WRONG, wrong)


def _contradiction(task: DueTask, generation_base: int) -> str | None:
    if task.fence_clock_ms != task.fired_at_ms:
        return f"fired at {task.fired_at_ms}, but the fence's clock read {task.fence_clock_ms}"
    if task.applied_offset < task.fence_offset:
        return (
            f"applied up to {task.applied_offset} only, but the fence was at {task.fence_offset}: "
            "a cancel in between would not have counted"
        )
    is_of_before = task.scheduled_offset == NOWHERE and 0 < task.generation <= generation_base
    if not is_of_before and not 0 <= task.scheduled_offset < task.applied_offset:
        return (
            f"its schedule at offset {task.scheduled_offset} had not been applied, only what is below "
            f"{task.applied_offset}"
        )
    return None


def _misnomer(task: DueTask, key: bytes | None, partition: int) -> str | None:
    name = f"{partition}:{task.generation}:{task.occurrence}:{task.attempt}"
    if task.emission_id != name:
        return f"its name is {task.emission_id!r}, it should be {name!r}"
    if key != task.task_id.encode("utf-8", "surrogatepass"):
        return f"its key is {key!r}, not the id of the task"
    return None


def content_fault(task: DueTask, schedule: Schedule, due_at_ms: InstantMs) -> Fault | None:
    """None if the record carries what was scheduled, else the first difference."""
    if task.due_at_ms != due_at_ms:
        return Code.DUE_TIME_DIFFERS, f"due at {task.due_at_ms}, but it was scheduled for {due_at_ms}"
    if task.payload != schedule.payload:
        return Code.CONTENT_DIFFERS, (
            f"its payload of {len(task.payload)} bytes is not the one of {len(schedule.payload)} bytes that was "
            "scheduled"
        )
    if (task.content_type, task.source) != (schedule.content_type, schedule.source):
        return Code.CONTENT_DIFFERS, "its content type or source is not the one that was scheduled"
    if dict(task.headers) != dict(schedule.headers):
        return Code.CONTENT_DIFFERS, "its headers are not those that were scheduled"
    return None
