"""`python -m pipeline.embedded.relock`: resolve Kafka anew and write its lock file.

For the person who moves duetasks to another Kafka: change `KAFKA_VERSION`, run this, run the integration tests, and
commit the lock file with them. Needs a network; nobody else ever needs it.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import jgo
from jgo.maven import PythonResolver

from pipeline.embedded.kafka_jars import KAFKA_VERSION, LOCK_FILE_NAME, LockedJar, render_lock, sha256_of

# Kafka's own distribution adds the binding that its library leaves to its users; without it nothing would be logged.
# Its version has to be that of the log4j-core which Kafka brings.
_LOG4J_BINDING = "org.apache.logging.log4j:log4j-slf4j-impl:2.25.5!"
ENDPOINT = f"org.apache.kafka:kafka_2.13:{KAFKA_VERSION}+{_LOG4J_BINDING}"


def resolve_jars() -> tuple[LockedJar, ...]:
    """Every jar that a broker needs at run time, with the checksum that it has now."""
    artifacts = {a.filename: a for a in jgo.resolve(ENDPOINT)}
    with tempfile.TemporaryDirectory() as folder:
        environment = jgo.build(ENDPOINT, cache_dir=Path(folder), resolver=PythonResolver())
        files = [p for name in ("jars", "modules") for p in (Path(environment.path) / name).glob("*.jar")]
        return tuple(
            LockedJar(
                sha256=sha256_of(file),
                group=artifacts[file.name].groupId,
                artifact=artifacts[file.name].artifactId,
                version=artifacts[file.name].version,
            )
            for file in files
        )


def main() -> None:
    """Write the lock file next to this module and say what it holds."""
    jars = resolve_jars()
    path = Path(__file__).with_name(LOCK_FILE_NAME)
    path.write_text(render_lock(jars), encoding="utf-8")
    sys.stdout.write(f"{path}: {len(jars)} jars of Kafka {KAFKA_VERSION}\n")


if __name__ == "__main__":
    main()
