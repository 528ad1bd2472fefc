"""Training runs of real Caffe in double precision, imported from its own files (golden/caffe/README.md): losses, and final weights."""

import re
import shutil

import contract
import numpy as np
import pytest
from caffe_nets import GOLDEN, expected, single, trace, write_fashion
from facade import Iterated
from safetensors.numpy import load_file

import stagerun

# From what each run started: the option of `caffe train`, and the file.
RUNS = {
    "lenet_m09_A": ("--weights", GOLDEN / "init_lenet_iter_0.caffemodel"),
    "lenet_m09_A_resume75": ("--snapshot", GOLDEN / "lenet_m09_A_resume75" / "start.solverstate"),
    "lenet_m09_B": ("--weights", GOLDEN / "lenet_m09_A" / "end.caffemodel"),
    "lenet_m09_C": ("--weights", GOLDEN / "lenet_m09_B" / "end.caffemodel"),
    "lenet_lrjump": ("--weights", GOLDEN / "init_lenet_iter_0.caffemodel"),
    "bnnet_m09_A": ("--weights", GOLDEN / "init_bnnet_iter_0.caffemodel"),
}
LATER = ("lenet_m09_B", "lenet_m09_C", "bnnet_m09_A")  # the first two go on from the first run
HERE = ("precision=FP64", "channels_last=false", "snapshot=0", "test_interval=0")
NUMBER = re.compile(r"(?<=: )(\d+\.\d+(e-\d+)?|\d+e-\d+)")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_fashion(folder, 9600, 100)
    return folder


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.long) if n in LATER else n for n in RUNS])
def test_same_loss_and_weights_as_caffe(name, data, tmp_path):
    """What came of Caffe's folder with the run's files, unedited, is trained with float32's numbers and the rates that Caffe logged."""
    option, start = RUNS[name]
    files = {"solver.prototxt": GOLDEN / name / "solver.prototxt", start.name: start}
    if option == "--snapshot":  # the state names its weights
        files["lenet_m09_A_iter_75.caffemodel"] = start.with_suffix(".caffemodel")
    net = "bnnet.prototxt" if name.startswith("bnnet") else "lenet.prototxt"
    folder, schedule, out = (tmp_path / name for name in ("caffe", "schedule", "out"))
    (folder / "nets").mkdir(parents=True)
    (folder / "data").symlink_to(data)
    shutil.copy(GOLDEN / net, folder / "nets")
    for copy, file in files.items():
        shutil.copy(file, folder / copy)
    (folder / "README").write_text(f"caffe train --solver=solver.prototxt {option}={start.name}\n")
    done = contract.stagerun(["import", "caffe", "caffe", "--out", "schedule"], tmp_path)
    assert done.exit_code == 0, done.output
    for file in schedule.glob("*.prototxt"):
        if file.name != net:
            file.write_text(NUMBER.sub(lambda found: repr(single(float(found[0]))), file.read_text()))
    lrs, right, first = trace(name)
    solver = schedule / "main.prototxt"
    kept = [
        line for line in solver.read_text().splitlines() if re.match(r"solverstate|weights|max_iter|param|\}|  ", line)
    ]
    knots = [f"knot {{ iter: {i} factor: {lr!r} }}" for i, lr in enumerate(lrs, first)]
    solver.write_text("\n".join([*kept, 'base_lr: 1 lr_policy: "piecewise_linear"', *knots]))
    sets = [f"main.{change}" for change in HERE]
    losses = [e.loss for e in stagerun.run(schedule, out, overrides=sets, threads=1) if isinstance(e, Iterated)]
    np.testing.assert_allclose(losses, right, rtol=1e-9)
    (snapshot,) = (out / "snapshots").iterdir()
    weights = load_file(snapshot / "model.safetensors")
    for tensor, value in expected(GOLDEN / name / "end.caffemodel").items():
        most = 1e-9 * max(np.abs(value).max(), 1e-3)
        np.testing.assert_allclose(weights[tensor], value, rtol=0, atol=most, err_msg=tensor)
