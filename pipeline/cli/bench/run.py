"""The phases of one benchmark run, in order, on one broker."""

import time
from collections.abc import Callable
from statistics import median_low
from typing import TYPE_CHECKING, Final

from confluent_kafka import Consumer, TopicPartition

from pipeline.adapters.avro_codec import AvroCodec
from pipeline.adapters.topic_setup import apply_topics
from pipeline.cli.bench.due_reader import DueReader, Received, reader_config, values_since
from pipeline.cli.bench.figures import Figures, Pace, Sizes, percentile
from pipeline.cli.bench.load import Load, Upstream, partition_sizes
from pipeline.cli.bench.plain_loop import WARM_UP_KEY, PlainLoop, Stretch
from pipeline.cli.child_agent import ChildAgents
from pipeline.errors import UnavailableError

if TYPE_CHECKING:
    from pipeline.config import Settings

__all__ = ["Run"]

_FAR_MS: Final = 7 * 86_400_000
_PHASE_TIMEOUT_S: Final = 300.0
_POSITIONS_PAUSE_S: Final = 0.25
_NOWHERE: Final = (-1, 0.0)
_SETTLE_S: Final = 2.0
_LEAD_S: Final = 4.0
_KILL_BEFORE_DUE_S: Final = 0.2
_SLOW_PER_S: Final = 5_000.0
"""For reckoning how long something may take before anything was measured."""
_ENCODED_PER_S: Final = 30_000


