"""Puts an agent together and runs it until it is told to stop."""

import gc
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Final

import faust
import msgspec
import structlog
from confluent_kafka.admin import AdminClient

from pipeline.adapters.agent_slot import AgentSlot
from pipeline.adapters.avro_codec import AvroCodec
from pipeline.adapters.faust_app import AgentApp, attach_owners, build_faust_app, peer_urls
from pipeline.adapters.group_membership import GroupMembership
from pipeline.adapters.http_api import HttpApi
from pipeline.adapters.kafka_admin import KafkaAdmin
from pipeline.adapters.kafka_offsets import FenceRounds, KafkaOffsets, WriteFence
from pipeline.adapters.kafka_state_log import KafkaStateLog
from pipeline.adapters.kafka_transaction import KafkaTransaction
from pipeline.adapters.prometheus_metrics import render_metrics
from pipeline.adapters.rocksdb_timer_table import RocksdbTableStore
from pipeline.adapters.system_clock import SystemClock
from pipeline.adapters.topic_setup import refuse_unsafe_topics
from pipeline.config import Fence, Settings
from pipeline.core.tasks import DurationMs, Partition
from pipeline.errors import UnavailableError
from pipeline.service.admission import Admission
from pipeline.service.owner.acquisition import Outside
from pipeline.service.owner.partition_owner import PartitionOwner
from pipeline.service.owner.pool import OwnerPool
from pipeline.service.owner.settings import OwnerSettings

if TYPE_CHECKING:
    from pipeline.service.owner.tenure import FenceTarget

__all__ = ["run_agent"]

log = structlog.get_logger(__name__)

LOCK_WAIT_MS: Final = 5_000
GC_THRESHOLD: Final = 50_000
RECORD_OVERHEAD_BYTES: Final = 4_096
"""What a record needs on its topic besides its value: key (1 KiB), headers of the batch, offsets."""


def run_agent(settings: Settings, *, accept_loss: bool = False) -> int:
    """Run an agent in this process until SIGTERM or SIGINT; returns the exit code.

    Raises:
        TopicMismatchError: the topics can lose data; nothing was started.
        UnavailableError: no cluster, or no free port.

    """
    for advice in refuse_unsafe_topics(settings):
        log.warning("topic_advice", message=advice.message)
    slot = AgentSlot.take(settings.data_dir)
    try:
        find = partial(_free_port, settings.http_host)
        # A free port is kept over restarts: other agents know this one's address from the last assignment.
        port = find(settings.http_port) if settings.http_port else slot.port(find)
        url = settings.advertised_url or f"http://{settings.http_host}:{port}"
        app = build_faust_app(settings, url=url, http_port=port, member=slot.member)
        agent = _Agent(settings, app, slot, url, accept_loss=accept_loss)
        # What is loaded by now stays: the collector need not look at it, nor run after every few hundred new objects.
        gc.collect()
        gc.freeze()
        gc.set_threshold(GC_THRESHOLD, 20, 20)
        log.info("agent_starts", url=url, slot=slot.folder.name, bootstrap_servers=settings.bootstrap_servers)
        slot.announce(url)
        return agent.run()
    finally:
        slot.release()


