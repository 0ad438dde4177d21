"""A handler that runs a command for each task: payload on standard input, the rest in the environment."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
import structlog

from pipeline.config import TASK_VARIABLE_PREFIX
from pipeline.core.effects import DueTask
from pipeline.core.task_fields import task_fields
from pipeline.service.consumer.task_handling import TaskContext

__all__ = ["CommandFailedError", "CommandHandler"]

log = structlog.get_logger(__name__)

_VARIABLE_BYTES_MAX: Final = 100_000
"""Linux refuses a variable of 128 KiB, and with it the whole command."""
_NOT_IN_ENVIRONMENT: Final = ("payload", "payload_base64")


class CommandFailedError(Exception):
    """The command ended with another code than 0, or did not end in time: the task was not applied."""


class CommandHandler:
    """Runs `arguments` (no shell) once a task; code 0 is applied, anything else a failed attempt.

    The command inherits standard output and error. It is killed, with its children, after `timeout_ms`. It runs in a
    session of its own: a Ctrl-C at the terminal lets it finish its task.
    """

    def __init__(self, arguments: Sequence[str], *, environment: Mapping[str, str], timeout_ms: int) -> None:
        self._arguments = list(arguments)
        self._environment = dict(environment)
        self._timeout_s = timeout_ms / 1000

    def __call__(self, task: DueTask, context: TaskContext) -> None:
        """Run the command; raises `CommandFailedError`, `OSError`."""
        with subprocess.Popen(  # noqa: S603  # running the user's command is the purpose; no shell reads the task
            self._arguments,
            stdin=subprocess.PIPE,
            env=self._environment | task_variables(task, context),
            start_new_session=True,
        ) as process:
            try:
                process.communicate(task.payload, timeout=self._timeout_s)
            except subprocess.TimeoutExpired as error:
                raise CommandFailedError(f"{self._arguments[0]} took longer than {self._timeout_s:g} s") from error
            finally:
                _kill_group(process)
        if process.returncode != 0:
            raise CommandFailedError(f"{self._arguments[0]} ended with code {process.returncode}")


def task_variables(task: DueTask, context: TaskContext) -> dict[str, str]:
    """`DUETASKS_TASK_ID`, `DUETASKS_TASK_DUE_AT_MS` and so on: the fields of a JSON line except the payload.

    Headers are JSON; a value that is too long for a variable is left out. A zero byte can't stand in one: U+FFFD does.
    """
    fields = task_fields(task, partition=context.partition, offset=context.offset, replay=context.replay)
    fields |= {"group": context.group, "handler_attempt": context.attempt}
    variables: dict[str, str] = {}
    for name, value in fields.items():
        text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
        if name in _NOT_IN_ENVIRONMENT or len(text.encode()) > _VARIABLE_BYTES_MAX:
            continue
        variable = TASK_VARIABLE_PREFIX + name.removeprefix("task_").upper()
        variables[variable] = text.replace("\0", "\ufffd")
    return variables


def _kill_group(process: "subprocess.Popen[bytes]") -> None:
    """Whatever the command left behind must not act for this task after its attempt was judged."""
    if process.returncode == 0:
        return
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        log.debug("command_gone", pid=process.pid)
