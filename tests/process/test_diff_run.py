"""`stagerun diff` of a folder and what a run made of it; and the hours that such a run has left."""

import json
import shutil
from pathlib import Path

import contract
import small
from facade import cost_key
from test_diff import diff

from stagerun.language import load

LONGER = ("--set", "early.max_iter=1000", "--redo", "early")


def test_a_folder_its_finished_run_and_a_snapshot(finished, tmp_path):
    snapshot = finished / "out" / "snapshots" / "init-00000006-a0001"
    moved = shutil.copytree(snapshot, tmp_path / snapshot.name)
    out = finished / "out"
    for a, b in ((finished / "schedule", out), (snapshot, out), (finished / "schedule", moved)):
        assert diff(a, b).stdout.endswith("the schedules train the same thing: nothing differs\n")
    edited = shutil.copytree(finished / "schedule", tmp_path / "edited")
    (edited / "collapse.prototxt").write_text(small.STAGES["collapse"].replace("0.02", "0.04"))
    said = diff(finished / "out", edited).stdout
    assert f"collapse\n  base_lr  0.02  ->  0.04 ({edited}/collapse.prototxt:1)\n" in said
    recipe = moved / "recipe.prototxt"
    recipe.write_text(recipe.read_text().replace("seed: 1", "seed: 2"))
    damaged = diff(finished / "schedule", moved)
    assert damaged.exit_code == 78 and "recipe.prototxt is not as it was written" in damaged.stderr


def planned(finished: Path, *arguments: object, out: Path | None = None) -> str:
    done = contract.stagerun(["plan", finished / "schedule", "--out", out or finished / "out", *arguments], finished)
    assert done.exit_code == 0, done.stderr
    return done.stdout


def test_the_hours_of_what_is_left_are_those_of_the_run(finished):
    text = planned(finished, *LONGER, "--budget", "2d")
    assert " left with 1 worker on cpu, as in the last run here\n" in text
    assert "an allocation of 2 d 00 h is enough" in text
    time = json.loads(planned(finished, *LONGER, "--json"))["time"]
    (early,) = time["stages"]
    assert early["stage"] == "early" and time["not_counted"] == []
    assert early["training"] > 0 and early["tests"] > 0 and early["snapshots"] > 0
    # Told how fast, it is that; snapshots as they were here.
    told = json.loads(planned(finished, *LONGER, "--json", "--images-per-second", 100))["time"]["stages"][0]
    assert told["training"] == 1000 * 16 / 100 and told["snapshots"] == early["snapshots"]
    assert "nothing is left to do in an allocation" in planned(finished, "--budget", "1h")


def test_the_later_of_run_and_rehearsal_counts(finished, tmp_path):
    out = shutil.copytree(finished / "out", tmp_path / "out")
    of = load(finished / "schedule")
    seconds = dict.fromkeys(("pass_seconds", "update_seconds", "test_seconds", "start_seconds"), 1.0)
    sizes = {"iterations": 4, "device_batch_size": 4, "test_batch_size": 50}
    cost = {"key": cost_key(of, of.stage("early")), "stages": ["early"], **sizes}
    figures = {
        "schedule": "tiny", "host": "h", "device": "cpu", "torch": "2", "workers": 2, "local_workers": 2, "threads": 1, "synthetic": "",
        "costs": [cost | seconds], "snapshot_bytes": 1, "snapshot_seconds": 1.0, "blocked_seconds": 0.5, "memory_bytes": 1,
        "gpu_memory_bytes": 0, "log_bytes": 1.0,
    }  # fmt: skip
    for year, said in ((2001, "as in the last run here"), (2999, "as rehearsed on 2999-01-01")):
        (out / "rehearsal.json").write_text(json.dumps(figures | {"date": f"{year}-01-01 00:00"}))
        assert said in planned(finished, *LONGER, out=out)
    # 2 device batches each and an update; 500 snapshots but the last, which takes 1 s; 100 images in one batch per worker.
    time = json.loads(planned(finished, *LONGER, "--json", out=out))["time"]["stages"][0]
    assert time == {
        "stage": "early", "training": 3000.0, "tests": 1.0, "snapshots": 499 * 0.5 + 1, "start": 1.0, "in_all": 3000 + 1 + 250.5 + 1,
    }  # fmt: skip
