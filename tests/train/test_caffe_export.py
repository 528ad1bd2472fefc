"""Weights and solver states of Caffe's into a run and out of a snapshot again: the same numbers, in files that protobuf reads, too."""

import shutil
from pathlib import Path

import caffe_nets
import contract
import numpy as np
import pytest
import torch
from facade import (
    MOMENTUM,
    WEIGHTS,
    Model,
    Origin,
    Weights,
    binary,
    caffe_pb2,
    caffemodel,
    decode,
    looked_at,
    net_of,
    planned_transfer,
    remember,
    tensors_in,
    transfer,
)
from net_texts import resnet50

from stagerun.language import load
from stagerun.models import build

pytestmark = pytest.mark.long

GOLDEN = caffe_nets.GOLDEN
SCHEDULE = """
name: "nets"
model {{ caffe_net: "net.prototxt" num_classes: 10 channels: 1 }}
data {{ train {{ source: "{data}/train_lmdb" images: 600 }} }}
solver {{
  batch_size: 16 device_batch_size: 16 base_lr: {lr} lr_policy: "fixed" max_iter: {iters} momentum: 0.9 weight_decay: 5e-4
  transform_param {{ scale: 0.00390625 }} precision: {precision} type: "{type}"
}}
stage {{ name: "a" solver_param {{ {start} }} }}
"""


def trained(folder: Path, data: Path, net: str, start: str, **more: object) -> Path:
    """The newest snapshot of a run, which has its output in `folder`/out."""
    folder.mkdir(exist_ok=True)
    values = {"lr": 0.01, "iters": 2, "precision": "FP64", "type": "SGD"} | more
    (folder / "schedule.prototxt").write_text(SCHEDULE.format(data=data, start=start, **values))
    shutil.copy(GOLDEN / f"{net}.prototxt", folder / "net.prototxt")
    done("run", folder, "--out", folder / "out", "--nproc", 1, "--threads", 1)
    return max((folder / "out" / "snapshots").glob("a-*"), key=lambda path: path.name)


def done(*words: object, folder: Path = Path()) -> None:
    made = contract.stagerun(words, folder)
    assert made.exit_code == 0, made.output


def tensors(snapshot: Path, file: str) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in decode((snapshot / file).read_bytes()).items()}


def of_net(text: str, shape: tuple[int, int, int], classes: int) -> Model:
    held = net_of(text, shape).text or text
    return Model(name="x", num_classes=classes, net=held, input_shape=shape, moving_average_fraction=None, eps=None)


@pytest.mark.parametrize("net", ["lenet", "bnnet"])
def test_what_caffe_wrote_comes_out_as_it_went_in(net, data, tmp_path):
    given = GOLDEN / f"{net}_m09_A" / "end.caffemodel"
    snapshot = trained(tmp_path / "s", data, net, f'weights {{ file: "{given}" }}', lr=1e-300)
    done("export", snapshot, tmp_path / "x.caffemodel", "--double")
    before, after = (path.read_bytes() for path in (given, tmp_path / "x.caffemodel"))
    kept = [name for name in binary.learnable(before) if "running" not in name and "factor" not in name]
    theirs, ours = binary.tensors(before), binary.tensors(after)
    assert theirs.keys() == ours.keys()
    for name in kept:
        np.testing.assert_array_equal(ours[name], theirs[name])
    read, right = (
        [
            (layer.name, layer.type, [tuple(blob.shape.dim) for blob in layer.blobs])
            for layer in caffe_pb2.NetParameter.FromString(path.read_bytes()).layer
            if layer.type != "Split"
        ]
        for path in (tmp_path / "x.caffemodel", given)
    )
    assert read == right


