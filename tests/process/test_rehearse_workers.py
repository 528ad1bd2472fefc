"""`stagerun rehearse` with workers of its own."""

import json

import pytest
import small


def test_two_workers_have_the_points_of_one(base, tmp_path):
    found = []
    for nproc in (1, 2):
        words = ["--iters", 12, "--out", tmp_path / "out", "--nproc", nproc, "--threads", 1, "--json"]
        done = small.stagerun("rehearse", base / "schedule", "--find-lr", "init", *words)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    one, two = ([point["loss"] for point in each["points"]] for each in found)
    assert len(one) == 12 and one == pytest.approx(two, rel=1e-3)
    assert not (tmp_path / "out").exists()


def test_pushes_under_way_do_not_end_a_rehearsal(base, tmp_path):
    """A stage with ASYNC stops where all its workers have pushed, which may be beyond the iteration where it is to stop."""
    words = ["--set", "solver.sync_param={ method: ASYNC replicas: 2 max_staleness: 2 }", "--only", "init"]
    words += ["--iters", 6, "--out", tmp_path / "out", "--nproc", 2, "--threads", 1, "--json"]
    done = small.stagerun("rehearse", base / "schedule", *words)
    assert done.returncode == 0, done.stderr
    (cost,) = json.loads(done.stdout)["figures"]["costs"]
    assert cost["pass_seconds"] > 0
