"""A stage that begins with a .solverstate: the run that real Caffe did after its `--snapshot`, and what is said of one that doesn't fit."""

import shutil
from pathlib import Path

import caffe_nets
import numpy as np
import pytest
from click.testing import CliRunner

from stagerun.base import caffe_blobs, caffe_file
from stagerun.base.errors import DataError
from stagerun.cli import main
from stagerun.data.write import write_lmdb
from stagerun.engine.codec import decode
from stagerun.language import load
from stagerun.language.proto import caffe_pb2
from stagerun.store.disk import LocalDisk
from stagerun.store.given import looked_at
from stagerun.store.read import inventory, read_file
from stagerun.train.caffe_state import remember
from stagerun.train.progress import MOMENTUM, WEIGHTS

GOLDEN = caffe_nets.GOLDEN / "lenet_m09_A_resume75"
NET = """
import torch.nn.functional as F
from torch import nn

class LeNet(nn.Module):
    def __init__(self, num_classes, channels):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(channels, 8, 5), nn.Conv2d(8, 16, 5)
        self.ip1, self.ip2 = nn.Linear(256, 64), nn.Linear(64, num_classes)

    def forward(self, x):
        x = F.max_pool2d(self.conv1(x), 2)
        x = F.max_pool2d(self.conv2(x), 2)
        return self.ip2(F.relu(self.ip1(x.flatten(1))))
"""
SCHEDULE = """
name: "resume75"
model {{ name: "lenet.py:LeNet" num_classes: 10 channels: 1 }}
data {{ train {{ source: "{data}" images: 4800 }} shuffle: false }}
solver {{
  batch_size: 64 device_batch_size: 64 base_lr: 0.05 lr_policy: "poly_cyc" power: 1 lr_iter: 360 max_iter: 150
  warmup_iter: 30 warmup_start_lr: 0.005 momentum: 0.9 weight_decay: 0.0005 precision: FP64 snapshot: 40 {more}
  param {{ kind: BIAS lr_mult: 2 decay_mult: 0 }}
  transform_param {{ scale: 0.00390625 }}
}}
stage {{ name: "a" solver_param {{ solverstate: "state/x.solverstate" }} }}
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    stored = np.load(Path(__file__).parents[1] / "golden" / "fashion_9664.npz")
    path = tmp_path_factory.mktemp("data") / "lmdb"
    images, labels = stored["images"], stored["labels"]
    write_lmdb(
        str(path),
        [
            caffe_pb2.Datum(
                channels=1, height=28, width=28, data=images[i].tobytes(), label=int(labels[i])
            ).SerializeToString()
            for i in range(4800)
        ],
    )
    return path


def folder_of(folder: Path, data: Path, more: str = "") -> Path:
    (folder / "state").mkdir(parents=True)
    (folder / "schedule.prototxt").write_text(SCHEDULE.format(data=data, more=more))
    (folder / "lenet.py").write_text(NET)
    shutil.copy(GOLDEN / "start.solverstate", folder / "state" / "x.solverstate")
    # Under the name that the state has for it.
    shutil.copy(GOLDEN / "start.caffemodel", folder / "state" / "lenet_m09_A_iter_75.caffemodel")
    return folder


def stagerun(*words: object) -> str:
    done = CliRunner().invoke(main, [str(word) for word in words])
    return f"{done.exit_code}\n{done.output}"


def tensors(out: Path, iter: int, file: str) -> dict[str, np.ndarray]:
    disk = LocalDisk()
    (ref,) = (ref for ref in inventory(disk, out).snapshots if ref.iter == iter)
    return {name: tensor.numpy() for name, tensor in decode(read_file(disk, out, ref.name, file, 1 << 30)).items()}


def test_the_run_after_caffes_snapshot_and_a_resumed_one(data: Path, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "s", data)
    plan = stagerun("plan", folder, "--out", tmp_path / "a")
    assert plan.startswith("0") and "75 to do" in plan and "begins: at iteration 75" in plan, plan
    (row,) = (line.split() for line in plan.splitlines() if line.startswith("a "))
    assert row[:4] == ["a", "x.solverstate", "75", "1.00"], "75 of its iterations are an epoch"
    run = stagerun("run", folder, "--out", tmp_path / "a", "--nproc", 1, "--threads", 1)
    assert run.startswith("0") and "iterations 75 to 150, batch 64, from its .solverstate" in run, run
    found = tensors(tmp_path / "a", 150, WEIGHTS)
    for name, value in caffe_blobs.tensors(caffe_file.read_net((GOLDEN / "end.caffemodel").read_bytes())).items():
        # Rates here are computed in double, and Caffe's in float32.
        np.testing.assert_allclose(found[name], value, atol=2e-6 * np.abs(value).max())
    assert stagerun("plan", folder, "--out", tmp_path / "a").count("done")

    shutil.copytree(tmp_path / "a", tmp_path / "b", symlinks=True)
    for snapshot in (tmp_path / "b" / "snapshots").glob("*00000150*"):
        shutil.rmtree(snapshot)
    shutil.rmtree(folder / "state")  # the snapshots have what it gave
    resumed = stagerun("run", folder, "--out", tmp_path / "b", "--nproc", 1, "--threads", 1)
    assert resumed.startswith("0"), resumed
    for file in (WEIGHTS, MOMENTUM):
        again = tensors(tmp_path / "b", 150, file)
        for name, value in tensors(tmp_path / "a", 150, file).items():
            np.testing.assert_array_equal(again[name], value)


def test_another_state_is_another_stage(data: Path, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "s", data)
    assert stagerun("run", folder, "--out", tmp_path / "a", "--nproc", 1, "--threads", 1).startswith("0")
    state = folder / "state" / "x.solverstate"
    held = caffe_file.read_state(state.read_bytes())
    state.write_bytes(caffe_file.state_bytes(held.iter, held.learned_net, [2 * blob.array() for blob in held.history]))
    assert "stale" in stagerun("plan", folder, "--out", tmp_path / "a")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("", "is of iteration 150, and stage `a` ends at 150"),
        ("momentum_form: TORCH", "Caffe remembers steps, and this form gradients"),
        ("sync_param { method: LOCAL replicas: 2 period: 2 }", "in no .solverstate"),
        ('weights { file: "x" }', "names its own weights"),
    ],
)
def test_one_that_does_not_fit(more: str, said: str, data: Path, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "s", data, more)
    if "150" in said:
        state = folder / "state" / "x.solverstate"
        held = caffe_file.read_state(state.read_bytes())
        state.write_bytes(caffe_file.state_bytes(150, held.learned_net, [blob.array() for blob in held.history]))
    output = stagerun("plan", folder, *["--weights"] * ("150" not in said), "--out", tmp_path / "a")
    assert said in output and "schedule.prototxt:" in output, output


def test_a_state_that_is_written_while_the_run_starts(data: Path, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "s", data)
    schedule = looked_at(load(folder), tmp_path)
    state = folder / "state" / "x.solverstate"
    held = caffe_file.read_state(state.read_bytes())
    state.write_bytes(caffe_file.state_bytes(held.iter, held.learned_net, [2 * blob.array() for blob in held.history]))
    with pytest.raises(DataError, match="has changed since the run looked at it"):
        remember(schedule, schedule.stages[0], {})


@pytest.mark.parametrize("iter", [75, 76])
def test_a_branch_before_its_beginning(iter: int, data: Path, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "s", data)
    with (folder / "schedule.prototxt").open("a") as file:
        file.write(f'stage {{ name: "b" from: "a@{iter}" solver_param {{ }} }}\n')
    output = stagerun("plan", folder, "--out", tmp_path / "a")
    assert ("schedule.prototxt:" in output and "`a` begins at 75" in output) == (iter == 75), output


def test_a_stage_with_a_parent_does_not_begin_with_one(data: Path, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "s", data)
    text = (folder / "schedule.prototxt").read_text()
    (folder / "schedule.prototxt").write_text(text.replace("stage {", 'stage { name: "z" solver_param { } }\nstage {'))
    output = stagerun("check", folder)
    assert "`solverstate` in stage `a`, which starts from `z`" in output, output


# What `run` says before the first update, `check` says, too.
EARLY = {
    'solverstate: "x.solverstate" type: "Adam" momentum2: 0.99': "remembers 8 blobs, and type `Adam` 16",
    'solverstate: "x.solverstate" lr_policy: "multistep" gamma: 0.1 stepvalue: 20 stepvalue: 60': "has passed 0 steps, and by iteration 75",
    'weights { file: "other.caffemodel" strict: false }': "other.caffemodel",
    'freeze: "**"': "there is nothing to train",
    'freeze: "nosuch.*"': "fits no parameter of the model",
}


@pytest.mark.parametrize("written", EARLY)
def test_what_check_finds_of_weights_and_freezing(written: str, tmp_path: Path) -> None:
    shutil.copy(GOLDEN / "start.solverstate", tmp_path / "x.solverstate")
    shutil.copy(GOLDEN / "start.caffemodel", tmp_path / "lenet_m09_A_iter_75.caffemodel")
    shutil.copy(caffe_nets.GOLDEN / "lenet.prototxt", tmp_path)
    other = caffe_file.net_bytes("n", [(caffe_file.layer_bytes("z", "InnerProduct"), [np.ones((2, 2), np.float32)])])
    (tmp_path / "other.caffemodel").write_bytes(other)
    (tmp_path / "schedule.prototxt").write_text(
        """name: "x" model { caffe_net: "lenet.prototxt" num_classes: 10 channels: 1 } data { train { source: "/d" images: 640 } }
        solver { batch_size: 64 device_batch_size: 64 base_lr: 0.05 lr_policy: "fixed" max_iter: 150 momentum: 0.9
        transform_param { crop_size: 28 } } stage { name: "a" solver_param { """
        + written
        + " } }"
    )
    output = stagerun("check", tmp_path)
    assert output.startswith("64") and EARLY[written] in output and "schedule.prototxt:" in output, output
