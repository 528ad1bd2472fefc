"""A run of a net of Caffe's: resumed to the same bits, used from its snapshot alone, changed between stages."""

import shutil
from pathlib import Path

import contract
import numpy as np
import pytest
from facade import Datum, write_lmdb
from safetensors.numpy import load_file

NET = """name: "small"
layer {
  name: "data" type: "Data" top: "data" top: "label"
  transform_param { scale: 0.0078125 mean_value: 127 }
  data_param { source: "images" batch_size: 4 backend: LMDB }
}
layer {
  name: "conv1" type: "Convolution" bottom: "data" top: "conv1" param { lr_mult: 1 } param { lr_mult: 2 decay_mult: 0 }
  convolution_param { num_output: 6 kernel_size: 3 weight_filler { type: "xavier" } }
}
layer { name: "bn1" type: "BatchNorm" bottom: "conv1" top: "conv1" }
layer { name: "scale1" type: "Scale" bottom: "conv1" top: "conv1" scale_param { bias_term: true } }
layer { name: "relu1" type: "ReLU" bottom: "conv1" top: "conv1" }
layer {
  name: "side" type: "InnerProduct" bottom: "conv1" top: "side" include { phase: TRAIN }
  inner_product_param { num_output: 10 weight_filler { type: "xavier" } }
}
layer {
  name: "side_loss" type: "SoftmaxWithLoss" bottom: "side" bottom: "label" top: "side_loss" loss_weight: 0.3
  include { phase: TRAIN }
}
layer { name: "drop" type: "Dropout" bottom: "conv1" top: "drop" }
layer {
  name: "ip" type: "InnerProduct" bottom: "drop" top: "ip"
  inner_product_param { num_output: 10 weight_filler { type: "gaussian" std: 0.01 } }
}
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
layer { name: "top1" type: "Accuracy" bottom: "ip" bottom: "label" top: "top1" include { phase: TEST } }
"""
SCHEDULE = """
solver { net: "small.prototxt" base_lr: 0.01 lr_policy: "fixed" momentum: 0.9 weight_decay: 0.001 batch_size: 8 snapshot: 2 }
stage { name: "first" solver_param { max_iter: 4 test_interval: 2 } }
stage { name: "other" solver_param { net: "other.prototxt" max_iter: 3 } }
"""


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "nets"
    made.mkdir()
    pixels = np.random.default_rng(1).integers(0, 256, (20, 192), np.uint8)
    images = [Datum(channels=3, height=8, width=8, data=one.tobytes(), label=i % 10) for i, one in enumerate(pixels)]
    write_lmdb(str(made / "images"), [image.SerializeToString() for image in images])
    (made / "small.prototxt").write_text(NET)
    (made / "other.prototxt").write_text(NET.replace('"ip"', '"ip_other"').replace("num_output: 6", "num_output: 6 "))
    (made / "schedule.prototxt").write_text(SCHEDULE)
    return made


def stagerun(*words: object, folder: Path = Path()) -> str:
    done = contract.stagerun(words, folder)
    assert done.exit_code == 0, done.output
    return done.output


def test_a_run_goes_on_to_the_same_bits_and_its_snapshots_hold_the_net(folder, tmp_path):
    out = tmp_path / "out"
    stagerun("run", folder, "--out", out, "--nproc", 1)
    snapshots = {path.name.rpartition("-")[0]: path for path in (out / "snapshots").iterdir()}
    ends = {name: (snapshots[name] / "model.safetensors").read_bytes() for name in ("first-00000004", "other-00000003")}
    first, other = (load_file(snapshots[name] / "model.safetensors") for name in ends)
    assert "side.weight" in first and "ip.weight" in first  # what training alone has, too
    assert (first["conv1.weight"] != other["conv1.weight"]).any() and "ip_other.weight" in other
    again = tmp_path / "again"
    shutil.copytree(out, again)
    for name in (*ends, "other-00000002"):
        shutil.rmtree(again / "snapshots" / snapshots[name].name)
    stagerun("run", folder, "--out", again, "--nproc", 1)
    for name, bits in ends.items():
        (found,) = (again / "snapshots").glob(f"{name}-*")
        assert (found / "model.safetensors").read_bytes() == bits
    made = tmp_path / "made.safetensors"
    said = stagerun("export", snapshots["first-00000004"], made)
    assert (
        f"stagerun.Snapshot('{snapshots['first-00000004']}').model()" in said and load_file(made).keys() == first.keys()
    )
    for net in folder.glob("*[rl].prototxt"):
        net.unlink()  # a snapshot needs no file
    said = stagerun("eval", snapshots["other-00000003"])
    assert "top-1" in said
