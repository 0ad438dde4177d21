"""The producers of rebuild and replay: a transaction longer than memory, and one that copies records as they are."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

from confluent_kafka import KafkaError, KafkaException, Producer

from pipeline.adapters.kafka_ledger import LibrdkafkaLog
from pipeline.adapters.kafka_transaction import KafkaTransaction, producer_config
from pipeline.errors import FencedError, UnavailableError, UnknownOutcomeError
from pipeline.service.recovery.ports import LogRecord

__all__ = ["REBUILD_TIMEOUT_MS", "KafkaLongTransaction", "KafkaReplayWriter"]

REBUILD_TIMEOUT_MS: Final = 300_000
"""How long the one transaction of a rebuild may take; brokers allow up to `transaction.max.timeout.ms`, 15 minutes."""
REPLAY_TIMEOUT_MS: Final = 30_000


class KafkaLongTransaction(KafkaTransaction):
    """The owner's transaction, for a rebuild: it writes more than the producer's queue holds."""

    async def flush(self) -> None:
        """Wait until what was produced so far has been answered for; raises `UnavailableError` if that takes long."""
        left = await self._run(lambda: self._producer.flush(self._timeout_s))
        if left:
            raise UnavailableError(
                f"{left} records were not acknowledged within {self._timeout_s:g} s: nothing changed."
            )


class KafkaReplayWriter:
    """Implements `ReplayWriter`: records go to the partition number that they came from."""

    def __init__(self, client: Mapping[str, str], transactional_id: str) -> None:
        self._producer = Producer(
            {**producer_config(client, transactional_id, REPLAY_TIMEOUT_MS), "logger": LibrdkafkaLog()}
        )
        self._fault: KafkaError | None = None

    async def acquire(self) -> None:
        """Get ready to write."""
        await self._call("get ready to write", lambda: self._producer.init_transactions(REPLAY_TIMEOUT_MS / 1000))

    def begin(self) -> None:
        """Open a transaction."""
        self._fault = None
        self._producer.begin_transaction()

    def copy(self, topic: str, partition: int, record: LogRecord, headers: Mapping[str, bytes]) -> None:
        """Add the record unchanged, with `headers` in place of those of the same names."""
        kept = [(name, value) for name, value in record.headers if name not in headers]
        self._produce(topic, partition, record.key, record.value, [*kept, *headers.items()])

    def delete(self, topic: str, partition: int, key: bytes) -> None:
        """Add a tombstone."""
        self._produce(topic, partition, key, None, [])

    async def commit(self) -> None:
        """All or nothing."""
        await self._call("commit", self._flush_and_commit)

    async def abort(self) -> None:
        """Give the open transaction up."""
        await self._call("abort", lambda: self._producer.abort_transaction(REPLAY_TIMEOUT_MS / 1000))

    async def close(self) -> None:
        """Let go; nothing is left to send after a commit or an abort."""
        await asyncio.to_thread(self._producer.close)

    def _produce(
        self,
        topic: str,
        partition: int,
        key: bytes | None,
        value: bytes | None,
        headers: list[tuple[str, bytes | None]],
    ) -> None:
        self._producer.produce(
            topic, key=key, value=value, partition=partition, headers=headers or None, on_delivery=self._note
        )

    def _note(self, error: KafkaError | None, _message: object) -> None:
        self._fault = self._fault or error

    def _flush_and_commit(self) -> None:
        self._producer.flush(REPLAY_TIMEOUT_MS / 1000)
        if self._fault is not None:
            raise KafkaException(self._fault)
        self._producer.commit_transaction(REPLAY_TIMEOUT_MS / 1000)

    async def _call(self, what: str, call: Callable[[], object]) -> None:
        try:
            await asyncio.to_thread(call)
        except KafkaException as error:
            fault: KafkaError = error.args[0]
            message = f"The replay could not {what}: {fault.str()}"
            if fault.code() in {KafkaError._FENCED, KafkaError.INVALID_PRODUCER_EPOCH}:  # noqa: SLF001  # local codes
                raise FencedError(f"{message}. Its transaction took too long, and was given up.") from error
            if what == "commit" and self._fault is None and not fault.txn_requires_abort():
                raise UnknownOutcomeError(f"{message}. The last batch may or may not be out.") from error
            raise UnavailableError(f"{message}. The batch in hand was not written.") from error
