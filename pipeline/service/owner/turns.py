"""How much one transaction takes: all at once while all is well, inputs and timers by turns while something is refused.

A transaction that the broker refuses is halved until the one record at fault stands alone; inputs and timers are
narrowed apart, so that success with the ones does not widen the others again.
"""

import msgspec

__all__ = ["Turn", "Turns"]


class Turn(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What the next transaction may take; `partial`: the other kind has its turn afterwards."""

    inputs_max: int
    timers_max: int
    partial: bool


class Turns:
    """Hands out turns; `narrow` after a refusal, `widen` after a success."""

    def __init__(self, inputs_max: int, timers_max: int) -> None:
        self._full = (inputs_max, timers_max)
        self._inputs = inputs_max
        self._timers = timers_max
        self._is_narrowed = False
        self._timers_next = False
        self._idle = 0

    def next(self) -> Turn:
        """The next turn: both kinds if nothing is narrowed."""
        if not self._is_narrowed:
            return Turn(inputs_max=self._inputs, timers_max=self._timers, partial=False)
        self._timers_next = not self._timers_next
        if self._timers_next:
            return Turn(inputs_max=0, timers_max=self._timers, partial=True)
        return Turn(inputs_max=self._inputs, timers_max=0, partial=True)

    def narrow(self, turn: Turn, items: int) -> None:
        """The transaction of `turn`, of `items` records, was refused: try half of that."""
        self._idle = 0
        # Also where nothing can be halved any more: an input and a timer that are refused together must come apart.
        self._is_narrowed = True
        half = max(1, items // 2)
        if turn.inputs_max:
            self._inputs = min(half, self._inputs)
        if turn.timers_max:
            self._timers = min(half, self._timers)

    def widen(self, turn: Turn) -> None:
        """The transaction of `turn` went through: double what it was narrowed to."""
        self._idle = 0
        if turn.inputs_max:
            self._inputs = min(2 * self._inputs, self._full[0])
        if turn.timers_max:
            self._timers = min(2 * self._timers, self._full[1])
        self._is_narrowed = (self._inputs, self._timers) != self._full

    def idle(self, turn: Turn) -> bool:
        """The turn found nothing to do; True if the other kind should be looked at before anybody sleeps.

        Two idle turns in a row are all there is: without this bound, a narrowed owner would spin and never wait.
        """
        self._idle = (self._idle + 1) % 2 if turn.partial else 0
        return self._idle > 0
