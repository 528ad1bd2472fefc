"""`stagerun export`: other programs get the same numbers out of the file."""

import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import stored_help
import torch
from facade import Normalise, load_network, open_snapshot, torchvision_models
from safetensors import safe_open
from safetensors.torch import load_file
from stored_help import stagerun

pytestmark = pytest.mark.long

COLOUR = "transform_param { crop_size: 40 mean_value: 104 mean_value: 117 mean_value: 124 scale: 0.017 }"
GREY = "transform_param { crop_size: 28 mean_value: 73 scale: 0.0111 }"
TINY = 'name: "resnet_small" num_classes: 10 channels: 1'


def snapshot(out: Path, model: str = 'name: "resnet18" num_classes: 7', solver: str = COLOUR) -> Path:
    schedule = stored_help.make_schedule(out.parent / f"{out.name}-schedule", model, solver)
    return stored_help.make_snapshot(out, schedule, seed=1, ema=2)


@pytest.fixture(scope="module")
def resnet18(tmp_path_factory):
    return snapshot(tmp_path_factory.mktemp("export") / "out")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return snapshot(tmp_path_factory.mktemp("export") / "out", TINY, GREY)


@pytest.fixture(scope="module")
def timms(tmp_path_factory):
    pytest.importorskip("stagerun.models.torchvision")  # without it timm can't be imported beside a CPU build of torch
    pytest.importorskip("timm")
    return snapshot(tmp_path_factory.mktemp("export") / "out", 'name: "timm/test_resnet" num_classes: 4')


def export(*arguments: object) -> str:
    done = stagerun("export", *arguments)
    assert done.exit_code == 0, done.stderr
    return done.stdout


def answers(folder: Path, images: np.ndarray, ema: bool = False) -> torch.Tensor:
    """What stagerun itself makes of uint8 images [N, H, W, C] in B, G, R."""
    stored = open_snapshot(folder)
    channels = stored.schedule.model.channels
    normalise = Normalise(
        stored.stage.solver.test_transform, channels, torch.device("cpu"), torch.float32, channels_last=True
    )
    with torch.no_grad():
        return load_network(stored, torch.device("cpu"), ema)(normalise(images))


# ---- torch and torchvision


@pytest.mark.parametrize("ema", [False, True])
def test_torchvisions_network_takes_the_file_and_what_is_printed(resnet18, tmp_path, ema):
    """As its user would do it: values of 0..1, the Normalize that was printed, the call that was printed."""
    file = tmp_path / "net.pth"
    said = export(resnet18, file, *["--ema"] * ema)
    assert f"wrote {file}, 4" in said
    assert "the network: torchvision.models.get_model('resnet18', num_classes=7)" in said
    printed = re.search(r"BGR: Normalize\(mean=(\[.*?\]), std=(\[.*?\])\) of 0\.\.1", said)
    assert printed

    net = torchvision_models().get_model("resnet18", num_classes=7)
    net.load_state_dict(torch.load(file, weights_only=True), strict=True)
    images, _ = stored_help.pictures(3, 40, 40, 3, 7)
    x = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255
    mean, std = (torch.tensor(json.loads(printed[i])).reshape(1, 3, 1, 1) for i in (1, 2))
    with torch.no_grad():
        found = net.eval()((x - mean) / std)
    torch.testing.assert_close(found, answers(resnet18, images, ema), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found, answers(resnet18, images, not ema), rtol=1e-2)


def test_metadata_says_what_the_network_expects(resnet18, tmp_path):
    facts = {}
    for name, options in {"trained": [], "averaged": ["--ema"]}.items():
        export(resnet18, tmp_path / f"{name}.safetensors", *options)
        with safe_open(tmp_path / f"{name}.safetensors", "pt") as file:
            facts = file.metadata()
        assert facts["weights"] == name
    assert facts["model"] == "resnet18" and facts["num_classes"] == "7"
    assert facts["snapshot_id"] == open_snapshot(resnet18).ref.id and facts["snapshot"] == "only-00000003-a0001"
    assert (facts["schedule"], facts["stage"], facts["iter"]) == ("stored", "only", "3")
    assert facts["before"] == "40 x 40 cut from the centre" and facts["scale"] == "0.017"
    assert facts["std_value"] == "1.0, 1.0, 1.0"
    assert (facts["channel_order"], facts["mean_value"]) == ("BGR", "104.0, 117.0, 124.0")