class _Agent:
    """The parts of one agent, in the order that they need each other."""

    def __init__(self, settings: Settings, app: AgentApp, slot: AgentSlot, url: str, *, accept_loss: bool) -> None:
        self._settings = settings
        self._app = app
        self._accept_loss = accept_loss
        self._name = url
        client = settings.client_config()
        cluster = KafkaAdmin(client)
        events = settings.topics.events
        self._topics = cluster.topics([events, settings.topics.state, settings.topics.due])
        self._partition_count = self._topics[events].partition_count
        # Each owner has one blocking call at a time, and one more while it restores.
        self._threads = ThreadPoolExecutor(2 * self._partition_count + 4, thread_name_prefix="owner")
        self._offsets = offsets = KafkaOffsets(AdminClient(client))
        self._codec = AvroCodec()
        self._outside = Outside(
            clock=SystemClock(),
            codec=self._codec,
            cluster=cluster,
            end_offsets=offsets,
            state_log=KafkaStateLog(client, settings.topics.state, self._threads),
            membership=GroupMembership(events, lambda: app.consumer._thread),  # noqa: SLF001  # no public way to it
            tables=RocksdbTableStore(slot.tables, memory_bytes=settings.table_memory_bytes, lock_wait_ms=LOCK_WAIT_MS),
            transaction=lambda _: self._no_partition(),
        )
        self._fence: FenceRounds | WriteFence = (
            FenceRounds(offsets, events) if settings.fence is Fence.OFFSET else WriteFence(offsets, events, client)
        )
        self._pool = OwnerPool(self._open_owner, partial(app.feeds.close, events))
        api = HttpApi(
            self._pool,
            partition_count=self._partition_count,
            due_topic=settings.topics.due,
            peers=partial(peer_urls, app, events),
            own_url=url,
            metrics=lambda: render_metrics(owner.status for owner in self._pool.owners.values()),
        )
        api.register(app)
        attach_owners(app, settings, self._pool)

    def run(self) -> int:
        """Faust's worker handles the signals; on the way out every owner finishes its transaction."""
        worker = faust.Worker(
            self._app,
            loglevel=self._settings.log_level.upper(),
            override_logging=False,
            redirect_stdouts=False,
            quiet=True,
            blocking_timeout=None,
        )
        worker.spinner = None  # it writes escape sequences to stdout, terminal or not
        try:
            worker.execute_from_commandline()
        except SystemExit as ended:
            return int(ended.code or 0)
        finally:
            self._threads.shutdown(wait=False, cancel_futures=True)
            log.info("agent_stopped", threads=threading.active_count())
        return 0

    @staticmethod
    def _no_partition() -> KafkaTransaction:
        raise AssertionError("each owner gets its own transactions")

    def _open_owner(self, partition: int) -> PartitionOwner:
        outside = msgspec.structs.replace(self._outside, transaction=partial(self._transaction, partition))
        admission = Admission(
            self._codec.decode_event,
            limits=self._settings.limits,
            partition=partition,
            partition_count=self._partition_count,
        )
        feed = self._app.feeds.open(self._settings.topics.events, partition)
        fence_target: FenceTarget = partial(self._fence.target, partition)
        return PartitionOwner(
            self._owner_settings(partition), outside, feed, admit=admission.admit, fence_target=fence_target
        )

    def _transaction(self, partition: int, transactional_id: str) -> KafkaTransaction:
        topics = self._settings.topics
        return KafkaTransaction(
            self._settings.client_config(),
            transactional_id=transactional_id,
            partition=partition,
            state_topic=self._settings.topics.state,
            own_topics=frozenset({topics.state, topics.due, topics.dead}),
            transaction_timeout_ms=self._settings.transaction_timeout_ms,
            executor=self._threads,
            is_open=lambda topic: self._offsets.is_open(topic, partition),
        )

    def _owner_settings(self, partition: int) -> OwnerSettings:
        settings = self._settings
        topics = settings.topics
        return OwnerSettings(
            partition=Partition(partition),
            owner=self._name,
            events_topic=topics.events,
            state_topic=topics.state,
            due_topic=topics.due,
            dead_topic=topics.dead,
            target_topics=settings.target_topics,
            limits=settings.limits,
            retention_ms=DurationMs(settings.retention_ms),
            offline_max_ms=DurationMs(int(self._topics[topics.state].settings["delete.retention.ms"])),
            heartbeat_interval_ms=settings.heartbeat_interval_ms,
            batch_records_max=settings.batch_records_max,
            batch_bytes_max=settings.batch_bytes_max,
            fire_max=settings.fire_max,
            emit_bytes_max=int(self._topics[topics.due].settings["max.message.bytes"]) - RECORD_OVERHEAD_BYTES,
            clock_jump_max_ms=settings.clock_jump_max_ms,
            accept_loss=self._accept_loss,
        )


def _free_port(host: str, port: int) -> int:
    """The port to listen on; 0 takes a free one. Raises `UnavailableError` if the wanted one is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UnavailableError(
                f"port {port} on {host} is taken ({error.strerror}): "
                "set DUETASKS_HTTP_PORT to another, or to 0 for a free one"
            ) from error
        return int(probe.getsockname()[1])
