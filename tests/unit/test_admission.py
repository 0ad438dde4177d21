"""Admission: each record of `task-events` becomes an event, or a rejection that names the first rule it breaks."""

from __future__ import annotations

import msgspec
import pytest

from pipeline.adapters.avro_codec import AvroCodec
from pipeline.core.events import DAY_MS, Cancel, Event, Limits, Reason, Rejection, Schedule
from pipeline.core.partitioning import partition_for_key
from pipeline.core.tasks import Tracking
from pipeline.service.admission import Admission, event_size

pytestmark = pytest.mark.unit

NOW_MS = 1_764_496_800_000
PARTITIONS = 4


class _Record(msgspec.Struct, frozen=True):
    key: bytes | None
    value: bytes | None
    offset: int = 17
    timestamp: int = NOW_MS


def _admission(key: bytes | None = b"t", *, check_partition: bool = False, **limits: object) -> Admission:
    return Admission(
        AvroCodec().decode_event,
        limits=Limits(**limits),
        partition=0 if key is None else partition_for_key(key, PARTITIONS),
        partition_count=PARTITIONS,
        check_partition=check_partition,
    )


def _admit(event: Event, key: bytes | None = None, **limits: object) -> Event | Rejection:
    key = event.task_id.encode() if key is None else key
    return _admission(key, **limits).admit(_Record(key, AvroCodec().encode_event(event)))


def _refused(result: Event | Rejection) -> tuple[Reason, str | None]:
    assert isinstance(result, Rejection), f"admitted: {result}"
    assert result.message
    return result.reason, result.task_id


@pytest.mark.parametrize(
    "event",
    [
        Schedule(task_id="t", delay_ms=0),
        Schedule(task_id="ordre-é-📦" * 20, due_at_ms=NOW_MS + 3_653 * DAY_MS),
        Schedule(task_id="t", due_at_ms=NOW_MS - 366 * DAY_MS, headers={"trace": b"1"}, target_topic="due-tasks"),
        Schedule(task_id="t", delay_ms=5, version=2**63 - 1),
        Cancel(task_id="t", event_id="e" * 256, version=1),
    ],
)
def test_what_keeps_the_rules_is_admitted_unchanged(event: Event) -> None:
    """The bounds themselves are inside."""
    assert _admit(event) == event


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (Schedule(task_id="t"), Reason.MISSING_TIME),
        (Schedule(task_id="t", due_at_ms=NOW_MS, delay_ms=1), Reason.TWO_TIMES),
        (
            Schedule(task_id="t", delay_ms=1, tracking=Tracking(lease_ms=1, attempts_max=1, backoff_ms=1)),
            Reason.INVALID_FIELD,
        ),
        (Schedule(task_id="t", due_at_ms=1_764_496_800), Reason.IMPLAUSIBLE_TIME),
        (Schedule(task_id="t", due_at_ms=NOW_MS - 366 * DAY_MS - 1), Reason.IMPLAUSIBLE_TIME),
        (Schedule(task_id="t", delay_ms=-2), Reason.IMPLAUSIBLE_TIME),
        (Schedule(task_id="t", due_at_ms=NOW_MS + 3_653 * DAY_MS + 1), Reason.BEYOND_HORIZON),
        (Schedule(task_id="t", delay_ms=2**63 - 1), Reason.BEYOND_HORIZON),
        (Schedule(task_id="t", delay_ms=1, version=-1), Reason.INVALID_VERSION),
        (Schedule(task_id="t", delay_ms=1, event_id="e" * 257), Reason.EVENT_ID_LENGTH),
        (Schedule(task_id="t", delay_ms=1, target_topic="task-state"), Reason.UNKNOWN_TARGET),
        (Schedule(task_id="t", delay_ms=1, target_topic="x" * 900_000), Reason.UNKNOWN_TARGET),
        (Schedule(task_id="t", delay_ms=1, headers={"Duetasks-x": b""}), Reason.RESERVED_HEADER),
        (Cancel(task_id="t", version=-(2**63)), Reason.INVALID_VERSION),
    ],
)
def test_the_rules_of_the_core_are_judged_against_the_append_time(event: Event, reason: Reason) -> None:
    """Judged against now, a replay would give other answers than the first reading did."""
    result = _admit(event)

    assert _refused(result) == (reason, "t")
    assert len(result.message) <= 500


@pytest.mark.parametrize("task_id", ["", "x" * 1_025, "é" * 513])
def test_an_id_of_a_wrong_length_is_refused_and_makes_no_row(task_id: str) -> None:
    """The verdict can't be noted: a row under such an id is what the rule forbids."""
    assert _refused(_admit(Cancel(task_id=task_id, version=5))) == (Reason.TASK_ID_LENGTH, None)


def test_a_null_key_is_refused() -> None:
    """Without a key the record stands in any partition, so its cancel would miss it."""
    record = _Record(None, AvroCodec().encode_event(Cancel(task_id="t")))

    assert _refused(_admission(None).admit(record)) == (Reason.NULL_KEY, None)


def test_a_null_value_is_refused_and_told_to_the_task() -> None:
    """A tombstone says nothing about who, when and why; whoever meant it as a cancel must find that it was none."""
    assert _refused(_admission().admit(_Record(b"t", None))) == (Reason.NULL_VALUE, "t")


@pytest.mark.parametrize("value", [None, b"x"])
def test_a_key_that_is_not_utf_8_is_refused(value: bytes | None) -> None:
    """Ids are text everywhere else."""
    reason, task_id = _refused(_admission(b"\xff\xfe").admit(_Record(b"\xff\xfe", value)))

    assert task_id is None
    assert reason is (Reason.NULL_VALUE if value is None else Reason.INVALID_KEY)