@pytest.mark.parametrize("of", ["tiny", "timms"])
def test_the_snapshot_makes_a_network_that_torchvision_lacks(of, tmp_path, request):
    folder = request.getfixturevalue(of)
    said = export(folder, tmp_path / "net.pth")
    made = re.search(r"the network: (stagerun\.Snapshot\('.*'\)\.model\(\))", said)
    assert made
    eval(made[1], {"stagerun": sys.modules["stagerun"]}).load_state_dict(
        torch.load(tmp_path / "net.pth", weights_only=True)
    )


# ---- ONNX


def run_onnx(file: Path, images: np.ndarray) -> np.ndarray:
    onnxruntime = pytest.importorskip("onnxruntime")
    found = onnxruntime.InferenceSession(file.read_bytes()).run(["logits"], {"images": images})[0]
    assert isinstance(found, np.ndarray)
    return found


@pytest.fixture
def onnx():
    pytest.importorskip("onnxscript")
    return pytest.importorskip("onnx")


def check_onnx(folder: Path, file: Path, side: int, *options: str, rgb: bool = False) -> str:
    """Bytes in, logits out, the same as stagerun's to 1e-5 of the largest, for any number of images; what was printed."""
    said = export(folder, file, *options)
    stored = open_snapshot(folder)
    for n in (1, 2, 5):
        images, _ = stored_help.pictures(n, side, side, stored.schedule.model.channels, 10)
        own = answers(folder, images).numpy()
        found = run_onnx(file, images[..., ::-1].copy() if rgb else images)
        assert found.dtype == np.float32 and found.shape == own.shape
        assert np.abs(found - own).max() <= 1e-5 * max(1.0, np.abs(own).max())
    return said


def test_an_onnx_graph_takes_bytes_of_the_size_that_is_asked_for(onnx, tiny, tmp_path):
    said = check_onnx(tiny, tmp_path / "other.onnx", 36, "--size", "36")
    assert "before: 36 x 36 cut from the centre" in said and "28" not in said


def test_an_onnx_graph_divides_by_std_value_and_takes_the_order_that_the_network_was_trained_on(onnx, tmp_path):
    solver = "channel_order: RGB mean_value: [120, 110, 100] std_value: [60, 50, 40] scale: 2 crop_size: 32"
    folder = snapshot(tmp_path / "out", 'name: "resnet_small" num_classes: 7', f"transform_param {{ {solver} }}")
    assert "3], RGB, 0..255" in check_onnx(folder, tmp_path / "net.onnx", 32, rgb=True)


def test_an_onnx_file_normalises_itself_and_holds_its_facts_and_nothing_of_this_machine(onnx, tiny, tmp_path):
    files = [tmp_path / "a.onnx", tmp_path / "b.onnx"]
    check_onnx(tiny, files[0], 28)
    export(tiny, files[1])
    assert files[0].read_bytes() == files[1].read_bytes()
    graph = onnx.load(files[0])
    onnx.checker.check_model(graph, full_check=True)
    facts = {p.key: p.value for p in graph.metadata_props}
    assert facts["input"] == "uint8 [N, 28, 28, 1], grey, 0..255; the graph normalises"
    assert facts["snapshot"] == "only-00000003-a0001" and facts["mean_value"] == "73.0"
    assert facts["before"] == "28 x 28 cut from the centre"
    for part in (str(Path(stored_help.__file__).parents[2]), os.path.dirname(torch.__file__)):
        assert part.encode() not in files[0].read_bytes()


