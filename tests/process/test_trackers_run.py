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
