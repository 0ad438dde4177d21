"""A Kafka cluster of several nodes on one machine, for tests that take nodes away and for looking at replication.

Each node is an `EmbeddedBroker` in a subfolder `node-<n>`, broker and controller in one process. Internal topics have
three replicas and `min.insync.replicas=2`: a cluster of three goes on, and loses nothing, while any one node is gone.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from pipeline.embedded.broker_errors import BrokerStartError
from pipeline.embedded.broker_folder import BrokerFolder
from pipeline.embedded.embedded_broker import (
    START_TIMEOUT_S_DEFAULT,
    STOP_TIMEOUT_S_DEFAULT,
    BrokerInfo,
    ClusterPlace,
    EmbeddedBroker,
)
from pipeline.embedded.file_lock import exclusive_lock
from pipeline.embedded.kafka_process import new_cluster_id
from pipeline.embedded.loopback_ports import choose_ports, is_free

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from pipeline.embedded.server_properties import BrokerPorts

__all__ = ["ClusterInfo", "EmbeddedCluster"]

NODES_DEFAULT = 3
HEAP_MB_DEFAULT = 384
IN_SYNC_TIMEOUT_S_DEFAULT = 60.0
_POLL_S = 0.2
_API_TIMEOUT_S = 5.0


class ClusterInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster that runs: `bootstrap_servers` names every node, so that clients find it while one is gone."""

    bootstrap_servers: str
    cluster_id: str
    nodes: tuple[BrokerInfo, ...]


