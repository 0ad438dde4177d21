"""The consumer of due tasks for applications: one object, put together from settings."""

from pathlib import Path

from pipeline import wiring
from pipeline.adapters.avro_codec import AvroCodec
from pipeline.adapters.consumer_codec import AvroConsumerCodec
from pipeline.adapters.due_subscription import DueSubscription
from pipeline.adapters.kafka_admin import KafkaAdmin
from pipeline.adapters.kafka_ledger import KafkaLedgerTransactions
from pipeline.adapters.rocksdb_ledger_table import RocksdbLedgerTables
from pipeline.adapters.system_clock import SystemClock
from pipeline.config import Settings
from pipeline.core.applied import group_fault
from pipeline.core.tasks import DurationMs
from pipeline.errors import NotFoundError, UsageError
from pipeline.ports import ClusterIdentity
from pipeline.service.consumer.counts import BatchRules, ConsumerCounts
from pipeline.service.consumer.due_consumer import ConsumerPorts, DueConsumer, StopRules
from pipeline.service.consumer.ports import TableIdentity
from pipeline.service.consumer.task_handling import ConsumerStopError, Handler, HandlingRules, TaskContext

__all__ = ["ConsumerCounts", "ConsumerStopError", "DueTaskConsumer", "TaskContext"]


class DueTaskConsumer:
    """Calls `handler(task, context)` for every due task, and applies each (task_id, generation, occurrence) once.

    How far "once" goes. The ledger row of a task, its dead record, what the handler sends by `context.produce` and the
    group's offset are one Kafka transaction: exactly once. An effect anywhere else (a database, an HTTP call) happens
    before that transaction, so it is at-least-once: a consumer that dies repeats at most the batch in hand, that is
    `batch_max` tasks of each partition, with the same `task.emission_id`. Use that id, or (task_id, generation,
    occurrence), to make the effect idempotent; `batch_max=1` repeats at most one task, and is slower.

    A handler that raises is called again after a pause (`backoff_ms`, doubling up to `backoff_max_ms`), while other
    partitions go on; after `attempts_max` calls the task goes to `dead-tasks` (HANDLER_FAILED) and the next ones go
    on. `UnavailableError` from a handler ("my database is down") is tried again without end; `ConsumerStopError` stops
    the consumer and leaves the task.

    One handler call must end within `max_poll_interval_ms`, or the group gives the partitions to another member.

    Consumers of one `group` share the partitions of the topic. Each keeps a copy of its part of the ledger under
    `data_dir`; several on one machine may share the folder, and any copy may be deleted while nobody runs.

    Args:
        group: the consumer group; it names the ledger too, so another group applies every task again for itself.
        handler: an ordinary function; what it returns is ignored, raising is failing.
        settings: brokers, prefix, folders; from the environment if not given, with the embedded broker of the data
            folder if none are set.
        topic: another topic that tasks are emitted to (`target_topic`); it needs as many partitions as `applied-tasks`.
        instance_id: static membership, so that a restart within the session time-out moves no partition.

    Raises:
        UsageError: the group's name can't be used.
        ConfigurationError: no brokers are set.

    """

    def __init__(
        self,
        group: str,
        handler: Handler,
        *,
        settings: Settings | None = None,
        topic: str | None = None,
        batch_max: int = 100,
        attempts_max: int = 5,
        backoff_ms: int = 200,
        backoff_max_ms: int = 30_000,
        max_poll_interval_ms: int = 300_000,
        instance_id: str | None = None,
        data_dir: Path | None = None,
    ) -> None:
        fault = group_fault(group)
        if fault is not None:
            raise UsageError(fault)
        if batch_max < 1 or attempts_max < 1 or backoff_ms < 1 or backoff_max_ms < backoff_ms:
            raise UsageError("batch_max, attempts_max and backoff_ms must be 1 or more, backoff_max_ms not below it.")
        settings = wiring.connected_settings() if settings is None else wiring.with_brokers(settings)
        names = settings.topics
        due_topic = names.target(topic or "")
        client = settings.client_config()
        self._admin = KafkaAdmin(client)
        self._names = (due_topic, names.applied)
        self._group = group
        clock = SystemClock()
        self._tables = RocksdbLedgerTables(
            data_dir or settings.data_dir, group=group, identity=self._table_identity, now_ms=clock.now_ms
        )
        subscription = DueSubscription(
            client=client,
            identity=self._identity,
            group=group,
            due_topic=due_topic,
            ledger_topic=names.applied,
            session_timeout_ms=settings.session_timeout_ms,
            max_poll_interval_ms=max_poll_interval_ms,
            instance_id=instance_id,
        )
        transactions = KafkaLedgerTransactions(
            client=client,
            group=group,
            due_topic=due_topic,
            ledger_topic=names.applied,
            dead_topic=names.dead,
            ledger_topic_id=lambda: self._table_identity(0).ledger_topic_id,
            group_view=subscription,
            transaction_timeout_ms=settings.transaction_timeout_ms,
        )
        self._consumer = DueConsumer(
            ConsumerPorts(
                subscription=subscription,
                transactions=transactions,
                tables=self._tables,
                codec=AvroConsumerCodec(AvroCodec()),
                clock=clock,
            ),
            handler=handler,
            handling=HandlingRules(
                group=group,
                topic=due_topic,
                attempts_max=attempts_max,
                backoff_ms=DurationMs(backoff_ms),
                backoff_max_ms=DurationMs(backoff_max_ms),
            ),
            batches=BatchRules(batch_max=batch_max),
        )

    @property
    def counts(self) -> ConsumerCounts:
        """What was done so far; read it from the thread that runs."""
        return self._consumer.counts

    def run(self, *, applied_max: int | None = None, idle_exit_ms: int | None = None) -> ConsumerCounts:
        """Consume until `stop` is called, `applied_max` tasks are applied, or nothing was in hand for `idle_exit_ms`.

        Blocks the calling thread, in which the handler runs too. Finished work is committed whatever ends it.

        Raises:
            NotFoundError: a topic is missing.
            TopicMismatchError: topic and ledger have different partition counts.
            UnavailableError: the brokers can't be reached at the start; later trouble is waited out.
            RefusedError: the brokers forbid it.

        """
        try:
            return self._consumer.run(StopRules(applied_max=applied_max, idle_exit_ms=idle_exit_ms))
        finally:
            self._tables.close()

    def stop(self) -> None:
        """Let `run` finish the task in hand, commit, leave the group and return; safe from threads and signals."""
        self._consumer.stop()

    def _identity(self) -> ClusterIdentity:
        return self._admin.identity(self._names)

    def _table_identity(self, partition: int) -> TableIdentity:
        found = self._identity()
        ledger = found.topics.get(self._names[1])
        if ledger is None:
            raise NotFoundError(f"There is no topic {self._names[1]}: create it with `duetasks topics apply`.")
        return TableIdentity(
            cluster_id=found.cluster_id, ledger_topic_id=ledger.topic_id, group=self._group, partition=partition
        )
