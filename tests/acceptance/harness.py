"""Real agents on a real broker, for tests that watch them from outside: as processes, over Kafka and over HTTP.

A `Deployment` is one test's own corner of a broker: topics under a prefix of their own, a group, a folder. Its agents
are subprocesses that can be stopped, killed, frozen and thawed. Nothing here sleeps for a fixed time: `until` waits for
a condition, and tells what the agents logged if that never comes.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Final, Self
from urllib.parse import quote

import httpx
import msgspec
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    ResourceType,
)
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

from pipeline.adapters.avro_codec import AvroCodec
from pipeline.adapters.topic_setup import apply_topics
from pipeline.config import Settings, TopicNames
from pipeline.core.events import Cancel, Schedule
from pipeline.core.tasks import InstantMs, TaskId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from pipeline.core.effects import DeadTask, DueTask

PARTITIONS: Final = 2
READY_WITHIN_S: Final = 45.0
HTTP_TIMEOUT_S: Final = 5.0
_POLL_S: Final = 0.05
_END_WITHIN_S: Final = 30.0
_LOG_LINES: Final = 40
_STOP_S: Final = 20.0

# Short enough for a test, long enough for two busy cores.
AGENT_SETTINGS: Final[dict[str, object]] = {
    "session_timeout_ms": 4_000,
    "transaction_timeout_ms": 5_000,
    "http_port": 0,
    "log_format": "json",
}


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A record as it stands on a topic."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None


def now_ms() -> InstantMs:
    """The clock of this machine, which is the agents' clock too."""
    return InstantMs(time.time_ns() // 1_000_000)


def schedule(task_id: str, due_at_ms: int, **fields: Any) -> Schedule:  # noqa: ANN401 - handed on
    """An event that schedules a task at an instant."""
    return Schedule(task_id=TaskId(task_id), due_at_ms=InstantMs(due_at_ms), **fields)


def cancel(task_id: str, **fields: Any) -> Cancel:  # noqa: ANN401 - handed on
    """An event that cancels a task."""
    return Cancel(task_id=TaskId(task_id), **fields)


def end_offset(consumer: Consumer, topic: str, partition: int) -> int:
    """Where a partition ends, for the consumer's isolation level; asked again while its leader changes."""
    for attempt in Retrying(
        stop=stop_after_delay(_END_WITHIN_S),
        wait=wait_fixed(_POLL_S),
        retry=retry_if_exception_type((KafkaException, LookupError)),
        reraise=True,
    ):
        with attempt:
            if attempt.retry_state.attempt_number > 1:
                consumer.list_topics(topic, timeout=10)  # else it goes on asking the old leader
            end = consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=10)[1]
            if end < 0:
                raise LookupError(f"{topic}-{partition} answered {end}, which stands for not known")
    return int(end)