class EmbeddedCluster:
    """The cluster of a data folder, of `node_count` nodes; its nodes go on when those that hold the object end.

    Args:
        data_dir: each node has a subfolder of it.
        cache_dir: Kafka's jars, as for `EmbeddedBroker`.
        node_count: how many nodes; the same at each start.
        heap_mb: bound of Java's heap for each node; a process takes about 200 MB beside it.
        settings: Kafka settings for every node, over those of `server_properties`.
        on_progress: gets a sentence whenever a wait begins or moves on.

    """

    def __init__(
        self,
        data_dir: Path,
        *,
        cache_dir: Path,
        node_count: int = NODES_DEFAULT,
        heap_mb: int = HEAP_MB_DEFAULT,
        settings: Mapping[str, str] | None = None,
        on_progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._data_dir = data_dir.absolute()
        self._cache_dir = cache_dir
        self._heap_mb = heap_mb
        self._settings = dict(settings or {})
        self._on_progress = on_progress
        self.node_ids = tuple(range(1, node_count + 1))
        self._nodes: dict[int, EmbeddedBroker] = {}

    def start(self, timeout_s: float = START_TIMEOUT_S_DEFAULT) -> ClusterInfo:
        """Start the nodes that do not run, and return once every node is in and answers.

        Raises as `EmbeddedBroker.start`; `BrokerStartError` also if the nodes don't find each other in time.
        """
        deadline_s = time.monotonic() + timeout_s
        with exclusive_lock(self._data_dir / "cluster.lock", timeout_s=timeout_s):
            self._nodes = self._placed()
            for node in self._nodes.values():
                node.launch(timeout_s)
            nodes = tuple(node.start(max(1.0, deadline_s - time.monotonic())) for node in self._nodes.values())
        info = ClusterInfo(
            bootstrap_servers=",".join(node.bootstrap_servers for node in nodes),
            cluster_id=nodes[0].cluster_id,
            nodes=nodes,
        )
        self._await_members(info, deadline_s)
        return info

    def node(self, node_id: int) -> EmbeddedBroker:
        """One node, to be killed, paused, stopped and started by itself; only once the cluster was started here."""
        return self._nodes[node_id]

    def bounce(self, node_id: int) -> None:
        """Restart one node as an operator does, cleanly; returns when it answers again."""
        self.node(node_id).stop()
        self.node(node_id).start()

    def stop(self, timeout_s: float = STOP_TIMEOUT_S_DEFAULT) -> None:
        """End every node cleanly. The last ones have no quorum to say goodbye to: they are killed after `timeout_s`."""
        for node in self._nodes.values():
            node.stop(timeout_s)

    def kill(self) -> None:
        """End every node that runs with SIGKILL, as when nobody needs its data again."""
        for node in self._nodes.values():
            if node.status() is not None:
                node.kill()

    def await_in_sync(self, timeout_s: float = IN_SYNC_TIMEOUT_S_DEFAULT) -> None:
        """Return once every partition has a leader and all its replicas: from here one more node may be lost.

        Raises:
            BrokerStartError: some replica did not catch up in time; the message names partitions.

        """
        deadline_s = time.monotonic() + timeout_s
        admin = AdminClient({"bootstrap.servers": self._bootstrap_servers(), "log_level": 0})
        while behind := _behind(admin):
            if time.monotonic() >= deadline_s:
                raise BrokerStartError(f"Not in sync after {timeout_s:g} s: {', '.join(behind[:5])}")
            time.sleep(_POLL_S)

    def _bootstrap_servers(self) -> str:
        running = (node.status() for node in self._nodes.values())
        return ",".join(info.bootstrap_servers for info in running if info is not None)

    def _placed(self) -> dict[int, EmbeddedBroker]:
        """The nodes with their ports: those of the last start, as long as one of them runs or they are free."""
        folders = {node_id: BrokerFolder(self._folder(node_id)) for node_id in self.node_ids}
        runs = any(folder.live_process(folder.read_state()) is not None for folder in folders.values())
        known = {node_id: folder.read_ports() for node_id, folder in folders.items()}
        ports = {node_id: each for node_id, each in known.items() if each is not None} if runs else _choose_all(known)
        cluster_id = next((found for each in folders.values() if (found := each.cluster_id())), None)
        cluster_id = cluster_id or new_cluster_id()
        return {
            node_id: EmbeddedBroker(
                self._folder(node_id),
                cache_dir=self._cache_dir,
                heap_mb=self._heap_mb,
                settings=self._settings,
                place=ClusterPlace(node_id=node_id, ports=ports, cluster_id=cluster_id),
                on_progress=self._on_progress,
            )
            for node_id in self.node_ids
        }

    def _folder(self, node_id: int) -> Path:
        return self._data_dir / f"node-{node_id}"

    def _await_members(self, info: ClusterInfo, deadline_s: float) -> None:
        """A node answers a little before the others count it; topics made then would get too few replicas."""
        admins = [AdminClient({"bootstrap.servers": node.bootstrap_servers, "log_level": 0}) for node in info.nodes]
        while not all(_member_count(admin) == len(self.node_ids) for admin in admins):
            if time.monotonic() >= deadline_s:
                raise BrokerStartError(f"The nodes at {info.bootstrap_servers} do not find each other in time.")
            time.sleep(_POLL_S)


def _choose_all(known: Mapping[int, BrokerPorts | None]) -> dict[int, BrokerPorts]:
    """Ports for every node, no two the same."""
    taken: set[int] = set()
    chosen: dict[int, BrokerPorts] = {}

    def free(port: int) -> bool:
        return port not in taken and is_free(port)

    for node_id, ports in known.items():
        chosen[node_id] = choose_ports(ports, free=free)
        taken |= {chosen[node_id].client, chosen[node_id].controller}
    return chosen


def _member_count(admin: AdminClient) -> int:
    try:
        return len(admin.list_topics(timeout=_API_TIMEOUT_S).brokers)
    except KafkaException:
        return 0


def _behind(admin: AdminClient) -> list[str]:
    """Partitions that lack a leader or a replica; the question itself, while nobody answers it."""
    try:
        topics = admin.list_topics(timeout=_API_TIMEOUT_S).topics.values()
    except KafkaException as error:
        return [str(error.args[0].str())]
    return [
        f"{topic.topic}-{partition.id}"
        for topic in topics
        for partition in topic.partitions.values()
        if partition.leader < 0 or len(partition.isrs) < len(partition.replicas)
    ]
