"""The phases of one benchmark run, in order, on one broker."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from confluent_kafka import Consumer, TopicPartition

from pipeline.adapters.avro_codec import AvroCodec
from pipeline.adapters.topic_setup import apply_topics
from pipeline.cli.bench.due_reader import DueReader, Received, reader_config
from pipeline.cli.bench.figures import Figures, Sizes, percentile
from pipeline.cli.bench.load import Load, Upstream, partition_sizes
from pipeline.cli.bench.plain_loop import WARM_UP_KEY, PlainLoop, Stretch
from pipeline.cli.child_agent import ChildAgents
from pipeline.errors import UnavailableError

if TYPE_CHECKING:
    from pipeline.config import Settings

__all__ = ["Run"]

_FAR_MS: Final = 7 * 86_400_000
_PHASE_TIMEOUT_S: Final = 300.0
_POSITIONS_PAUSE_S: Final = 0.05
_SETTLE_S: Final = 2.0
_LEAD_S: Final = 4.0
_KILL_BEFORE_DUE_S: Final = 0.2
_STATE_STEPS: Final = 2


class Run:
    """One run: `measure` does it all. Needs a broker, and the topics of `settings` in place and empty."""

    def __init__(self, settings: "Settings", sizes: Sizes, on_progress: Callable[[str], None]) -> None:
        self._settings = settings
        self._sizes = sizes
        self._say = on_progress
        self._client = settings.client_config()
        self._upstream = Upstream(settings)
        self._agents = ChildAgents(settings, sizes.agents)
        self._reader = DueReader(self._client, settings.topics.due, settings.partitions)
        # The ends of the log itself: the last stable offset may lag behind a commit that has just returned.
        self._probe = Consumer({**reader_config(self._client), "isolation.level": "read_uncommitted"})
        self._due: dict[str, int] = {}
        self._received: list[Received] = []
        self._ingest_per_s = 1.0

    def measure(self) -> Figures:
        """All phases; raises `UnavailableError` if one does not end in time."""
        try:
            self._reader.start()
            self._say("Starting the agents")
            self._agents.start()
            self._agents.await_ready()
            self._warm_up()
            ingest = self._ingest()
            rss_bytes = self._agents.rss_bytes()
            drain = self._drain()
            lateness_ms = self._lateness()
            warm_s = self._restart("restart-warm", remove_tables=False)
            cold_s = self._restart("restart-cold", remove_tables=True)
            self._settle()
        finally:
            self._agents.stop()
            self._reader.stop()
        return self._figures(ingest, drain, lateness_ms, warm_s, cold_s, rss_bytes)

    # -- with the agent ----------------------------------------------------------------------------------------------

    def _warm_up(self) -> None:
        """Java compiles while it runs: what is measured first would pay for it."""
        self._say("Warming up")
        due_at_ms = _now_ms() + 3_000
        self._schedule("warm-up", [due_at_ms] * self._sizes.warm_up)
        self._receive()

    def _ingest(self) -> Stretch:
        sizes = self._sizes
        self._say(f"Ingest: {sizes.pending:,} events")
        starts = self._ends()
        far_ms = _now_ms() + _FAR_MS
        load = Load(
            prefix="pending", due_at_ms=range(far_ms, far_ms + sizes.pending), payload_bytes=sizes.payload_bytes
        )
        records = load.records()
        sent_s = self._upstream.send(records)
        self._ingest_per_s = sizes.pending / (self._await_applied() - sent_s)
        time.sleep(_SETTLE_S)
        return self._stretch(starts, [key for key, _ in records])

    def _drain(self) -> tuple[float, Stretch]:
        count = self._sizes.drain
        self._say(f"Drain: {count:,} tasks due at one instant")
        starts = self._ends()
        due_at_ms = _now_ms() + int((2 * count / self._ingest_per_s + count / 30_000 + _LEAD_S) * 1000)
        keys = self._schedule("drain", [due_at_ms] * count)
        if _now_ms() > due_at_ms:
            raise UnavailableError("the tasks of the drain phase were due before they were all scheduled")
        self._say(f"Drain: waiting for the instant, then receiving {count:,} tasks")
        last_ms = max(each.at_ms for each in self._receive())
        return count / ((last_ms - due_at_ms) / 1000), self._stretch(starts, keys)

    def _lateness(self) -> list[float]:
        sizes = self._sizes
        self._say(f"Lateness: {sizes.lateness_per_s:,} tasks a second for {sizes.lateness_s} s")
        count = sizes.lateness_per_s * sizes.lateness_s
        start_ms = _now_ms() + int((2 * count / self._ingest_per_s + count / 30_000 + _LEAD_S) * 1000)
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
        """Wait until the agent's tables have all that `task-events` has; the wall clock's seconds then."""
        ends = dict(enumerate(self._ends()))
        until_s = time.monotonic() + _PHASE_TIMEOUT_S
        while time.monotonic() < until_s:
            positions = self._agents.positions()
            if all(positions.get(partition, -1) >= end for partition, end in ends.items()):
                return time.time()
            time.sleep(_POSITIONS_PAUSE_S)
        raise UnavailableError(f"events were not applied within {_PHASE_TIMEOUT_S:g} s: see {self._agents.log_file}")

    def _ends(self) -> list[int]:
        topic = self._settings.topics.events
        return [
            self._probe.get_watermark_offsets(TopicPartition(topic, partition), cached=False)[1]
            for partition in range(self._settings.partitions)
        ]

    # -- without it --------------------------------------------------------------------------------------------------

    def _stretch(self, starts: list[int], keys: list[bytes]) -> Stretch:
        return Stretch(
            topic=self._settings.topics.events,
            starts=starts,
            counts=partition_sizes(keys, self._settings.partitions),
            transaction_records=self._settings.batch_records_max,
            outputs={},
        )

    def _ceilings(self, ingest: Stretch, drain: Stretch) -> tuple[float, float]:
        """The plain loop's rates over the same input and output bytes, into topics of the same settings."""
        self._say("Ceilings: collecting what the agent wrote")
        scratch = self._settings.model_copy(update={"topic_prefix": "ceiling."})
        apply_topics(scratch)
        scheduled, emitted = self._states()
        due = {each.key: each.value for each in self._received}
        self._say("Ceiling of ingest: the plain loop")
        outputs = {scratch.topics.state: {key: v for key, v in scheduled.items() if key.startswith(b"pending-")}}
        started_s, ended_s = PlainLoop(self._client, _writing(ingest, outputs), "ingest").run()
        ingest_per_s = sum(ingest.counts) / (ended_s - started_s)
        self._say("Ceiling of drain: the plain loop")
        outputs = {
            scratch.topics.state: {key: v for key, v in emitted.items() if key.startswith(b"drain-")},
            scratch.topics.due: {key: v for key, v in due.items() if key.startswith(b"drain-")},
        }
        reader = DueReader(self._client, scratch.topics.due, self._settings.partitions)
        reader.start()
        try:
            started_s, _ = PlainLoop(self._client, _writing(drain, outputs), "drain").run()
            reader.await_count(sum(drain.counts) + self._settings.partitions, _PHASE_TIMEOUT_S)
            last_ms = max(each.at_ms for each in reader.take() if each.key != WARM_UP_KEY)
        finally:
            reader.stop()
        return ingest_per_s, sum(drain.counts) / (last_ms / 1000 - started_s)

    def _states(self) -> tuple[dict[bytes, bytes], dict[bytes, bytes]]:
        """The first and the second row that the agent wrote of each task: scheduled, and emitted."""
        reader = DueReader(self._client, self._settings.topics.state, self._settings.partitions)
        reader.start()
        scheduled: dict[bytes, bytes] = {}
        emitted: dict[bytes, bytes] = {}
        wanted = self._sizes.pending + _STATE_STEPS * len(self._due)
        try:
            reader.await_count(wanted, _PHASE_TIMEOUT_S)
            for each in reader.take():
                if scheduled.setdefault(each.key, each.value) is not each.value:
                    emitted[each.key] = each.value
        finally:
            reader.stop()
        return scheduled, emitted

    # -- the result --------------------------------------------------------------------------------------------------

    def _figures(
        self,
        ingest: Stretch,
        drain: tuple[float, Stretch],
        lateness_ms: list[float],
        warm_s: float,
        cold_s: float,
        rss_bytes: int,
    ) -> Figures:
        drain_per_s, drain_stretch = drain
        ingest_ceiling, drain_ceiling = self._ceilings(ingest, drain_stretch)
        codec = AvroCodec()
        tasks = [codec.decode_due(each.value) for each in self._received]
        unique = {(task.task_id, task.generation, task.occurrence) for task in tasks}
        return Figures(
            ingest_per_s=round(self._ingest_per_s),
            ingest_ceiling_per_s=round(ingest_ceiling),
            ingest_ratio=round(self._ingest_per_s / ingest_ceiling, 3),
            drain_per_s=round(drain_per_s),
            drain_ceiling_per_s=round(drain_ceiling),
            drain_ratio=round(drain_per_s / drain_ceiling, 3),
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


def _writing(stretch: Stretch, outputs: dict[str, dict[bytes, bytes]]) -> Stretch:
    return Stretch(
        topic=stretch.topic,
        starts=stretch.starts,
        counts=stretch.counts,
        transaction_records=stretch.transaction_records,
        outputs=outputs,
    )
