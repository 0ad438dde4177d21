"""The consumer group in memory: who owns a partition, in which generation, and what was committed."""

from collections.abc import Mapping

from pipeline.core.tasks import Offset
from pipeline.errors import FencedError
from pipeline.testing.simulated_process import SimulatedProcess

__all__ = ["MemoryGroup", "MemoryMembership"]


class MemoryGroup:
    """The group coordinator of one group. Who is absent from a rebalance keeps its old generation, and its beliefs."""

    def __init__(self) -> None:
        self.generation = 0
        self.assignment: dict[int, str] = {}
        self.offsets: dict[int, Offset] = {}
        self._generations: dict[str, int] = {}

    def rebalance(self, assignment: Mapping[int, str]) -> None:
        """A new generation: `assignment` says which member owns each partition; nobody else is a member."""
        self.generation += 1
        self.assignment = dict(assignment)
        self._generations.update(dict.fromkeys(assignment.values(), self.generation))

    def is_owner(self, partition: int, member: str) -> bool:
        """Whether the group would take a commit of `member` for `partition`."""
        return self.assignment.get(partition) == member and self._generations.get(member) == self.generation


class MemoryMembership:
    """The membership port of one member: its process's name is its member id."""

    def __init__(self, group: MemoryGroup, process: SimulatedProcess) -> None:
        self._group = group
        self._process = process

    async def prove(self, partition: int) -> None:
        """Raises `FencedError` unless the group takes this member for the partition's owner."""
        await self._process.reach("membership.prove")
        self._check(partition)

    async def commit(self, partition: int, position: Offset) -> None:
        """Record `position`; raises `FencedError` like `prove`."""
        await self._process.reach("membership.commit")
        self._check(partition)
        self._group.offsets[partition] = position

    async def committed(self, partition: int) -> Offset | None:
        """What the group last committed, or None."""
        await self._process.reach("membership.committed")
        return self._group.offsets.get(partition)

    def _check(self, partition: int) -> None:
        if not self._group.is_owner(partition, self._process.name):
            raise FencedError(f"{self._process.name} does not own partition {partition} in the group's eyes")
