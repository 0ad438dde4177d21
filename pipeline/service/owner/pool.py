"""One owner for each assigned partition: started on assignment, stopped within a bound on revocation."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import structlog

from pipeline.service.owner.partition_owner import PartitionOwner

__all__ = ["OwnerPool"]

log = structlog.get_logger(__name__)

STOP_S: Final = 2.0
"""How long a rebalance waits for transactions in hand; what is not done then is left to the next owner's fencing."""


class OwnerPool:
    """The owners of an agent. `open_owner` makes one for a partition, `close_owner` lets go of its input."""

    def __init__(self, open_owner: Callable[[int], PartitionOwner], close_owner: Callable[[int], None]) -> None:
        self._open_owner = open_owner
        self._close_owner = close_owner
        self._running: dict[int, tuple[PartitionOwner, asyncio.Task[None]]] = {}
        self.assigned_once = False

    @property
    def owners(self) -> Mapping[int, PartitionOwner]:
        """The running owners by partition."""
        return {partition: owner for partition, (owner, _) in self._running.items()}

    @property
    def tasks(self) -> Sequence[asyncio.Task[None]]:
        """What the owners run in."""
        return [task for _, task in self._running.values()]

    def assign(self, partitions: Iterable[int]) -> None:
        """Start the owners of partitions that are new; all acquire at the same time."""
        for partition in sorted(partitions):
            if partition in self._running:
                continue
            owner = self._open_owner(partition)
            task = asyncio.create_task(owner.run(), name=f"owner-{partition}")
            self._running[partition] = (owner, task)
        self.assigned_once = True

    async def revoke(self, partitions: Iterable[int]) -> None:
        """Stop those owners; returns within two seconds and a little, whatever they are doing."""
        leaving = {
            partition: self._running.pop(partition) for partition in list(partitions) if partition in self._running
        }
        if not leaving:
            return
        for owner, _ in leaving.values():
            owner.stop()
        tasks = [task for _, task in leaving.values()]
        _, late = await asyncio.wait(tasks, timeout=STOP_S)
        for task in late:
            task.cancel()
        if late:
            log.warning("owners_cancelled", count=len(late), after_s=STOP_S)
            await asyncio.wait(late, timeout=STOP_S)
        for partition in leaving:
            self._close_owner(partition)

    async def stop(self) -> None:
        """Stop all."""
        await self.revoke(list(self._running))
