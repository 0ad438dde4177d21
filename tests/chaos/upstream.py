"""An upstream as a process of its own, to be killed and frozen: `python -m tests.chaos.upstream NAME HISTORY ...`.

It writes down each event before it sends it and after it was answered. Started again after a kill it sends again, with
the same ids, whatever had no answer: as an application with an outbox does.
"""

from __future__ import annotations

import argparse
import itertools
import random
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from pipeline.adapters.avro_codec import AvroCodec
from pipeline.config import load_settings
from pipeline.errors import DuetasksError, UnavailableError, UndeliveredError, UnsentError
from pipeline.producer import TaskProducer
from tests.chaos.authoring import Author
from tests.chaos.history import HistoryFile, What, read_history

if TYPE_CHECKING:
    from collections.abc import Iterable
    from concurrent.futures import Future

    from pipeline.config import Settings
    from pipeline.core.events import Event
    from pipeline.service.receipts import Receipt

TICK_S: Final = 0.05
UNANSWERED_MAX: Final = 3_000
TRANSACTION_TIMEOUT_S: Final = 6.0
CALL_S: Final = 10.0
ABORTED_SHARE: Final = 0.15
LONG_SHARE: Final = 0.01
LONG_S: Final = 1.5


class SdkUpstream:
    """Sends by the SDK, one event at a time, without waiting for the answers."""

    def __init__(self, settings: Settings, history: HistoryFile, name: str) -> None:
        self._producer = TaskProducer(settings, source=name)
        self._history = history
        self._name = name
        self._codec = AvroCodec()
        self._attempts = itertools.count()
        self._unanswered = 0
        self._lock = threading.Lock()
        self._again: list[Event] = []

    def send(self, events: Iterable[Event]) -> None:
        """Send these, and again what had no known outcome."""
        again, self._again = self._again, []
        if self._unanswered > UNANSWERED_MAX:
            self._again = again
            return  # the brokers rest; memory must not grow meanwhile
        for event in [*again, *events]:
            self._send_one(event)

    def close(self) -> None:
        """Wait for the answers; what has none stays unknown."""
        try:
            self._producer.close()
        except UndeliveredError:
            return  # each was written down

    def _send_one(self, event: Event) -> None:
        attempt = f"{self._name}-a{next(self._attempts)}"
        self._history.sending(attempt, event, self._codec.encode_event(event))
        with self._lock:
            self._unanswered += 1

        def answered(future: Future[Receipt]) -> None:
            self._note(attempt, event, future)

        try:
            self._producer.submit(event).add_done_callback(answered)
        except UnsentError:
            self._history.note(What.UNSENT, attempt, event.event_id)

    def _note(self, attempt: str, event: Event, future: Future[Receipt]) -> None:
        error = future.exception()
        with self._lock:
            self._unanswered -= 1
        if error is None:
            receipt = future.result()
            self._history.stands(What.ACKNOWLEDGED, attempt, event, receipt.partition, receipt.offset)
        else:
            is_unsent = isinstance(error, UnsentError)
            self._history.note(What.UNSENT if is_unsent else What.UNKNOWN, attempt, event.event_id)
            self._again.append(event)


