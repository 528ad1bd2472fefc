"""The product and `tests/reference.py`, which trains plainly, come to the same bits: every tensor, and every figure of an evaluation."""

import re
from pathlib import Path
from types import SimpleNamespace

import cv2
import lmdb
import numpy as np
import pytest
import reference
import torch
from click.testing import CliRunner
from facade import Datum
from nan_help import lives
from safetensors.torch import load_file

import stagerun
from stagerun.cli import main

SOLVERS = Path(__file__).parents[2] / "solvers"
TRAIN, VAL = 90, 25  # images of each set


def write_images(path: Path, count: int, shape: tuple[int, int, int], classes: int, encoded: bool = False) -> None:
    rng = np.random.default_rng(count)
    path.parent.mkdir(parents=True, exist_ok=True)
    with lmdb.open(str(path), map_size=1 << 26) as file, file.begin(write=True) as transaction:
        for n in range(count):
            image, label = rng.integers(0, 256, shape, np.uint8), int(rng.integers(classes)) if n >= classes else n
            data = cv2.imencode(".jpg", image)[1] if encoded else image.transpose(2, 0, 1)
            height, width, channels = (0, 0, 0) if encoded else shape
            datum = Datum(
                channels=channels, height=height, width=width, data=data.tobytes(), label=label, encoded=encoded
            )
            transaction.put(b"%08d" % n, datum.SerializeToString())


def differences(out: Path, trained: SimpleNamespace) -> list[object]:
    """Tensors of the snapshots in OUT, of all iterations that the reference keeps, which have other bits there."""
    compared, found = set(), []
    for folder in (out / "snapshots").glob("[!.]*"):
        name, iter, _ = folder.name.rsplit("-", 2)
        if (name, int(iter)) not in trained.states:
            continue
        compared.add((name, int(iter)))
        for part in ("model", "optim", "ema"):
            file, ours = folder / f"{part}.safetensors", getattr(trained.states[name, int(iter)], part)
            theirs = load_file(file) if file.exists() else {}
            found += [
                (name, iter, part, key) for key in ours.keys() | theirs.keys() if bits(ours, key) != bits(theirs, key)
            ]
    missing = {key for key in trained.states if key[1] is not None} - compared
    return sorted(found) + sorted(missing)


def bits(tensors: dict[str, torch.Tensor], name: str) -> object:
    tensor = tensors.get(name)
    return None if tensor is None else (tensor.dtype, tensor.shape, tensor.contiguous().numpy().tobytes())


def assert_same(folder: Path, out: Path, given: object = None) -> SimpleNamespace:
    """Train the schedule in `folder` into `out`, and by the reference."""
    torch.set_num_threads(1)
    schedule = stagerun.load(folder)
    events = list(stagerun.run(schedule, out, threads=1))
    trained = reference.train(schedule, given)
    steps = {(e.stage, e.iter): (e.lr, e.loss) for e in events if type(e).__name__ == "Iterated"}
    assert steps.keys() == trained.steps.keys()
    for key, (lr, loss) in trained.steps.items():
        assert steps[key] == (pytest.approx(lr, rel=1e-12, abs=0), pytest.approx(loss, rel=1e-6)), key
    tests = [e for e in events if type(e).__name__ == "Tested"]
    assert {(e.stage, e.iter, e.ema): (e.images, e.top1, e.top5, e.loss) for e in tests} == trained.scores
    assert differences(out, trained) == []
    return trained


# -- the gallery: the schedules that a CPU trains in minutes, in copies whose iterations and epochs are divided by a number
GALLERY = {
    "cifar10_alexnet": 600,
    "cifar10_inception_bn_28": 900,
    "cifar10_resnet9_24ep": 1200,
    "collapse_atlas": 240,
    "fashion_collapse": 200,
    "fashion_ensemble": 200,
    "fashion_fixres": 60,
    "fashion_longtail": 12,
    "fashion_losses": 60,
    "fashion_own_network": 1,
}
ITERATIONS = (
    r"""((?:max|lr|warmup|patience)_(?:iter|epoch): |test_interval: |knot \{ iter: |@|\.\.|/(?=\d+"))(\d+(?:\.\d+)?)"""
)


