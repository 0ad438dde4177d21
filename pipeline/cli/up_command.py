"""`duetasks up` and `down`: everything that one machine needs, in one command."""

import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import typer

from pipeline.cli.options import START, JsonFlag
from pipeline.cli.output import Output
from pipeline.cli.session import embedded_broker, load_settings
from pipeline.errors import NotFoundError, RefusedError, UnavailableError

if TYPE_CHECKING:
    import subprocess

    from pipeline.adapters.agent_process import AgentProcess
    from pipeline.config import Settings

__all__ = ["register"]

_READY_TIMEOUT_S: Final = 60.0
_READY_PAUSE_S: Final = 0.2
_HTTP_TIMEOUT_S: Final = 2.0
_NEXT: Final = """
Next, for example:
  duetasks schedule hello --in 10s --payload 'Hello, world'
  duetasks status hello
  duetasks consume --group demo"""


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """What `up` did and found."""

    bootstrap_servers: str
    broker: str
    topics_created: list[str]
    topics_altered: list[str]
    agent_pid: int
    agent_log: str | None
    http: str


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command(rich_help_panel=START)(up)
    app.command(rich_help_panel=START)(down)


def up(
    *,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Leave it running in the background; `duetasks down` stops it.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Start what is needed: Kafka unless one is configured, the topics, and an agent. Ctrl-C stops what it started."""
    output = Output(as_json=as_json)
    for name in (signal.SIGTERM, signal.SIGHUP):  # a supervisor's stop, and a terminal that was closed
        if signal.getsignal(name) is not signal.SIG_IGN:  # under nohup it goes on without its terminal
            signal.signal(name, _as_interrupt)
    undo: list[Callable[[], object]] = []
    try:
        process, started = _start(output, undo, detached=detach)
        output.result(started, _told(started, detached=detach))
        if detach:
            undo.clear()
        else:
            _wait(output, process)
    except KeyboardInterrupt:
        output.say("Stopping what was started")
    finally:
        # Bounded, and worth the wait: a second Ctrl-C would leave a broker behind that nobody expects.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for step in reversed(undo):
            step()


def down(*, as_json: JsonFlag = False) -> None:
    """Stop the agent that `up` started and the embedded broker of the data folder; all data stays."""
    from pipeline.adapters.agent_process import AgentProcess  # noqa: PLC0415  # slow imports wait for a command

    output = Output(as_json=as_json)
    settings = load_settings()
    with output.working("Stopping") as on_progress:
        agent_stopped = AgentProcess(settings.data_dir).stop()
        broker = embedded_broker(settings, on_progress)
        broker_stopped = broker.stop() if broker.status() is not None else False
    if not agent_stopped and not broker_stopped:
        raise NotFoundError(f"Nothing that `duetasks up` started runs in {settings.data_dir}.")
    stopped = " and ".join(name for name, was in (("agent", agent_stopped), ("broker", broker_stopped)) if was)
    output.result(
        {"agent_stopped": agent_stopped, "broker_stopped": broker_stopped},
        f"Stopped the {stopped}. All data stays in {settings.data_dir}.",
    )


def _start(
    output: Output, undo: list[Callable[[], object]], *, detached: bool
) -> "tuple[subprocess.Popen[bytes], Started]":
    """Start all three in order; `undo` gets a step for each thing that was started here."""
    from pipeline.adapters.agent_process import AgentProcess  # noqa: PLC0415  # slow imports wait for a command
    from pipeline.adapters.topic_setup import apply_topics, refuse_unsafe_topics  # noqa: PLC0415  # as above

    settings = load_settings()
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    agent = AgentProcess(settings.data_dir)
    if (present := agent.running()) is not None:
        raise RefusedError(
            f"`duetasks up` already runs an agent for {settings.data_dir} (process {present.pid}). "
            "Stop it with `duetasks down`; for a second agent: DUETASKS_HTTP_PORT=0 duetasks agent"
        )
    with output.working("Looking for Kafka") as on_progress:
        settings, broker = _with_kafka(settings, on_progress, undo)
        on_progress("Setting up topics")
        done = apply_topics(settings)
        refuse_unsafe_topics(settings)
        on_progress("Starting the agent")
        process = agent.start(detached=detached)
        undo.append(agent.stop)
        http = _await_ready(agent, process, settings)
    started = Started(
        bootstrap_servers=settings.bootstrap_servers or "",
        broker=broker,
        topics_created=[creation.topic for creation in done.creations],
        topics_altered=sorted({alteration.topic for alteration in done.alterations}),
        agent_pid=process.pid,
        agent_log=str(agent.log_file) if detached else None,
        http=http,
    )
    return process, started


def _with_kafka(
    settings: "Settings", on_progress: Callable[[str], None], undo: list[Callable[[], object]]
) -> "tuple[Settings, str]":
    if settings.bootstrap_servers is not None:
        return settings, "as configured"
    broker = embedded_broker(settings, on_progress)
    was_running = broker.status() is not None
    if not was_running:
        undo.append(broker.stop)  # before the start: one that is interrupted while it starts is stopped too
    info = broker.start()
    how = "was running" if was_running else f"started, process {info.pid}"
    return settings.with_bootstrap(info.bootstrap_servers), f"embedded, {how}, log {info.log_file}"


def _await_ready(agent: "AgentProcess", process: "subprocess.Popen[bytes]", settings: "Settings") -> str:
    """Wait until the agent has restored its partitions, and return its address; raises if it ended instead."""
    from pipeline.adapters.agent_slot import running_agents  # noqa: PLC0415  # slow imports wait for a command

    until_s = time.monotonic() + _READY_TIMEOUT_S
    while time.monotonic() < until_s:
        if process.poll() is not None:
            raise UnavailableError(f"The agent ended with code {process.returncode}{agent.last_words()}")
        url = next((found.url for found in running_agents(settings.data_dir) if found.pid == process.pid), None)
        if url is not None and _is_ready(url):
            return url
        time.sleep(_READY_PAUSE_S)
    raise UnavailableError(f"The agent was not ready within {_READY_TIMEOUT_S:g} s{agent.last_words()}")


def _is_ready(url: str) -> bool:
    import httpx  # noqa: PLC0415  # slow to import, and only asked here

    try:
        return httpx.get(f"{url}/readyz", timeout=_HTTP_TIMEOUT_S).is_success
    except httpx.HTTPError:
        return False


def _wait(output: Output, process: "subprocess.Popen[bytes]") -> None:
    """Stay until the agent ends, and end with its code: it does so by itself only when something is wrong."""
    code = process.wait()
    output.say(f"The agent ended by itself with code {code}: what it logged above says why.")
    raise typer.Exit(max(1, code))


def _told(started: Started, *, detached: bool) -> str:
    changes = [f"created {', '.join(started.topics_created)}"] if started.topics_created else []
    changes += [f"mended {', '.join(started.topics_altered)}"] if started.topics_altered else []
    log = f", log {started.agent_log}" if started.agent_log else ""
    return (
        f"Kafka   {started.bootstrap_servers} ({started.broker})\n"
        f"Topics  {'; '.join(changes) or 'as declared'}\n"
        f"Agent   {started.http} (process {started.agent_pid}{log})\n"
        f"{_NEXT}\n\n"
        + ("Stop all of it: duetasks down" if detached else "Stop what was started: Ctrl-C. The agent's log follows.")
    )


def _as_interrupt(*_: object) -> None:
    raise KeyboardInterrupt
