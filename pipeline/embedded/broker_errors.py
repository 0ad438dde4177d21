"""Everything that the embedded broker raises, split by remedy."""

from __future__ import annotations


class EmbeddedBrokerError(Exception):
    """The embedded broker can't do what was asked; the message says what to do now."""


class EmbeddedExtraMissingError(EmbeddedBrokerError):
    """The Python packages that carry Java and the jars are not installed."""


class JarsUnavailableError(EmbeddedBrokerError):
    """Kafka's jars could not be fetched, most likely because this machine is offline."""


class JarChecksumError(EmbeddedBrokerError):
    """A jar differs from the one that was tested, even after it was fetched again."""


class BrokerStartError(EmbeddedBrokerError):
    """Kafka did not come up; the message quotes its log."""


class BrokerBusyError(EmbeddedBrokerError):
    """Another process is starting or stopping the same broker."""
