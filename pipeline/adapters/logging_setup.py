"""Logs to stderr: structlog's events, and what libraries say through `logging`, in one format."""

import logging
import sys
from typing import Any

import structlog

__all__ = ["set_up_logging"]


def set_up_logging(*, log_format: str, log_level: str) -> None:
    """Send all logs of this process to stderr, as `json` lines or for a `console`, from `log_level` up.

    Call it once, before anything logs; stdout stays free for results. A later call replaces the earlier one.
    """
    level = logging.getLevelNamesMapping()[log_level.upper()]
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,  # a second set-up must reach loggers that were used before it
    )
    handler = logging.StreamHandler(sys.stderr)
    if level > logging.DEBUG:
        handler.addFilter(_LibrariesOnlyWarn())
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder(), structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_renderers(log_format)],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)


class _LibrariesOnlyWarn(logging.Filter):
    """Lets our own events pass, and of what libraries say only warnings: Faust tells each of its steps at INFO."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line is printed; structlog hands its events over as dicts."""
        return isinstance(record.msg, dict) or record.levelno >= logging.WARNING


def _renderers(log_format: str) -> list[Any]:
    # Tracebacks without local variables in both: those hold payloads and passwords.
    if log_format == "json":
        transformer = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        return [structlog.processors.ExceptionRenderer(transformer), structlog.processors.JSONRenderer()]
    plain = structlog.dev.plain_traceback
    return [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain)]