def shorter(name: str, folder: Path, divisor: float) -> Path:
    """A copy of a schedule of the gallery with a few small random images and a few small batches."""
    copy, shape = folder / name, (32, 32, 3) if name.startswith("cifar10") else (28, 28, 1)
    copy.mkdir(parents=True)
    classes = int(re.findall(r"num_classes: (\d+)", (SOLVERS / name / "schedule.prototxt").read_text())[0])
    for images, count in (("train", TRAIN), ("val", VAL)):
        write_images(folder / f"{name}_{images}", count, shape, classes, encoded=name == "cifar10_alexnet")
        if name == "fashion_longtail":  # `sampling` looks there for labels
            assert (
                CliRunner().invoke(main, ["data", "verify", "--index", str(folder / f"{name}_{images}")]).exit_code == 0
            )

    def divided(found: re.Match[str]) -> str:
        number = float(found[2]) / divisor
        least = 0 if "knot" in found[1] else 1
        return found[1] + (f"{number:.3f}" if "epoch" in found[1] else str(max(round(number), least)))

    for file in SOLVERS.joinpath(name).iterdir():
        text = file.read_text()
        if file.suffix == ".prototxt":
            text = re.sub("#.*", "", text)
            text = re.sub(r'sweep \{ name: "(?!poly2_240)\w+_\d+" .*', "", text)  # of the atlas
            text = re.sub(ITERATIONS, divided, text)
            text = re.sub(r"\bsnapshot: \d+", "", text)
            text = re.sub(r"\nensemble \{.*", "", text)
            text = re.sub(r"\bbatch_size: (\d+)(\s.*\n\s*|\s+)device_batch_size: (\d+)", batch_sizes, text)
            text = re.sub(r"test_batch_size: \d+", "test_batch_size: 20", text)
            for images, count in (("train", TRAIN), ("val", VAL)):
                path = folder / f"{name}_{images}"
                text = re.sub(
                    rf'{images} \{{ source: "[^"]*" images: \d+', f'{images} {{ source: "{path}" images: {count}', text
                )
        (copy / file.name).write_text(text)
    return copy


def batch_sizes(found: re.Match[str]) -> str:
    passes = int(found[1]) // int(found[3])
    return f"batch_size: {4 * passes} device_batch_size: 4"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if "inception" in name else name for name in GALLERY]
)
def test_gallery(name, tmp_path):
    assert_same(shorter(name, tmp_path, GALLERY[name]), tmp_path / "out")


def test_gallery_of_two_schedules(tmp_path):
    """The second starts with weights of the first, and freezes some."""
    base = assert_same(shorter("fashion_base", tmp_path, 60), tmp_path / "base")
    copy = shorter("fashion_finetune", tmp_path, 20)
    file = f"{tmp_path}/base:base"
    text = (copy / "schedule.prototxt").read_text()
    (copy / "schedule.prototxt").write_text(text.replace("../../out/fashion_base:base", file))
    assert_same(copy, tmp_path / "out", given={file: base.states["base", None].model})


