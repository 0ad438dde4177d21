"""Puts the pieces together: settings that reach a cluster, and the embedded broker of a data folder."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from pipeline.config import Settings, load_settings, user_cache_dir
from pipeline.errors import UnavailableError

if TYPE_CHECKING:
    from pipeline.embedded import EmbeddedBroker

__all__ = ["connected_settings", "embedded_broker", "with_brokers"]


def connected_settings(**overrides: object) -> Settings:
    """The settings, with brokers in any case: those set, else the embedded broker of the data folder.

    Raises:
        ConfigurationError: a setting is wrong.
        UnavailableError: none is set and none runs; the message says what to type.

    """
    return with_brokers(load_settings(**overrides))


def with_brokers(settings: Settings) -> Settings:
    """`settings` with the embedded broker's address where they name none; raises `UnavailableError`."""
    if settings.bootstrap_servers is not None:
        return settings
    running = embedded_broker(settings).status()
    if running is None:
        raise UnavailableError(
            f"No Kafka is set, and no embedded broker runs in {settings.data_dir}: start one with `duetasks up` or "
            "`duetasks broker start`, or set DUETASKS_BOOTSTRAP_SERVERS=host:port."
        )
    return settings.with_bootstrap(running.bootstrap_servers)


def embedded_broker(settings: Settings, on_progress: Callable[[str], None] = lambda _: None) -> "EmbeddedBroker":
    """The embedded broker of the data folder, running or not; `on_progress` gets a sentence for each wait."""
    from pipeline.embedded import KAFKA_VERSION, EmbeddedBroker  # noqa: PLC0415  # only where no cluster is configured

    jars_dir = settings.cache_dir or user_cache_dir() / f"kafka-{KAFKA_VERSION}"
    return EmbeddedBroker(settings.data_dir, cache_dir=jars_dir, on_progress=on_progress)
