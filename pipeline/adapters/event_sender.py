"""Sends events to `task-events` on librdkafka, many at a time, and tells what became of each one."""

import threading
from collections import deque
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Final, NamedTuple

import structlog
from confluent_kafka import KafkaError, KafkaException, Message, Producer

from pipeline.adapters.transmissions import Transmissions
from pipeline.core.events import Event, Reason
from pipeline.core.tasks import InstantMs, Offset, Partition
from pipeline.errors import (
    DuetasksError,
    RejectedTaskError,
    UnavailableError,
    UndeliveredError,
    UnknownOutcomeError,
    UnsentError,
)
from pipeline.service.receipts import Receipt
from pipeline.service.task_requests import OutgoingEvent

__all__ = ["Done", "EventSender", "QuietLogger", "sender_config"]

log = structlog.get_logger(__name__)

QUEUE_MESSAGES_MAX: Final = 100_000
QUEUE_KBYTES_MAX: Final = 131_072
_STATISTICS_INTERVAL_MS: Final = 250
_SETTLE_MS: Final = 1_500
"""What librdkafka may take to notice a time-out (it looks once a second), and we to judge it (by the statistics)."""
_WAIT_S: Final = 0.05
_UNTOLD_MAX: Final = 10_000
"""Failures kept for `close`, of events whose author never looks; beyond that they are only counted."""

_TOO_LARGE: Final = frozenset({KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE})
_NOT_TAKEN: Final = frozenset(
    {
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.INVALID_RECORD,
        KafkaError.INVALID_TIMESTAMP,
        KafkaError.POLICY_VIOLATION,
        KafkaError.TOPIC_EXCEPTION,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError.UNSUPPORTED_COMPRESSION_TYPE,
        KafkaError._UNKNOWN_PARTITION,  # noqa: SLF001  # librdkafka's local codes are named so
        KafkaError._UNKNOWN_TOPIC,  # noqa: SLF001  # the same
    }
)
"""The broker, or librdkafka before any broker, said no: the event is not in the topic. Anything else is doubtful."""


