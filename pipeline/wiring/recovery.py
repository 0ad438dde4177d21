"""Puts rebuilds together: what `duetasks rebuild` runs."""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
from confluent_kafka.admin import AdminClient

from pipeline.adapters.agent_slot import AgentSlot, running_agents
from pipeline.adapters.avro_codec import AvroCodec
from pipeline.adapters.group_members import group_members
from pipeline.adapters.kafka_admin import KafkaAdmin
from pipeline.adapters.kafka_ledger import LibrdkafkaLog
from pipeline.adapters.kafka_offsets import KafkaOffsets
from pipeline.adapters.kafka_partition_log import KafkaPartitionLog
from pipeline.adapters.kafka_state_log import KafkaStateLog
from pipeline.adapters.recovery_producers import REBUILD_TIMEOUT_MS, KafkaLongTransaction
from pipeline.adapters.rocksdb_timer_table import RocksdbTableStore
from pipeline.adapters.scratch_folder import scratch_folder
from pipeline.adapters.system_clock import SystemClock
from pipeline.config import Settings
from pipeline.core.tasks import DurationMs, Partition
from pipeline.errors import FencedError, NotFoundError, RefusedError, TopicMismatchError, UsageError
from pipeline.service.admission import Admission
from pipeline.service.owner.settings import OwnerSettings
from pipeline.service.owner.table_refresh import StateContent, read_content, refresh_table
from pipeline.service.recovery.ports import RebuildOutside
from pipeline.service.recovery.rebuilder import Rebuilder, RebuildReport

__all__ = [
    "TableReport",
    "agents_in_the_way",
    "rebuild_from_events",
    "rebuild_from_state",
]

LOCK_WAIT_MS: Final = 5_000

Progress = Callable[[str, int, int], None]
"""Hears what is being done, how far it is, and how much it is."""


class TableReport(msgspec.Struct, frozen=True, kw_only=True):
    """One local table: how many rows `task-state` has for it, what they reflect, and where the old one went."""

    slot: str
    partition: int
    rows: int
    state_end: int
    position: int | None
    put_aside: str | None = None


# -- from state ------------------------------------------------------------------------------------------------


def rebuild_from_state(
    settings: Settings,
    *,
    partition: int | None,
    confirm: Callable[[list[TableReport]], bool],
    on_progress: Progress,
) -> list[TableReport]:
    """Rebuild the local tables of the data folder; what was done, or would be if `confirm` says no.

    Raises `NotFoundError` (no tables), `RefusedError` (agents run on the folder), `UnavailableError`,
    `CorruptStateError` (it took longer than the topic keeps deletions).
    """
    with _threads() as threads:
        return asyncio.run(_from_state(settings, partition, confirm, on_progress, threads))


async def _from_state(
    settings: Settings,
    partition: int | None,
    confirm: Callable[[list[TableReport]], bool],
    on_progress: Progress,
    threads: ThreadPoolExecutor,
) -> list[TableReport]:
    client, topic, codec = settings.client_config(), settings.topics.state, AvroCodec()
    log, state_log = KafkaPartitionLog(client), KafkaStateLog(client, topic, threads)
    places = [(folder, number) for folder, number in _local_tables(settings.data_dir) if partition in {None, number}]
    if not places:
        raise NotFoundError(f"There are no local tables to rebuild in {settings.data_dir}.")
    contents: dict[int, StateContent] = {}
    for number in sorted({number for _, number in places}):
        end = (await log.bounds(topic, number)).end
        told = partial(on_progress, f"Reading task-state, partition {number}")
        contents[number] = await read_content(state_log, codec, number, end, told)
    reports = [_table_report(settings, folder, number, contents[number]) for folder, number in places]
    if not confirm(reports):
        return reports
    deletions_kept_ms = int(KafkaAdmin(client).topics([topic])[topic].settings["delete.retention.ms"])
    slots = AgentSlot.hold_all(settings.data_dir)
    try:
        for at, (folder, number) in enumerate(places):
            store = RocksdbTableStore(folder, memory_bytes=settings.table_memory_bytes, lock_wait_ms=LOCK_WAIT_MS)
            told = partial(on_progress, f"Restoring partition {number}")
            aside = await refresh_table(
                store,
                state_log,
                codec,
                contents[number],
                partition=number,
                clock=SystemClock(),
                deletions_kept_ms=deletions_kept_ms,
                on_progress=told,
            )
            reports[at] = msgspec.structs.replace(reports[at], put_aside=aside)
    finally:
        for slot in slots:
            slot.release()
    return reports


def _local_tables(data_dir: Path) -> Iterator[tuple[Path, int]]:
    for table in sorted(data_dir.glob("agents/*/tables/*")):
        if table.is_dir() and table.name.isdecimal():
            yield table.parent, int(table.name)


def _table_report(settings: Settings, folder: Path, number: int, content: StateContent) -> TableReport:
    inputs = content.positions.inputs if content.positions is not None else {}
    place = inputs.get(settings.topics.events)
    return TableReport(
        slot=folder.parent.name,
        partition=number,
        rows=content.rows,
        state_end=content.end,
        position=None if place is None else place.position,
    )


