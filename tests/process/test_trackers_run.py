"""Trackers of runs that are killed and go on, that hang, and that raise."""

import json
import os
import random
import time
from pathlib import Path
from typing import Any

import processes
import pytest
import small

from stagerun import manual

BEFORE = {"init": 0, "cyc1": 60, "collapse": 65, "early": 60}
INIT = 'base_lr: 0.1 lr_policy: "poly" power: 1 max_iter: 60 test_interval: 7 snapshot: 10'


@pytest.fixture(scope="module")
def folder(tmp_path_factory, data):
    base = tmp_path_factory.mktemp("trackers")
    small.make_schedule(base / "schedule", data, init=INIT)
    return base


@pytest.fixture
def other(tmp_path):
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


def require_notes(out: Path, lines: int) -> None:
    """The table has each iteration of the log that stands, once and with its values."""
    standing: dict[tuple[str, int], dict[str, Any]] = {}
    for line in (out / "log.jsonl").read_text().splitlines():
        event = json.loads(line) if line.endswith("}") else {"event": ""}
        if event["event"] == "StageStarted":
            stage, iter = event["stage"], event["iter"]
            standing = {at: one for at, one in standing.items() if at[0] != stage or at[1] <= iter}
        elif event["event"] == "Iterated":
            standing[event["stage"], event["iter"]] = event
    assert len(standing) == lines
    (path,) = out.glob("notes-*.csv")
    rows = [line.split(",") for line in path.read_text().splitlines()]
    shown = [(name, int(iteration), float(value)) for _, iteration, name, value in rows]
    for name in ("loss", "lr", "momentum"):
        expected = [(f"{stage}/{name}", BEFORE[stage] + i, one[name]) for (stage, i), one in standing.items()]
        assert [one for one in shown if one[0] in {each[0] for each in expected}] == expected


def test_a_run_that_was_killed_twice_is_shown_once(folder, tmp_path, other):
    """The first kill takes the tracker's process, too. It is that of the manual's example."""
    rng, out, words = random.Random(1), tmp_path / "out", ("--retry", "--log", "notes")
    for whom in ("all", "launcher"):
        run = small.start(folder / "schedule", out, *words, environment=other)
        seen = len(list(out.glob("snapshots/*")))
        while run.process.poll() is None and len(list(out.glob("snapshots/*"))) < seen + 1:
            time.sleep(0.02)
        time.sleep(rng.uniform(0, 1.5))
        processes.kill_all(run.pids() if whom == "all" else [run.process.pid])
        run.wait()
    done = small.run(folder / "schedule", out, *words, env=other, code=0)
    assert "warning" not in done.stderr + done.stdout, done.stderr + done.stdout
    require_notes(out, 71)
    assert (out / "trackers" / "notes.txt").read_text().endswith("finished\n")


def test_wandb_without_a_network(folder, tmp_path):
    pytest.importorskip("wandb")
    folders = {name: str(tmp_path / name) for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR")}
    env = {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", **folders}
    for stage in ("init", "early"):
        done = small.run(folder / "schedule", tmp_path / "out", "--log", "wandb", "--until", stage, env=env)
        assert done.returncode == 0 and "warning" not in done.stderr + done.stdout, done.stderr + done.stdout
    run = json.loads((tmp_path / "out" / "trackers" / "wandb.json").read_text())["run"]
    files = list((tmp_path / "out" / "wandb").glob(f"offline-run-*-{run}/run-{run}.wandb"))
    assert len(files) == 2 and all(file.stat().st_size for file in files)


def test_one_that_hangs_or_raises_costs_a_warning(folder, tmp_path, other):
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
    require_notes(tmp_path / "out", 71)