class Agent:
    """One agent process. Its data folder belongs to its name: started again, it finds its tables again."""

    def __init__(self, name: str, data_dir: Path, environment: dict[str, str], arguments: Iterable[str]) -> None:
        self.name = name
        self.data_dir = data_dir
        data_dir.mkdir(parents=True, exist_ok=True)
        self.log_file = data_dir / f"agent-{secrets.token_hex(3)}.log"
        self.is_frozen = False
        self._url: str | None = None
        self._http = httpx.Client(timeout=HTTP_TIMEOUT_S)
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pipeline.cli", "agent", *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    # -- the process -------------------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """Whether the process lives, frozen or not."""
        return self.process.poll() is None

    def kill(self) -> None:
        """End it with SIGKILL: no goodbye to the group, no commit, no flush."""
        self.process.kill()
        self.process.wait(_STOP_S)
        self._http.close()

    def stop(self) -> int:
        """End it as an operator does, and give its exit code."""
        self.process.terminate()
        self.process.send_signal(signal.SIGCONT)  # a frozen process keeps other signals for later
        try:
            return self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"agent {self.name} did not stop within {_STOP_S} s\n{self.log_tail()}") from None
        finally:
            self._http.close()

    def freeze(self) -> None:
        """SIGSTOP: it lives, holds its connections, and does nothing."""
        self.is_frozen = True
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT: it goes on as if no time had passed."""
        self.is_frozen = False
        self.process.send_signal(signal.SIGCONT)

    # -- what it says ------------------------------------------------------------------------------------------

    @property
    def url(self) -> str | None:
        """Where it answers, once it has announced that."""
        if self._url is None:
            for announced in self.data_dir.glob("agents/*/agent.json"):
                told = json.loads(announced.read_text("utf-8"))
                if told["pid"] == self.process.pid:
                    self._url = str(told["url"])
        return self._url

    def get(self, path: str, **query: str) -> httpx.Response | None:
        """The answer to a GET, or None while nobody answers."""
        if self.url is None:
            return None
        try:
            return self._http.get(self.url + path, params=query)
        except httpx.HTTPError:
            return None

    @property
    def is_ready(self) -> bool:
        """Whether it says that every partition that it owns is restored and fenced."""
        answer = self.get("/readyz")
        return answer is not None and answer.is_success

    def partitions(self) -> dict[int, dict[str, Any]]:
        """The partitions that it owns, each as `/readyz` shows it; empty while it does not answer."""
        answer = None if self.is_frozen else self.get("/readyz")
        return {} if answer is None else {status["partition"]: status for status in answer.json()["partitions"]}

    def status(self, task_id: str) -> dict[str, Any]:
        """A task as the agent tells it; empty if there is none, or if it can't tell now."""
        answer = self.get(f"/v1/tasks/{quote(task_id, safe='')}")
        return answer.json() if answer is not None and answer.is_success else {}

    def tasks(self) -> dict[str, dict[str, Any]]:
        """All tasks of all partitions by their ids, as the agent lists them; raises if it can't tell now."""
        found: dict[str, dict[str, Any]] = {}
        query: dict[str, str] = {"limit": "1000"}
        while True:
            answer = self.get("/v1/tasks", **query)
            assert answer is not None, f"agent {self.name} does not answer\n{self.log_tail()}"
            assert answer.is_success, f"{answer.text}\n{self.log_tail()}"
            page = answer.json()
            found |= {task["task_id"]: task for task in page["tasks"]}
            if page["next_page_token"] is None:
                return found
            query["page_token"] = page["next_page_token"]

    def log(self) -> list[dict[str, Any]]:
        """Its log so far, a mapping for each event; lines that are not JSON under `raw`."""
        return [_log_line(line) for line in self.log_file.read_text("utf-8", "replace").splitlines()]

    def logged(self, event: str) -> list[dict[str, Any]]:
        """What it logged under this event name."""
        return [line for line in self.log() if line.get("event") == event]

    @property
    def tables(self) -> Path:
        """The folder of its timer tables, one subfolder for each partition."""
        return self.data_dir / "agents" / "0" / "tables"

    def log_tail(self) -> str:
        """The end of its log, for a failure's message."""
        lines = self.log_file.read_text("utf-8", "replace").splitlines()[-_LOG_LINES:]
        state = "runs" if self.is_running else f"ended with {self.process.returncode}"
        return "\n".join([f"--- agent {self.name} ({state}), {self.log_file}", *lines])