# -- what the gallery lacks
SCHEDULE = """
name: "made"
determinism: {determinism}
model {{ name: "net.py:build" num_classes: 5 channels: 3 }}
data {{ train {{ source: "{folder}/train" images: {train} }} val {{ source: "{folder}/val" images: {val} }} }}
solver {{
  batch_size: 20 device_batch_size: 4 base_lr: 0.05 lr_policy: "fixed" max_iter: 3 momentum: 0.9 weight_decay: 1e-2
  param {{ kind: NORM decay_mult: 0 }} param {{ kind: BIAS lr_mult: 2 }}
  transform_param {{ pad: 2 crop_size: 16 mirror: true mean_value: 120 scale: 0.02 }}
  test_transform_param {{ crop_size: 16 mean_value: 120 scale: 0.02 }}
  test_batch_size: 8
}}
"""
NETWORK = """
from torch import nn

def build(num_classes, channels):
    return nn.Sequential(
        nn.Conv2d(channels, 8, 3, stride=2, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, num_classes),
    )
"""
POLICIES = {
    "fixed": "warmup_iter: 2 warmup_start_lr: 0.001",
    "step": "gamma: 0.5 stepsize: 2",
    "multistep": "gamma: 0.3 stepvalue: [1, 3]",
    "exp": "gamma: 0.9",
    "exp_epoch": "gamma: 0.7",
    "inv": "gamma: 0.1 power: 0.75",
    "poly": "power: 1.5 warmup_iter: 2 warmup_start_lr: 0.01 decay_from: WARMUP_END",
    "poly_cyc": "power: 2 lr_iter: 7",
    "sigmoid": "gamma: -1 stepsize: 2",
    "linear": "end_lr: 0.01",
    "cosine": "end_lr: 0.001",
    "one_minus_sqrt": "policy_start_iter: 1",
    "piecewise_linear": "knot { iter: 0 factor: 0.1 } knot { iter: 2 factor: 1 } knot { iter: 4 factor: 0.3 }",
    "plateau": "gamma: 0.5 plateau_winsize: [1, 1] average_loss: 2",
}
RATES = "".join(
    f'stage {{ name: "{name}" from: "" solver_param {{ lr_policy: "{name}" max_iter: 4 base_lr: 0.05 {fields} }} }}\n'
    for name, fields in POLICIES.items()
)
# A tree, each update once, then carried over by itself or into smaller images and larger batches.
TREE = """
stage { name: "sgd" solver_param { max_iter: 5 ema_decay: 0.8 test_interval: 2 } }
stage { name: "on" from: "sgd@3" solver_param { carry { momentum: KEEP } mixup_alpha: 0.2 label_smoothing: 0.1 ema_decay: 0.9
  transform_param { cutout_size: 4 } } }
stage { name: "larger" from: "on" solver_param { batch_size: 24 device_batch_size: 8 mixup_alpha: 2
  transform_param { crop_size: 12 random_resized_crop_param { min_area_ratio: 0.3 } } } }
"""
UPDATES = """
stage { name: "again" from: "sgd" solver_param { carry { momentum: KEEP data: RESTART } random_seed: 7 } }
stage { name: "torch" from: "sgd" solver_param { momentum_form: TORCH } }
stage { name: "nesterov" from: "torch" solver_param { type: "Nesterov" momentum_form: TORCH carry { momentum: KEEP } } }
stage { name: "ahead" from: "sgd" solver_param { type: "Nesterov" carry { momentum: KEEP } } }
stage { name: "lars" from: "sgd" solver_param { type: "LARS" base_lr: 5 param { kind: NORM adapt: false } } }
stage { name: "adam" from: "" solver_param { type: "Adam" base_lr: 0.01 } }
stage { name: "adam_on" solver_param { type: "Adam" base_lr: 0.005 carry { momentum: KEEP } } }
"""


def made(folder: Path, stages: str, determinism: str = "FIXED") -> Path:
    write_images(folder / "train", TRAIN, (20, 18, 3), 5, encoded=True)
    write_images(folder / "val", VAL, (20, 18, 3), 5)
    text = SCHEDULE.format(folder=folder, train=TRAIN, val=VAL, determinism=determinism)
    schedule = folder / "schedule"
    schedule.mkdir()
    (schedule / "schedule.prototxt").write_text(text + stages)
    (schedule / "net.py").write_text(NETWORK)
    return schedule


def test_learning_rates(tmp_path):
    assert_same(made(tmp_path, RATES), tmp_path / "out")


@pytest.mark.parametrize("determinism", ["FIXED", "ELASTIC"])
def test_updates_and_what_is_carried_over(determinism, tmp_path):
    assert_same(made(tmp_path, TREE + UPDATES, determinism), tmp_path / "out")


@pytest.mark.long
def test_three_workers_killed_then_two_then_one(tmp_path):
    schedule, out = made(tmp_path, TREE.replace("max_iter: 5", "max_iter: 12 snapshot: 1"), "ELASTIC"), tmp_path / "out"
    lives(schedule, out, 3, kill_after=2)
    lives(schedule, out, 2, stop_after=13)
    assert [event.stage for event in stagerun.run(schedule, out, threads=1) if type(event).__name__ == "Tested"] == [
        *("on", "on", "larger")
    ]
    assert differences(out, reference.train(stagerun.load(schedule))) == []
