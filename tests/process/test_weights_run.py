"""Stages that take weights from elsewhere, freeze some, and have networks of their own: real runs, resumed, by one to three workers."""

import json
import shutil
from pathlib import Path

import pytest
import small
import tiny
import torch
from nan_help import lives
from safetensors.torch import load_file, save_file

SCHEDULE = """
name: "{name}"
model {{ name: "resnet_small" num_classes: {classes} channels: 1 spare_classes: true }}
data {{
  train {{ source: "{data}/train_lmdb" images: 600 }}
  val {{ source: "{data}/val_lmdb" images: 100 }}
}}
determinism: ELASTIC
solver {{
  batch_size: 12 device_batch_size: 4 momentum: 0.9 weight_decay: 5e-4 base_lr: 0.02 lr_policy: "fixed"
  transform_param {{ mean_value: 73 scale: 0.0111 }}
  snapshot: 2 display: 1 test_batch_size: 50 test_iter: 1
}}
"""
TUNED = """
stage {{ name: "head" solver_param {{
  max_iter: 4  weights {{ file: "{file}" {how} }}
  freeze: "conv1.*" freeze: "bn1.*" freeze: "layer*"
}} }}
stage {{ name: "all" from: "head" solver_param {{ max_iter: 3 carry {{ momentum: KEEP }} }} }}
"""
BASE = 'stage { name: "trunk" solver_param { max_iter: 3 } }\n'


def write(folder: Path, data: Path, stages: str, classes: int = 10) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "schedule.prototxt").write_text(SCHEDULE.format(name=folder.name, data=data, classes=classes) + stages)
    return folder