class TopicReader:
    """Reads a topic from its first record on, `read_committed` as a consumer must; keeps all that it has seen."""

    def __init__(self, bootstrap_servers: str, topic: str, partition_count: int, *, isolation: str) -> None:
        self.records: list[Record] = []
        self._topic = topic
        self._positions = dict.fromkeys(range(partition_count), 0)
        self._consumer = Consumer(
            {
                "bootstrap.servers": bootstrap_servers,
                "group.id": f"reader-{secrets.token_hex(4)}",
                "isolation.level": isolation,
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "enable.partition.eof": True,
                "fetch.wait.max.ms": 50,
                "log_level": 0,  # a broker that a test kills is no news
            }
        )
        self._consumer.assign([TopicPartition(topic, partition, 0) for partition in range(partition_count)])

    def catch_up(self, within_s: float = 30.0) -> list[Record]:
        """All records up to what is the end now, in the order of each partition."""
        until_s = time.monotonic() + within_s
        ends = {partition: self._end(partition) for partition in self._positions}
        while any(self._positions[partition] < end for partition, end in ends.items()):
            assert time.monotonic() < until_s, f"{self._topic}: at {self._positions} of {ends} after {within_s} s"
            for message in self._consumer.consume(10_000, 0.1):
                self._take(message)
        return self.records

    def close(self) -> None:
        """Let go of the connection."""
        self._consumer.close()

    def _end(self, partition: int) -> int:
        return end_offset(self._consumer, self._topic, partition)

    def _take(self, message: Any) -> None:  # noqa: ANN401 - confluent's message
        error, partition, offset = message.error(), message.partition(), message.offset()
        if error is None:
            self._positions[partition] = offset + 1
            self.records.append(
                Record(
                    topic=self._topic,
                    partition=partition,
                    offset=offset,
                    timestamp_ms=message.timestamp()[1],
                    key=message.key(),
                    value=message.value(),
                )
            )
        elif error.code() == KafkaError._PARTITION_EOF:
            self._positions[partition] = max(self._positions[partition], offset)
        elif not error.retriable() and error.code() not in {KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN}:
            raise KafkaException(error)


