"""The auditor that people run, at the end of a simulated world: it must agree that every promise was kept."""

from typing import TYPE_CHECKING, Final

from pipeline.core.audit_view import NEVER
from pipeline.testing.memory_audit import audit_cluster
from pipeline.testing.memory_consumers import DUE
from pipeline.testing.simulator.consumers import GROUP
from pipeline.testing.simulator.judge import BrokenPromiseError
from pipeline.testing.simulator.plan import Kind
from pipeline.testing.simulator.world import World

if TYPE_CHECKING:
    from pipeline.core.tasks import Offset

__all__ = ["audit"]

_OVERDUE_MS: Final = 5_000


async def audit(world: World) -> None:
    """Read all topics as `duetasks verify` does; raises `BrokenPromiseError` with the first violation that it finds."""
    shape = world.shape
    if shape.is_forgetful and shape.skew_ms:
        return  # rows were forgotten by clocks that nobody can look up afterwards
    offsets: dict[tuple[str, str, int], Offset] = {}
    if shape.consumers:
        for partition in range(shape.partitions):
            offsets[GROUP, DUE, partition] = world.consumers.world.committed_offset(partition)
    report = await audit_cluster(
        world.cluster,
        retention_ms=shape.retention_ms,
        overdue_ms=_OVERDUE_MS,
        compaction_lag_ms=0 if Kind.COMPACTION in shape.nemeses else NEVER,
        group_offsets=offsets,
        groups=(GROUP,),  # the other group is a nemesis
    )
    for finding in report.findings:
        place = f"{finding.topic}-{finding.partition}@{finding.offset}"
        raise BrokenPromiseError(f"audit: {finding.code} at {place}, task {finding.task_id!r}: {finding.detail}")
