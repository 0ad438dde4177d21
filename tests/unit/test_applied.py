"""The ledger's keys, digests and pauses, and a task as plain fields."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from pipeline.core.applied import belongs_to, group_fault, ledger_digest, ledger_key, retry_delay_ms
from pipeline.core.effects import DueTask
from pipeline.core.task_fields import task_fields
from pipeline.core.tasks import DurationMs, InstantMs

pytestmark = pytest.mark.unit

GROUPS = st.text(min_size=1, max_size=8).filter(lambda group: group_fault(group) is None)
IDENTITIES = st.tuples(
    GROUPS, st.text(alphabet="a0\x00:1", min_size=1, max_size=6), st.integers(0, 12), st.integers(0, 12)
)


def due(task_id: str = "t", generation: int = 1, occurrence: int = 0, attempt: int = 0) -> DueTask:
    """A due task."""
    return DueTask(
        task_id=task_id,
        generation=generation,
        occurrence=occurrence,
        attempt=attempt,
        emission_id="e",
        due_at_ms=InstantMs(1_000),
        fired_at_ms=InstantMs(1_250),
        payload=b"",
    )


@given(IDENTITIES, IDENTITIES)
@example(("g", "0\x00t", 1, 0), ("g", "t", 1, 0))
@example(("g", "t", 1, 11), ("g", "t", 11, 1))
def test_two_tasks_share_a_row_only_if_they_are_the_same(
    one: tuple[str, str, int, int], other: tuple[str, str, int, int]
) -> None:
    """A shared key would skip a task that was never applied."""
    assume(one != other)

    keys = [
        ledger_key(group, due(task_id, generation, occurrence))
        for group, task_id, generation, occurrence in (one, other)
    ]

    assert keys[0] != keys[1]
    assert ledger_digest(keys[0]) != ledger_digest(keys[1])


def test_attempts_of_an_occurrence_share_their_row() -> None:
    """An occurrence is applied once, whichever of its attempts got through."""
    assert ledger_key("g", due(attempt=0)) == ledger_key("g", due(attempt=3))


def test_a_row_belongs_to_its_group_alone() -> None:
    """`orders` must not take the rows of `orders-2` for its own."""
    key = ledger_key("orders-2", due())

    assert belongs_to("orders-2", key)
    assert not belongs_to("orders", key)
    assert not belongs_to("order", key)


@pytest.mark.parametrize("group", ["", "x" * 201, "a\0b", "a\nb"])
def test_a_group_that_cannot_name_a_ledger_is_refused(group: str) -> None:
    """A zero byte would make keys ambiguous."""
    assert group_fault(group) is not None


@pytest.mark.parametrize("group", ["orders", "aufträge v2", "x" * 200, "a.b-c_d"])
def test_ordinary_groups_are_accepted(group: str) -> None:
    """Whatever people call their services."""
    assert group_fault(group) is None


def test_pauses_double_up_to_their_bound() -> None:
    """Also after so many failures that doubling would overflow anything."""
    pauses = [retry_delay_ms(n, first_ms=DurationMs(200), max_ms=DurationMs(1_000)) for n in (1, 2, 3, 4, 10_000)]

    assert pauses == [200, 400, 800, 1_000, 1_000]


def test_fields_tell_text_from_bytes() -> None:
    """A payload that is no text must survive the way through JSON."""
    task = msgspec.structs.replace(due(), payload=b"\xff", headers={"a": b"x", "b": b"\xfe"}, content_type="image/png")

    assert task_fields(task, partition=3, offset=7, replay=True) == {
        "task_id": "t",
        "generation": 1,
        "occurrence": 0,
        "attempt": 0,
        "emission_id": "e",
        "due_at_ms": 1_000,
        "fired_at_ms": 1_250,
        "lateness_ms": 250,
        "payload_base64": "/w==",
        "content_type": "image/png",
        "headers": {"a": "x"},
        "headers_base64": {"b": "/g=="},
        "partition": 3,
        "offset": 7,
        "replay": True,
    }


def test_a_text_payload_stays_text() -> None:
    """What people schedule on a command line they want to read again."""
    fields = task_fields(msgspec.structs.replace(due(), payload="grüße".encode()), partition=0, offset=0, replay=False)

    assert fields["payload"] == "grüße"
    assert "payload_base64" not in fields
