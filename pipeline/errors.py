"""Every error that duetasks raises, split by what the caller should do about it.

DuetasksError
├── UsageError               the call itself is wrong: correct it (exit code 2)
│   └── ConfigurationError   a setting is missing or wrong
├── NotFoundError            nothing there by that name (exit code 3)
├── RefusedError             understood, and refused (exit code 4)
│   ├── RejectedTaskError    a task or cancel that breaks a rule: carries the reason code
│   ├── TopicMismatchError   a topic's settings can lose data: `duetasks topics verify` names each
│   └── DataLossError        records are gone that were needed: an operator decides
├── UnavailableError         the broker or agent can't be reached now: try again later (exit code 5)
├── RetryableError           this attempt failed cleanly, nothing happened: try again
│   ├── UnsentError          the event was not sent: send it again
│   └── PoisonedBatchError   a record in the batch is refused by the broker: try a smaller batch
├── UnknownOutcomeError      it may or may not have happened: send the same event again, same event_id
│   └── UndeliveredError     the same for several events at once: `failures` has each with its own error
├── FencedError              somebody else owns this: drop everything in memory, never write from it
└── CorruptStateError        the local table can't be trusted: put it aside, restore from task-state
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pipeline.core.events import Event

__all__ = [
    "EXIT_DONE",
    "EXIT_NOT_FOUND",
    "EXIT_REFUSED",
    "EXIT_UNAVAILABLE",
    "EXIT_USAGE",
    "EXIT_VIOLATED",
    "ConfigurationError",
    "CorruptStateError",
    "DataLossError",
    "DuetasksError",
    "FencedError",
    "NotFoundError",
    "PoisonedBatchError",
    "RefusedError",
    "RejectedTaskError",
    "RetryableError",
    "TopicMismatchError",
    "UnavailableError",
    "UndeliveredError",
    "UnknownOutcomeError",
    "UnsentError",
    "UsageError",
]

EXIT_DONE: Final = 0
EXIT_VIOLATED: Final = 1
EXIT_USAGE: Final = 2
EXIT_NOT_FOUND: Final = 3
EXIT_REFUSED: Final = 4
EXIT_UNAVAILABLE: Final = 5


class DuetasksError(Exception):
    """Anything that duetasks raises on purpose; the message says what, which one, and what to do now."""

    exit_code: int = 1


class UsageError(DuetasksError):
    """The call is wrong as written; correct it and call again."""

    exit_code = EXIT_USAGE


class ConfigurationError(UsageError):
    """A setting is missing or can't be right; nothing was started."""


class NotFoundError(DuetasksError):
    """There is nothing by that name."""

    exit_code = EXIT_NOT_FOUND


class RefusedError(DuetasksError):
    """The request was understood and refused; sending it again changes nothing."""

    exit_code = EXIT_REFUSED


class RejectedTaskError(RefusedError):
    """A task or a cancel breaks a rule; `reason` is the code that the agent would record."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class TopicMismatchError(RefusedError):
    """A topic is set up in a way that can lose data; `findings` says which, what it costs, and what to type."""

    def __init__(self, message: str, *, findings: Sequence[object] = ()) -> None:
        super().__init__(message)
        self.findings = tuple(findings)


class DataLossError(RefusedError):
    """Records that were still needed are gone; the partition waits until an operator decides."""


class UnavailableError(DuetasksError):
    """The broker or the agent can't be reached within the deadline; nothing is known to have happened."""

    exit_code = EXIT_UNAVAILABLE


class RetryableError(DuetasksError):
    """This attempt failed cleanly and changed nothing; try again."""


class UnsentError(RetryableError):
    """The event was certainly not sent; send it again. `event` is the one, as `send_event` takes it."""

    exit_code = EXIT_UNAVAILABLE

    def __init__(self, message: str, *, event: "Event | None" = None) -> None:
        super().__init__(message)
        self.event = event


class PoisonedBatchError(RetryableError):
    """The broker refuses a record of this batch; the transaction was aborted, try with fewer records."""


class UnknownOutcomeError(DuetasksError):
    """The deadline passed with the outcome unknown; repeat with the same `event_id`, which makes it harmless.

    `event`, where one was being sent, has that id: `send_event` takes it as it is.
    """

    exit_code = EXIT_UNAVAILABLE

    def __init__(self, message: str, *, event: "Event | None" = None) -> None:
        super().__init__(message)
        self.event = event


class UndeliveredError(UnknownOutcomeError):
    """Events that nobody was told about were not delivered: `failures` has each event with its own error."""

    def __init__(self, message: str, *, failures: "Sequence[tuple[Event, DuetasksError]]") -> None:
        super().__init__(message, event=failures[0][0] if failures else None)
        self.failures = tuple(failures)


class FencedError(DuetasksError):
    """Somebody else owns this partition now; drop what is in memory and acquire again if still a member."""


class CorruptStateError(DuetasksError):
    """The local table can't be trusted; put it aside and restore it from `task-state`."""
