"""Stages with images of their own in real runs: stopped anywhere, on any number of workers, the same bits."""

import json

import processes
import pytest
import small
import tiny
from nan_help import lives
from processes import events


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
    done = small.run(folder, base / "straight", code=0)
    (base / "straight.txt").write_text(done.stdout)
    return base


def test_each_set_has_its_own_position_and_epoch(base):
    files = (base / "straight" / "snapshots").glob("*/state.json")
    states = {file.parent.name.split("-a")[0]: json.loads(file.read_bytes())["position"] for file in files}
    assert states["init-00000006"] == 96 and states["cyc1-00000005"] == 80
    assert states["collapse-00000003"] == 96 + 3 * 16, "on from where `init` left the set"
    epochs = {(e["stage"], e["iter"]): e["epoch"] for e in events(base / "straight", "Iterated")}
    assert epochs["cyc1", 5] == pytest.approx(80 / 100) and epochs["collapse", 1] == pytest.approx(112 / 600)


def test_all_validation_sets_are_evaluated_and_the_first_decides(base):
    first = [e for e in events(base / "straight", "Tested") if e["stage"] == "cyc1"]
    beside = events(base / "straight", "TestedBeside")
    assert [(e["iter"], e["val"], e["images"]) for e in first] == [(4, "v1", 100), (5, "v1", 100)]
    assert [(e["iter"], e["val"], e["images"]) for e in beside] == [(4, "v2", 600), (5, "v2", 600)]
    shown = (base / "straight.txt").read_text()
    assert f"cyc1 on v2: top-1 {100 * beside[-1]['top1']:.2f} %" in shown
    for command, *more in (["report"], ["eval", "--stage", "cyc1"]):
        done = small.stagerun(command, base / "straight", *more)
        assert done.returncode == 0 and "v2" in done.stdout, done.stdout + done.stderr


def test_a_run_that_is_killed_within_a_set_and_stopped_at_a_join_has_the_same_bits(base, tmp_path):
    folder, out = base / "schedule", tmp_path / "out"
    lives(folder, out, 3, kill_after=9)  # `init` has 6 iterations and `cyc1` has 5, with a snapshot after 2
    lives(folder, out, 2, stop_after=4)  # while `cyc1` is evaluated at its end
    assert "cyc1-00000005" in processes.content(out) and not list((out / "snapshots").glob("collapse-*"))
    lives(folder, out)
    assert processes.ends(out) == processes.ends(base / "straight")
