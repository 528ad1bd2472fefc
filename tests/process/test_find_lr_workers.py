"""`stagerun rehearse --find-lr` with workers of its own."""

import json
from pathlib import Path

import pytest
import small


def test_two_workers_have_the_points_of_one(base: Path, tmp_path: Path) -> None:
    found = []
    for nproc in (1, 2):
        words = ["--iters", 12, "--out", tmp_path / "out", "--nproc", nproc, "--threads", 1, "--json"]
        done = small.stagerun("rehearse", base / "schedule", "--find-lr", "init", *words)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    one, two = ([point["loss"] for point in each["points"]] for each in found)
    assert len(one) == 12 and one == pytest.approx(two, rel=1e-3)
    assert not (tmp_path / "out").exists()