@pytest.mark.parametrize("value", [None, AvroCodec().encode_event(Cancel(task_id="\x00positions", version=9))])
def test_a_key_that_starts_with_a_zero_byte_makes_no_row(value: bytes | None) -> None:
    """It is the positions record's: a row of that name would overwrite what the owner knows about the table."""
    _, task_id = _refused(_admission(b"\x00positions").admit(_Record(b"\x00positions", value)))

    assert task_id is None


def test_reserved_keys_are_named_as_such() -> None:
    """The sentence tells the author to choose another id."""
    record = _Record(b"\x00t", AvroCodec().encode_event(Cancel(task_id="\x00t")))

    assert _refused(_admission(b"\x00t").admit(record))[0] is Reason.RESERVED_KEY


def test_a_key_that_differs_from_the_task_is_noted_for_neither() -> None:
    """Either could be meant."""
    assert _refused(_admit(Cancel(task_id="t", version=4), key=b"u")) == (Reason.KEY_MISMATCH, None)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"", Reason.MALFORMED),
        (b"hello", Reason.MALFORMED),
        (b"\xc3\x01", Reason.MALFORMED),
        (b"\xc3\x01" + bytes(8), Reason.UNKNOWN_SCHEMA),
        (AvroCodec().encode_event(Cancel(task_id="t"))[:-1], Reason.MALFORMED),
        (AvroCodec().encode_event(Cancel(task_id="t")) + b"\x00", Reason.MALFORMED),
        (b"\x00\x00\x00\x00\x07rest", Reason.UNKNOWN_SCHEMA),
        (b'{"type": "CANCEL"', Reason.MALFORMED),
        (b'{"type": "CANCEL", "task_id": "t", "x": 1}', Reason.UNKNOWN_FIELD),
    ],
)
def test_a_value_that_is_no_event_is_told_to_the_task_that_the_key_names(value: bytes, reason: Reason) -> None:
    """The key is the task's id by contract, so its author can find the refusal."""
    assert _refused(_admission().admit(_Record(b"t", value))) == (reason, "t")


def test_the_confluent_framing_is_told_that_there_is_no_registry() -> None:
    """Whoever sends it has a registry in mind."""
    rejection = _admission().admit(_Record(b"t", b"\x00\x00\x00\x00\x07rest"))

    assert isinstance(rejection, Rejection)
    assert "no schema registry is configured" in rejection.message


def test_a_value_that_names_another_task_is_noted_for_neither() -> None:
    """It is refused for its field, but the key does not say whose it is."""
    record = _Record(b"t", b'{"type": "CANCEL", "task_id": "u", "x": 1}')

    assert _refused(_admission().admit(record)) == (Reason.UNKNOWN_FIELD, None)


def test_a_refusal_in_a_partition_that_is_not_the_key_s_makes_no_row() -> None:
    """The row would be a second one of the same task, in a table that nobody asks."""
    stray = Admission(
        AvroCodec().decode_event,
        limits=Limits(),
        partition=(partition_for_key(b"t", PARTITIONS) + 1) % PARTITIONS,
        partition_count=PARTITIONS,
    )
    value = AvroCodec().encode_event(Schedule(task_id="t", version=5))

    assert _refused(stray.admit(_Record(b"t", value))) == (Reason.MISSING_TIME, None)


def test_a_stray_is_refused_only_where_that_is_asked_for() -> None:
    """An owner checks only the keys that are new to it, as the check costs as much as all the others."""
    ours = partition_for_key(b"t", PARTITIONS)
    record = _Record(b"t", AvroCodec().encode_event(Cancel(task_id="t")))

    for partition in range(PARTITIONS):
        for check in (False, True):
            admission = Admission(
                AvroCodec().decode_event,
                limits=Limits(),
                partition=partition,
                partition_count=PARTITIONS,
                check_partition=check,
            )
            result = admission.admit(record)
            if check and partition != ours:
                assert _refused(result) == (Reason.WRONG_PARTITION, None)
            else:
                assert result == Cancel(task_id="t")


def test_size_is_key_and_value_and_headers_once_more() -> None:
    """The due task carries headers in its value and as Kafka headers: it must fit its topic too."""
    event = Schedule(task_id="t", delay_ms=1, payload=b"x" * 100, headers={"é": b"12345"})
    size = len(AvroCodec().encode_event(event)) + len(b"t") + len("é".encode()) + 5

    assert _admit(event, event_bytes_max=size) == event
    assert _refused(_admit(event, event_bytes_max=size - 1)) == (Reason.TOO_LARGE, "t")
    assert event_size(1, 2, event.headers) == 10


def test_a_version_that_no_row_can_hold_is_left_out_of_the_rejection() -> None:
    """The owner notes the version of a refused event: one beyond 64 bits would make the row unwritable."""
    rejection = _admission().admit(_Record(b"t", b'{"type": "CANCEL", "task_id": "t", "version": 9223372036854775808}'))

    assert _refused(rejection) == (Reason.INVALID_VERSION, "t")
    assert rejection.version == 0


def test_the_version_and_id_of_a_refused_event_are_kept() -> None:
    """Every event with a version counts, whatever its verdict; and its author looks for its id."""
    rejection = _admit(Schedule(task_id="t", version=5, event_id="e"))

    assert isinstance(rejection, Rejection)
    assert (rejection.version, rejection.event_id) == (5, "e")