@pytest.mark.parametrize("type", ["SGD", "Nesterov", "AdaGrad", "RMSProp", "AdaDelta", "Adam"])
def test_export_and_import_of_a_state(type, data, tmp_path):
    net = "bnnet" if type == "Adam" else "lenet"
    snapshot = trained(tmp_path / "s", data, net, "", type=type)
    made_in = tmp_path / "models"
    made_in.mkdir()
    files = ["models/x.caffemodel", "--solverstate", "models/x.solverstate", "--double"]
    # Where `caffe train --snapshot models/x.solverstate` goes on, too.
    done("export", snapshot, *files, folder=tmp_path)
    state = binary.read_state((made_in / "x.solverstate").read_bytes())
    assert (state.iter, state.learned_net) == (2, "models/x.caffemodel")
    theirs = caffe_pb2.SolverState.FromString((made_in / "x.solverstate").read_bytes())
    assert [tuple(one.shape.dim) for one in theirs.history] == [one.shape for one in state.history]

    (tmp_path / "t").mkdir()
    shutil.copy(tmp_path / "s" / "net.prototxt", tmp_path / "t")
    text = (tmp_path / "s" / "schedule.prototxt").read_text()
    text = text.replace("solver_param {", 'solver_param { solverstate: "../models/x.solverstate" max_iter: 3')
    (tmp_path / "t" / "schedule.prototxt").write_text(text)
    schedule = looked_at(load(tmp_path / "t"), tmp_path / "out")
    made, mistakes = planned_transfer(schedule, schedule.stages[0])
    assert schedule.stages[0].begins == 2 and not mistakes and len(made.of(Origin.FILE)) == len(made.rows)
    remembered = tensors(snapshot, MOMENTUM)
    live = {name: torch.zeros(value.shape, dtype=torch.from_numpy(value).dtype) for name, value in remembered.items()}
    remember(schedule.stages[0], live)
    for name, value in remembered.items():
        np.testing.assert_array_equal(live[name].numpy(), value)
    weights = binary.tensors((made_in / "x.caffemodel").read_bytes())
    for name, value in tensors(snapshot, WEIGHTS).items():
        np.testing.assert_allclose(weights[name], value, rtol=1e-15 if "running" in name else 0)


def test_a_net_with_shared_parameters_there_and_back():
    """Caffe writes them with each layer that has them."""
    text = """
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 1 dim: 3 dim: 8 dim: 8 } } }
layer { name: "a" type: "Convolution" bottom: "data" top: "a" param { name: "w" } param { name: "b" }
        convolution_param { num_output: 4 kernel_size: 8 weight_filler { type: "xavier" } } }
layer { name: "b" type: "Convolution" bottom: "data" top: "b" param { name: "w" } param { name: "b" }
        convolution_param { num_output: 4 kernel_size: 8 } }
layer { name: "sum" type: "Eltwise" bottom: "a" bottom: "b" top: "sum" }
"""
    model = of_net(text, (3, 8, 8), 4)
    network, images = build(model).eval(), torch.randn(2, 3, 8, 8)
    alone = torch.nn.functional.linear(images.flatten(1), network.get_parameter("a.weight").flatten(1))
    torch.testing.assert_close(network(images), 2 * alone)
    weights = network.state_dict()
    data = caffemodel(model, weights, double=False)
    assert [blob.shape for layer in binary.read_net(data) for blob in layer.blobs] == [(4, 3, 8, 8), (4,)] * 2
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    made, mistakes = transfer(shapes, None, binary.shapes(data), Weights(file="x.caffemodel", path=""))
    assert not mistakes and len(made.of(Origin.FILE)) == 2


def test_mistakes_of_export(data, tmp_path):
    snapshot = trained(tmp_path / "s", data, "lenet", "", type="AdamW", precision="FP32")
    cases = {
        ("x.pth", "--solverstate", "y"): "for .caffemodel; this is .pth",
        ("x.caffemodel", "--solverstate", "y", "--ema"): "goes with the trained weights",
        ("x.caffemodel", "--solverstate", "y"): "Caffe has no solver of type `AdamW`",
        ("x.safetensors", "--double"): "--double",
    }
    for words, said in cases.items():
        made = contract.stagerun(["export", snapshot, *words], tmp_path)
        assert made.exit_code == 64 and said in made.output, made.output
        assert not list(tmp_path.glob("x.*"))


@torch.no_grad()
@pytest.mark.parametrize("name", ["resnet50", "resnet50_intel_caffe"])
def test_intels_net_answers_as_the_network_that_has_its_weights(name):
    """Of torchvision's with the net's first pooling, which pads nothing."""
    network = build(model := Model(name=name, num_classes=1000)).eval()
    for key, tensor in network.state_dict().items():
        if "bn" in key or key.startswith("conv1.") or "downsample.1" in key:  # zeros and ones by themselves
            tensor.copy_(torch.rand(tensor.shape) + 0.1)
    file = tensors_in(caffemodel(model, network.state_dict(), double=False), "x.caffemodel")
    if name == "resnet50":
        network.maxpool = torch.nn.MaxPool2d(3, 2, ceil_mode=True)
    images = torch.randn(1, 3, 224, 224)
    expected, answers = network(images), []
    for intel in (True, False):
        net = build(of_net(resnet50(intel), (3, 224, 224), 1000)).eval()
        own = net.state_dict()
        assert {key for key in own if key not in file} <= {"conv1.bias"}
        net.load_state_dict(own | {key: value for key, value in file.items() if key in own})
        answers.append(net(images))
    largest = float(expected.abs().max())
    torch.testing.assert_close(answers[0], expected, atol=1e-5 * largest, rtol=0)
    assert (answers[1] - expected).abs().max() > 1e-2 * largest, (
        "the stride in the 1x1 convolutions is another function"
    )
