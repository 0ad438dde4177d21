"""Settings and brokers for the commands; what is slow to import is imported when a command calls."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.config import Settings
    from pipeline.embedded import EmbeddedBroker

__all__ = ["connected_settings", "embedded_broker", "load_settings"]


def load_settings() -> "Settings":
    """The settings of this process; raises `ConfigurationError`."""
    from pipeline import config  # noqa: PLC0415  # a third of a second that `--help` must not take

    return config.load_settings()


def connected_settings() -> "Settings":
    """The settings, with the embedded broker found where they name none; raises `UnavailableError` if none runs.

    From then on only warnings are logged, to stderr: a command's result tells the rest.
    """
    from pipeline import wiring  # noqa: PLC0415  # as above
    from pipeline.adapters.logging_setup import set_up_logging  # noqa: PLC0415  # the same

    settings = wiring.connected_settings()
    level = settings.log_level if settings.log_level in {"debug", "error"} else "warning"
    set_up_logging(log_format=settings.log_format, log_level=level)
    return settings


def embedded_broker(settings: "Settings", on_progress: Callable[[str], None] = lambda _: None) -> "EmbeddedBroker":
    """The embedded broker of the data folder, running or not."""
    from pipeline import wiring  # noqa: PLC0415  # as above

    return wiring.embedded_broker(settings, on_progress)
