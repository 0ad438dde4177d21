"""The play itself: news sent at its time, the agent killed in the middle and started again, calls collected."""

import time
from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from pipeline.cli.child_agent import ChildAgents
from pipeline.cli.demo.callers import Callers
from pipeline.cli.demo.checking import Expected, Tally, compare
from pipeline.cli.demo.flights import Flight
from pipeline.cli.demo.screen import Scene, Screen
from pipeline.cli.demo.story import Compression, Kind, News, NewsKind, call_of, first_ms, kind_of, news_of
from pipeline.cli.demo.upstream import Upstream

if TYPE_CHECKING:
    from pipeline.config import Settings

__all__ = ["Ending", "Play"]

_TICK_S: Final = 0.05
_DEAD_S: Final = 2.0
_OVERDUE_MAX_S: Final = 30.0
_GRACE_S: Final = 2.0
_BEFORE_FIRST_NEWS_S: Final = 1.0


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it. `dead_s` is how long the agent was away; `due_meanwhile` how many calls became due then."""

    tallies: dict[Kind, Tally]
    dead_s: float
    due_meanwhile: int
    news_meanwhile: int
    late_ms_p50: float
    late_ms_max: float
    too_late: int

    @property
    def is_right(self) -> bool:
        """Whether every promise was kept."""
        return all(tally.is_right for tally in self.tallies.values())


class Play:
    """One performance; needs brokers and topics."""

    def __init__(self, settings: "Settings", flights: Sequence[Flight], *, speed: float, consumers: int) -> None:
        self._settings = settings
        self._flights = {flight.task_id: flight for flight in flights}
        self._speed = speed
        self._agent = ChildAgents(settings)
        self._callers = Callers(settings, consumers)
        self._starts_ms = first_ms(flights)
        news = [each for flight in flights for each in news_of(flight, self._starts_ms)]
        self._news = sorted(news, key=lambda each: each.at_ms)  # stable: of one flight they stay in order
        self._agent_says, self._agent_is_well = "starting", True
        self._killed_s = self._dead_s = 0.0
        self._sent_at_kill = self._news_meanwhile = 0

    def prepare(self) -> None:
        """Start the agent and the consumers, and wait until the agent owns its partitions."""
        self._agent.start()
        self._callers.start()
        self._agent.await_ready()
        self._agent_says = "at work"

    def perform(self, show: Screen) -> Ending:
        """From the first news to the last call, telling `show` how it goes; `stop` must follow in any case."""
        compression = Compression(
            starts_ms=self._starts_ms,
            real_starts_ms=int((time.time() + _BEFORE_FIRST_NEWS_S) * 1000),
            speed=self._speed,
        )
        expected = self._expected(compression)
        dues = sorted(each.due_at_ms for each in expected.values() if each.due_at_ms is not None)
        upstream = Upstream(self._settings, self._flights, compression)
        try:
            self._run(compression, upstream, dues, show)
        finally:
            upstream.close()
        self._callers.stop()
        return self._ending(expected, dues, len(upstream.too_late))

    def stop(self) -> None:
        """End what still runs."""
        self._callers.stop()
        self._agent.stop()

    def _expected(self, compression: Compression) -> dict[str, Expected]:
        """What must come of each flight, from its row in the file alone."""
        found = {}
        for flight in self._flights.values():
            call_ms = call_of(flight)
            due_at_ms = None if call_ms is None else compression.real_ms(call_ms)
            found[flight.task_id] = Expected(kind=kind_of(flight), due_at_ms=due_at_ms)
        return found

    def _run(self, compression: Compression, upstream: Upstream, dues: list[int], show: Screen) -> None:
        """Until all calls are made, and a little longer for those that should not be."""
        kill_at_ms = dues[len(dues) // 2] if dues else 0
        ends_at_ms = max([compression.real_ms(self._news[-1].at_ms), *dues[-1:]])
        sent, grace_until_s = 0, 0.0
        while True:
            now_ms = time.time() * 1000
            sent = self._send_known(upstream, compression, sent, now_ms)
            self._disturb(now_ms, kill_at_ms, sent)
            show(self._scene(compression, upstream, len(dues), ends_at_ms))
            self._callers.check()
            over = sent == len(self._news) and now_ms > ends_at_ms and self._agent_is_well
            if (
                over
                and not grace_until_s
                and (len(self._callers.made) >= len(dues) or now_ms > ends_at_ms + _OVERDUE_MAX_S * 1000)
            ):
                grace_until_s = time.monotonic() + _GRACE_S
            if grace_until_s and time.monotonic() > grace_until_s:
                return
            time.sleep(_TICK_S)

    def _send_known(self, upstream: Upstream, compression: Compression, sent: int, now_ms: float) -> int:
        news: Sequence[News] = self._news
        while sent < len(news) and compression.real_ms(news[sent].at_ms) <= now_ms:
            upstream.send(news[sent])
            sent += 1
        return sent

    def _disturb(self, now_ms: float, kill_at_ms: int, sent: int) -> None:
        """Kill the agent once, let some time pass, start it again, and see when it is back."""
        if not self._killed_s:
            if now_ms >= kill_at_ms:
                self._killed_s, self._sent_at_kill = self._agent.kill(), sent
                self._agent_says, self._agent_is_well = "killed with SIGKILL", False
        elif not self._dead_s:
            dead_s = time.time() - self._killed_s
            if self._agent_says.startswith("killed") and dead_s >= _DEAD_S:
                self._agent.start()
                self._agent_says = "started again after the SIGKILL, taking over its timers"
            elif self._agent_says.startswith("started") and self._agent.is_ready():
                self._dead_s, self._news_meanwhile = dead_s, sent - self._sent_at_kill
                self._agent_says, self._agent_is_well = f"at work again, {dead_s:.1f} s after the SIGKILL", True

    def _scene(self, compression: Compression, upstream: Upstream, calls: int, ends_at_ms: int) -> Scene:
        now_ms = time.time() * 1000
        made = self._callers.made
        span_ms = max(1, ends_at_ms - compression.real_starts_ms)
        return Scene(
            played_ms=compression.played_ms(now_ms),
            done=min(1.0, max(0.0, (now_ms - compression.real_starts_ms) / span_ms)),
            scheduled=upstream.sent[NewsKind.SCHEDULE],
            moved=upstream.sent[NewsKind.MOVE],
            cancelled=upstream.sent[NewsKind.CANCEL],
            flights=len(self._flights),
            made=len(made),
            calls=calls,
            late_ms=made[-1].seen_at_ms - made[-1].due_at_ms if made else 0,
            agent=self._agent_says,
            agent_is_well=self._agent_is_well,
        )

    def _ending(self, expected: dict[str, Expected], dues: list[int], too_late: int) -> Ending:
        made = self._callers.made
        late_ms = sorted(call.seen_at_ms - call.due_at_ms for call in made) or [0.0]
        killed_ms = self._killed_s * 1000
        back_ms = killed_ms + self._dead_s * 1000
        return Ending(
            tallies=compare(expected, made),
            dead_s=round(self._dead_s, 1),
            due_meanwhile=bisect_left(dues, back_ms) - bisect_left(dues, killed_ms),
            news_meanwhile=self._news_meanwhile,
            late_ms_p50=round(late_ms[len(late_ms) // 2], 1),
            late_ms_max=round(late_ms[-1], 1),
            too_late=too_late,
        )
