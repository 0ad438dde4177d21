"""A Faust transport that hands over whole fetches: one message a batch, instead of about 100 us for each record.

It is found by its entry point in `faust.transports`. Membership, heartbeats and rebalances stay Faust's; what a batch
adds is `start_position` and `end_position`, also when the position moved over markers without a record, so that the
owner can check that nothing was skipped. Owners ask for positions and room through a `PartitionFeed`; Faust's own seeks
to committed offsets are overruled by it.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec
from aiokafka.consumer.fetcher import FetchResult
from aiokafka.errors import ConsumerStoppedError
from faust.transport.drivers import aiokafka as driver
from faust.types import ConsumerMessage

from pipeline.adapters.fetched_records import all_records
from pipeline.core.tasks import Offset
from pipeline.ports import InputBatch

__all__ = ["FeedRegistry", "FetchedBatch", "PartitionFeed", "Transport"]

FETCH_TIMEOUT_S: Final = 0.25
"""Other calls to Faust's consumer thread queue behind a fetch, so it must not be long."""
FETCH_WAIT_MS: Final = 500
FETCH_BYTES_MAX: Final = 4 * 1_048_576
BUFFERED_BYTES_MAX: Final = 64 * 1_048_576
"""Of all partitions together; each has its share, but room for one fetch."""
BUFFERED_RECORDS_MAX: Final = 50_000