class Run:
    """One run: `measure` does it all. Needs a broker, and the topics of `settings` in place and empty."""

    def __init__(self, settings: "Settings", sizes: Sizes, on_progress: Callable[[str], None]) -> None:
        self._settings = settings
        self._sizes = sizes
        self._say = on_progress
        self._client = settings.client_config()
        self._scratch_settings = settings.model_copy(update={"topic_prefix": "ceiling."})
        self._scratch = self._scratch_settings.topics
        self._upstream = Upstream(settings)
        self._agents = ChildAgents(settings, sizes.agents)
        self._reader = DueReader(self._client, settings.topics.due, [0] * settings.partitions)
        # The ends of the log itself: the last stable offset may lag behind a commit that has just returned.
        self._probe = Consumer({**reader_config(self._client), "isolation.level": "read_uncommitted"})
        self._due: dict[str, int] = {}
        self._received: list[Received] = []
        self._slowest_per_s = _SLOW_PER_S

    def measure(self) -> Figures:
        """All phases; raises `UnavailableError` if one does not end in time."""
        try:
            apply_topics(self._scratch_settings)
            self._reader.start()
            self._say("Starting the agents")
            self._agents.start()
            self._agents.await_ready()
            self._warm_up()
            ingest = [self._ingest(number) for number in range(self._sizes.rounds)]
            rss_bytes = self._agents.rss_bytes()
            drain = [self._drain(number) for number in range(self._sizes.rounds)]
            lateness_ms = self._lateness()
            warm_s = self._restart("restart-warm", remove_tables=False)
            cold_s = self._restart("restart-cold", remove_tables=True)
            self._settle()
        finally:
            self._agents.stop()
            self._reader.stop()
        return self._figures(ingest, drain, lateness_ms, warm_s, cold_s, rss_bytes)

    # -- the phases --------------------------------------------------------------------------------------------------

    def _warm_up(self) -> None:
        """Java compiles while it runs: what is measured first would pay for it."""
        self._say("Warming up")
        due_at_ms = _now_ms() + 3_000
        self._schedule("warm-up", [due_at_ms] * self._sizes.warm_up)
        self._receive()

    def _ingest(self, number: int) -> Pace:
        count = _part(self._sizes.pending, number, self._sizes.rounds)
        self._say(f"Ingest, round {number + 1} of {self._sizes.rounds}: {count:,} events")
        topics = self._settings.topics
        starts, state_starts = self._ends(topics.events), self._ends(topics.state)
        far_ms = _now_ms() + _FAR_MS
        load = Load(
            prefix=f"pending-{number}", due_at_ms=range(far_ms, far_ms + count), payload_bytes=self._sizes.payload_bytes
        )
        records = load.records()
        sent_s = self._upstream.send(records)
        per_s = count / (self._await_applied() - sent_s)
        self._slowest_per_s = per_s if number == 0 else min(per_s, self._slowest_per_s)
        time.sleep(_SETTLE_S)
        self._say(f"Ingest, round {number + 1} of {self._sizes.rounds}: the plain loop")
        rows = values_since(self._client, topics.state, state_starts, _PHASE_TIMEOUT_S)
        stretch = self._stretch(starts, [key for key, _ in records], {self._scratch.state: rows})
        started_s, ended_s = PlainLoop(self._client, stretch, "ingest").run()
        return Pace(per_s, count / (ended_s - started_s))

    def _drain(self, number: int) -> Pace:
        count = _part(self._sizes.drain, number, self._sizes.rounds)
        self._say(f"Drain, round {number + 1} of {self._sizes.rounds}: {count:,} tasks due at one instant")
        topics = self._settings.topics
        starts, state_starts = self._ends(topics.events), self._ends(topics.state)
        due_at_ms = _now_ms() + self._lead_ms(count)
        keys = self._schedule(f"drain-{number}", [due_at_ms] * count)
        if _now_ms() > due_at_ms:
            raise UnavailableError("the tasks of the drain phase were due before they were all scheduled")
        received = self._receive()
        per_s = count / ((max(each.at_ms for each in received) - due_at_ms) / 1000)
        time.sleep(_SETTLE_S)
        self._say(f"Drain, round {number + 1} of {self._sizes.rounds}: the plain loop")
        rows = values_since(self._client, topics.state, state_starts, _PHASE_TIMEOUT_S)
        due = {each.key: each.value for each in received}
        return Pace(
            per_s, self._drain_ceiling(self._stretch(starts, keys, {self._scratch.state: rows, self._scratch.due: due}))
        )

    def _drain_ceiling(self, stretch: Stretch) -> float:
        """Like the drain, it ends when a `read_committed` reader has the last record."""
        reader = DueReader(self._client, self._scratch.due, self._ends(self._scratch.due))
        reader.start()
        try:
            started_s, _ = PlainLoop(self._client, stretch, "drain").run()
            reader.await_count(sum(stretch.counts) + self._settings.partitions, _PHASE_TIMEOUT_S)
            last_ms = max(each.at_ms for each in reader.take() if each.key != WARM_UP_KEY)
        finally:
            reader.stop()
        return sum(stretch.counts) / (last_ms / 1000 - started_s)

    def _lateness(self) -> list[float]:
        sizes = self._sizes
        self._say(f"Lateness: {sizes.lateness_per_s:,} tasks a second for {sizes.lateness_s} s")
        count = sizes.lateness_per_s * sizes.lateness_s
        start_ms = _now_ms() + self._lead_ms(count)
        due_at_ms = [start_ms + number * 1000 // sizes.lateness_per_s for number in range(count)]
        self._schedule("lateness", due_at_ms)
        if _now_ms() > start_ms:
            raise UnavailableError("the tasks of the lateness phase were due before they were all scheduled")
        return sorted(each.at_ms - self._due[each.key.decode()] for each in self._receive())

    def _restart(self, name: str, *, remove_tables: bool) -> float:
        """Seconds from SIGKILL until the first task that was due meanwhile is received."""
        self._say(f"Restart with {self._sizes.pending:,} pending, {'without' if remove_tables else 'with'} tables")
        time.sleep(_SETTLE_S)
        due_at_ms = _now_ms() + int(_LEAD_S * 1000)
        self._schedule(name, [due_at_ms] * self._sizes.probes)
        time.sleep(max(0.0, due_at_ms / 1000 - _KILL_BEFORE_DUE_S - time.time()))
        killed_s = self._agents.kill()
        if remove_tables:
            self._agents.remove_tables()
        self._agents.start()
        first_ms = min(each.at_ms for each in self._receive())
        self._agents.await_ready()
        return first_ms / 1000 - killed_s

    def _settle(self) -> None:
        """What comes twice comes late: wait a little for it."""
        time.sleep(_SETTLE_S)
        self._received += self._reader.take()

    # -- their steps -------------------------------------------------------------------------------------------------

    def _lead_ms(self, count: int) -> int:
        """Time enough to encode, send and apply that many events."""
        return int((2 * count / self._slowest_per_s + count / _ENCODED_PER_S + _LEAD_S) * 1000)

    def _schedule(self, prefix: str, due_at_ms: list[int]) -> list[bytes]:
        """Schedule tasks that are received soon, and wait until the table has them; returns their keys."""
        load = Load(prefix=prefix, due_at_ms=due_at_ms, payload_bytes=self._sizes.payload_bytes)
        self._due |= zip(load.task_ids, due_at_ms, strict=True)
        records = load.records()
        self._upstream.send(records)
        self._await_applied()
        return [key for key, _ in records]

    def _receive(self) -> list[Received]:
        """Wait for everything that was scheduled to be received soon; what is new of it."""
        if not self._reader.await_count(len(self._due), _PHASE_TIMEOUT_S):
            self._say(f"Only {self._reader.count:,} of {len(self._due):,} tasks were received")
        new = self._reader.take()
        if not new:
            raise UnavailableError(f"no due task came within {_PHASE_TIMEOUT_S:g} s: see {self._agents.log_file}")
        self._received += new
        return new

    def _await_applied(self) -> float:
        """Wait until the agents' tables have all that `task-events` has; the wall clock's seconds when they had."""
        ends = dict(enumerate(self._ends(self._settings.topics.events)))
        until_s = time.monotonic() + _PHASE_TIMEOUT_S
        while time.monotonic() < until_s:
            positions = self._agents.positions()
            if all(positions.get(partition, _NOWHERE)[0] >= end for partition, end in ends.items()):
                return max(since_s for _, since_s in positions.values())
            time.sleep(_POSITIONS_PAUSE_S)
        raise UnavailableError(f"events were not applied within {_PHASE_TIMEOUT_S:g} s: see {self._agents.log_file}")

    def _ends(self, topic: str) -> list[int]:
        return [
            self._probe.get_watermark_offsets(TopicPartition(topic, partition), cached=False)[1]
            for partition in range(self._settings.partitions)
        ]

    def _stretch(self, starts: list[int], keys: list[bytes], outputs: dict[str, dict[bytes, bytes]]) -> Stretch:
        """What the plain loop has to do: the same input, and the very bytes that the agents wrote for it."""
        return Stretch(
            topic=self._settings.topics.events,
            starts=starts,
            counts=partition_sizes(keys, self._settings.partitions),
            transaction_records=self._settings.batch_records_max,
            outputs=outputs,
        )

    # -- the result --------------------------------------------------------------------------------------------------

    def _figures(
        self,
        ingest: list[Pace],
        drain: list[Pace],
        lateness_ms: list[float],
        warm_s: float,
        cold_s: float,
        rss_bytes: int,
    ) -> Figures:
        codec = AvroCodec()
        tasks = [codec.decode_due(each.value) for each in self._received]
        unique = {(task.task_id, task.generation, task.occurrence) for task in tasks}
        return Figures(
            ingest_per_s=round(median_low(pace.per_s for pace in ingest)),
            ingest_ceiling_per_s=round(median_low(pace.ceiling_per_s for pace in ingest)),
            ingest_ratio=round(median_low(pace.ratio for pace in ingest), 3),
            drain_per_s=round(median_low(pace.per_s for pace in drain)),
            drain_ceiling_per_s=round(median_low(pace.ceiling_per_s for pace in drain)),
            drain_ratio=round(median_low(pace.ratio for pace in drain), 3),
            lateness_ms_p50=round(percentile(lateness_ms, 50), 1),
            lateness_ms_p99=round(percentile(lateness_ms, 99), 1),
            lateness_ms_max=round(lateness_ms[-1], 1),
            early=sum(
                each.at_ms < task.due_at_ms or task.fired_at_ms < task.due_at_ms or task.task_id not in self._due
                for each, task in zip(self._received, tasks, strict=True)
            ),
            lost=len(self._due.keys() - {task.task_id for task in tasks}),
            doubled=len(tasks) - len(unique),
            restart_warm_s=round(warm_s, 2),
            restart_cold_s=round(cold_s, 2),
            rss_mb=round(rss_bytes / 2**20, 1),
            pending=self._sizes.pending,
        )


def _now_ms() -> int:
    return int(time.time() * 1000)


def _part(whole: int, number: int, parts: int) -> int:
    """How much falls on the part with that number, so that all of them make the whole."""
    return whole * (number + 1) // parts - whole * number // parts
