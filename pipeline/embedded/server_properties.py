"""Settings of the embedded broker, each with its reason.

Pure: values in, text out. A cluster of several nodes is the same function called once for each node with the same
`voters`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

# Loopback only, as an address and not as a name: a name can resolve to ::1 first, where nobody listens.
LOOPBACK = "127.0.0.1"

_HEAD = "# Written at each start of the embedded broker; changes are lost.\n"
_ASCII_END = 128


class BrokerPorts(msgspec.Struct, frozen=True, kw_only=True):
    """The two loopback ports of a node: for clients, and for the KRaft controllers among themselves."""

    client: int
    controller: int

    @property
    def bootstrap_servers(self) -> str:
        """Address that clients connect to."""
        return f"{LOOPBACK}:{self.client}"


class NodePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What one node of an embedded cluster is."""

    ports: BrokerPorts
    log_dir: str
    node_id: int = 1
    # node id -> controller port, of every node of the cluster; empty means: this node is the whole cluster.
    voters: dict[int, int] = {}

    @property
    def replicas(self) -> int:
        """Copies that internal topics get: all nodes, at most three."""
        return min(3, len(self.voters) or 1)


def broker_settings(plan: NodePlan, *, overrides: Mapping[str, str]) -> dict[str, str]:
    """Kafka's settings for one node; `overrides` win (for tests that need another bound)."""
    return {**_network(plan), **_storage(plan), **_coordinators(plan), **_safety(plan), **overrides}


def _network(plan: NodePlan) -> dict[str, str]:
    voters = plan.voters or {plan.node_id: plan.ports.controller}
    return {
        # One process is both: a controller of its own would cost a second JVM and give a single node nothing.
        "process.roles": "broker,controller",
        "node.id": str(plan.node_id),
        # Static voters: they live in this file and not in the data, so the controller port can change between starts.
        "controller.quorum.voters": ",".join(f"{n}@{LOOPBACK}:{port}" for n, port in sorted(voters.items())),
        "listeners": f"PLAINTEXT://{LOOPBACK}:{plan.ports.client},CONTROLLER://{LOOPBACK}:{plan.ports.controller}",
        # What clients are told to connect to: without it the machine's host name, which other machines could reach.
        "advertised.listeners": f"PLAINTEXT://{LOOPBACK}:{plan.ports.client}",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "controller.listener.names": "CONTROLLER",
        "inter.broker.listener.name": "PLAINTEXT",
        # Two cores beside the agent: the default of eight request threads only adds context switches.
        "num.io.threads": "4",
        "num.network.threads": "2",
        # A killed broker that comes back is refused until its former session ran out; the default (9 s) would be the
        # better part of a restart. A stall of this length costs little here: leaders are elected again at once.
        "broker.session.timeout.ms": "4000",
        "broker.heartbeat.interval.ms": "1000",
    }


def _storage(plan: NodePlan) -> dict[str, str]:
    return {
        "log.dirs": plan.log_dir,
        # Both compacted and plain topics are used: the cleaner has to run; one thread is enough for small logs.
        "log.cleaner.enable": "true",
        "log.cleaner.threads": "1",
        # The default (128 MiB) would be a sixth of the heap; 32 MiB still holds 1.2 million keys in one pass.
        "log.cleaner.dedupe.buffer.size": str(32 * 1024 * 1024),
        # Kafka's default, said aloud because the size limits of the topics are derived from it (1 MiB and 12 bytes).
        "message.max.bytes": "1048588",
        # After a kill every log is checked before the broker serves: let both cores do it.
        "num.recovery.threads.per.data.dir": "2",
    }


def _coordinators(plan: NodePlan) -> dict[str, str]:
    return {
        "offsets.topic.replication.factor": str(plan.replicas),
        # Fifty partitions (the default) mean fifty logs to create and to load at each start, for a handful of groups.
        "offsets.topic.num.partitions": "4",
        "transaction.state.log.replication.factor": str(plan.replicas),
        "transaction.state.log.min.isr": str(_min_isr(plan)),
        "transaction.state.log.num.partitions": "4",
        "share.coordinator.state.topic.replication.factor": str(plan.replicas),
        "share.coordinator.state.topic.min.isr": str(_min_isr(plan)),
        "share.coordinator.state.topic.num.partitions": "4",
        # The delay waits for more members of a starting fleet; here each start of an agent would just take 3 s longer.
        "group.initial.rebalance.delay.ms": "0",
        # Lets a test choose a session time-out of a second or two; the client still chooses (agents ask for more).
        "group.min.session.timeout.ms": "1000",
        # Kafka's default: the longest time-out that a transactional producer may ask for.
        "transaction.max.timeout.ms": "900000",
        # A transaction that outlived its time-out holds `read_committed` readers back until this check finds it. The
        # first check must not come before a broker that was killed leads its partitions again, which takes it the
        # broker session above: with no leader to tell, Kafka takes the partitions for deleted, and the transaction
        # hangs there for ever (seen with 1 s; `tests/integration/test_hanging_transactions.py`).
        "transaction.abort.timed.out.transaction.cleanup.interval.ms": "8000",
    }


def _safety(plan: NodePlan) -> dict[str, str]:
    return {
        # Topics are made by `duetasks topics apply` with their settings. One made by a typo would have none of them.
        "auto.create.topics.enable": "false",
        "default.replication.factor": str(plan.replicas),
        "min.insync.replicas": str(_min_isr(plan)),
        # A replica that missed records must not lead: acknowledged cancels would vanish.
        "unclean.leader.election.enable": "false",
    }


def _min_isr(plan: NodePlan) -> int:
    """Copies that must have a record before it is acknowledged: one less than there are, so that one node may stop."""
    return max(1, plan.replicas - 1)


def render_properties(settings: Mapping[str, str]) -> str:
    """Text of a Java properties file, in ASCII."""
    lines = (f"{key}={_escaped(value)}\n" for key, value in settings.items())
    return _HEAD + "".join(lines)


def render_log4j(log_file: Path) -> str:
    """Text of a log4j2 configuration, in ASCII: one log file of at most 10 MB, and the three before it."""
    path = _escaped(str(log_file))
    return f"""\
{_HEAD}status = error
appender.file.type = RollingFile
appender.file.name = file
appender.file.fileName = {path}
appender.file.filePattern = {path}.%i
appender.file.layout.type = PatternLayout
appender.file.layout.pattern = [%d] %p %m (%c)%n
appender.file.policies.type = Policies
appender.file.policies.size.type = SizeBasedTriggeringPolicy
appender.file.policies.size.size = 10MB
appender.file.strategy.type = DefaultRolloverStrategy
appender.file.strategy.max = 3
rootLogger.level = info
rootLogger.appenderRef.file.ref = file
# Each component prints all its settings at each start, two thousand lines in all; those that we set are beside the log.
logger.settings.name = org.apache.kafka.common.config.AbstractConfig
logger.settings.level = warn
"""


def _escaped(value: str) -> str:
    """A value for Java's properties format, which is read as Latin-1 and takes a backslash as an escape."""
    utf16 = value.replace("\\", "\\\\").encode("utf-16-be")
    units = [int.from_bytes(utf16[at : at + 2]) for at in range(0, len(utf16), 2)]
    return "".join(chr(unit) if unit < _ASCII_END else f"\\u{unit:04x}" for unit in units)
