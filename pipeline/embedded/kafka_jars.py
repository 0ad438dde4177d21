"""Kafka's jars: named and checksummed in a lock file, fetched once into a cache folder that all brokers share.

The lock file is the authority. Nothing is resolved when a broker starts: exactly the locked files are fetched, and a
file that differs from its checksum is never put on a class path.
"""

from __future__ import annotations

import hashlib
import shutil
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

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


# Puts one jar below a folder and says where; the folder is empty or holds other jars.
Fetch: TypeAlias = "Callable[[LockedJar, Path], Path]"


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
        raise ValueError(f"{LOCK_FILE_NAME}: not a `sha256  group:artifact:version` line: {line!r}")
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
    fetch: Fetch | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> tuple[Path, ...]:
    """Every locked jar as a file whose checksum was just compared, fetched first where it is missing or differs.

    Raises:
        EmbeddedExtraMissingError: the extra `embedded` is not installed.
        JarsUnavailableError: a jar can't be fetched; the message names the way to use another cluster.
        JarChecksumError: a jar fetched twice still differs; somebody between here and the repository changes files.

    """
    # Read first, without the lock: the cache of a whole machine may be read-only for this user.
    if not all(_is_good(cache_dir, jar) for jar in jars):
        with exclusive_lock(
            cache_dir / "download.lock",
            timeout_s=_CACHE_LOCK_TIMEOUT_S,
            on_wait=lambda: on_progress("Waiting for another process that fetches Kafka into the same cache"),
        ):
            wanted = [jar for jar in jars if not _is_good(cache_dir, jar)]
            for jar in wanted:
                (cache_dir / jar.file_name).unlink(missing_ok=True)
            if wanted:
                _fetch_all(cache_dir, wanted, fetch or fetch_with_jgo, on_progress)
    return tuple(cache_dir / jar.file_name for jar in jars)


def _is_good(cache_dir: Path, jar: LockedJar) -> bool:
    path = cache_dir / jar.file_name
    return path.exists() and sha256_of(path) == jar.sha256


def _fetch_all(cache_dir: Path, wanted: Sequence[LockedJar], fetch: Fetch, on_progress: Callable[[str], None]) -> None:
    """Fetch jars, several at once; the caller holds the lock of the cache."""
    # Into a folder of its own first: what an interrupted download leaves behind must not look like a jar.
    incoming = cache_dir / "incoming"
    shutil.rmtree(incoming, ignore_errors=True)
    what = f"Fetching Kafka {KAFKA_VERSION}, once for all brokers of this machine"
    on_progress(f"{what}: {len(wanted)} files")
    done_bytes = 0
    with ThreadPoolExecutor(_DOWNLOADS_AT_ONCE, thread_name_prefix="kafka-jars") as pool:
        futures = [pool.submit(_fetch_checked, jar, cache_dir, incoming, fetch) for jar in wanted]
        try:
            for done, future in enumerate(as_completed(futures), start=1):
                done_bytes += future.result().stat().st_size
                on_progress(f"{what}: {done} of {len(wanted)} files, {done_bytes / 1e6:.1f} MB")
        finally:
            pool.shutdown(cancel_futures=True)  # after a failure the others would only fail one by one
            shutil.rmtree(incoming, ignore_errors=True)


def _fetch_checked(jar: LockedJar, cache_dir: Path, incoming: Path, fetch: Fetch) -> Path:
    found = ""
    for attempt in ("first", "second"):
        fetched = fetch(jar, incoming / attempt)
        found = sha256_of(fetched)
        if found == jar.sha256:
            return fetched.replace(cache_dir / jar.file_name)
        fetched.unlink()
    raise JarChecksumError(
        f"{jar.file_name} was fetched twice and differs from the tested file (sha256 {found}, expected {jar.sha256}). "
        "Something between this machine and the repository changes files: ask whoever runs that proxy or mirror."
    )


def fetch_with_jgo(jar: LockedJar, folder: Path) -> Path:
    """Fetch one jar with jgo, from the repositories of the user's jgo settings or else its default."""
    try:
        import requests  # noqa: PLC0415 - part of an extra: absent is a sentence, not a traceback
        from jgo.config import GlobalSettings  # noqa: PLC0415 - as above
        from jgo.maven import MavenContext  # noqa: PLC0415 - as above
    except ImportError as error:
        raise EmbeddedExtraMissingError from error
    repositories = GlobalSettings.load().repositories or None  # None: jgo's default
    context = MavenContext(repo_cache=folder, remote_repos=repositories, timeout=_REQUEST_TIMEOUT_S)
    artifact = context.project(jar.group, jar.artifact).at_version(jar.version).artifact()
    try:
        return Path(artifact.resolve())
    except requests.RequestException as error:
        raise _unavailable(jar, "this machine seems to be offline") from error
    except RuntimeError as error:
        raise _unavailable(jar, "no repository in jgo's settings has it") from error
    except OSError as error:
        raise _unavailable(jar, f"it can't be stored ({error})") from error


def _unavailable(jar: LockedJar, why: str) -> JarsUnavailableError:
    return JarsUnavailableError(
        f"Can't fetch {jar.file_name} for the embedded broker: {why}. "
        "Mend that and try again, or use a Kafka cluster that you have: set DUETASKS_BOOTSTRAP_SERVERS=host:port."
    )


def render_lock(jars: Iterable[LockedJar]) -> str:
    """Text of a lock file that `parse_lock` reads."""
    head = (
        f"# Jars of Apache Kafka {KAFKA_VERSION} with its log4j binding: sha256, then group:artifact:version.\n"
        "# Written by `python -m pipeline.embedded.relock`; not edited by hand.\n"
    )
    in_order = sorted(jars, key=lambda jar: (jar.group, jar.artifact))
    return head + "".join(f"{jar.sha256}  {jar.group}:{jar.artifact}:{jar.version}\n" for jar in in_order)
