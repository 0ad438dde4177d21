"""A deployment of its own for the benchmark and the demonstration: a broker, topics and a folder that end with it."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.cli.session import embedded_broker, load_settings

if TYPE_CHECKING:
    from pipeline.config import Settings

__all__ = ["as_interrupt", "fresh_deployment"]


@contextmanager
def fresh_deployment(name: str, on_progress: Callable[[str], None], *, keep: bool = False) -> Iterator["Settings"]:
    """Yields settings with an embedded broker in a new folder, topics in place; removes all of it unless `keep`.

    Other settings are this process's own: how large the agent's batches are, for example.
    """
    from pipeline.adapters.topic_setup import apply_topics  # noqa: PLC0415  # slow imports stay out of --help

    folder = Path(tempfile.mkdtemp(prefix=f"duetasks-{name}-"))
    own = {"data_dir": folder, "topic_prefix": "", "group_id": name, "group_instance_id": None, "agent_url": None}
    settings = load_settings().model_copy(update=own)
    broker = embedded_broker(settings, on_progress)
    try:
        settings = settings.with_bootstrap(broker.start().bootstrap_servers)
        on_progress("Setting up topics")
        apply_topics(settings)
        yield settings
    finally:
        broker.stop()
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def as_interrupt(*_: object) -> None:
    """A signal handler: SIGTERM ends a command as Ctrl-C does, so that what it started is stopped."""
    raise KeyboardInterrupt
