"""`stagerun verify-resume` as a whole: its runs are killed and stopped, and end in the same bits."""

import json
from pathlib import Path

import pytest
import small
from test_verify_resume import words


@pytest.mark.smoke
def test_killed_once_it_is_bit_exact(base: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = small.stagerun(
        *words(base / "schedule", out, "--nproc", 1, "--kills", 1, "--iters", 2, "--json"), timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert (told["verdict"], told["different"]) == ("BIT-EXACT", []) and told["interruptions"] >= 1
    assert told["went_on"] == sum(life["went_on"] for life in told["lives"]) >= 1
    assert [path.name for path in out.iterdir()] == [], "nothing is left"


@pytest.mark.slow
def test_killed_and_stopped_with_other_workers_each_time_it_is_bit_exact(base: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    elastic = ("--set", "determinism=ELASTIC", "--nproc", 2, "--then-workers", 1)
    done = small.stagerun(
        *words(base / "schedule", out, *elastic, "--kills", 2, "--iters", 2, "--synthetic", "--json"), timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert (told["verdict"], told["equal"], told["promised"], told["different"]) == ("BIT-EXACT", True, True, [])
    assert [(s["stage"], s["iterations"], s["equal"]) for s in told["stages"]] == [(n, 2, True) for n in small.STAGES]
    assert all(s["interrupted"] == [s["straight"]] and len(s["straight"]) == 64 for s in told["stages"])
    hits = [life["hit"] for life in told["lives"] if life["hit"]]
    assert len(hits) == told["interruptions"] and len(hits) % 2 == 0, (
        "another two where nothing went on from a snapshot"
    )
    assert sorted(hit.split()[0] for hit in hits[:2]) == ["SIGKILL", "SIGTERM"]
    assert told["went_on"] == sum(life["went_on"] for life in told["lives"]) >= 1
    assert [life["workers"] for life in told["lives"]][:2] == [2, 1]
    assert told["losses"] >= 8 and told["evaluations"] >= 8 and told["environment"]["reducer"] == "tree"
    assert [path.name for path in out.iterdir()] == [], "nothing is left"


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [1, 3])
def test_with_each_kind_of_kill(base: Path, tmp_path: Path, nproc: int) -> None:
    done = small.stagerun(*words(base / "schedule", tmp_path / "out", "--nproc", nproc), timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\nBIT-EXACT: interrupted equals uninterrupted (5 interruptions in " in done.stdout
    assert "SIGTERM to " in done.stdout
    assert f", threads 1, workers {nproc}, reducer " in done.stdout
