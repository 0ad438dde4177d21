"""Which schedule may fire, by comparing events in pairs: the auditor's own answer, made without the production fold.

`overrules` is the whole rule. `Requests` applies it to the events of one task as they come, in the order of the log,
and keeps what later events or emissions may still ask about: a few schedules, the newest version, the last event ids.

Where it can't know, it says so (`is_doubtful`) and never guesses: events before the first retained one may have had a
higher version or the same event id; a finished task may have been forgotten before its next event came.
"""

from collections import deque
from typing import Final

import msgspec

from pipeline.core.audit import Outcome
from pipeline.core.events import Rejection
from pipeline.core.tasks import EVENT_HASHES_MAX, DurationMs, InstantMs, Offset

__all__ = ["SKEW_MS", "Request", "Requests", "Standing", "overrules"]

SKEW_MS: Final = 60_000
"""How far the clocks of owners and brokers are taken to differ, where a deadline of one meets a stamp of the other."""
REPEAT_WINDOW_MS: Final = 86_400_000
"""An event is sent again within a day: later, no repeat of one that retention or compaction has removed is assumed."""
KEPT_MAX: Final = 32
ENDED_MAX: Final = 256
"""Places of schedules that can't fire, remembered to say why if one of them does."""


class Request(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An event that was not refused. `place` counts offsets over all creations of the topic, as generations do."""

    place: int
    offset: Offset
    at_ms: InstantMs
    is_cancel: bool
    version: int = 0
    digest: bytes = b""
    due_at_ms: InstantMs = InstantMs(0)
    target_topic: str = ""


class Standing(msgspec.Struct, kw_only=True, gc=False):
    """A schedule and what is known of it: who overruled it, whether that is uncertain, what became of it."""

    request: Request
    overruled_by: Request | None = None
    is_doubtful: bool = False
    outcome: Outcome | None = None


def overrules(other: Request, schedule: Request) -> bool:
    """Whether `other` stops `schedule` from firing: a newer version does; without versions, whatever comes later."""
    later = other.place > schedule.place
    if other.version and schedule.version:
        tie = other.version == schedule.version and (other.is_cancel or not later)
        return tie or other.version > schedule.version
    return later


class Requests:
    """The events of one task so far.

    `is_whole`: no earlier event of the task can be missing; else those of before `unknown_until_ms` may repeat one
    that is gone.
    """

    def __init__(self, *, retention_ms: DurationMs, is_whole: bool, unknown_until_ms: int) -> None:
        self._retention_ms = retention_ms
        self._unknown_until_ms = 0 if is_whole else unknown_until_ms + REPEAT_WINDOW_MS
        self._is_whole = is_whole
        self._has_row: bool | None = False if is_whole else None  # None: perhaps
        self._kept: deque[Standing] = deque()
        self._ended: deque[tuple[int, Outcome]] = deque(maxlen=ENDED_MAX)
        self._newest: Request | None = None
        self._floor = 0
        self._digests: deque[bytes] = deque(maxlen=EVENT_HASHES_MAX)
        self._perhaps_version = 0
        self._perhaps_digests: deque[bytes] = deque(maxlen=4 * EVENT_HASHES_MAX)
        self._forget_at_ms: int | None = None

    @property
    def live(self) -> Standing | None:
        """The schedule that should fire, if there is one that certainly or perhaps should."""
        for standing in reversed(self._kept):
            if standing.overruled_by is None and standing.outcome is None:
                return standing
        return None

    def find(self, place: int) -> Standing | None:
        """The schedule at a place, if it is still kept: only overruled or finished ones are let go."""
        return next((standing for standing in self._kept if standing.request.place == place), None)

    def ended(self, place: int) -> Outcome | None:
        """How the event at a place ended if it was never to fire, as far as that is still remembered."""
        return next((outcome for at, outcome in self._ended if at == place), None)

    def refuse(self, rejection: Rejection, place: int, at_ms: InstantMs) -> None:
        """An event was refused: its version counts all the same, if it names its task."""
        self._perhaps_forget(at_ms)
        self._ended.append((place, Outcome.REFUSED))
        if rejection.task_id is not None and rejection.version:
            self._floor = max(self._floor, rejection.version)
            self._note_row(at_ms)

    def add(self, request: Request) -> Outcome | None:
        """One more event; STALE or DUPLICATE if it changes nothing, else None."""
        self._perhaps_forget(request.at_ms)
        if request.digest and request.digest in self._digests:
            self._ended.append((request.place, Outcome.DUPLICATE))
            return Outcome.DUPLICATE
        doubtful = self._may_be_repeated(request)
        if self._is_stale(request):
            self._remember(request, doubtful=doubtful)
            self._ended.append((request.place, Outcome.STALE))
            return Outcome.STALE
        doubtful = doubtful or self._may_be_stale(request)
        stopped = self._stop(request, doubtful=doubtful)
        self._remember(request, doubtful=doubtful)
        if request.is_cancel:
            self._finish_by_cancel(request, stopped)
        else:
            self._keep(Standing(request=request, is_doubtful=doubtful))
            self._forget_at_ms = 0 if doubtful and self._forget_at_ms is not None else None
            self._has_row = True
        return None

    def finish(self, standing: Standing, outcome: Outcome, at_ms: InstantMs) -> None:
        """A schedule was emitted or set aside."""
        standing.outcome = outcome
        if self.live is None:
            self._forget_at_ms = at_ms + self._retention_ms

    def _keep(self, standing: Standing) -> None:
        self._kept.append(standing)
        if len(self._kept) > KEPT_MAX:
            self._ended.append((self._kept.popleft().request.place, Outcome.REPLACED))

    # -- what is known -----------------------------------------------------------------------------------------

    def _is_stale(self, request: Request) -> bool:
        """Whether an earlier event has overruled it before it came."""
        if not request.version:
            return False
        if request.version < self._floor or (request.version == self._floor and not request.is_cancel):
            return True
        if self._newest is None:
            return False
        if request.is_cancel:
            return self._newest.version > request.version
        return overrules(self._newest, request)

    def _may_be_repeated(self, request: Request) -> bool:
        if not request.digest:
            return False
        return request.digest in self._perhaps_digests or request.at_ms < self._unknown_until_ms

    def _may_be_stale(self, request: Request) -> bool:
        return bool(request.version) and (not self._is_whole or request.version <= self._perhaps_version)

    def _stop(self, request: Request, *, doubtful: bool) -> Standing | None:
        """Mark the schedules that it overrules; returns the one that was to fire."""
        stopped = None
        for standing in self._kept:
            if standing.overruled_by is not None or not overrules(request, standing.request):
                continue
            if standing.outcome is None:
                stopped = standing
            if doubtful:
                standing.is_doubtful = True
            else:
                standing.overruled_by = request
        return stopped

    def _remember(self, request: Request, *, doubtful: bool) -> None:
        if request.version:
            if doubtful:
                self._perhaps_version = max(self._perhaps_version, request.version)
            elif self._newest is None or request.version >= self._newest.version:
                self._newest = request
        if not request.digest:
            return
        # A cancel without a version for a task that nobody knows leaves nothing, not even its id.
        leaves_row = not request.is_cancel or bool(request.version)
        if doubtful or (not leaves_row and self._has_row is None):
            self._perhaps_digests.append(request.digest)
        elif leaves_row or self._has_row:
            self._digests.append(request.digest)

    # -- forgetting --------------------------------------------------------------------------------------------

    def _note_row(self, at_ms: InstantMs) -> None:
        if self._has_row is not True:
            self._has_row = True
            if self._forget_at_ms is None and self.live is None:
                self._forget_at_ms = at_ms + self._retention_ms

    def _finish_by_cancel(self, request: Request, stopped: Standing | None) -> None:
        if stopped is not None:
            wake_ms = max(request.at_ms, stopped.request.due_at_ms) + self._retention_ms
            self._forget_at_ms = request.at_ms + self._retention_ms if stopped.is_doubtful else wake_ms
        elif request.version:
            self._note_row(request.at_ms)

    def _perhaps_forget(self, at_ms: InstantMs) -> None:
        """A finished task may be forgotten from its instant on: what is known of it is then only perhaps known."""
        if self._forget_at_ms is None or at_ms < self._forget_at_ms - SKEW_MS:
            return
        known = self._newest.version if self._newest is not None else 0
        self._perhaps_version = max(self._perhaps_version, known, self._floor)
        self._perhaps_digests.extend(self._digests)
        self._newest, self._floor = None, 0
        self._digests.clear()
        self._forget_at_ms = None
        self._has_row = None