@pytest.mark.parametrize("rule", ["MEAN_PROBABILITY", "MEAN_LOGIT"])
def test_an_ensemble_is_one_graph(onnx, tmp_path, rule):
    folder, out, file = tmp_path / "schedule", tmp_path / "out", tmp_path / "net.onnx"
    images, labels = stored_help.pictures(9, 28, 28, 1, 10)
    data = stored_help.make_lmdb(tmp_path / "data", images, labels)
    members = [answers(path, images).double() for path in stored_help.make_ensemble(out, folder, data, 9, rule, GREY)]
    said = export(out, file, "--stage", "both")
    assert "output: logits float32 [N, 10]" in said
    expected = torch.stack(members).mean(0) if rule == "MEAN_LOGIT" else torch.stack(members).softmax(2).mean(0).log()
    found = run_onnx(file, images)
    assert np.abs(found - expected.numpy()).max() <= 1e-5 * max(1.0, expected.abs().max())
    (row,) = json.loads(stagerun("eval", out, "--stage", "both", "--json").stdout)["evaluations"]
    loss = torch.nn.functional.cross_entropy(torch.from_numpy(found).double(), torch.from_numpy(labels).long())
    assert row["loss"] == pytest.approx(float(loss), rel=1e-5) and row["ensemble"] == "both"
    facts = {p.key: p.value for p in onnx.load(file).metadata_props}
    assert (facts["ensemble"], facts["stage"], facts["mean_value"]) == ("both", "other; only", "73.0")
    done = stagerun("export", out, tmp_path / "net.pth", "--stage", "both")
    assert done.exit_code == 64 and "`both` averages the answers of 2 networks, and .pth holds one" in done.stderr


# ---- mistakes


@pytest.mark.parametrize(
    "arguments, message, hint",
    [
        (["{tmp}/net"], "its ending names no format", "`.onnx` or `.caffemodel`"),
        (["{tmp}/net.pth", "--size", "32"], "--size is for .onnx", "leave them out"),
        (["{tmp}/net.pth", "--onnx"], "No such option '--onnx'", "the ending of FILE says the format"),
        (["{tmp}/net.pth", "--size", "0"], "0 is not in the range x>=1", ""),
    ],
)
def test_mistakes(tiny, tmp_path, arguments, message, hint):
    done = stagerun("export", tiny, *(a.format(tmp=tmp_path) for a in arguments))
    assert done.exit_code == 64 and message in done.stderr and hint in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_snapshot(tiny):
    for argument, hint in ((tiny.parent, "neither a schedule's folder"), ("nowhere", "OUT/snapshots/NAME")):
        done = stagerun("export", argument, "net.pth")
        assert done.exit_code == 64 and hint in done.stderr


def test_an_onnx_graph_needs_a_size_that_fits(onnx, tiny, tmp_path):
    no_crop = snapshot(tmp_path / "out", TINY, "transform_param { scale: 1 }")
    done = stagerun("export", no_crop, tmp_path / "a.onnx")
    assert done.exit_code == 64 and "no crop_size" in done.stderr and "--size N" in done.stderr
    small = snapshot(tmp_path / "small", 'name: "squeezenet1_1" num_classes: 4')
    done = stagerun("export", small, tmp_path / "a.onnx", "--size", 8)
    assert done.exit_code == 64 and "can't make an ONNX file" in done.stderr and "--size" in done.stderr
    assert not (tmp_path / "a.onnx").exists()


def test_a_file_is_replaced_only_when_asked(tiny, tmp_path):
    file = tmp_path / "net.pth"
    file.write_bytes(b"precious")
    done = stagerun("export", tiny.name, file, "--out", tiny.parents[1])
    assert done.exit_code == 64 and "exists already" in done.stderr and "--force" in done.stderr
    assert file.read_bytes() == b"precious"
    export(tiny.name, file, "--force", "--out", tiny.parents[1])
    assert torch.load(file, weights_only=True).keys() == load_file(tiny / "model.safetensors").keys()
    assert [p.name for p in tmp_path.iterdir()] == ["net.pth"]
