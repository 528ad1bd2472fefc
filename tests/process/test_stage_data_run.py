"""Stages with images of their own in real runs: stopped anywhere, on any number of workers, the same bits."""

import json
import time
from pathlib import Path
from typing import Any

import processes
import pytest
import small
import tiny


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """`cyc1` trains on 100 other images, `collapse` on the first ones again; two validation sets in `cyc1`."""
    base = tmp_path_factory.mktemp("sets")
    tiny.make_data(base / "data")
    tiny.make_data(base / "other", first=800)
    own = f"""
data {{
  train {{ source: "{base}/other/val_lmdb" images: 100 }}
  val {{ source: "{base}/data/val_lmdb" images: 100 name: "v1" }}
  val {{ source: "{base}/other/train_lmdb" images: 600 name: "v2" }}
}}"""
    folder = small.make_schedule(base / "schedule", base / "data", cyc1=small.STAGES["cyc1"] + own)
    path = folder / "schedule.prototxt"
    path.write_text("determinism: ELASTIC\n" + path.read_text())
    done = small.run(folder, base / "straight")
    assert done.returncode == 0, done.stdout + done.stderr
    (base / "straight.txt").write_text(done.stdout)
    return base


def log(base: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (base / "straight" / "log.jsonl").read_text().splitlines()]


def test_each_set_has_its_own_position_and_epoch(base):
    files = (base / "straight" / "snapshots").glob("*/state.json")
    states = {file.parent.name.split("-a")[0]: json.loads(file.read_bytes())["position"] for file in files}
    assert states["init-00000006"] == 96 and states["cyc1-00000005"] == 80
    assert states["collapse-00000003"] == 96 + 3 * 16, "on from where `init` left the set"
    lines = log(base)
    epochs = {(e["stage"], e["iter"]): e["epoch"] for e in lines if e["event"] == "Iterated"}
    assert epochs["cyc1", 5] == pytest.approx(80 / 100) and epochs["collapse", 1] == pytest.approx(112 / 600)


def test_all_validation_sets_are_evaluated_and_the_first_decides(base):
    lines = log(base)
    first = [e for e in lines if e["event"] == "Tested" and e["stage"] == "cyc1"]
    beside = [e for e in lines if e["event"] == "TestedBeside"]
    assert [(e["iter"], e["val"], e["images"]) for e in first] == [(4, "v1", 100), (5, "v1", 100)]
    assert [(e["iter"], e["val"], e["images"]) for e in beside] == [(4, "v2", 600), (5, "v2", 600)]
    shown = (base / "straight.txt").read_text()
    assert f"cyc1 on v2: top-1 {100 * beside[-1]['top1']:.2f} %" in shown
    for command, *more in (["report"], ["eval", "--stage", "cyc1"]):
        done = small.stagerun(command, base / "straight", *more)
        assert done.returncode == 0 and "v2" in done.stdout, done.stdout + done.stderr


def test_a_run_that_is_killed_within_a_set_and_stopped_at_a_join_has_the_same_bits(base, tmp_path):
    folder, out = base / "schedule", tmp_path / "out"
    run = small.start(folder, out, nproc=3)
    until = time.monotonic() + 120
    while not list((out / "snapshots").glob("cyc1-00000002-*")) and time.monotonic() < until:
        time.sleep(0.02)
    processes.kill_all(run.pids())
    run.wait()
    assert run.gone()
    assert small.run(folder, out, "--until", "cyc1", nproc=2).returncode == 0
    done = small.run(folder, out)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "EQUIVALENT" not in done.stdout, done.stdout
    assert processes.ends(out) == processes.ends(base / "straight")
