"""Kafka's jars: named and checksummed in a lock file, fetched once into a cache folder that all brokers share.

The lock file is the authority. Nothing is resolved when a broker starts: exactly the locked files are fetched, and a
file that differs from its checksum is never put on a class path.
"""

from __future__ import annotations

import hashlib
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pipeline.embedded.broker_errors import EmbeddedExtraMissingError, JarChecksumError, JarsUnavailableError
from pipeline.embedded.file_lock import exclusive_lock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

KAFKA_VERSION = "4.4.0"

LOCK_FILE_NAME = "kafka-jars.lock"

_DOWNLOADS_AT_ONCE = 4
_REQUEST_TIMEOUT_S = 20
# A first download takes half a minute on a good line; whoever waits behind it waits at most this long.
_CACHE_LOCK_TIMEOUT_S = 900.0


class LockedJar(msgspec.Struct, frozen=True, kw_only=True):
    """One jar of the lock file: its coordinates and the checksum it must have."""

    sha256: str
    group: str
    artifact: str
    version: str

    @property
    def file_name(self) -> str:
        """Name of the file in the cache folder."""
        return f"{self.artifact}-{self.version}.jar"


def parse_lock(text: str) -> tuple[LockedJar, ...]:
    """Jars of a lock file, in the order of the file.

    A line is `sha256  group:artifact:version`; empty lines and lines that start with `#` are skipped.

    Raises:
        ValueError: a line has another shape; the package is damaged, install it again.

    """
    lines = (line for line in text.splitlines() if line.strip() and not line.startswith("#"))
    return tuple(_parse_line(line) for line in lines)


def _parse_line(line: str) -> LockedJar:
    sha256, _, coordinates = line.partition("  ")
    parts = coordinates.split(":")
    if len(sha256) != hashlib.sha256().digest_size * 2 or len(parts) != 3:  # noqa: PLR2004 - group:artifact:version
        message = f"{LOCK_FILE_NAME}: not a `sha256  group:artifact:version` line: {line!r}"
        raise ValueError(message)
    return LockedJar(sha256=sha256, group=parts[0], artifact=parts[1], version=parts[2])


def locked_jars() -> tuple[LockedJar, ...]:
    """Jars of the Kafka that this package was tested with."""
    return parse_lock(resources.files("pipeline.embedded").joinpath(LOCK_FILE_NAME).read_text("utf-8"))


def sha256_of(path: Path) -> str:
    """Hex checksum of a file."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def ensure_jars(
    cache_dir: Path,
    *,
    jars: Sequence[LockedJar],
    fetch: Callable[[LockedJar, Path], Path] | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> tuple[Path, ...]:
    """Every locked jar as a file whose checksum was just compared, fetched first where it is missing or differs.

    Raises:
        EmbeddedExtraMissingError: the extra `embedded` is not installed.
        JarsUnavailableError: a jar can't be fetched; the message names the way to use another cluster.
        JarChecksumError: a jar fetched twice still differs; somebody between here and the repository changes files.

    """
    with exclusive_lock(
        cache_dir / "download.lock",
        timeout_s=_CACHE_LOCK_TIMEOUT_S,
        on_wait=lambda: on_progress("Waiting for another process that fetches Kafka into the same cache"),
    ):
        wanted = [jar for jar in jars if not _is_good(cache_dir, jar)]
        if wanted:
            _fetch_all(cache_dir, wanted, fetch or _fetch_with_jgo, on_progress)
    return tuple(cache_dir / jar.file_name for jar in jars)


def _is_good(cache_dir: Path, jar: LockedJar) -> bool:
    """Whether the cache holds the jar; one with another checksum is removed."""
    path = cache_dir / jar.file_name
    if not path.exists():
        return False
    if sha256_of(path) == jar.sha256:
        return True
    path.unlink()
    return False


def _fetch_all(
    cache_dir: Path,
    wanted: Sequence[LockedJar],
    fetch: Callable[[LockedJar, Path], Path],
    on_progress: Callable[[str], None],
) -> None:
    on_progress(f"Fetching Kafka {KAFKA_VERSION}: {len(wanted)} files")
    done_bytes = 0
    # Into a folder of its own first: what an interrupted download leaves behind must not look like a jar.
    with (
        tempfile.TemporaryDirectory(prefix="incoming-", dir=cache_dir) as incoming,
        ThreadPoolExecutor(_DOWNLOADS_AT_ONCE, thread_name_prefix="kafka-jars") as pool,
    ):
        futures = [pool.submit(_fetch_checked, jar, cache_dir, Path(incoming), fetch) for jar in wanted]
        try:
            for done, future in enumerate(as_completed(futures), start=1):
                done_bytes += future.result().stat().st_size
                on_progress(f"Fetching Kafka {KAFKA_VERSION}: {done} of {len(wanted)} files, {done_bytes / 1e6:.1f} MB")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _fetch_checked(jar: LockedJar, cache_dir: Path, incoming: Path, fetch: Callable[[LockedJar, Path], Path]) -> Path:
    found = ""
    for attempt in ("first", "second"):
        fetched = fetch(jar, incoming / attempt)
        found = sha256_of(fetched)
        if found == jar.sha256:
            return fetched.replace(cache_dir / jar.file_name)
        fetched.unlink()
    message = (
        f"{jar.file_name} was fetched twice and differs from the tested file (sha256 {found}, expected {jar.sha256}). "
        "Something between this machine and the repository changes files: ask whoever runs that proxy or mirror."
    )
    raise JarChecksumError(message)


def _fetch_with_jgo(jar: LockedJar, folder: Path) -> Path:
    """Fetch one jar with jgo, from the repositories of the user's jgo settings or else its default."""
    try:
        from jgo.config import GlobalSettings  # noqa: PLC0415 - part of an extra: absent is a sentence, not a traceback
        from jgo.maven import MavenContext  # noqa: PLC0415 - as above
    except ImportError as error:
        raise EmbeddedExtraMissingError from error
    context = MavenContext(
        repo_cache=folder,
        remote_repos=GlobalSettings.load().repositories or None,
        timeout=_REQUEST_TIMEOUT_S,
    )
    component = context.project(jar.group, jar.artifact).at_version(jar.version)
    try:
        return Path(component.artifact().resolve())
    except (OSError, RuntimeError) as error:  # requests' errors are OSErrors; jgo's "not found" is a RuntimeError
        message = (
            f"Can't fetch {jar.file_name}, which the embedded broker needs once: this machine seems to be offline. "
            "Connect it, or point duetasks at a Kafka cluster that you have: "
            "DUETASKS_BOOTSTRAP_SERVERS=host:port."
        )
        raise JarsUnavailableError(message) from error


def render_lock(jars: Iterable[LockedJar]) -> str:
    """Text of a lock file that `parse_lock` reads."""
    head = (
        f"# Jars of Apache Kafka {KAFKA_VERSION} with its log4j binding: sha256, then group:artifact:version.\n"
        "# Written by `python -m pipeline.embedded.relock`; not edited by hand.\n"
    )
    lines = sorted(f"{jar.sha256}  {jar.group}:{jar.artifact}:{jar.version}\n" for jar in jars)
    return head + "".join(sorted(lines, key=lambda line: line.partition("  ")[2]))