def sender_config(client: Mapping[str, str], *, deadline_ms: int, linger_ms: int, bytes_max: int) -> dict[str, object]:
    """The options of the SDK's producer, each with its reason."""
    settle_ms = min(_SETTLE_MS, deadline_ms // 2)
    return {
        **client,
        "acks": "all",  # a receipt means: on all in-sync replicas
        # A retry inside librdkafka neither doubles an event nor overtakes another; unless events timed out while a
        # broker was away: then it begins a new epoch, and may write again what had arrived. The event_id tells.
        "enable.idempotence": True,
        "partitioner": "murmur2_random",  # Java's; librdkafka's own default would part a cancel from its schedule
        "linger.ms": linger_ms,  # gathers events that are sent at about the same time into one request
        "compression.type": "lz4",  # cheap for both sides; events of one upstream are alike
        "delivery.timeout.ms": deadline_ms - settle_ms,  # includes every retry; the rest is for telling why
        "queue.buffering.max.messages": QUEUE_MESSAGES_MAX,  # back-pressure: then submit waits
        "queue.buffering.max.kbytes": QUEUE_KBYTES_MAX,  # the same for large ones
        "message.max.bytes": bytes_max + 16_384,  # our own limit speaks first, and in our words
        "statistics.interval.ms": _STATISTICS_INTERVAL_MS,  # tells unsent from unknown (`transmissions.py`)
    }


Done = Callable[[Receipt | DuetasksError], None]
"""Called once, from the sender's thread, with what became of an event; it must be quick and must not raise."""


def receipt_of(message: Message, topic: str, event_id: str) -> Receipt:
    """What an acknowledged message says of its event.

    librdkafka takes "I had that already" for an acknowledgement too, and then nobody tells where the record stands.
    """
    offset = message.offset()
    return Receipt(
        topic=topic,
        partition=Partition(message.partition()),
        offset=Offset(-1 if offset is None else offset),
        timestamp_ms=InstantMs(-1 if offset is None else message.timestamp()[1]),
        event_id=event_id,
    )


class EventSender:
    """One librdkafka producer and the thread that serves it; safe to use from several threads.

    Every event that is accepted gets exactly one answer, at the latest shortly after the deadline.
    Raises `UnavailableError` at once if no broker answers, or the topic is missing.
    """

    def __init__(
        self, client: Mapping[str, str], topic: str, *, deadline_ms: int, linger_ms: int, bytes_max: int
    ) -> None:
        self._topic = topic
        self._deadline_s = deadline_ms / 1000
        self._trouble = ""
        self._troubles_logged: set[int] = set()
        self._transmissions = Transmissions(topic)
        self._doubtful: deque[_Doubt] = deque()
        self._untold: dict[int, tuple[Event, DuetasksError]] = {}
        self._untold_more = 0
        self._progress = threading.Event()
        self._stopping = threading.Event()
        self._closed = False
        self._producer = Producer(
            {
                **sender_config(client, deadline_ms=deadline_ms, linger_ms=linger_ms, bytes_max=bytes_max),
                "error_cb": self._on_trouble,
                "stats_cb": self._on_statistics,
                "logger": QuietLogger(),
            }
        )
        self._check_topic()
        self._thread = threading.Thread(target=self._serve, name="duetasks-sender", daemon=True)
        self._thread.start()

    def submit(self, outgoing: OutgoingEvent, done: Done) -> None:
        """Hand an event over and return at once; waits, up to the deadline, only while the queue is full.

        Raises:
            UnsentError: the queue stayed full, or the producer is closed or broken; `done` will not be called.

        """
        if self.try_submit(outgoing, done):
            return
        until_s = monotonic() + self._deadline_s
        while not self.try_submit(outgoing, done):
            if monotonic() >= until_s:
                raise UnsentError(
                    f"{QUEUE_MESSAGES_MAX} events or {QUEUE_KBYTES_MAX} KiB wait to be sent, and none went: "
                    f"{self._trouble or 'the broker is too slow'}",
                    event=outgoing.event,
                )
            self.wait_progress()

    def try_submit(self, outgoing: OutgoingEvent, done: Done) -> bool:
        """As `submit`, but False at once if the queue is full."""
        if self._closed:
            raise UnsentError("this producer is closed: open another", event=outgoing.event)
        report = _Report(self, outgoing.event, done)
        try:
            self._producer.produce(self._topic, outgoing.value, outgoing.key, on_delivery=report)
        except BufferError:
            return False
        except KafkaException as error:
            raise UnsentError(
                f"not sent: {error.args[0].str()}. Open another producer", event=outgoing.event
            ) from error
        return True

    def wait_progress(self) -> None:
        """Wait until reports came in, or a moment has passed; several threads may wait."""
        self._progress.clear()
        self._progress.wait(_WAIT_S)

    def told(self, error: BaseException) -> None:
        """Note that somebody was told of an event's failure, so that `close` need not tell it."""
        self._untold.pop(id(error), None)

    def close(self, timeout_s: float | None = None) -> None:
        """Wait until everything is answered, at most `timeout_s` (default: the deadline); then let go.

        Raises:
            UndeliveredError: events were not delivered, and nobody was told yet.

        """
        if self._closed:
            return
        self._closed = True
        if not self._drained(self._deadline_s if timeout_s is None else timeout_s):
            self._producer.purge()
            self._drained(_SETTLE_MS / 1000)
        self._stopping.set()
        self._thread.join()
        self._settle(decided=False)
        if self._untold:
            raise self._undelivered()

    def _drained(self, timeout_s: float) -> bool:
        until_s = monotonic() + timeout_s
        while (len(self._producer) or self._doubtful) and monotonic() < until_s:
            self.wait_progress()
        return not len(self._producer) and not self._doubtful

    def _undelivered(self) -> UndeliveredError:
        failures = list(self._untold.values())
        count = len(failures) + self._untold_more
        return UndeliveredError(
            f"{count} events were not delivered, and nobody was told; `failures` names them. "
            f"The first: {failures[0][1]}",
            failures=failures,
        )

    # -- served by the thread ----------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._stopping.is_set():
            if self._producer.poll(_WAIT_S):
                self._progress.set()

    def _on_trouble(self, error: KafkaError) -> None:
        self._trouble = error.str()
        if error.code() in self._troubles_logged:
            return  # librdkafka says it again with each attempt to connect, many times a second
        self._troubles_logged.add(error.code())
        log.warning("producer_trouble", error=error.str(), code=error.code(), fatal=error.fatal())

    def _on_statistics(self, statistics: str) -> None:
        self._transmissions.update(statistics, idle=not self._doubtful and not len(self._producer))
        self._settle(decided=True)

    def on_acknowledged(self, report: "_Report", message: Message) -> None:
        """The broker has it."""
        self._troubles_logged.clear()  # the next outage is told again
        partition = message.partition()
        self._transmissions.acknowledged(partition)
        report.done(receipt_of(message, self._topic, report.event.event_id))

    def on_failed(self, report: "_Report", error: KafkaError, message: Message) -> None:
        """It was not acknowledged; where that leaves a doubt, the next statistics decide."""
        if error.code() in _TOO_LARGE:
            fault = (
                f"the topic {self._topic} does not take it: {error.str()}. Raise its max.message.bytes, or send less"
            )
            self._fail(report, RejectedTaskError(fault, reason=Reason.TOO_LARGE))
        elif error.code() in _NOT_TAKEN:
            self._fail(report, UnsentError(f"the broker does not take it: {error.str()}", event=report.event))
        else:
            self._doubtful.append(_Doubt(report, error, message.partition()))

    def _settle(self, *, decided: bool) -> None:
        """Answer the doubtful ones; undecided, their outcome is unknown."""
        while self._doubtful:
            doubt = self._doubtful.popleft()
            event, reason = doubt.report.event, doubt.error.str()
            if self._trouble:
                reason += f" ({self._trouble})"
            if decided and self._transmissions.never_sent(doubt.partition):
                self._fail(doubt.report, UnsentError(f"not sent: {reason}. Send it again", event=event))
                continue
            advice = f"Send it again with the same event_id ({event.event_id}), which makes a second arrival harmless"
            self._fail(
                doubt.report, UnknownOutcomeError(f"{reason}; the event may have arrived. {advice}", event=event)
            )

    def _fail(self, report: "_Report", error: DuetasksError) -> None:
        if len(self._untold) < _UNTOLD_MAX:
            self._untold[id(error)] = report.event, error
        else:
            self._untold_more += 1
        report.done(error)

    def _check_topic(self) -> None:
        try:
            # Asked for by name, a missing topic would be created by brokers that allow it: with their own settings.
            topics = self._producer.list_topics(timeout=self._deadline_s).topics
        except KafkaException as error:
            self._producer.poll(0)
            raise UnavailableError(
                f"No broker answered within {self._deadline_s:g} s: {self._trouble or error.args[0].str()}. "
                "Check DUETASKS_BOOTSTRAP_SERVERS, and that Kafka runs."
            ) from error
        found = topics.get(self._topic)
        if found is None or found.error is not None:
            raise UnavailableError(f"There is no topic {self._topic}: create it with `duetasks topics apply`.")


class _Report:
    """librdkafka's delivery report of one event; it is called from the sender's thread."""

    __slots__ = ("_sender", "done", "event")

    def __init__(self, sender: EventSender, event: Event, done: Done) -> None:
        self._sender = sender
        self.event = event
        self.done = done

    def __call__(self, error: KafkaError | None, message: Message) -> None:
        if error is None:
            self._sender.on_acknowledged(self, message)
        else:
            self._sender.on_failed(self, error, message)


class _Doubt(NamedTuple):
    report: _Report
    error: KafkaError
    partition: int


class QuietLogger:
    """librdkafka's own log lines, as debug events: what matters comes back as an error."""

    def log(self, _level: int, message: str, *args: object) -> None:
        """Called by confluent-kafka."""
        if not structlog.is_configured():
            return  # an application that does not use structlog would find them on its standard output
        log.debug("librdkafka", message=message % args if args else message)
