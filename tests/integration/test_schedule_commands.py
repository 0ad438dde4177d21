"""`duetasks schedule`, `cancel` and `import` on a real broker, and a stand-in for the agent that tells verdicts."""

from __future__ import annotations

import io
import json
import sys
import threading
import uuid
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from pipeline.adapters.avro_codec import AvroCodec
from pipeline.cli.app import run
from pipeline.config import Settings
from pipeline.core.events import Cancel, Event, Rejection, Schedule
from pipeline.errors import EXIT_NOT_FOUND, EXIT_REFUSED, EXIT_UNAVAILABLE, EXIT_USAGE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.conftest import BrokerUnderTest

pytestmark = pytest.mark.integration

_TIMEOUT_S = 20

Emitted = dict[str, Any]


@pytest.fixture
def settings(broker: BrokerUnderTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Settings]:
    """A topic of one partition of one's own, for this process and the commands that it runs."""
    monkeypatch.setenv("DUETASKS_BOOTSTRAP_SERVERS", broker.bootstrap_servers)
    monkeypatch.setenv("DUETASKS_TOPIC_PREFIX", f"commands-{uuid.uuid4().hex[:8]}-")
    monkeypatch.setenv("DUETASKS_DATA_DIR", str(tmp_path / "data"))
    settings = Settings()
    topic, admin = settings.topics.events, AdminClient(settings.client_config())
    new = NewTopic(topic, num_partitions=1, config={"message.timestamp.type": "LogAppendTime"})
    admin.create_topics([new])[topic].result(_TIMEOUT_S)
    while topic not in admin.list_topics(timeout=_TIMEOUT_S).topics:
        pass  # the controller answers before the broker knows
    yield settings
    admin.delete_topics([topic])[topic].result(_TIMEOUT_S)


@pytest.fixture
def events(settings: Settings) -> Callable[[], list[Event | Rejection]]:
    """The events that stand on the topic, in order."""

    def read() -> list[Event | Rejection]:
        place = TopicPartition(settings.topics.events, 0, 0)
        consumer = Consumer({**settings.client_config(), "group.id": "reader", "enable.auto.commit": False})
        try:
            _, end = consumer.get_watermark_offsets(place, timeout=_TIMEOUT_S)
            consumer.assign([place])
            messages = [consumer.poll(_TIMEOUT_S) for _ in range(end)]
        finally:
            consumer.close()
        return [AvroCodec().decode_event(message.value()) for message in messages]

    return read


