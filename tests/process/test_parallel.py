"""`run --parallel N`: the bits of a run without, whatever is killed or stopped, and what can't go with it."""

import json
import re
import shutil
import signal
from pathlib import Path
from subprocess import CompletedProcess

import photos
import processes
import pytest
import small
from contract import stagerun
from processes import content, events

STAGES = """
stage { name: "trunk" solver_param { base_lr: 0.1 lr_policy: "fixed" max_iter: 8 } }
stage { name: "a" from: "trunk@4" solver_param { base_lr: 0.02 lr_policy: "poly" power: 1 max_iter: 6 } }
stage { name: "b" from: "trunk" solver_param { base_lr: 0.03 lr_policy: "poly" power: 1 max_iter: 6 } }
stage { name: "c" from: "a" solver_param { base_lr: 0.01 lr_policy: "poly" power: 1 max_iter: 4 carry { momentum: KEEP } } }
stage { name: "d" from: "" solver_param { base_lr: 0.05 lr_policy: "poly" power: 1 max_iter: 6 } }
ensemble { name: "all" members: ["b", "c"] }
"""

ENDS = ("trunk-00000008", "a-00000006", "b-00000006", "c-00000004", "d-00000006")
KEPT = 3  # `keep_snapshots`


@pytest.fixture(scope="module")
def tree(base, tmp_path_factory):
    """A schedule's folder, and the output folder of a run that trained one stage after the other."""
    folder = tmp_path_factory.mktemp("tree")
    schedule = small.make_schedule(folder / "schedule", base / "data")
    text = (schedule / "schedule.prototxt").read_text()
    (schedule / "schedule.prototxt").write_text(text[: text.index("stage {")] + STAGES)
    small.run(schedule, folder / "alone", code=0)
    return schedule, folder / "alone"


def results(out: Path) -> dict[str, object]:
    found = {p.name.rpartition("-a")[0]: json.loads(p.read_text()) for p in (out / "results").glob("*.json")}
    together = json.loads((out / "results" / "ensembles" / "all.json").read_text())
    return {"all": together["top1"]} | {n: (its["top1"], its["test_loss"], its["loss"]) for n, its in found.items()}


def assert_same(out: Path, alone: Path) -> None:
    wanted, found = content(alone), content(out)
    assert all(wanted.get(name, its) == its for name, its in found.items())
    assert set(ENDS) <= found.keys()
    # A stop makes one more, in whose place an older one goes.
    assert all(len([name for name in found if name.startswith(f"{stage}-")]) <= KEPT for stage in "bcd")
    assert results(out) == results(alone) and not (out / ".parallel").exists()


def parallel(schedule: Path, out: Path, *words: object, code: int = 0) -> CompletedProcess[str]:
    return small.stagerun("run", schedule, "--out", out, "--threads", 1, "--parallel", 2, *words, code=code)


def sent(schedule: Path, out: Path, sign: signal.Signals, stage: str) -> tuple[int, str]:
    """A run that gets a signal while it trains a stage: its exit code, and what it said."""
    words = ["run", str(schedule), "--out", str(out), "--threads", "1", "--parallel", "2"]
    run = processes.Run(words).start()
    processes.until(run, lambda: events(out / ".parallel" / stage, "Iterated"))
    run.process.send_signal(sign)
    return run.wait()


def test_what_is_stopped_and_killed_goes_on_to_the_same_bits(tree, tmp_path):
    schedule, alone = tree
    out = tmp_path / "out"
    code, said = sent(schedule, out, signal.SIGTERM, "d")
    assert code == 75 and "the same command resumes" in said
    # One may have come to its end in that moment.
    assert re.search(r"stage (d|trunk): (stopped and saved|done)", said), said
    assert not (out / ".parallel").exists() and any(name.startswith("d-") for name in content(out))
    sent(schedule, out, signal.SIGKILL, "c")
    (out / ".parallel" / "notes").mkdir()
    (out / ".parallel" / "there").symlink_to(alone)
    # An ordinary run takes over what is left, and nothing else.
    done = small.run(schedule, out, code=0)
    assert "stage c: took over what a killed run with --parallel left" in done.stderr
    assert sorted(p.name for p in (out / ".parallel").iterdir()) == ["notes", "there"]
    assert (alone / "log.jsonl").exists()
    shutil.rmtree(out / ".parallel")
    assert_same(out, alone)


def test_a_failing_stage_ends_the_run_with_its_code_and_from_a_damaged_snapshot_it_comes_to_the_same_bits(
    tree, tmp_path
):
    """A worker finds the damage under the snapshot's second name; the run goes on as one without --parallel does."""
    schedule, alone = tree
    out, only = tmp_path / "out", ("--only", "trunk", "--only", "d")
    done = parallel(schedule, out, *only, "--set", "d.base_lr=1e30", code=79)
    assert "in stage `d` the loss is nan" in done.stderr, done.stderr
    assert not (out / ".parallel").exists()
    assert small.run(schedule, out, "--only", "trunk").returncode == 0
    (end,) = (out / "snapshots").glob("trunk-00000008-*")
    weights = max(end.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    data = bytearray(weights.read_bytes())
    data[-5] ^= 1
    weights.write_bytes(data)
    done = parallel(schedule, out)
    assert f"snapshot {end.name} is damaged and was set aside as .bad-{end.name}" in done.stderr
    assert_same(out, alone)
    finished = {e["stage"] for e in events(out, "StageFinished")}
    assert finished == {"a", "b", "c", "d", "trunk"} and "all" in done.stdout
    assert parallel(schedule, out).stdout.startswith("nothing to do")


def test_what_needs_the_whole_machine_is_refused(tree, tmp_path):
    schedule, _ = tree
    for words in (("--nproc", 2), ("--log", "tensorboard"), ("--profile", tmp_path / "x")):
        refused = stagerun(["run", schedule, "--out", "out", "--parallel", 2, *words], tmp_path)
        assert refused.exit_code == 64 and f"--parallel with {words[0]}: " in refused.stderr, refused.stderr


FOLDERS = """
name: "folders" model { name: "resnet_small" num_classes: 3 }
data { train { source: "train" } }
solver { batch_size: 8 device_batch_size: 4 base_lr: 0.05 lr_policy: "fixed" max_iter: 2 transform_param { crop_size: 32 } }
stage { name: "one" solver_param {} }
stage { name: "two" from: "" solver_param {} }
"""


def test_folders_of_images_are_imported_once(tmp_path):
    photos.make_folder(tmp_path / "s" / "train", per_class=8)
    (tmp_path / "s" / "schedule.prototxt").write_text(FOLDERS)
    parallel(tmp_path / "s", tmp_path / "out")
    (made,) = (tmp_path / "out" / "data").iterdir()
    notes = [e["text"] for e in events(tmp_path / "out", "Note")]
    assert {line.partition(";")[0] for line in notes if "imported" in line} == {
        f"{tmp_path}/s/train: imported 24 images to {made}"
    }
    # All know what they were trained on, though only the first has imported it.
    seen = [
        json.loads(m.read_bytes()[:-65])["environment"]["training set"]
        for m in (tmp_path / "out").glob("snapshots/*/MANIFEST.json")
    ]
    assert len(seen) == 2 and len(set(seen)) == 1 and "sample" in seen[0]
