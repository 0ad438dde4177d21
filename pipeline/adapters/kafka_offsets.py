"""Asks leaders for the ends of partitions, and makes the fence's rounds."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar

import structlog
from confluent_kafka import IsolationLevel, KafkaError, KafkaException, Producer, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_delay, wait_fixed

from pipeline.core.tasks import Offset
from pipeline.errors import RetryableError, TopicMismatchError, UnavailableError
from pipeline.ports import TopicIdentity
from pipeline.service.owner.fence import FENCE_KEY

if TYPE_CHECKING:
    from concurrent.futures import Future

__all__ = ["FenceRounds", "KafkaOffsets", "WriteFence"]

log = structlog.get_logger(__name__)

Answer = TypeVar("Answer")

DEADLINE_S: Final = 5.0
RETRY_S: Final = 0.05
METADATA_S: Final = 1.0
DESCRIBE_S: Final = 1.5
_RETRIABLE: Final = frozenset(
    {
        KafkaError.OFFSET_NOT_AVAILABLE,  # a new leader that does not know its high watermark yet
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.UNKNOWN_LEADER_EPOCH,
        KafkaError._NOENT,  # noqa: SLF001  # "no leaders found": librdkafka's local codes are named so
        KafkaError._TRANSPORT,  # noqa: SLF001  # the same
        KafkaError._TIMED_OUT,  # noqa: SLF001  # the same
    }
)


class KafkaOffsets:
    """Implements `EndOffsets`: `read_uncommitted`, so an open transaction does not hide what lies behind it."""

    def __init__(self, admin: AdminClient) -> None:
        self._admin = admin

    async def end_offset(self, topic: str, partition: int) -> Offset:
        """The high watermark, asked for after this call began."""
        place = (topic, partition)
        return (await self.ask([place], OffsetSpec.latest()))[place]

    async def start_offset(self, topic: str, partition: int) -> Offset:
        """The first offset still retained."""
        place = (topic, partition)
        return (await self.ask([place], OffsetSpec.earliest()))[place]

    async def is_open(self, topic: str, partition: int) -> bool:
        """Whether a transaction is open there: the last stable offset lies below the high watermark."""
        place = (topic, partition)
        stable = (await self.ask([place], OffsetSpec.latest(), IsolationLevel.READ_COMMITTED))[place]
        return stable < await self.end_offset(topic, partition)

    async def ask(
        self,
        places: Iterable[tuple[str, int]],
        spec: OffsetSpec,
        isolation_level: IsolationLevel = IsolationLevel.READ_UNCOMMITTED,
    ) -> dict[tuple[str, int], Offset]:
        """Offsets by (topic, partition), one request a leader; raises `UnavailableError` after five seconds."""
        wanted = {TopicPartition(topic, partition): spec for topic, partition in places}

        async def list_offsets() -> dict[tuple[str, int], Offset]:
            answers = self._admin.list_offsets(wanted, isolation_level=isolation_level, request_timeout=DEADLINE_S)
            return {
                (place.topic, place.partition): _told((await _result(future)).offset)
                for place, future in answers.items()
            }

        try:
            return await self._persist(list_offsets, {place.topic for place in wanted})
        except KafkaException as error:
            raise UnavailableError(f"the ends of {sorted(wanted)} can't be had: {error}") from error

    async def _persist(self, question: Callable[[], Awaitable[Answer]], topics: Collection[str]) -> Answer:
        """The answer, asked for again within five seconds while leaders change; raises the last `KafkaException`."""

        async def learn(_state: RetryCallState) -> None:
            await self._learn_leaders(topics)

        again = AsyncRetrying(
            stop=stop_after_delay(DEADLINE_S),
            wait=wait_fixed(RETRY_S),
            retry=retry_if_exception(_may_pass),
            before_sleep=learn,
            reraise=True,
        )
        return await again(question)

    async def _learn_leaders(self, topics: Collection[str]) -> None:
        """Ask who leads now, and who controls.

        Else librdkafka goes on asking with the leader epoch that it knows, or asks a controller that is gone.
        """
        for topic in topics:
            try:
                await asyncio.to_thread(self._admin.list_topics, topic, METADATA_S)
            except KafkaException as error:  # the next attempt will tell
                log.debug("leaders_unknown", topic=topic, reason=str(error))

    async def identity(self, topic: str) -> TopicIdentity:
        """The topic's id and partition count, asked for after this call began."""

        async def describe() -> TopicIdentity:
            answer = self._admin.describe_topics(TopicCollection([topic]), request_timeout=DESCRIBE_S)
            described = await _result(answer[topic])
            return TopicIdentity(topic_id=str(described.topic_id), partition_count=len(described.partitions))

        try:
            return await self._persist(describe, [topic])
        except KafkaException as error:
            if error.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise RetryableError(f"topic {topic} is gone") from error
            raise UnavailableError(f"topic {topic} can't be described: {error}") from error


