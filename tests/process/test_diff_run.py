"""`stagerun diff` of a folder and what a run made of it; and the hours that such a run has left."""

import json
import shutil
from pathlib import Path

import small
from click.testing import CliRunner
from test_diff import diff as diff
from test_diff import schedule as schedule

from stagerun import store
from stagerun.cli import main
from stagerun.language import load
from stagerun.plan.estimate import Cost, Figures
from stagerun.plan.rehearsal import cost_key
from stagerun.tools.diff.command import compare, diff_text
from stagerun.train.results import write_figures


def test_a_folder_and_its_finished_run(finished: Path, tmp_path: Path) -> None:
    assert diff_text(compare(str(finished / "schedule"), str(finished / "out"))).endswith(
        "they train the same thing: nothing differs"
    )
    edited = shutil.copytree(finished / "schedule", tmp_path / "edited")
    (edited / "collapse.prototxt").write_text(small.STAGES["collapse"].replace("0.02", "0.04"))
    said = diff_text(compare(str(finished / "out"), str(edited)))
    assert f"collapse\n  base_lr  0.02  ->  0.04 ({edited}/collapse.prototxt:1)\n" in said


def test_a_snapshot_and_a_damaged_one(finished: Path, tmp_path: Path) -> None:
    snapshot = finished / "out" / "snapshots" / "init-00000006-a0001"
    assert diff(snapshot, finished / "out").stdout.endswith("nothing differs\n")
    moved = shutil.copytree(snapshot, tmp_path / snapshot.name)
    assert diff(finished / "schedule", moved).stdout.endswith("nothing differs\n")
    recipe = moved / "recipe.prototxt"
    recipe.write_text(recipe.read_text().replace("seed: 1", "seed: 2"))
    result = diff(finished / "schedule", moved)
    assert result.exit_code == 78 and "recipe.prototxt is not as it was written" in result.stderr


def planned(finished: Path, *arguments: object, out: Path | None = None) -> str:
    words = ["plan", finished / "schedule", "--out", out or finished / "out", *arguments]
    result = CliRunner().invoke(main, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_hours_of_what_is_left_are_those_of_the_run(finished: Path) -> None:
    longer = ("--set", "early.max_iter=1000", "--redo", "early")
    text = planned(finished, *longer, "--budget", "2d")
    assert " left with 1 worker on cpu, as in the last run here\n" in text
    assert "an allocation of 2 d 00 h is enough" in text
    time = json.loads(planned(finished, *longer, "--json"))["time"]
    assert [s["stage"] for s in time["stages"]] == ["early"] and time["not_counted"] == []
    early = time["stages"][0]
    assert early["training"] > 0 and early["tests"] > 0 and early["snapshots"] > 0
    # Told how fast, it is that; snapshots as they were here.
    told = json.loads(planned(finished, *longer, "--json", "--images-per-second", 100))["time"]["stages"][0]
    assert told["training"] == 1000 * 16 / 100 and told["snapshots"] == early["snapshots"]
    assert "nothing is left to do in an allocation" in planned(finished, "--budget", "1h")


def test_the_later_of_run_and_rehearsal_counts(finished: Path, tmp_path: Path) -> None:
    out = shutil.copytree(finished / "out", tmp_path / "out")
    longer = ("--set", "early.max_iter=1000", "--redo", "early")
    early = load(finished / "schedule")
    cost = Cost(
        key=cost_key(early, early.stage("early")), stages=("early",), iterations=4, device_batch_size=4,
        pass_seconds=1.0, update_seconds=1.0, test_batch_size=50, test_seconds=1.0, start_seconds=1.0,
    )  # fmt: skip
    for date, said in (
        ("2001-01-01 00:00", "as in the last run here"),
        ("2999-01-01 00:00", "as rehearsed on 2999-01-01"),
    ):
        figures = Figures(
            schedule="tiny", date=date, host="h", device="cpu", torch="2", workers=2, local_workers=2, threads=1, synthetic="",
            costs=(cost,), snapshot_bytes=1, snapshot_seconds=1.0, blocked_seconds=0.5, memory_bytes=1, gpu_memory_bytes=0,
            log_bytes=1.0,
        )  # fmt: skip
        write_figures(store.LocalDisk(), out, figures)
        assert said in planned(finished, *longer, out=out)
    # 2 device batches each and an update; 500 snapshots but the last, which takes 1 s; 100 images in one batch per worker.
    time = json.loads(planned(finished, *longer, "--json", out=out))["time"]["stages"][0]
    assert time == {
        "stage": "early", "training": 3000.0, "tests": 1.0, "snapshots": 499 * 0.5 + 1, "start": 1.0, "in_all": 3000 + 1 + 250.5 + 1,
    }  # fmt: skip
