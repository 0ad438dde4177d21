"""The consumer group's word on who owns a partition, through Faust's own consumer.

Faust's own `commit` waits behind its fetches and crashes the app on a refusal, so these calls go straight to the
consumer, on the loop of its thread.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

from aiokafka.errors import CommitFailedError, IllegalStateError, KafkaError, StaleMetadata
from aiokafka.structs import TopicPartition

from pipeline.core.tasks import Offset
from pipeline.errors import FencedError, UnavailableError

__all__ = ["GroupMembership"]

Result = TypeVar("Result")

DEADLINE_S: Final = 10.0
COMMIT_DEADLINE_S: Final = 1.0
"""Telling the group is for observers: an owner must not wait long for it, least of all in a rebalance."""


class GroupMembership:
    """Implements `Membership` for one topic; `consumer_thread` gives Faust's consumer thread, once it runs."""

    def __init__(self, topic: str, consumer_thread: Callable[[], Any]) -> None:
        self._topic = topic
        self._consumer_thread = consumer_thread

    async def prove(self, partition: int) -> None:
        """Commit what is committed already: it succeeds only under the present generation."""

        async def prove(consumer: Any, place: TopicPartition) -> None:  # noqa: ANN401  # aiokafka's consumer
            committed = await consumer.committed(place)
            await consumer.commit({place: committed or 0})

        await self._ask(partition, prove)

    async def commit(self, partition: int, position: Offset) -> None:
        """Record `position` for observers."""

        async def commit(consumer: Any, place: TopicPartition) -> None:  # noqa: ANN401  # the same
            await consumer.commit({place: position})

        await self._ask(partition, commit, COMMIT_DEADLINE_S)

    async def committed(self, partition: int) -> Offset | None:
        """What the group last committed, or None."""

        async def committed(consumer: Any, place: TopicPartition) -> Offset | None:  # noqa: ANN401  # the same
            found = await consumer.committed(place)
            return None if found is None else Offset(found)

        return await self._ask(partition, committed)

    async def _ask(
        self,
        partition: int,
        ask: Callable[[Any, TopicPartition], Awaitable[Result]],
        deadline_s: float = DEADLINE_S,
    ) -> Result:
        thread = self._consumer_thread()
        consumer = thread._consumer  # noqa: SLF001  # Faust has no public way to it
        place = TopicPartition(self._topic, partition)

        async def ask_there() -> Result:
            return await ask(consumer, place)

        asked = asyncio.run_coroutine_threadsafe(ask_there(), thread.thread_loop)
        try:
            # The deadline is kept here: a thread that has ended would never answer.
            async with asyncio.timeout(deadline_s):
                return await asyncio.wrap_future(asked)
        except (CommitFailedError, IllegalStateError, StaleMetadata) as error:
            raise FencedError(f"the group does not give us partition {partition}: {error}") from error
        except (KafkaError, TimeoutError) as error:
            asked.cancel()
            raise UnavailableError(f"the group's coordinator does not answer for {partition}: {error!r}") from error