class FenceRounds:
    """Fence targets for all partitions of an agent, a round at a time: who asks during a round is served by the next.

    A round asks for the ends and the identity of the topic together: a partition count that was raised sends cancels
    elsewhere, and a topic created anew has other offsets; neither may be found out only after something has fired.
    """

    def __init__(self, offsets: KafkaOffsets, topic: str) -> None:
        self._offsets = offsets
        self._topic = topic
        self._waiting: dict[int, list[asyncio.Future[Offset]]] = {}
        self._round: asyncio.Task[None] | None = None

    async def target(self, partition: int, known: TopicIdentity) -> Offset:
        """An offset above all that was acknowledged before this call.

        Raises `TopicMismatchError` if the partition count is no longer the known one, `RetryableError` if the topic is
        another, `UnavailableError`.
        """
        future: asyncio.Future[Offset] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(partition, []).append(future)
        if self._round is None or self._round.done():
            self._round = asyncio.create_task(self._rounds())
        target = await future
        check_identity(self._topic, known, self._identity)
        return target

    _identity: TopicIdentity

    async def _rounds(self) -> None:
        while self._waiting:
            waiting, self._waiting = self._waiting, {}
            places = [(self._topic, partition) for partition in waiting]
            try:
                ends, self._identity = await asyncio.gather(
                    self._offsets.ask(places, OffsetSpec.latest()), self._offsets.identity(self._topic)
                )
            except (UnavailableError, RetryableError) as error:
                _fail(waiting, error)
                continue
            except Exception as error:  # noqa: BLE001  # an owner that waits for ever would be an orphaned partition
                _fail(waiting, UnavailableError(f"the fence can't be asked for: {error!r}"))
                continue
            for partition, futures in waiting.items():
                for future in futures:
                    if not future.done():
                        future.set_result(ends[self._topic, partition])


class WriteFence:
    """The fence that a deposed leader can't answer: a tiny record, acknowledged by all in-sync replicas.

    The target is the position after that record; the owner has read everything before it when it has read it back.
    """

    def __init__(self, offsets: KafkaOffsets, topic: str, client: Mapping[str, str]) -> None:
        self._offsets = offsets
        self._topic = topic
        self._producer = Producer({**client, "acks": "all", "enable.idempotence": True, "linger.ms": 0})

    async def target(self, partition: int, known: TopicIdentity) -> Offset:
        """As `FenceRounds.target`."""
        loop = asyncio.get_running_loop()
        written: asyncio.Future[Offset] = loop.create_future()

        def report(error: KafkaError | None, message: Any) -> None:  # noqa: ANN401  # confluent's Message
            def settle() -> None:
                if written.done():
                    return
                if error is not None:
                    written.set_exception(UnavailableError(f"the fence record can't be written: {error}"))
                elif message.offset() is None:  # "I had that already", after a leader change: nobody tells where
                    written.set_exception(UnavailableError("the broker did not tell where the fence record stands"))
                else:
                    written.set_result(Offset(message.offset() + 1))

            loop.call_soon_threadsafe(settle)

        self._producer.produce(self._topic, key=FENCE_KEY, value=b"\x00", partition=partition, on_delivery=report)
        flushing = loop.run_in_executor(None, self._producer.flush, DEADLINE_S)
        target, identity, _ = await asyncio.gather(written, self._offsets.identity(self._topic), flushing)
        check_identity(self._topic, known, identity)
        return target


def check_identity(topic: str, known: TopicIdentity, now: TopicIdentity) -> None:
    """Raise unless the topic is the one that was acquired, with the same partition count."""
    if now.topic_id != known.topic_id:
        raise RetryableError(f"{topic} was created anew: acquiring again")
    if now.partition_count != known.partition_count:
        raise TopicMismatchError(
            f"{topic} has {now.partition_count} partitions now, the timers were placed with {known.partition_count}: "
            "cancels would miss their tasks, so nothing fires; see docs/how-to/change-the-partition-count.md"
        )


def _fail(waiting: Mapping[int, list[asyncio.Future[Offset]]], error: Exception) -> None:
    for futures in waiting.values():
        for future in futures:
            if not future.done():
                future.set_exception(error)


def _may_pass(error: BaseException) -> bool:
    return isinstance(error, KafkaException) and error.args[0].code() in _RETRIABLE


def _told(offset: int) -> Offset:
    """The offset of an answer that tells one: librdkafka hands -1001 over as an answer while leaders change.

    Taken for an end it would look as if records had been lost.
    """
    if offset < 0:
        raise KafkaException(KafkaError(KafkaError.OFFSET_NOT_AVAILABLE, f"the answer was {offset}"))
    return Offset(offset)


async def _result(future: "Future[Any]") -> Any:  # noqa: ANN401  # whatever the admin call answers
    return await asyncio.wrap_future(future)
