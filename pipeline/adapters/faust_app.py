"""The Faust app of an agent: membership, rebalances and web server are Faust's; the timers are the owners'.

No Faust table, acknowledgement or exactly-once setting is used: `docs/explanation/why-not-faust-tables.md` says why.
"""

import ssl
from collections.abc import AsyncIterator, Iterable
from typing import Any

import faust
from faust.assignor.partition_assignor import PartitionAssignor
from faust.tables.manager import TableManager
from yarl import URL

from pipeline.adapters.batch_transport import FETCH_BYTES_MAX, FeedRegistry, FetchedBatch
from pipeline.config import Settings
from pipeline.service.owner.pool import OwnerPool

__all__ = ["AgentApp", "build_faust_app"]


class _NoTables(TableManager):  # type: ignore[misc]  # Faust ships no types
    """Faust waits a second for tables to register; there are none, and a restart should not take that second."""

    async def on_start(self) -> None:
        """Called by Faust."""
        await self._update_channels()
        await self.recovery.start()


class _Assignor(PartitionAssignor):  # type: ignore[misc]  # the same
    """Takes the group's word also where it remembers an earlier address of this agent.

    A static member that starts again is given its old assignment, with the address that it had then; Faust's own
    assertion on that would leave the consumer stuck until its session ends.
    """

    def on_assignment(self, assignment: Any) -> None:  # noqa: ANN401  # Faust's own signature
        """Called by the consumer when the group has decided."""
        try:
            super().on_assignment(assignment)
        except AssertionError:
            if sorted(assignment.assignment) != sorted(self._assignment.kafka_protocol_assignment(self._table_manager)):
                raise


class AgentApp(faust.App):  # type: ignore[misc]  # Faust ships no types
    """A Faust app that carries the feeds between its consumer and the owners."""

    feeds: FeedRegistry
    leaves_group: bool
    """Whether an orderly end gives the partitions up at once; not where the user plans restarts."""


def build_faust_app(settings: Settings, *, url: str, http_port: int, member: str) -> AgentApp:
    """The app, without its agent yet.

    `url` is how other agents reach this one. `member` names this agent to the group: when it was killed and starts
    again, the group gives it its partitions back at once instead of waiting for the session of the dead one to end.
    """
    assert settings.bootstrap_servers is not None, "the caller has connected the settings"
    app = AgentApp(
        settings.group_id,
        broker=[URL(f"duetasks://{server.strip()}") for server in settings.bootstrap_servers.split(",")],
        broker_credentials=_credentials(settings),
        env={},  # Faust's own variables (WEB_PORT, ...) are not part of our settings
        TableManager=_NoTables,
        PartitionAssignor=_Assignor,
        store="memory://",
        datadir=str(settings.data_dir / "faust"),
        autodiscover=False,
        topic_allow_declare=False,  # `duetasks topics apply` creates them
        topic_disable_leader=True,
        reply_create_topic=False,
        processing_guarantee="at_least_once",  # correctness is the owners' transactions
        consumer_auto_offset_reset="earliest",
        consumer_max_fetch_size=FETCH_BYTES_MAX,
        consumer_group_instance_id=settings.group_instance_id or member,
        broker_session_timeout=settings.session_timeout_ms / 1000,
        broker_heartbeat_interval=max(0.3, settings.session_timeout_ms / 3_500),
        broker_rebalance_timeout=max(30.0, settings.session_timeout_ms / 1000),
        broker_request_timeout=max(40.0, settings.session_timeout_ms / 1000 + 5),
        broker_max_poll_interval=300.0,
        broker_commit_interval=3600.0,  # there is nothing for Faust to commit
        stream_buffer_maxsize=64,  # batches, not records; each partition's feed has its own bound behind it
        stream_wait_empty=False,
        stream_recovery_delay=0.0,
        table_standby_replicas=1,  # with 0 and no tables Faust drops its assignor, which knows every agent's address
        web_enabled=True,
        web_bind=settings.http_host,  # what it listens on: without it Faust takes every interface
        web_host=settings.http_host,
        web_port=http_port,
        canonical_url=url,
        web_tables_enabled=False,
        web_router_enabled=False,
        web_graph_enabled=False,
        web_stats_enabled=False,
        web_metrics_enabled=False,
        worker_redirect_stdouts=False,
    )
    app.feeds = FeedRegistry()
    app.leaves_group = settings.group_instance_id is None
    return app


def attach_owners(app: AgentApp, settings: Settings, pool: OwnerPool) -> None:
    """Feed the owners from the app's agent, and let assignments start and stop them."""
    events = settings.topics.events
    topic = app.topic(
        events,
        acks=False,  # positions live in the table and travel in the owners' transactions
        key_serializer="raw",
        value_serializer="raw",
    )

    @app.agent(topic, name="task-events")  # type: ignore[untyped-decorator]  # Faust ships no types
    async def feed_owners(stream: Any) -> AsyncIterator[None]:  # noqa: ANN401  # Faust's stream
        async for event in stream.events():
            fetched = event.value
            if isinstance(fetched, FetchedBatch):
                app.feeds.put(fetched)
            yield

    @app.on_partitions_assigned.connect  # type: ignore[untyped-decorator]  # the same
    async def start_owners(_app: Any, assigned: Iterable[Any], **_: Any) -> None:  # noqa: ANN401  # Faust's signal
        pool.assign(tp.partition for tp in assigned if tp.topic == events)

    @app.on_partitions_revoked.connect  # type: ignore[untyped-decorator]  # the same
    async def stop_owners(_app: Any, revoked: Iterable[Any], **_: Any) -> None:  # noqa: ANN401  # the same
        await pool.revoke(tp.partition for tp in revoked if tp.topic == events)

    @app.on_before_shutdown.connect  # type: ignore[untyped-decorator]  # the same
    async def stop_all(_app: Any, **_: Any) -> None:  # noqa: ANN401  # the same
        await pool.stop()


def peer_urls(app: AgentApp, topic: str) -> dict[int, str]:
    """Which agent owns which partition, by the last assignment: its address as it advertises it."""
    hosts = app.assignor.external_topics_metadata()
    return {partition: str(url) for url, topics in hosts.items() for partition in topics.get(topic, ())}


def _credentials(settings: Settings) -> Any:  # noqa: ANN401  # one of Faust's credential classes
    if settings.security_protocol == "PLAINTEXT":
        return None
    context = None
    if settings.security_protocol.endswith("SSL"):
        context = ssl.create_default_context(cafile=settings.ssl_ca_file)
        if settings.ssl_certificate_file is not None:
            context.load_cert_chain(settings.ssl_certificate_file, settings.ssl_key_file)
    if settings.security_protocol == "SSL":
        return faust.SSLCredentials(context)
    password = settings.sasl_password.get_secret_value() if settings.sasl_password else None
    return faust.SASLCredentials(
        username=settings.sasl_username,
        password=password,
        mechanism=settings.sasl_mechanism,
        ssl_context=context,
    )
