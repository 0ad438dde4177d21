"""What the README shows is run as it stands there."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

pytestmark = pytest.mark.acceptance

README = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
COMMANDS = re.findall(r"^\$ (duetasks .+)$", README, re.MULTILINE)
(SNIPPET,) = re.findall(r"```python\n(.+?)```", README, re.DOTALL)


@pytest.fixture
def environment(tmp_path: Path, kafka_cache_dir: Path) -> Iterator[Mapping[str, str]]:
    """A newcomer's shell: nothing is set but where things may be written."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DUETASKS_")}
    bin_dir = Path(sys.executable).parent
    found = {
        **clean,
        "PATH": f"{bin_dir}{os.pathsep}{clean['PATH']}",
        "DUETASKS_DATA_DIR": str(tmp_path),
        "DUETASKS_CACHE_DIR": str(kafka_cache_dir),
        "DUETASKS_HTTP_PORT": "0",
    }
    yield found
    subprocess.run(["duetasks", "down"], env=found, check=False, timeout=60, capture_output=True)  # noqa: S607  # the venv's own


def _run(command: str, environment: Mapping[str, str]) -> str:
    done = subprocess.run(  # noqa: S602  # the README's lines are shell lines
        command, shell=True, env=environment, check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_first_screen_does_what_it_shows(environment: Mapping[str, str]) -> None:
    """A newcomer types these lines in this order, and the Python below them."""
    outputs = {command: _run(command, environment) for command in COMMANDS}

    assert len(COMMANDS) == 6
    assert "Agent" in outputs["duetasks up --detach"]
    assert "[SCHEDULED]" in outputs[COMMANDS[1]]
    assert "[CANCELLED]" in outputs["duetasks cancel order-18 --wait"]
    assert '"payload":"cancel order 17"' in outputs["duetasks consume --group billing --max 1"]
    producing = SNIPPET.split("def apply")[0]
    _run(f"{sys.executable} -c '{producing}'", environment)
    status = _run("duetasks status order-17", environment)
    assert "CANCELLED" in status


def test_the_python_consumer_is_complete() -> None:
    """The snippet must name things that exist; running it would never end."""
    compiled = compile(SNIPPET.split("with TaskProducer")[0], "README.md", "exec")

    namespace: dict[str, object] = {}
    exec(compiled, namespace)  # noqa: S102  # our own README

    assert {"DueTaskConsumer", "TaskProducer"} <= set(namespace)
