"""A stage that begins with a .solverstate: the run that real Caffe did after its `--snapshot`, and what is said of one that doesn't fit."""

import shutil
from pathlib import Path

import caffe_nets
import contract
import numpy as np
import pytest
from caffe_lies import layer_bytes
from facade import MOMENTUM, WEIGHTS, DataError, binary, decode, looked_at, remember

from stagerun.language import load

GOLDEN = caffe_nets.GOLDEN / "lenet_m09_A_resume75"
SCHEDULE = """
name: "resume75"
model {{ caffe_net: "lenet.prototxt" num_classes: 10 channels: 1 }}
data {{ train {{ source: "fmnist_train_lmdb" images: 4800 }} shuffle: false }}
solver {{
  batch_size: 64 device_batch_size: 64 base_lr: 0.05 lr_policy: "poly_cyc" power: 1 lr_iter: 360 max_iter: 150
  warmup_iter: 30 warmup_start_lr: 0.005 momentum: 0.9 weight_decay: 0.0005 precision: FP64 snapshot: 40
  param {{ kind: BIAS lr_mult: 2 decay_mult: 0 }}
  transform_param {{ scale: 0.00390625 crop_size: 28 }}
}}
{stages}
"""
STATE = 'solverstate: "state/x.solverstate"'
STAGE = f'stage {{ name: "a" solver_param {{ {STATE} }} }}'


def folder_of(folder: Path, stages: str = STAGE) -> Path:
    (folder / "state").mkdir(parents=True)
    (folder / "schedule.prototxt").write_text(SCHEDULE.format(stages=stages))
    shutil.copy(caffe_nets.GOLDEN / "lenet.prototxt", folder)
    shutil.copy(GOLDEN / "start.solverstate", folder / "state" / "x.solverstate")
    # Under the name that the state has for it.
    shutil.copy(GOLDEN / "start.caffemodel", folder / "state" / "lenet_m09_A_iter_75.caffemodel")
    return folder


def change(state: Path, factor: float = 2, iter: int = 75) -> None:
    held = binary.read_state(state.read_bytes())
    blobs = [factor * blob.data.reshape(blob.shape) for blob in held.history]
    state.write_bytes(binary.state_bytes(iter, held.learned_net, blobs))


def stagerun(*words: object, folder: Path) -> str:
    done = contract.stagerun(words, folder)
    return f"{done.exit_code}\n{done.output}"


def tensors(out: Path, file: str) -> dict[str, np.ndarray]:
    (end,) = (out / "snapshots").glob("a-00000150-*")
    return {name: tensor.numpy() for name, tensor in decode((end / file).read_bytes()).items()}


@pytest.mark.long
def test_the_run_after_caffes_snapshot_a_resumed_one_and_another_state(tmp_path):
    folder = folder_of(tmp_path / "s")
    caffe_nets.write_fashion(folder, 4800, 1)
    plan = stagerun("plan", "s", "--out", "a", folder=tmp_path)
    assert plan.startswith("0") and "75 to do" in plan and "begins: at iteration 75" in plan, plan
    (row,) = (line.split() for line in plan.splitlines() if line.startswith("a "))
    assert row[:4] == ["a", "x.solverstate", "75", "1.00"], "75 of its iterations are an epoch"
    run = stagerun("run", "s", "--out", "a", "--nproc", 1, "--threads", 1, folder=tmp_path)
    assert run.startswith("0") and "iterations 75 to 150, batch 64, from its .solverstate" in run, run
    found = tensors(tmp_path / "a", WEIGHTS)
    for name, value in binary.tensors((GOLDEN / "end.caffemodel").read_bytes()).items():
        # Rates here are computed in double, and Caffe's in float32.
        np.testing.assert_allclose(found[name], value, atol=2e-6 * np.abs(value).max())
    assert "done" in stagerun("plan", "s", "--out", "a", folder=tmp_path)
    change(folder / "state" / "x.solverstate")
    assert "stale" in stagerun("plan", "s", "--out", "a", folder=tmp_path)

    shutil.copy(GOLDEN / "start.solverstate", folder / "state" / "x.solverstate")
    shutil.copytree(tmp_path / "a", tmp_path / "b", symlinks=True)
    for snapshot in (tmp_path / "b" / "snapshots").glob("*00000150*"):
        shutil.rmtree(snapshot)
    shutil.rmtree(folder / "state")  # the snapshots have what it gave
    resumed = stagerun("run", "s", "--out", "b", "--nproc", 1, "--threads", 1, folder=tmp_path)
    assert resumed.startswith("0"), resumed
    for file in (WEIGHTS, MOMENTUM):
        again = tensors(tmp_path / "b", file)
        for name, value in tensors(tmp_path / "a", file).items():
            np.testing.assert_array_equal(again[name], value)


def test_a_state_that_is_written_while_the_run_starts(tmp_path):
    folder = folder_of(tmp_path / "s")
    schedule = looked_at(load(folder), tmp_path)
    change(folder / "state" / "x.solverstate")
    with pytest.raises(DataError, match="has changed since the run looked at it"):
        remember(schedule.stages[0], {})


# What `run` says before the first update, `check` says, too, but where a stage begins: that `plan` knows.
EARLY = {
    'solverstate: "state/end.solverstate"': "has iteration 150, and stage `a` ends at 150",
    f"{STATE} momentum_form: TORCH": "Caffe stores steps, and this form gradients",
    f"{STATE} sync_param {{ method: LOCAL replicas: 2 period: 2 }}": "a .solverstate lacks its history",
    f'{STATE} weights {{ file: "x" }}': "names its weights",
    f'{STATE} }} }} stage {{ name: "b" from: "a@75" solver_param {{': "`a` begins at 75",
    f'}} }} stage {{ name: "b" solver_param {{ {STATE}': "`solverstate` in stage `b`, which starts from `a`",
    f'{STATE} type: "Adam" momentum2: 0.99': "holds 8 blobs, and type `Adam` needs 16",
    f'{STATE} lr_policy: "multistep" gamma: 0.1 stepvalue: 20 stepvalue: 60': "has passed 0 steps, and by iteration 75",
    'weights { file: "other.caffemodel" strict: false }': "other.caffemodel",
    'freeze: "**"': "there is nothing to train",
    'freeze: "nosuch.*"': "fits no parameter of the model",
    f'{STATE} }} }} stage {{ name: "b" from: "a@76" solver_param {{': "",
}


@pytest.mark.parametrize("written", EARLY)
def test_what_check_finds_of_states_weights_and_freezing(written, tmp_path):
    stage = f'stage {{ name: "a" solver_param {{ {written} }} }}'
    folder = folder_of(tmp_path / "s", stage)
    shutil.copy(folder / "state" / "x.solverstate", folder / "state" / "end.solverstate")
    change(folder / "state" / "end.solverstate", 1, 150)
    other = binary.net_bytes("n", [(layer_bytes("z", "InnerProduct"), [np.ones((2, 2), np.float32)])])
    (folder / "other.caffemodel").write_bytes(other)
    begins = "end.solverstate" in written or "a@" in written
    output = stagerun("plan" if begins else "check", "s", folder=tmp_path)
    if EARLY[written]:
        assert output.startswith("64") and EARLY[written] in output and "schedule.prototxt:" in output, output
    else:
        assert output.startswith("0"), output