@pytest.fixture
def verdicts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, Emitted]]]:
    """A stand-in for an agent: it gives these answers in turn, and the last one for ever."""
    answers: list[tuple[int, Emitted]] = []
    asked: list[dict[str, list[str]]] = []

    class Agent(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(parse_qs(urlsplit(self.path).query))
            status, answer = answers.pop(0) if len(answers) > 1 else answers[0]
            body = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base class's name
            del format, args

    server = HTTPServer(("127.0.0.1", 0), Agent)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    monkeypatch.setenv("DUETASKS_AGENT_URL", f"http://127.0.0.1:{server.server_port}")
    yield answers
    server.shutdown()
    thread.join()
    server.server_close()
    assert all(set(query) == {"partition", "offset", "task_id"} for query in asked)


def _passed(verdict: str, reason: str = "", emission: Emitted | None = None) -> tuple[int, Emitted]:
    return 200, {"passed": True, "verdict": verdict, "reason": reason, "emission": emission}


# -- schedule and cancel ---------------------------------------------------------------------------------------------


def test_schedule_sends_what_was_typed(
    events: Callable[[], list[Event | Rejection]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Payload from the line, a file or standard input; headers, version, ids; and the receipt as JSON."""
    (tmp_path / "payload.bin").write_bytes(b"\x00\xff")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"from stdin\n")))
    more = ["--content-type", "text/plain", "--version", "3", "-H", "a=b=c", "-H", "ü=ä", "--event-id", "e1"]

    assert run(["schedule", "ordre-é", "--in", "1h30m", "--payload", "naïve", *more, "--json"]) == 0
    receipt = json.loads(capsys.readouterr().out)
    assert run(["schedule", "t", "--at", "2030-04-01T14:30:00+02:00", "--payload", f"@{tmp_path}/payload.bin"]) == 0
    assert run(["schedule", "t", "--in", "0s", "-p", "-", "--target-topic", "due-tasks"]) == 0
    assert run(["cancel", "t", "--version", "4"]) == 0

    first, second, third, fourth = events()
    assert isinstance(first, Schedule)
    assert (first.task_id, first.delay_ms, first.payload) == ("ordre-é", 5_400_000, "naïve".encode())
    assert (first.content_type, first.version, first.event_id) == ("text/plain", 3, "e1")
    assert first.headers == {"a": b"b=c", "ü": "ä".encode()}
    assert (receipt["offset"], receipt["event_id"]) == (0, "e1")
    assert receipt["due_at_ms"] == receipt["timestamp_ms"] + 5_400_000
    assert isinstance(second, Schedule)
    assert (second.due_at_ms, second.payload) == (1_901_277_000_000, b"\x00\xff")
    assert isinstance(third, Schedule)
    assert third.payload == b"from stdin\n"
    assert isinstance(fourth, Cancel)
    assert (fourth.task_id, fourth.version) == ("t", 4)
    text = capsys.readouterr().out
    assert "Sent: schedule 't', to be due 2030-04-01T12:30:00.000Z" in text
    assert "Sent: cancel 't'" in text


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], EXIT_USAGE, "Give --at INSTANT or --in DURATION"),
        (["--in", "1h", "--at", "2030-04-01T14:30:00Z"], EXIT_USAGE, "one of the two"),
        (["--in", "soon"], EXIT_USAGE, "is not a duration"),
        (["--at", "2030-04-01T14:30:00"], EXIT_USAGE, "has no offset"),
        (["--in", "1h", "-H", "novalue"], EXIT_USAGE, "is not NAME=VALUE"),
        (["--in", "1h", "-H", "a=1", "-H", "a=2"], EXIT_USAGE, "given twice"),
        (["--in", "1h", "--version", "0"], EXIT_USAGE, "count from 1"),
        (["--in", "1h", "-p", "@/no/such/file"], EXIT_USAGE, "No such file"),
        (["--at", "1970-01-21T10:08:16Z"], EXIT_REFUSED, "were these seconds?"),
        (["--in", "600w"], EXIT_REFUSED, "the horizon"),
        (["--in", "1h", "--target-topic", "nowhere"], EXIT_REFUSED, "allow-list"),
    ],
)
def test_what_can_t_be_is_refused_before_it_is_sent(
    events: Callable[[], list[Event | Rejection]],
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    """2 for a wrong call, 4 for a task that breaks a rule; a sentence for both."""
    assert run(["schedule", "t", *arguments]) == code

    assert message in " ".join(capsys.readouterr().err.split())
    assert events() == []


@pytest.mark.parametrize(
    ("verdict", "code", "sentence"),
    [
        ("CANCELLED", 0, "The task is cancelled."),
        ("ALREADY_CANCELLED", 0, "was cancelled before"),
        ("DUPLICATE", 0, "nothing changed"),
        ("STALE", EXIT_REFUSED, "higher"),
        ("TOO_LATE", EXIT_REFUSED, "Too late"),
        ("UNKNOWN_TASK", EXIT_NOT_FOUND, "There is no such task"),
        ("UNKNOWN", EXIT_UNAVAILABLE, "not remembered"),
    ],
)
@pytest.mark.usefixtures("settings")
def test_waiting_ends_with_the_verdict_as_exit_code(
    verdicts: list[tuple[int, Emitted]],
    capsys: pytest.CaptureFixture[str],
    verdict: str,
    code: int,
    sentence: str,
) -> None:
    """A script must be able to act on it, and a person to read it."""
    verdicts += [(200, {"passed": False}), (503, {"error": "partition 0 has no owner now"}), _passed(verdict)]

    assert run(["cancel", "t", "--wait"]) == code

    assert sentence in capsys.readouterr().out


@pytest.mark.usefixtures("settings")
def test_a_late_cancel_is_told_where_the_emission_is(
    verdicts: list[tuple[int, Emitted]], capsys: pytest.CaptureFixture[str]
) -> None:
    """So that the caller can look whether the effect can still be undone."""
    emission = {"topic": "due-tasks", "partition": 0, "offset": 17, "fired_at_ms": 1_764_496_800_004}
    verdicts.append(_passed("TOO_LATE", emission=emission))

    assert run(["cancel", "t", "--wait", "--json"]) == EXIT_REFUSED
    assert json.loads(capsys.readouterr().out)["emission"] == emission
    assert run(["cancel", "t", "--wait"]) == EXIT_REFUSED
    assert "2025-11-30T10:00:00.004Z: due-tasks, partition 0, offset 17" in capsys.readouterr().out


@pytest.mark.usefixtures("settings")
def test_a_refusal_by_the_agent_tells_its_reason(
    verdicts: list[tuple[int, Emitted]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Agent and command may have other limits; then the agent's word counts."""
    verdicts.append(_passed("REJECTED", "BEYOND_HORIZON"))

    assert run(["schedule", "t", "--in", "1h", "--wait"]) == EXIT_REFUSED
    assert "Refused: BEYOND_HORIZON." in capsys.readouterr().out


def test_without_a_verdict_in_time_the_receipt_is_not_lost(
    verdicts: list[tuple[int, Emitted]],
    events: Callable[[], list[Event | Rejection]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The event is sent and stays so: whoever repeats it must know."""
    verdicts.append((200, {"passed": False}))

    assert run(["schedule", "t", "--in", "1h", "--wait", "--timeout", "200ms", "--json"]) == EXIT_UNAVAILABLE

    answer = json.loads(capsys.readouterr().out)
    assert "is sent" in answer["error"]
    assert answer["receipt"]["offset"] == 0
    assert len(events()) == 1


# -- import ----------------------------------------------------------------------------------------------------------


def _line(task_id: str, **fields: object) -> str:
    return json.dumps({"task_id": task_id, "type": "SCHEDULE", "delay": "1h", **fields})


def test_import_sends_what_is_right_and_reports_the_rest(
    events: Callable[[], list[Event | Rejection]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One bad line must not stop a night's work, nor go unnoticed; and running it again sends nothing twice."""
    file = tmp_path / "tasks.jsonl"
    lines = [_line(f"t{n}") for n in range(200)]
    lines[17], lines[18], lines[99], lines[150] = _line("t17", dely="1h"), "", "{", _line("", event_id="mine")
    file.write_text("\n".join(lines), "utf-8")

    assert run(["import", str(file), "--json"]) == EXIT_REFUSED

    answer = json.loads(capsys.readouterr().out)
    assert (answer["lines"], answer["sent"], answer["refused"]) == (200, 196, 3)
    assert [(refusal["line"], refusal["reason"]) for refusal in answer["refusals"]] == [
        (18, "UNKNOWN_FIELD"),
        (100, "MALFORMED"),
        (151, "TASK_ID_LENGTH"),
    ]
    sent = events()
    assert [event.task_id for event in sent] == [f"t{n}" for n in range(200) if n not in {17, 18, 99, 150}]
    assert len({event.event_id for event in sent}) == 196

    assert run(["import", str(file)]) == EXIT_REFUSED
    assert "were imported before, 3 refused" in capsys.readouterr().out
    assert len(events()) == 196

    with file.open("a") as more:
        more.write("\n" + _line("late", event_id="mine"))
    assert run(["import", str(file)]) == EXIT_REFUSED
    assert [event.event_id for event in events()[196:]] == ["mine"]

    assert run(["import", str(file), "--again"]) == EXIT_REFUSED
    assert len(events()) == 196 + 1 + 197
    assert len({event.event_id for event in events()}) == 2 * 196 + 1


def test_an_import_of_right_lines_ends_with_success(
    settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 0, and how many."""
    del settings
    file = tmp_path / "tasks.jsonl"
    file.write_text(_line("t") + "\n" + json.dumps({"task_id": "t", "type": "CANCEL"}) + "\n", "utf-8")

    assert run(["import", str(file)]) == 0

    assert "2 events sent, 0 lines refused, of 2 lines." in capsys.readouterr().out