# -- from events -----------------------------------------------------------------------------------------------


def agents_in_the_way(settings: Settings) -> list[str]:
    """The agents that must be stopped before anything is written; raises `UnavailableError`."""
    members = group_members(settings.client_config(), settings.group_id)
    local = [f"process {agent.pid} at {agent.url}" for agent in running_agents(settings.data_dir)]
    return members or local


def rebuild_from_events(
    settings: Settings,
    *,
    partition: int | None,
    confirm: Callable[[list[RebuildReport]], bool],
    on_progress: Progress,
) -> list[RebuildReport]:
    """Rebuild `task-state` from the other topics; what was done, or would be if `confirm` says no.

    Raises `RefusedError` (agents run, one started, or the topics changed meanwhile), `TopicMismatchError`,
    `UnavailableError`, `UnknownOutcomeError`. Partitions are written one by one: those before the failed one are done.
    """
    with _threads() as threads, scratch_folder(settings.data_dir, "rebuild") as scratch:
        return asyncio.run(_from_events(settings, partition, confirm, on_progress, threads, scratch))


async def _from_events(
    settings: Settings,
    partition: int | None,
    confirm: Callable[[list[RebuildReport]], bool],
    on_progress: Progress,
    threads: ThreadPoolExecutor,
    scratch: Path,
) -> list[RebuildReport]:
    work = [
        (number, _rebuilder(settings, number, count, on_progress, threads, scratch))
        for number, count in _wanted(settings, partition)
    ]
    try:
        reports = [await rebuilder.plan() for _, rebuilder in work]
        if not confirm(reports):
            return reports
        refuse_if_agents_run(settings)
        for (number, rebuilder), report in zip(work, reports, strict=True):
            await _write(number, rebuilder, report)
        return reports
    finally:
        for _, rebuilder in work:
            rebuilder.close()


async def _write(number: int, rebuilder: Rebuilder, report: RebuildReport) -> None:
    try:
        await rebuilder.write(report)
    except FencedError as error:
        raise RefusedError(
            f"An agent started meanwhile and owns partition {number}, which stays as it was: stop the agents, then "
            "rebuild again."
        ) from error


def refuse_if_agents_run(settings: Settings) -> None:
    """Raise `RefusedError` if somebody could own the partitions."""
    members = agents_in_the_way(settings)
    if members:
        raise RefusedError(
            f"Agents run in group {settings.group_id} ({', '.join(members[:3])}): stop all of them first. One that was "
            f"killed leaves the group after {settings.session_timeout_ms / 1000:g} s."
        )


def _wanted(settings: Settings, partition: int | None) -> Iterable[tuple[int, int]]:
    """The partitions to work on, each with their count."""
    events = settings.topics.events
    found = KafkaAdmin(settings.client_config()).identity([events]).topics.get(events)
    if found is None:
        raise TopicMismatchError(f"Topic {events} does not exist: there is nothing to rebuild from.")
    if partition is not None and partition >= found.partition_count:
        raise UsageError(f"There is no partition {partition}: {events} has {found.partition_count}.")
    numbers = range(found.partition_count) if partition is None else [partition]
    return [(number, found.partition_count) for number in numbers]


def _rebuilder(
    settings: Settings, number: int, count: int, on_progress: Progress, threads: ThreadPoolExecutor, scratch: Path
) -> Rebuilder:
    client, codec, topics = settings.client_config(), AvroCodec(), settings.topics
    offsets = KafkaOffsets(AdminClient({**client, "logger": LibrdkafkaLog()}))
    outside = RebuildOutside(
        clock=SystemClock(),
        codec=codec,
        cluster=KafkaAdmin(client),
        log=KafkaPartitionLog(client),
        state_log=KafkaStateLog(client, topics.state, threads),
        scratch=lambda name: RocksdbTableStore(
            scratch / name, memory_bytes=settings.table_memory_bytes // (2 * count), lock_wait_ms=0
        ),
        transaction=lambda transactional_id: KafkaLongTransaction(
            client,
            transactional_id=transactional_id,
            partition=number,
            state_topic=topics.state,
            own_topics=frozenset({topics.state, topics.due, topics.dead}),
            transaction_timeout_ms=REBUILD_TIMEOUT_MS,
            executor=threads,
            is_open=lambda topic: offsets.is_open(topic, number),
        ),
    )
    owner = OwnerSettings(
        partition=Partition(number),
        owner="rebuild",
        events_topic=topics.events,
        state_topic=topics.state,
        due_topic=topics.due,
        dead_topic=topics.dead,
        target_topics=settings.target_topics,
        limits=settings.limits,
        retention_ms=DurationMs(settings.retention_ms),
    )
    admission = Admission(codec.decode_event, limits=settings.limits, partition=number, partition_count=count)
    told = partial(on_progress, f"Partition {number}")
    return Rebuilder(owner, outside, admit=admission.admit, on_progress=told)


@contextmanager
def _threads() -> Iterator[ThreadPoolExecutor]:
    threads = ThreadPoolExecutor(8, thread_name_prefix="recovery")
    try:
        yield threads
    finally:
        threads.shutdown(wait=True)