class Deployment:
    """One test's topics, group, folder and agents; `close` ends all of it."""

    def __init__(self, bootstrap_servers: str, folder: Path, **settings: object) -> None:
        name = f"t{secrets.token_hex(4)}"
        self.folder = folder
        self._chosen = {
            **AGENT_SETTINGS,
            "bootstrap_servers": bootstrap_servers,
            "topic_prefix": f"{name}.",
            "group_id": name,
            "partitions": PARTITIONS,
            **settings,
        }
        self.settings = Settings(**self._chosen)  # type: ignore[arg-type]  # pydantic validates
        self.topics = TopicNames(self.settings.topic_prefix)
        self.codec = AvroCodec()
        self.agents: list[Agent] = []
        self._readers: dict[str, TopicReader] = {}
        self._producer: Producer | None = None
        self.admin = AdminClient({**self.settings.client_config(), "log_level": 0})
        self.create_topics()

    def create_topics(self) -> None:
        """Create the topics that are missing, as `duetasks topics apply` does."""
        apply_topics(self.settings)

    def recreate_topic(self, topic: str) -> None:
        """Delete a topic and create it anew, empty, under the same name."""
        self.admin.delete_topics([topic], operation_timeout=10)[topic].result(15)
        self.until(lambda: topic not in self.admin.list_topics(timeout=5).topics, within_s=15, what=f"{topic} is gone")
        self.create_topics()

    def add_partitions(self, topics: Iterable[str], count: int) -> None:
        """Raise the partition count of topics, as somebody who does not know better."""
        for future in self.admin.create_partitions([NewPartitions(topic, count) for topic in topics]).values():
            future.result(15)

    def alter_topic(self, topic: str, **settings: object) -> None:
        """Change settings of a topic; `_` stands for the dot in their names."""
        entries = [
            ConfigEntry(name.replace("_", "."), str(value), incremental_operation=AlterConfigOpType.SET)
            for name, value in settings.items()
        ]
        resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=entries)
        self.admin.incremental_alter_configs([resource])[resource].result(15)

    # -- agents ------------------------------------------------------------------------------------------------

    def start_agent(self, name: str = "a", *arguments: str, ready: bool = True, **settings: object) -> Agent:
        """Start an agent in the folder of `name`, and wait until it is ready, unless told otherwise."""
        agent = Agent(name, self.folder / name, self.environment(name, **settings), arguments)
        self.agents.append(agent)
        if ready:
            self.await_ready()
        return agent

    def environment(self, name: str, **settings: object) -> dict[str, str]:
        """The variables of a process of this deployment, with the data folder of `name`."""
        chosen = {**self._chosen, "data_dir": self.folder / name, **settings}
        environment = {key: value for key, value in os.environ.items() if not key.startswith("DUETASKS_")}
        return environment | {f"DUETASKS_{key.upper()}": _as_variable(value) for key, value in chosen.items()}

    def await_ready(self, within_s: float = READY_WITHIN_S) -> None:
        """Wait until the running agents together own every partition, restored and fenced, and each answers."""

        def ready() -> bool:
            active: Counter[int] = Counter()
            awake = [agent for agent in self.running() if not agent.is_frozen]
            if not all(agent.is_ready for agent in awake):
                return False
            for agent in awake:
                active.update(n for n, status in agent.partitions().items() if status["phase"] == "ACTIVE")
            return active == Counter(range(self.settings.partitions))

        self.until(ready, within_s=within_s, what="every partition is active on one agent")

    def running(self) -> list[Agent]:
        """The agents whose process lives."""
        return [agent for agent in self.agents if agent.is_running]

    # -- Kafka -------------------------------------------------------------------------------------------------

    @property
    def producer(self) -> Producer:
        """An upstream as it should be: acknowledged by all replicas, Java's partitioner."""
        if self._producer is None:
            self._producer = self.new_producer()
        return self._producer

    def new_producer(self, **options: object) -> Producer:
        """An upstream with options of its own."""
        usual = {
            "acks": "all",
            "enable.idempotence": True,
            "partitioner": "murmur2_random",
            "linger.ms": 2,
            "message.max.bytes": 8_000_000,  # the topic decides what is too large
            "log_level": 0,  # a broker that a test kills is no news
        }
        return Producer({**self.settings.client_config(), **usual, **options})

    def send(self, *events: Schedule | Cancel, producer: Producer | None = None) -> list[tuple[int, int]]:
        """Send events in order; returns the partition and offset of each, once all are acknowledged."""
        producer = producer or self.producer
        places: dict[int, tuple[int, int]] = {}

        def report(number: int) -> Callable[[KafkaError | None, Any], None]:
            def note(error: KafkaError | None, message: Any) -> None:  # noqa: ANN401 - confluent's message
                assert error is None, f"event {number} was not acknowledged: {error}"
                places[number] = (message.partition(), message.offset())

            return note

        for number, event in enumerate(events):
            value = self.codec.encode_event(event)
            while True:
                try:
                    producer.produce(self.topics.events, value, event.task_id.encode(), on_delivery=report(number))
                    break
                except BufferError:
                    producer.poll(0.1)
        producer.flush(30)
        assert len(places) == len(events), f"{len(events) - len(places)} events were not acknowledged"
        return [places[number] for number in range(len(events))]

    def reader(self, topic: str, *, isolation: str = "read_committed") -> TopicReader:
        """The reader of a topic; the same one for each call."""
        if topic not in self._readers:
            servers = self.settings.bootstrap_servers
            assert servers is not None
            self._readers[topic] = TopicReader(servers, topic, self.settings.partitions, isolation=isolation)
        return self._readers[topic]

    def count(self, topic: str) -> int:
        """How many records a topic has now; what was compacted away is not among them."""
        servers = self.settings.bootstrap_servers
        assert servers is not None
        reader = TopicReader(servers, topic, self.settings.partitions, isolation="read_committed")
        try:
            return len(reader.catch_up())
        finally:
            reader.close()

    def end_offsets(self, *topics: str) -> dict[tuple[str, int], int]:
        """Where these topics end, markers included."""
        consumer = Consumer({**self.settings.client_config(), "group.id": "ends"})
        try:
            return {
                (topic, partition): end_offset(consumer, topic, partition)
                for topic in topics
                for partition in range(self.settings.partitions)
            }
        finally:
            consumer.close()

    def group_is_at_the_end(self) -> bool:
        """Whether the agents' group has committed the end of every partition of `task-events`, for its observers."""
        places = [TopicPartition(self.topics.events, n) for n in range(self.settings.partitions)]
        client = {**self.settings.client_config(), "group.id": self.settings.group_id, "enable.auto.commit": False}
        observer = Consumer(client)
        try:
            committed = observer.committed(places, timeout=10)
            return all(place.offset == end_offset(observer, place.topic, place.partition) for place in committed)
        finally:
            observer.close()

    def due(self) -> list[DueTask]:
        """All due tasks so far, as a consumer sees them."""
        return [self.codec.decode_due(record.value) for record in self._values(self.topics.due)]

    def dead(self) -> list[DeadTask]:
        """All that was set aside so far."""
        return [self.codec.decode_dead(record.value) for record in self._values(self.topics.dead)]

    def _values(self, topic: str) -> list[Any]:
        return self.reader(topic).catch_up()

    # -- waiting -----------------------------------------------------------------------------------------------

    def until(self, condition: Callable[[], object], *, within_s: float, what: str) -> None:
        """Wait until `condition` holds; fails with `what` and the agents' logs when the time is over."""
        until_s = time.monotonic() + within_s
        while not condition():
            if time.monotonic() >= until_s:
                raise AssertionError(f"not within {within_s:g} s: {what}\n{self.logs()}")
            time.sleep(_POLL_S)

    def await_due(self, task_ids: Iterable[str], within_s: float = 30.0) -> list[DueTask]:
        """Wait until each of these was emitted at least once; returns all that was emitted."""
        wanted = set(task_ids)

        def missing() -> set[str]:
            return wanted - {task.task_id for task in self.due()}

        self.until(lambda: not missing(), within_s=within_s, what=f"{len(wanted)} due tasks are out")
        return self.due()

    def await_status(self, task_id: str, status: str, within_s: float = 30.0) -> None:
        """Wait until some agent says that the task has this status."""

        def has_it() -> bool:
            return any(agent.status(task_id).get("status") == status for agent in self.running())

        self.until(has_it, within_s=within_s, what=f"{task_id} is {status}")

    def await_clock(self, instant_ms: int) -> None:
        """Wait until the clock has passed an instant."""
        left_s = max(0, instant_ms - now_ms()) / 1000
        self.until(lambda: now_ms() > instant_ms, within_s=left_s + 5, what="the clock goes on")

    def pass_instant(self, instant_ms: int, within_s: float = 60.0) -> list[DueTask]:
        """Wait until every partition has demonstrably fired what was due at `instant_ms`; returns all due tasks.

        Timers of a partition fire in the order of their instants, so a marker that is due later and has fired proves
        that whatever was due earlier had its turn.
        """
        markers = [
            schedule(marker, instant_ms + 1)
            for marker in (f"marker-{secrets.token_hex(4)}-{n}" for n in range(16 * self.settings.partitions))
        ]
        places = self.send(*markers)
        assert {partition for partition, _ in places} == set(range(self.settings.partitions)), "a marker for each"
        self.await_due([marker.task_id for marker in markers], within_s)
        return self.fired()

    def fired(self) -> list[DueTask]:
        """All due tasks so far, without the markers of `pass_instant`."""
        return [task for task in self.due() if not task.task_id.startswith("marker-")]

    # -- the end -----------------------------------------------------------------------------------------------

    def logs(self) -> str:
        """The ends of all agents' logs."""
        return "\n".join(agent.log_tail() for agent in self.agents)

    def close(self) -> None:
        """End agents and connections, whatever state they are in."""
        for agent in self.running():
            agent.kill()
        for reader in self._readers.values():
            reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def assert_fired_once(due: Iterable[DueTask], task_ids: Iterable[str]) -> None:
    """Exactly these tasks came out, each once and none before its time."""
    tasks = list(due)
    counts = Counter(task.task_id for task in tasks)
    wanted = set(task_ids)
    doubled = {task_id: count for task_id, count in counts.items() if count > 1}
    early = [task for task in tasks if task.fired_at_ms < task.due_at_ms]

    assert not doubled, f"fired more than once: {doubled}"
    assert not early, f"fired early: {[(task.task_id, task.due_at_ms, task.fired_at_ms) for task in early]}"
    assert set(counts) == wanted, (
        f"missing {sorted(wanted - set(counts))[:9]}, surplus {sorted(set(counts) - wanted)[:9]}"
    )


def _as_variable(value: object) -> str:
    """A setting as the environment holds it: several values are a JSON array."""
    return json.dumps(sorted(value)) if isinstance(value, frozenset) else str(value)


def _log_line(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        return {"raw": line}
    return found if isinstance(found, dict) else {"raw": line}
