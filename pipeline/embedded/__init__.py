"""The local broker: a real Apache Kafka (KRaft) from Python packages alone."""

from __future__ import annotations

from pipeline.embedded.embedded_broker import BrokerInfo, EmbeddedBroker

__all__ = ["BrokerInfo", "EmbeddedBroker"]
