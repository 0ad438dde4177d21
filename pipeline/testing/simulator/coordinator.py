"""The group coordinator of the simulated agents: sessions, and rebalances that stop the world, as Faust's do."""

import asyncio
from collections.abc import Sequence
from typing import Final, Protocol

from pipeline.testing.memory_group import MemoryGroup
from pipeline.testing.simulated_process import SimulatedProcess

__all__ = ["Coordinator", "Member"]

SESSION_MS: Final = 10_000
_HEARTBEAT_MS: Final = 3_000
_TICK_MS: Final = 500
_REVOKE_S_MAX: Final = 6.0


class Member(Protocol):
    """What a rebalance asks of a member."""

    process: SimulatedProcess
    machine: str

    async def revoked(self) -> None:
        """Let go of everything."""
        ...

    def assigned(self, partitions: Sequence[int]) -> None:
        """Take these."""
        ...


class Coordinator:
    """Who is in the group, and who owns what. A member that is silent for a session is expelled; it learns it later."""

    def __init__(self, group: MemoryGroup, partition_count: int, *, static_members: bool) -> None:
        self.group = group
        self._partition_count = partition_count
        self._static_members = static_members
        self._members: list[Member] = []
        self._expelled: list[Member] = []
        self._silent_ms: dict[str, int] = {}
        self._deaf_ms: dict[str, int] = {}
        self._is_stale = False

    def join(self, member: Member) -> None:
        """A new member; with static members it takes the place of its machine's last one at once."""
        if self._static_members:
            self._members = [other for other in self._members if other.machine != member.machine]
            self._expelled = [other for other in self._expelled if other.machine != member.machine]
        self._members.append(member)
        self._is_stale = True

    def leave(self, member: Member) -> None:
        """A member says good-bye."""
        self._members = [other for other in self._members if other is not member]
        self._expelled = [other for other in self._expelled if other is not member]
        self._is_stale = True

    def rebalance(self) -> None:
        """Somebody joins and leaves: everything is dealt out anew."""
        self._is_stale = True

    def expel(self, member: Member) -> None:
        """Its session is over, whether it lives or not."""
        if member in self._members:
            self._members.remove(member)
            self._expelled.append(member)
            self._deaf_ms[member.process.name] = _HEARTBEAT_MS
            self._is_stale = True

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(_TICK_MS / 1_000)
            self._expel_silent()
            await self._take_back()
            if self._is_stale and self._members:
                await self._rebalance()

    def _expel_silent(self) -> None:
        for member in list(self._members):
            name = member.process.name
            self._silent_ms[name] = 0 if member.process.responds else self._silent_ms.get(name, 0) + _TICK_MS
            if self._silent_ms[name] >= SESSION_MS:
                self.expel(member)

    async def _take_back(self) -> None:
        """Who was expelled and lives hears of it with its next heartbeat, lets go, and joins again."""
        self._expelled = [member for member in self._expelled if member.process.alive]
        for member in list(self._expelled):
            name = member.process.name
            if member.process.responds:
                self._deaf_ms[name] -= _TICK_MS
            if member.process.responds and self._deaf_ms[name] < 0:
                await self._revoke([member])
                if member.process.alive and member in self._expelled:
                    self._expelled.remove(member)
                    self.join(member)

    async def _rebalance(self) -> None:
        responding = [member for member in self._members if member.process.responds]
        if len(responding) < len(self._members) or not responding:
            return  # the others are waited for until their session is over
        self._is_stale = False
        await self._revoke(responding)
        ready = [member for member in responding if member.process.responds and member in self._members]
        if len(ready) < len(responding):
            self._is_stale = True  # one fell silent in the middle: once more
        if not ready:
            return
        turn = self.group.generation  # partitions move with each rebalance, so that moves are met often
        owners = {number: ready[(number + turn) % len(ready)] for number in range(self._partition_count)}
        self.group.rebalance({number: member.process.name for number, member in owners.items()})
        for member in ready:
            member.assigned([number for number, owner in owners.items() if owner is member])

    async def _revoke(self, members: Sequence[Member]) -> None:
        revoking = [asyncio.ensure_future(member.revoked()) for member in members]
        _, late = await asyncio.wait(revoking, timeout=_REVOKE_S_MAX)
        for task in late:
            task.cancel()
        await asyncio.gather(*revoking, return_exceptions=True)
