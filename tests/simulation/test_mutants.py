"""The simulator must catch what was broken on purpose, or its silence says nothing; and show it the same way twice.

Each mutant is a copy of the package with one patch, simulated in a process of its own: two at a time.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

import pipeline
from pipeline.testing.simulator.plan import Plan, draw_plan
from tests.simulation.mutants import MUTANTS, Mutant

# Behind other suites on a busy machine, the last of a hundred waits for all those before it.
pytestmark = [pytest.mark.simulation, pytest.mark.timeout(900)]

PACKAGE: Final = Path(pipeline.__file__).parent
PATCHED: Final = ("core", "service", "testing")
"""Parts of the package that are copied; the others stand in the copy as links."""
MEMORY_KB: Final = 4_000_000
TIMEOUT_S: Final = 600
AT_ONCE: Final = 2
STEPS: Final = 80


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """How a simulation of many seeds ended; `failed` is its outcome as JSON, None if no promise was broken."""

    exit_code: int
    failed: dict[str, Any] | None
    said: str


def patched_copy(folder: Path, mutant: Mutant | None = None) -> Path:
    """A copy of the package in `folder`, cheap enough for a hundred of them; raises if the mutant does not fit it."""
    copy = folder / PACKAGE.name
    copy.mkdir(parents=True)
    for part in PACKAGE.iterdir():
        if part.name in PATCHED:
            shutil.copytree(part, copy / part.name)
        elif part.name != "__pycache__":
            (copy / part.name).symlink_to(part)
    for name in ("schemas", "topics"):
        (folder / name).symlink_to(PACKAGE.parent / name)
    for file, old, new in mutant.edits if mutant is not None else ():
        text = (copy / file).read_text()
        if text.count(old) != 1:
            raise LookupError(f"{mutant}: bring it up to date, {file} has this {text.count(old)} times:\n{old}")
        (copy / file).write_text(text.replace(old, new))
    return folder


def run(folder: Path, *arguments: str, hash_seed: str = "0") -> subprocess.CompletedProcess[str]:
    """Python on the copy in `folder`, bounded in time and memory: a broken owner may loop for ever."""
    bounded = ["/bin/sh", "-c", f'ulimit -v {MEMORY_KB} 2>/dev/null; exec "$0" "$@"', sys.executable, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONHASHSEED": hash_seed}
    return subprocess.run(
        bounded, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


def simulated(folder: Path, mutant: Mutant | None, seeds: int) -> Verdict:
    """What the simulator finds in the seeds from 0 on, and no trace of the copy."""
    try:
        patched_copy(folder, mutant)
        command = ["-m", "pipeline.cli", "simulate", "--seed", "0", "--seeds", str(seeds), "--steps", str(STEPS)]
        ended = run(folder, *command, "--jobs", "1", "--no-shrink", "--json")
        found = json.loads(ended.stdout) if ended.stdout else {}
        return Verdict(exit_code=ended.returncode, failed=found.get("failed"), said=ended.stderr[-2_000:])
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def verdicts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The mutants of this run by name, each a `Future`, and the real code under the name ""."""
    folder = tmp_path_factory.mktemp("mutants")
    wanted = [item.callspec.params["mutant"] for item in request.session.items if _has_mutant(item)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found: dict[str, Future[Verdict]] = {}
        for number, mutant in enumerate(wanted):
            found[mutant.name] = pool.submit(partial(simulated, folder / str(number), mutant, mutant.seeds))
        seeds = max((mutant.seeds for mutant in wanted), default=1)
        found[""] = pool.submit(partial(simulated, folder / "real", None, seeds))
        yield found
        pool.shutdown(cancel_futures=True)


def _has_mutant(item: pytest.Item) -> bool:
    return item.path.name == Path(__file__).name and "mutant" in getattr(getattr(item, "callspec", None), "params", {})


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_planted_bug_breaks_its_promise(mutant: Mutant, verdicts: dict[str, Any]) -> None:
    """A protection whose removal nobody notices is not watched at all."""
    verdict = verdicts[mutant.name].result()

    assert verdict.exit_code == 1, f"not caught within {mutant.seeds} seeds: {verdict.said}"
    assert verdict.failed is not None, verdict.said
    what = verdict.failed["failure"]["what"]
    assert what.partition(":")[0] in mutant.breaks, what


def test_the_real_code_keeps_every_promise_in_the_same_worlds(verdicts: dict[str, Any]) -> None:
    """Else it would not be the planted bugs that are caught."""
    verdict = verdicts[""].result()

    assert verdict.failed is None, verdict.failed
    assert verdict.exit_code == 0, verdict.said


def test_mutants_have_names_of_their_own() -> None:
    """Two with one name would share one verdict, and one of them would never be tried."""
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


def test_the_copy_is_what_runs(tmp_path: Path) -> None:
    """Were it the installed package, the patches would be without effect."""
    folder = patched_copy(tmp_path / "copy")

    ended = run(folder, "-c", "import pipeline.cli, pipeline.service.owner.fence as fence; print(fence.__file__)")

    assert (folder / "pipeline/service/owner/fence.py").samefile(ended.stdout.strip())
    assert str(tmp_path) in ended.stdout


def test_a_mutant_that_does_not_fit_the_code_fails_loudly(tmp_path: Path) -> None:
    """A patch that changes nothing would look like a bug that nobody catches, or worse, be forgotten."""
    gone = Mutant(name="gone", edits=(("core/firing.py", "no such text", ""),), breaks=("G1",))

    with pytest.raises(LookupError, match="bring it up to date"):
        patched_copy(tmp_path / "copy", gone)


DIGESTS: Final = """
from pipeline.testing.simulator.plan import draw_plan
from pipeline.testing.simulator.simulation import simulate
for seed in range(6):
    outcome = simulate(draw_plan(seed, 80))
    print(outcome.digest, *outcome.history, sep="\\n")
"""


def test_a_seed_does_the_same_in_every_process(tmp_path: Path) -> None:
    """Else a failure could not be shown again: sets and hashes must not decide anything."""
    folder = patched_copy(tmp_path / "copy")

    told = [run(folder, "-c", DIGESTS, hash_seed=hash_seed).stdout for hash_seed in ("1", "2026")]

    assert told[0] == told[1]
    assert "all faults end" in told[0]


def test_shrinking_keeps_the_promise_and_ends_in_fewer_steps(tmp_path: Path) -> None:
    """What is left must show the same bug: by itself, and again from the file that it was saved to."""
    mutant = next(each for each in MUTANTS if each.name == "cancel does nothing")
    folder, file = patched_copy(tmp_path / "copy", mutant), tmp_path / "plan.json"
    found = run(
        folder, "-m", "pipeline.cli", "simulate", "--seed", "0", "--seeds", "60", "--jobs", "1", "--no-shrink", "--json"
    )
    seed = json.loads(found.stdout)["failed"]["seed"]

    shrunk = run(folder, "-m", "pipeline.cli", "simulate", "--seed", str(seed), "--save", str(file), "--json")
    again = run(folder, "-m", "pipeline.cli", "simulate", "--plan", str(file), "--no-shrink", "--json")

    plan = msgspec.json.decode(file.read_bytes(), type=Plan)
    assert {step.number for step in plan.steps} <= {step.number for step in draw_plan(seed, STEPS).steps}
    assert len(plan.steps) < STEPS // 4
    assert json.loads(shrunk.stdout)["failure"]["what"].startswith("G4:")
    assert json.loads(again.stdout)["failure"] == json.loads(shrunk.stdout)["failure"]
    assert again.returncode == shrunk.returncode == 1