class FetchedBatch(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One fetch of one partition; `epoch` counts the seeks before it, so that what was fetched earlier is known."""

    topic: str
    partition: int
    epoch: int
    batch: InputBatch
    size_bytes: int


class PartitionFeed:
    """The input of one owner: an `EventSource` for it, and a list of wishes for the consumer's thread.

    The owner's loop calls `seek`, `take`, `wait`, `pause`, `put`; the thread only reads `wanted` and `epoch`, which are
    single attributes, so no lock is needed.
    """

    def __init__(self, wake_fetcher: Callable[[], None], bytes_max: Callable[[], int]) -> None:
        self._wake_fetcher = wake_fetcher
        self._bytes_max = bytes_max
        self._batches: deque[FetchedBatch] = deque()
        self._bytes = 0
        self._records = 0
        self._arrived = asyncio.Event()
        self.epoch = 0
        self.wanted: Offset | None = None
        """Where the owner wants to read from since `epoch`; None: nowhere now."""

    def seek(self, position: Offset) -> None:
        """Forget what is buffered and fetch from `position` on."""
        self._forget()
        self.epoch += 1
        self.wanted = position
        self._wake_fetcher()

    def pause(self) -> None:
        """Forget what is buffered and fetch nothing until the next `seek`."""
        self._forget()
        self.epoch += 1
        self.wanted = None

    def take(self) -> InputBatch | None:
        """The next buffered batch, or None; never waits."""
        if not self._batches:
            return None
        was_full = self.is_full
        fetched = self._batches.popleft()
        self._bytes -= fetched.size_bytes
        self._records -= len(fetched.batch.records)
        if was_full and not self.is_full:
            self._wake_fetcher()
        return fetched.batch

    async def wait(self, timeout_ms: int) -> None:
        """Return when something is buffered, `wake` was called, or the time is over."""
        if not self._batches:
            try:
                async with asyncio.timeout(timeout_ms / 1000):
                    await self._arrived.wait()
            except TimeoutError:
                pass  # the time is over: that is an answer
        self._arrived.clear()

    def wake(self) -> None:
        """End a wait now."""
        self._arrived.set()

    def put(self, fetched: FetchedBatch) -> None:
        """A batch arrived; one that was fetched before the last seek is dropped."""
        if fetched.epoch != self.epoch:
            return
        self._batches.append(fetched)
        self._bytes += fetched.size_bytes
        self._records += len(fetched.batch.records)
        self._arrived.set()

    @property
    def is_full(self) -> bool:
        """Whether fetching should rest until the owner has taken some."""
        return self._bytes >= self._bytes_max() or self._records >= BUFFERED_RECORDS_MAX

    def _forget(self) -> None:
        self._batches.clear()
        self._bytes = self._records = 0


class FeedRegistry:
    """The feeds of an agent by (topic, partition), shared between the owners' loop and the consumer's thread."""

    def __init__(self) -> None:
        self._feeds: dict[tuple[str, int], PartitionFeed] = {}
        self.wake_fetcher: Callable[[], None] = lambda: None

    def open(self, topic: str, partition: int) -> PartitionFeed:
        """A new feed for the partition, in place of an earlier one."""
        feed = PartitionFeed(lambda: self.wake_fetcher(), self._share)  # noqa: PLW0108  # the thread sets it later
        self._feeds[topic, partition] = feed
        return feed

    def close(self, topic: str, partition: int) -> None:
        """Nothing of the partition is wanted any more."""
        feed = self._feeds.pop((topic, partition), None)
        if feed is not None:
            feed.pause()

    def get(self, topic: str, partition: int) -> PartitionFeed | None:
        """The partition's feed, if somebody reads it."""
        return self._feeds.get((topic, partition))

    def _share(self) -> int:
        return max(FETCH_BYTES_MAX, BUFFERED_BYTES_MAX // max(1, len(self._feeds)))

    def put(self, fetched: FetchedBatch) -> None:
        """Hand a batch to its feed, if there still is one."""
        feed = self._feeds.get((fetched.topic, fetched.partition))
        if feed is not None:
            feed.put(fetched)


class _BatchThread(driver.AIOKafkaConsumerThread):  # type: ignore[misc]  # Faust ships no types
    """Faust's consumer thread, fetching whole batches of the partitions that their owners want."""

    _sought: dict[Any, tuple[int, int]]

    def _create_worker_consumer(self, transport: Any) -> Any:  # noqa: ANN401  # Faust's own signature
        consumer = super()._create_worker_consumer(transport)
        # Read before `start` builds the fetcher. Faust would read uncommitted, and wait 1.5 s for a fetch.
        consumer._isolation_level = "read_committed"  # noqa: SLF001  # no setting reaches it
        consumer._fetch_max_wait_ms = FETCH_WAIT_MS  # noqa: SLF001  # the same
        self._sought = {}
        self._wished = asyncio.Event()
        registry: FeedRegistry = self.app.feeds
        loop = self.thread_loop
        registry.wake_fetcher = lambda: loop.call_soon_threadsafe(self._wished.set)
        return consumer

    async def on_thread_stop(self) -> None:
        """Leave the group in an orderly end, so that others take over now and not when the session has ended."""
        if self.app.leaves_group and self._consumer is not None:
            coordinator = self._consumer._coordinator  # noqa: SLF001  # a static member never leaves by itself
            if coordinator is not None:
                coordinator._group_instance_id = None  # noqa: SLF001  # the same
        try:
            await super().on_thread_stop()
        except asyncio.CancelledError:
            # aiokafka cancels its fetches, and one that was waiting to ask a broker again that is away lets that
            # through (0.14, `Fetcher.close`). Without the rest of its end Faust would wait for this thread for ever.
            await self._consumer._client.close()  # noqa: SLF001  # what aiokafka would have done next

    def verify_event_path(self, now: float, tp: Any) -> None:  # noqa: ANN401  # Faust's own signature
        """Faust judges progress by its own acks, which are not used here; owners report their own."""

    async def _fetch_records(
        self,
        consumer: Any,  # noqa: ANN401  # aiokafka's consumer
        active_partitions: Iterable[Any],
        timeout: float | None = None,  # noqa: ARG002, ASYNC109  # Faust's own signature; its second is too long
        max_records: int | None = None,  # noqa: ARG002  # a fetch is handed over whole
    ) -> dict[Any, list[FetchedBatch]]:
        if not self.consumer.flow_active:
            return {}
        fetcher = consumer._fetcher  # noqa: SLF001  # as Faust's own driver does
        if consumer._closed or fetcher._closed:  # noqa: SLF001  # the same
            raise ConsumerStoppedError
        with fetcher._subscriptions.fetch_context():  # noqa: SLF001  # the same
            if fetcher._subscriptions.reassignment_in_progress:  # noqa: SLF001  # the same
                return {}
            self._wished.clear()
            wanted = self._follow_wishes(consumer, active_partitions)
            drained = self._drain(consumer, fetcher, wanted)
            if not drained:
                await self._wait_for_more(fetcher)
                drained = self._drain(consumer, fetcher, self._follow_wishes(consumer, active_partitions))
            return drained

    def _follow_wishes(self, consumer: Any, active_partitions: Iterable[Any]) -> dict[Any, int]:  # noqa: ANN401
        """Seek where an owner asked for it; the partitions to hand over now, each with the epoch of its last seek."""
        registry: FeedRegistry = self.app.feeds
        wanted = {}
        for tp in active_partitions or ():
            feed = registry.get(tp.topic, tp.partition)
            if feed is None or not consumer._subscription.is_assigned(tp):  # noqa: SLF001  # as the driver does
                continue
            epoch, position = feed.epoch, feed.wanted
            if position is None:
                continue
            if self._sought.get(tp) != (id(feed), epoch):
                consumer.seek(tp, position)
                self._sought[tp] = (id(feed), epoch)
            if not feed.is_full:
                wanted[tp] = epoch
        return wanted

    def _drain(self, consumer: Any, fetcher: Any, wanted: dict[Any, int]) -> dict[Any, list[FetchedBatch]]:  # noqa: ANN401
        drained = {}
        for tp in list(fetcher._records):  # noqa: SLF001  # as `Fetcher.fetched_records` does
            if tp not in wanted:
                continue
            result = fetcher._records.pop(tp)  # noqa: SLF001  # the same
            fetcher._notify(fetcher._wait_consume_future)  # noqa: SLF001  # the same
            if type(result) is not FetchResult:
                result.check_raise()
                continue
            state = consumer._subscription.subscription.assignment.state_value(tp)  # noqa: SLF001  # the same
            start = state.position if state.has_valid_position else None
            records = all_records(result)
            end = state.position if state.has_valid_position else None
            if start is None or end is None or end == start:
                continue
            size = sum(len(record.value or b"") + len(record.key or b"") for record in records)
            batch = InputBatch(start_position=start, end_position=end, records=records)
            fetched = FetchedBatch(
                topic=tp.topic, partition=tp.partition, epoch=wanted[tp], batch=batch, size_bytes=size
            )
            drained[tp] = [fetched]
        return drained

    async def _wait_for_more(self, fetcher: Any) -> None:  # noqa: ANN401  # aiokafka's fetcher
        """Wait for a fetch to arrive or an owner to wish something, a quarter of a second at most."""
        fetched = fetcher._create_fetch_waiter()  # noqa: SLF001  # as `Fetcher.fetched_records` does
        wished = asyncio.ensure_future(self._wished.wait())
        try:
            await asyncio.wait([fetched, wished], timeout=FETCH_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
            if fetched.done() and not fetched.cancelled():
                fetched.result()  # authorization errors
        finally:
            wished.cancel()
            if not fetched.done():
                fetched.cancel()


class _BatchConsumer(driver.Consumer):  # type: ignore[misc]  # Faust ships no types
    """Faust's consumer, one message a batch."""

    def _new_consumer_thread(self) -> _BatchThread:
        return _BatchThread(self, loop=self.loop, beacon=self.beacon)

    def _to_message(self, tp: Any, record: FetchedBatch) -> ConsumerMessage:  # noqa: ANN401  # Faust's own signature
        # Faust drops a message that lies before the last one it read; here an owner decides what is read again.
        self._read_offset[tp] = None
        return ConsumerMessage(
            tp.topic,
            tp.partition,
            record.batch.start_position,
            0.0,
            0,
            [],
            None,
            record,
            None,
            0,
            record.size_bytes,
            tp,
            # Faust skips messages of another generation than the app's.
            generation_id=self.app.consumer_generation_id,
        )


class Transport(driver.Transport):  # type: ignore[misc]  # Faust ships no types
    """`duetasks://host:port`: Kafka by aiokafka, in whole batches."""

    Consumer = _BatchConsumer