def tensors(out: Path, stage: str, iter: int) -> dict[str, torch.Tensor]:
    *_, folder = sorted((out / "snapshots").glob(f"{stage}-{iter:08d}-*"))
    return load_file(folder / "model.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """`data`, and a run with 12 classes in `out`."""
    folder = tmp_path_factory.mktemp("weights")
    tiny.make_data(folder / "data")
    small.run(write(folder / "base", folder / "data", BASE, 12), folder / "out", code=0)
    return folder


@pytest.fixture(scope="module")
def tuned(base):
    """A run from that snapshot, by one worker."""
    write(base / "tuned", base / "data", TUNED.format(file="../out:trunk", how='drop: "fc.*"'))
    done = small.run(base / "tuned", base / "one", code=0)
    assert "taken from ../out:trunk  54" in done.stdout and "frozen" in done.stdout, done.stdout
    return base


def test_what_is_frozen_stays_and_what_is_thawed_moves(tuned):
    trunk = tensors(tuned / "out", "trunk", 3)
    head, last = tensors(tuned / "one", "head", 4), tensors(tuned / "one", "all", 3)
    for name in trunk:
        if not name.startswith("fc."):
            assert torch.equal(trunk[name], head[name]), name
            assert not torch.equal(head[name], last[name]) or not last[name].is_floating_point(), name
    assert head["fc.weight"].shape[0] == 10 and not torch.equal(head["fc.weight"], last["fc.weight"])
    (momentum,) = (tuned / "one" / "snapshots").glob("head-00000004-*/optim.safetensors")
    assert {name.partition("/")[2] for name in load_file(momentum)} == {"fc.weight", "fc.bias"}
    (state,) = (tuned / "one" / "snapshots").glob("head-00000004-*/state.json")
    kept = json.loads(state.read_text())["weights"]
    assert kept["tensors"]["conv1.weight"] == "taken from the file: conv1.weight"
    assert kept["left"] == {"fc.bias": "dropped", "fc.weight": "dropped"}
    assert kept["tensors"]["fc.bias"] == "drawn anew: dropped"


@pytest.mark.parametrize("workers", [2, 3])
def test_the_same_bits_by_more_workers_and_after_an_interruption(tuned, workers, tmp_path):
    """It goes on in the midst of the stage, then over the joint."""
    out = tmp_path / "out"
    lives(tuned / "tuned", out, workers, stop_after=3)
    lives(tuned / "tuned", out, workers)
    for stage, iter in (("head", 4), ("all", 3)):
        assert same(tensors(out, stage, iter), tensors(tuned / "one", stage, iter)), stage


def test_another_file_is_stale(tuned, tmp_path):
    file, data = tmp_path / "w.safetensors", tuned / "data"
    held = {f"module.{k}": v for k, v in tensors(tuned / "out", "trunk", 3).items()}
    save_file(held, file)
    how = 'drop: "fc.*" rename { from: "module.*" to: "*" }'
    folder = write(tmp_path / "s", data, TUNED.format(file="../w.safetensors", how=how))
    out = shutil.copytree(tuned / "one", tmp_path / "out")
    # From a file in place of a snapshot: other bytes, another `rename`.
    plan = small.stagerun("plan", folder, "--out", out)
    assert "stale" in plan.stdout and "weights.sha256" in plan.stdout
    assert small.run(folder, out, "--redo", "head").returncode == 0
    assert same(tensors(out, "all", 3), tensors(tuned / "one", "all", 3)), "the same weights by another way"


def test_a_stage_with_a_network_of_its_own_takes_over_what_fits(tuned, tmp_path):
    stages = (
        BASE
        + 'stage { name: "wide" solver_param { max_iter: 2 model { name: "resnet_small" num_classes: 11 channels: 1 spare_classes: true } } }'
    )
    folder = write(tmp_path / "s", tuned / "data", stages, 12)
    done = small.run(folder, tmp_path / "out")
    assert done.returncode == 0 and "fc.weight 11 x 512: 12 x 512 in the network before" in done.stdout, done.stdout
    assert tensors(tmp_path / "out", "wide", 2)["fc.bias"].shape == (11,)
    (snapshot,) = (tmp_path / "out" / "snapshots").glob("wide-00000002-*")
    assert small.stagerun("eval", snapshot, "--device-batch", 50).returncode == 0
    assert small.run(folder, tmp_path / "out").returncode == 0
    note = small.stagerun("check", folder).stderr
    assert "stage `wide` has 11 classes, and `trunk` has 12: its head starts from random weights" in note


MISTAKES = {
    "no such file": ("none.pt", "", "none.pt: no such file or directory"),
    "no such stage": ("../out:trank", "", "has no snapshot of `trank` at its end"),
    "no such iteration": ("../out:trunk@7", "", "has no snapshot of `trunk` at iteration 7"),
    "not downloaded": ("torchvision/resnet999", "", "has no weights for `resnet999`"),
    "no tensors": ("../base/schedule.prototxt", "", "not a safetensors file"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found_before_training_at_its_line(tuned, name):
    file, how, message = MISTAKES[name]
    folder = write(tuned / "wrong", tuned / "data", TUNED.format(file=file, how=how))
    plan = small.stagerun("plan", folder, "--weights")
    assert plan.returncode == 64 and message in plan.stderr, plan.stderr
    assert "schedule.prototxt:16:" in plan.stderr and "^" in plan.stderr, plan.stderr


HOW = {
    "compressed": "compress_param { method: TOP_K ratio: 0.1 }",
    "replicas": "sync_param { method: LOCAL replicas: 3 period: 2 }",
    "pushed": "sync_param { method: ASYNC replicas: 3 max_staleness: 2 }",
    "layer-wise": 'type: "LARS" ema_decay: 0.9',
}


@pytest.mark.parametrize("name", HOW)
def test_what_is_frozen_stays_whatever_moves_the_rest(tuned, name, tmp_path):
    text = TUNED.format(file=f"{tuned}/out:trunk", how='drop: "fc.*"').replace(
        "max_iter: 4", f"max_iter: 4 {HOW[name]}"
    )
    text = text.replace("batch_size: 12", "batch_size: 4") if name == "pushed" else text
    folder = write(tmp_path / "s", tuned / "data", text)
    small.run(folder, tmp_path / "out", "--only", "head", code=0)
    trunk, head = tensors(tuned / "out", "trunk", 3), tensors(tmp_path / "out", "head", 4)
    moved = [
        name for name in trunk if name not in ("fc.weight", "fc.bias") and not torch.equal(trunk[name], head[name])
    ]
    assert not moved