class TransactionalUpstream:
    """Sends by transactions: some are aborted, some stay open for a while."""

    def __init__(self, settings: Settings, history: HistoryFile, name: str, rng: random.Random) -> None:
        self._settings = settings
        self._history = history
        self._name = name
        self._rng = rng
        self._codec = AvroCodec()
        self._numbers = itertools.count()
        self._producer = self._acquire()
        self._again: list[Event] = []

    def send(self, events: Iterable[Event]) -> None:
        """Send these, and again what had no known outcome, as one transaction."""
        wanted = [*self._again, *events]
        if not wanted:
            return
        attempt = f"{self._name}-t{next(self._numbers)}"
        try:
            self._again = []
            self._transact(attempt, wanted)
        except KafkaException:
            self._history.note(What.UNKNOWN, attempt)
            self._again = wanted
            # Its successor fences it and settles what it left, one way or the other.
            self._producer = self._acquire()

    def close(self) -> None:
        """Nothing is open between two calls."""

    def _transact(self, attempt: str, events: list[Event]) -> None:
        self._producer.begin_transaction()
        for event in events:
            value = self._codec.encode_event(event)
            self._history.sending(attempt, event, value)
            self._producer.produce(
                self._settings.topics.events,
                value,
                event.task_id.encode(),
                on_delivery=self._placed(attempt, event),
            )
        self._producer.flush(CALL_S)
        if self._rng.random() < LONG_SHARE:
            STOPPING.wait(self._rng.random() * LONG_S)
        if self._rng.random() < ABORTED_SHARE:
            self._abort(attempt)
            return
        self._producer.commit_transaction(CALL_S)
        self._history.note(What.COMMITTED, attempt)

    def _abort(self, attempt: str) -> None:
        self._producer.abort_transaction(CALL_S)
        self._history.note(What.ABORTED, attempt)

    def _placed(self, attempt: str, event: Event) -> object:
        def placed(error: KafkaError | None, message: Message) -> None:
            if error is None:
                self._history.stands(What.PLACED, attempt, event, message.partition(), message.offset())

        return placed

    def _acquire(self) -> Producer:
        while not STOPPING.is_set():
            producer = Producer(
                {
                    **self._settings.client_config(),
                    "transactional.id": self._name.split(".")[0],
                    "transaction.timeout.ms": int(TRANSACTION_TIMEOUT_S * 1000),
                    "delivery.timeout.ms": int(TRANSACTION_TIMEOUT_S * 1000),
                    "acks": "all",
                    "partitioner": "murmur2_random",
                    "log_level": 0,
                }
            )
            try:
                producer.init_transactions(CALL_S)
            except KafkaException:
                STOPPING.wait(0.5)  # the brokers are away
            else:
                return producer
        raise SystemExit(0)


STOPPING: Final = threading.Event()
"""Set by SIGTERM: this module is a program."""


def unanswered(paths: Iterable[Path]) -> list[Event]:
    """What an earlier life of this upstream sent and was not told the outcome of; an aborted transaction is told."""
    codec = AvroCodec()
    open_attempts: dict[tuple[str, str], bytes] = {}
    for line in read_history(*paths):
        if line.what is What.SENDING:
            open_attempts[line.attempt, line.event_id] = line.event
        elif line.what is What.ACKNOWLEDGED:
            open_attempts.pop((line.attempt, line.event_id), None)
        elif line.what in {What.COMMITTED, What.ABORTED}:
            for key in [key for key in open_attempts if key[0] == line.attempt]:
                del open_attempts[key]
    return [codec.decode_event(value) for value in {key[1]: value for key, value in open_attempts.items()}.values()]


def main() -> None:
    """Send until SIGTERM."""
    parser = argparse.ArgumentParser(description="One upstream of a chaos run.")
    parser.add_argument("name")
    parser.add_argument("history", type=Path, help="folder of its history files")
    parser.add_argument("--life", type=int, required=True, help="how often it was started before")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--rate", type=float, required=True, help="new events a second")
    parser.add_argument("--transactional", action="store_true")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: STOPPING.set())
    name = f"{options.name}.{options.life}"
    rng = random.Random(f"{options.seed} {name}")
    settings = load_settings()
    left_open = unanswered(options.history.glob(f"{options.name}.*.jsonl"))
    history = HistoryFile(options.history / f"{name}.jsonl")
    upstream = (
        TransactionalUpstream(settings, history, name, rng)
        if options.transactional
        else _sdk_upstream(settings, history, name)
    )
    upstream.send(left_open)
    author = Author(name, rng)
    owed = 0.0
    while not STOPPING.wait(TICK_S):
        owed += options.rate * TICK_S
        upstream.send(author.write(int(owed)))
        owed -= int(owed)
    upstream.send([])
    upstream.close()


def _sdk_upstream(settings: Settings, history: HistoryFile, name: str) -> SdkUpstream:
    while True:
        try:
            return SdkUpstream(settings, history, name)
        except UnavailableError:
            if STOPPING.wait(0.5):
                raise SystemExit(0) from None
        except DuetasksError as error:
            raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
