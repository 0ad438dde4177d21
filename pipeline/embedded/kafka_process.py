"""Kafka as a process: prepared, started detached, awaited, ended."""

from __future__ import annotations

import base64
import os
import secrets
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from pipeline.embedded.broker_errors import BrokerStartError
from pipeline.embedded.broker_folder import without_stack_traces

if TYPE_CHECKING:
    from pipeline.embedded.broker_folder import BrokerFolder, BrokerState

__all__ = ["await_ready", "format_storage", "is_stopped", "new_cluster_id", "spawn_detached", "terminate"]

# The whole environment of the Java processes. Nothing is handed on: JAVA_TOOL_OPTIONS or a class path meant for
# another program would change the broker. Without a UTF-8 locale Java can't open a path that is not ASCII.
_ENVIRONMENT = {"LC_ALL": "C.UTF-8"}

_POLL_S = 0.1
_API_TIMEOUT_S = 2.0
_KILL_WAIT_S = 10.0


def new_cluster_id() -> str:
    """Id for a new cluster, as Kafka makes them: 16 random bytes in URL-safe base64 without padding."""
    while (text := base64.urlsafe_b64encode(secrets.token_bytes(16)).decode().rstrip("=")).startswith("-"):
        pass  # a leading dash would read as an option on the command line
    return text


def format_storage(command: list[str], *, timeout_s: float) -> None:
    """Run Kafka's storage tool.

    Raises:
        BrokerStartError: it failed, with what it said, or took too long.

    """
    try:
        done = subprocess.run(  # noqa: S603 - our own Java with our own arguments, no shell
            command, capture_output=True, text=True, check=False, timeout=timeout_s, env=_ENVIRONMENT
        )
    except subprocess.TimeoutExpired as error:
        raise BrokerStartError("Preparing Kafka's data folder took too long: is this machine overloaded?") from error
    if done.returncode != 0:
        said = "\n".join(without_stack_traces(done.stderr or done.stdout))
        raise BrokerStartError(f"Kafka could not prepare its data folder: {said}")


def spawn_detached(command: list[str], *, console_file: Path) -> psutil.Process:
    """Start a process in a session of its own: neither Ctrl-C here nor the end of this process reaches it."""
    console = os.open(console_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        # Not subprocess.Popen: its object complains when it is dropped while the process runs, and that is the point.
        pid = os.posix_spawn(
            command[0],
            command,
            _ENVIRONMENT,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, console, 1),
                (os.POSIX_SPAWN_DUP2, console, 2),
            ],
            setsid=True,
            # A Java that is born with SIGTERM ignored or blocked never runs its clean shutdown.
            setsigdef=[signal.SIGTERM, signal.SIGINT, signal.SIGHUP],
            setsigmask=[],
        )
    finally:
        os.close(console)
    return psutil.Process(pid)


def await_ready(folder: BrokerFolder, state: BrokerState, *, deadline_s: float) -> None:
    """Return once the broker answers an API call; `deadline_s` is on the monotonic clock.

    Raises:
        BrokerStartError: it ended, or does not answer before the deadline; it may still be running then.

    """
    while not _answers(state):
        if folder.live_process(state) is None:
            raise BrokerStartError(f"Kafka ended while it was starting. The end of its log:\n{folder.log_tail()}")
        if time.monotonic() >= deadline_s:
            raise BrokerStartError(
                f"Kafka (pid {state.pid}) runs, but does not answer at {state.bootstrap_servers} in time. "
                f"The end of its log, {folder.log_file}:\n{folder.log_tail()}"
            )
        time.sleep(_POLL_S)


def terminate(process: psutil.Process, *, timeout_s: float) -> bool:
    """End a process with SIGTERM; True if it ended by itself within `timeout_s`, False if it had to be killed."""
    try:
        process.terminate()
        process.send_signal(signal.SIGCONT)  # a paused process keeps other signals for later
        process.wait(timeout_s)
    except psutil.TimeoutExpired:
        process.kill()
        process.wait(_KILL_WAIT_S)
        return False
    except psutil.NoSuchProcess:
        return True  # it ended by itself in between
    return True


def _answers(state: BrokerState) -> bool:
    """Whether the broker answers an API call, as the cluster that it should be: an open port proves neither."""
    admin = AdminClient(
        {
            "bootstrap.servers": state.bootstrap_servers,
            "reconnect.backoff.max.ms": 200,  # it is expected to refuse at first: try again at once
            "log_level": 0,  # and not worth a line on the terminal each time
        }
    )
    try:
        return bool(admin.list_topics(timeout=_API_TIMEOUT_S).cluster_id == state.cluster_id)
    except KafkaException:
        return False


def is_stopped(pid: int) -> bool:
    """Whether every thread of the process stands still after SIGSTOP."""
    try:
        texts = [(task / "stat").read_text("ascii", "replace") for task in Path(f"/proc/{pid}/task").iterdir()]
    except FileNotFoundError:
        return False  # a thread has just ended, so the others are not still yet either
    return all(text.rpartition(")")[2].split()[0] in {"T", "t"} for text in texts)
