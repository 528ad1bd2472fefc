"""Runs that are killed and go on, as the trackers show them."""

import os
import random
import time
from pathlib import Path

import processes
import pytest
import small
import tiny
import tracked

from stagerun import manual

BEFORE = {"init": 0, "cyc1": 60, "collapse": 65, "early": 60}
INIT = 'base_lr: 0.1 lr_policy: "poly" power: 1 max_iter: 60 test_interval: 7 snapshot: 10'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("trackers")
    tiny.make_data(base / "data")
    small.make_schedule(base / "schedule", base / "data", init=INIT)
    return base


def killed_and_resumed(base: Path, out: Path, trackers: list[str], kills: int, rng: random.Random) -> None:
    """`kills` times after one to three new snapshots or so, and then to the end. Half the kills take the trackers' processes, too."""
    words = [word for name in trackers for word in ("--log", name)]
    for number in range(kills):
        run = small.start(base / "schedule", out, "--retry", *words, environment=tracked.environment(base))
        seen = len(list(out.glob("snapshots/*")))
        while run.process.poll() is None and len(list(out.glob("snapshots/*"))) < seen + 1:
            time.sleep(0.02)
        time.sleep(rng.uniform(0, 1.5))
        processes.kill(run, ("all", "launcher")[number % 2], rng)
        run.wait()
    done = small.run(base / "schedule", out, "--retry", *words, env=_env(base))
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr + done.stdout, done.stderr + done.stdout


def _env(base: Path) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **tracked.environment(base)}


@pytest.mark.skipif(not tracked.installed(), reason="no tracker is installed")
def test_a_run_that_was_killed_twice_is_shown_once(folder: Path, tmp_path: Path) -> None:
    names = tracked.installed()[:1]
    killed_and_resumed(folder, tmp_path / "out", names, 2, random.Random(1))
    assert tracked.require_each_once(folder, tmp_path / "out", names[0], BEFORE) == 71


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_runs_killed_at_random_are_shown_once(folder: Path, tmp_path: Path, seed: int) -> None:
    names = tracked.installed()
    assert names
    killed_and_resumed(folder, tmp_path / "out", names, 5, random.Random(seed))
    for name in names:
        assert tracked.require_each_once(folder, tmp_path / "out", name, BEFORE) == 71


# -- of another package


@pytest.fixture
def other(tmp_path: Path) -> dict[str, str]:
    """An environment in which one is installed: the manual's example, and two that fail."""
    info = tmp_path / "site" / "lab_notes-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lab-notes\nVersion: 1.0\n")
    names = {"notes": "Notes", "hanging": "Hanging", "raising": "Raising"}
    rows = "".join(f"{name} = lab_notes:{kind}\n" for name, kind in names.items())
    (info / "entry_points.txt").write_text(f"[stagerun.logs]\n{rows}")
    page = (Path(manual.__file__).parent / "trackers.md").read_text()
    example = page.partition("```python\n")[2].partition("```")[0]
    (tmp_path / "site" / "lab_notes.py").write_text(example + FAILING)
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path / "site")}


FAILING = """

import time


class Hanging(Notes):
    def send(self, points, texts):
        time.sleep(1000)


class Raising(Notes):
    def begin(self, run):
        raise ConnectionError("no route to the server")
"""


def require_notes(out: Path) -> None:
    (path,) = out.glob("notes-*.csv")
    rows = [line.split(",") for line in path.read_text().splitlines()]
    shown = [(name, int(iteration), float(value)) for _, iteration, name, value in rows]
    for name, points in tracked.logged(out, BEFORE).items():
        assert [(iteration, value) for one, iteration, value in shown if one == name] == points


def test_the_manuals_example(folder: Path, tmp_path: Path, other: dict[str, str]) -> None:
    assert "notes: of the package lab-notes." in " ".join(small.stagerun("run", "--help", env=other).stdout.split())
    done = small.run(folder / "schedule", tmp_path / "out", "--log", "notes", nproc=2, env=other)
    assert done.returncode == 0, done.stderr
    require_notes(tmp_path / "out")
    assert (tmp_path / "out" / "trackers" / "notes.txt").read_text() == "finished\n"


def test_one_that_hangs_or_raises_costs_a_warning(folder: Path, tmp_path: Path, other: dict[str, str]) -> None:
    words = ["--grace", "8s", "--log", "hanging", "--log", "raising"]
    run = small.start(folder / "schedule", tmp_path / "out", *words, environment=other)
    code, said = run.wait(120)
    assert code == 0, said
    assert run.gone(5)
    assert said.count("warning: raising does not take the run's lines: ConnectionError: no route to the server") == 1
    assert said.count("warning: hanging has not taken all lines within 2 s of the run's end") == 1
    assert "Traceback" not in said
    # The run is over, and a tracker that is named now gets all of it.
    done = small.run(folder / "schedule", tmp_path / "out", "--log", "notes", env=other)
    assert done.returncode == 0 and "nothing to do" in done.stdout, done.stdout
    require_notes(tmp_path / "out")
