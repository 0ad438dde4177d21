"""The local broker: a real Apache Kafka (KRaft) from Python packages alone."""

from __future__ import annotations

from pipeline.embedded.broker_errors import (
    BrokerBusyError,
    BrokerStartError,
    EmbeddedBrokerError,
    EmbeddedExtraMissingError,
    JarChecksumError,
    JarsUnavailableError,
)
from pipeline.embedded.embedded_broker import BrokerInfo, EmbeddedBroker
from pipeline.embedded.embedded_cluster import ClusterInfo, EmbeddedCluster
from pipeline.embedded.kafka_jars import KAFKA_VERSION

__all__ = [
    "KAFKA_VERSION",
    "BrokerBusyError",
    "BrokerInfo",
    "BrokerStartError",
    "ClusterInfo",
    "EmbeddedBroker",
    "EmbeddedBrokerError",
    "EmbeddedCluster",
    "EmbeddedExtraMissingError",
    "JarChecksumError",
    "JarsUnavailableError",
]
