"""`stagerun import caffe`: nets that are kept whole, and what a stage starts from that no stage makes."""

import io
from pathlib import Path

import pytest
from click.testing import CliRunner
from PIL import Image

from stagerun.base import recipe
from stagerun.base.errors import ExitCode
from stagerun.cli import main
from stagerun.data.write import write_lmdb
from stagerun.language import load
from stagerun.language.nets import of_model
from stagerun.language.proto import caffe_pb2

DATA = """layer {
  name: "data" type: "Data" top: "data" top: "label" include { phase: %s }
  transform_param { crop_size: 8 mean_value: 1 mean_value: 2 mean_value: 3 }
  data_param { source: "/data/cifar10_train_lmdb" batch_size: 10 backend: LMDB }
}
"""
LAYERS = """layer {
  name: "conv1" type: "Convolution" bottom: "data" top: "conv1" param { lr_mult: 1 } param { lr_mult: 2 }
  convolution_param { num_output: 4 kernel_size: 3 }
}
layer { name: "ip" type: "InnerProduct" bottom: "conv1" top: "ip" inner_product_param { num_output: 10 } }
"""
LOSS = 'layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }\n'
ACCURACY = 'layer { name: "top1" type: "Accuracy" bottom: "ip" bottom: "label" top: "top1" %s }\n'
NET = (
    'name: "small"  # as published\n'
    + DATA % "TRAIN"
    + DATA % "TEST"
    + LAYERS
    + LOSS
    + ACCURACY % "include { phase: TEST }"
)
SOLVER = 'base_lr: 0.01 lr_policy: "fixed" max_iter: 20 test_interval: 10 test_iter: 1\n'


def run(folder: Path, *arguments: str) -> tuple[int, str]:
    told = ("--images", "500", "--val-images", "100", "--out", str(folder / "out"))
    found = CliRunner().invoke(main, ["import", "caffe", str(folder), *told, *arguments], prog_name="stagerun")
    return found.exit_code, " ".join(found.output.split())


def imported(folder: Path, *arguments: str) -> recipe.Schedule:
    code, said = run(folder, *arguments)
    assert code == 0, said
    return load(folder / "out")


def write(folder: Path, **texts: str) -> Path:
    for name, text in texts.items():
        (folder / (name if name == "README" else f"{name}.prototxt")).write_text(text)
    return folder


def test_the_net_is_copied_as_it_is(tmp_path: Path) -> None:
    schedule = imported(write(tmp_path, net=NET, solver=f'net: "net.prototxt" {SOLVER}'))
    (stage,) = schedule.stages
    assert (tmp_path / "out" / "net.prototxt").read_text() == NET
    assert (stage.model.name, stage.model.num_classes, stage.model.input_shape) == ("net.prototxt", 10, (3, 8, 8))
    assert [(rule.name, rule.lr_mult) for rule in stage.solver.param] == [("conv1.bias", 2.0)]


@pytest.mark.parametrize(("mode", "channels"), [("RGB", 3), ("L", 1)])
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_encoded_images_say_their_channels(mode: str, channels: int, kind: str, tmp_path: Path) -> None:
    """As Caffe, which decodes the first; no mean has as many numbers."""
    held = io.BytesIO()
    Image.new(mode, (12, 12)).save(held, kind)
    datum = caffe_pb2.Datum(data=held.getvalue(), encoded=True, label=1).SerializeToString()
    write_lmdb(str(tmp_path / "lmdb"), [datum] * 3)
    net = NET.replace("/data/cifar10_train_lmdb", str(tmp_path / "lmdb"))
    net = net.replace(" mean_value: 1 mean_value: 2 mean_value: 3", "")
    schedule = imported(write(tmp_path, net=net, solver=f'net: "net.prototxt" {SOLVER}'))
    assert schedule.stages[0].model.input_shape == (channels, 8, 8)


ASPECT = (
    "random_aspect_ratio_param { min_area_ratio: 0.1 max_area_ratio: 1 resize_param { height: 9 interp_mode: CUBIC } }"
)


@pytest.mark.parametrize(
    "said",
    [
        "mirror: true crop_size: 8 scale: 0.5 mean_value: 1 mean_value: 2 mean_value: 3",
        "crop_h: 8 crop_w: 8 scale: 1",
        "crop_size: 8 random_resize_param { min_size: 9 max_size: 9 resize_param { interp_mode: AREA } }",
        f"crop_size: 8 {ASPECT}",
        'crop_size: 8 mean_file: "mean.binaryproto"',
        f'crop_size: 8 mean_file: "mean.binaryproto" {ASPECT}',
    ],
)
def test_an_imported_transform_is_that_which_the_net_itself_means(said: str, tmp_path: Path) -> None:
    mean = caffe_pb2.BlobProto(num=1, channels=3, height=2, width=2, data=[0.1, *[7] * 10, 8.5])
    (tmp_path / "mean.binaryproto").write_bytes(mean.SerializeToString())
    net = NET.replace("crop_size: 8 mean_value: 1 mean_value: 2 mean_value: 3", said)
    run(write(tmp_path, net=net, solver=f'net: "net.prototxt" {SOLVER}'))
    folder = tmp_path / "out"
    (one,) = load(folder, ["model.channels=3"]).stages
    (folder / "net.prototxt").write_text(net)
    (folder / "solver.prototxt").write_text(f'net: "net.prototxt" {SOLVER}')
    data = 'data { train { source: "lmdb" images: 10 } val { source: "lmdb" images: 10 } }'
    text = f'name: "itself" model {{ channels: 3 }} {data} stage {{ name: "itself" solver: "solver.prototxt" }}'
    (folder / "schedule.prototxt").write_text(text)
    (other,) = load(folder).stages
    assert one.solver.transform == other.solver.transform
    assert one.solver.test_transform == other.solver.test_transform


@pytest.mark.parametrize(("more", "order"), [("is_color: false", "one number"), ("", "B, G, R")])
def test_a_missing_mean_is_asked_for_in_as_many_numbers_as_there_are_channels(
    more: str, order: str, tmp_path: Path
) -> None:
    data = 'layer { name: "data" type: "ImageData" top: "data" top: "label" include { phase: TRAIN } '
    data += 'transform_param { crop_size: 8 mean_file: "mean.binaryproto" } '
    data += f'image_data_param {{ source: "list.txt" batch_size: 10 {more} }} }}\n'
    net = data + LAYERS + LOSS
    code, said = run(write(tmp_path, net=net, solver=f'net: "net.prototxt" {SOLVER.partition(" test")[0]}'))
    assert code == ExitCode.RECIPE
    assert f"is not there; write its path, or `mean_value` in its place: {order}" in said
    assert f"mean_value: ? # the mean of each channel? {order}" in said


@pytest.mark.parametrize("way", ["two files", "in the solver", "stages"])
def test_nets_in_other_forms_are_one_network(way: str, tmp_path: Path) -> None:
    """As a net of both phases is: in two files, within the solver, and by `stage` of a state."""
    whole = imported(write(tmp_path, net=NET, solver=f'net: "net.prototxt" {SOLVER}')).stages[0]
    other = tmp_path / "other"
    other.mkdir()
    train, test = DATA % "TRAIN" + LAYERS + LOSS, DATA % "TEST" + LAYERS + LOSS + ACCURACY % ""
    if way == "two files":
        write(other, train=train, test=test, solver=f'train_net: "train.prototxt" test_net: "test.prototxt" {SOLVER}')
    elif way == "in the solver":
        write(other, solver=f"net_param {{ {NET} }} {SOLVER}".replace("  # as published", ""))
    else:
        staged = NET.replace("include { phase: TEST }", 'include { phase: TEST stage: "tested" }')
        write(other, net=staged, solver=f'net: "net.prototxt" test_state {{ stage: "tested" }} {SOLVER}')
    stage = imported(other).stages[0]
    one, two = of_model(whole.model), of_model(stage.model)
    assert (one.train, one.test) == (two.train, two.test)
    assert stage.solver == whole.solver


def test_nets_that_read_other_images_are_one_network(tmp_path: Path) -> None:
    solver = f'net: "%s.prototxt" {SOLVER}'
    write(tmp_path, net=NET, plain=NET.replace("crop_size: 8", "crop_size: 8 mirror: true"))
    write(tmp_path, a_solver=solver % "net", b_solver=solver % "plain")
    first, second = imported(tmp_path, "--order", "a_solver,b_solver").stages
    assert first.model == second.model and second.solver.model is None
    assert (first.solver.transform.mirror, second.solver.transform.mirror) == (False, True)


def test_layers_of_no_classifier_are_mistakes_at_their_places(tmp_path: Path) -> None:
    net = NET.replace('"SoftmaxWithLoss"', '"ContrastiveLoss"').replace('"Convolution"', '"Embed"')
    code, said = run(write(tmp_path, net=net, solver=f'net: "net.prototxt" {SOLVER}'))
    assert code == ExitCode.RECIPE and "unknown type `ContrastiveLoss`" in said and "unknown type `Embed`" in said
    assert f"{tmp_path}/net.prototxt:13:23:" in said and said.endswith("2 mistakes")


def test_shapes_are_checked_at_their_places_in_the_folder(tmp_path: Path) -> None:
    net = NET.replace("num_output: 4", "num_output: 4 group: 5")
    code, said = run(write(tmp_path, net=net, solver=f'net: "net.prototxt" {SOLVER}'))
    assert code == ExitCode.RECIPE and f"{tmp_path}/net.prototxt:14:" in said and "group 5" in said


def test_weights_and_states_that_no_stage_makes(tmp_path: Path) -> None:
    write(tmp_path, net=NET, solver=f'net: "net.prototxt" {SOLVER}')
    write(tmp_path, README="caffe train --solver=solver.prototxt --weights=published.caffemodel\n")
    (tmp_path / "published.caffemodel").write_bytes(b"")
    given = imported(tmp_path).stages[0].solver.weights
    assert given is not None and given.path == str(tmp_path / "published.caffemodel") and not given.strict
    other = tmp_path / "other"
    other.mkdir()
    write(other, net=NET, solver=f'net: "net.prototxt" {SOLVER}')
    write(other, README="caffe train --solver=solver.prototxt --snapshot=old_iter_5.solverstate\n")
    (other / "old_iter_5.solverstate").write_bytes(b"")
    assert imported(other).stages[0].solver.solverstate_path == str(other / "old_iter_5.solverstate")


def test_docker_is_no_launcher_of_workers(tmp_path: Path) -> None:
    write(tmp_path, net=NET, solver=f'net: "net.prototxt" {SOLVER}')
    write(tmp_path, README="$DOCKER_RUN caffe train --solver=solver.prototxt\n")
    assert imported(tmp_path).stages[0].solver.batch_size == 10


def test_several_solvers_are_named_in_the_hint(tmp_path: Path) -> None:
    solver = f'net: "net.prototxt" {SOLVER}'
    write(tmp_path, net=NET, solver_a=solver, solver_b=solver)
    code, said = run(tmp_path)
    assert code == ExitCode.RECIPE and "solver_a.prototxt (a), solver_b.prototxt (b)" in said
    assert "`--order a` imports that one alone" in said
    for name in "ab":
        (tmp_path / f"train_{name}.sh").write_text(f"caffe train --solver=solver_{name}.prototxt\n")
    code, said = run(tmp_path)
    assert code == ExitCode.RECIPE and "with `--order`: solver_a.prototxt, solver_b.prototxt" in said


def test_nets_of_one_file_name_are_two_files(tmp_path: Path) -> None:
    solver = f'net: "%s/net.prototxt" {SOLVER}'
    for name, text in {"a": NET, "b": NET.replace("num_output: 4", "num_output: 7")}.items():
        (tmp_path / name).mkdir()
        write(tmp_path / name, net=text)
        write(tmp_path, **{f"{name}_solver": solver % name})
    first, second = imported(tmp_path, "--order", "a_solver,b_solver").stages
    assert [of_model(one.model).train.layers[1].shapes[0][0] for one in (first, second)] == [4, 7]
    assert (first.model.name, second.model.name) == ("net.prototxt", "net_b.prototxt")


def test_layers_of_two_nets_stay_in_their_order(tmp_path: Path) -> None:
    """What is there in testing alone may be what a later layer of both takes."""
    first, word, linear = LAYERS.partition('layer { name: "ip"')
    linear = word + linear.replace('"conv1"', '"last"')
    dropped = 'layer { name: "drop" type: "Dropout" bottom: "conv1" top: "last" }\n'
    scaled = 'layer { name: "half" type: "Power" bottom: "conv1" top: "last" power_param { scale: 0.5 } }\n'
    train, test = DATA % "TRAIN" + first + dropped + linear + LOSS, DATA % "TEST" + first + scaled + linear + LOSS
    write(tmp_path, train=train, test=test, solver=f'train_net: "train.prototxt" test_net: "test.prototxt" {SOLVER}')
    made = of_model(imported(tmp_path).stages[0].model)
    assert [layer.name for layer in made.train.layers] == ["data", "conv1", "drop", "ip", "loss"]
    assert [layer.name for layer in made.test.layers] == ["data", "conv1", "half", "ip", "loss"]


def test_mistakes_in_a_net_that_is_put_together_are_at_their_places(tmp_path: Path) -> None:
    test = NET.replace("num_output: 10", "num_output: 9")
    write(tmp_path, a=NET, b=test, solver=f'train_net: "a.prototxt" test_net: "b.prototxt" {SOLVER}')
    code, said = run(tmp_path)
    assert (
        code == ExitCode.RECIPE and "/a.prototxt:16:1: ip.weight is 10 x 144 in training and 9 x 144 in testing" in said
    )
    assert (
        "/a.prototxt:1:1: the number of classes is 10 in training and 9 in testing" in said and "net_main" not in said
    )


def test_a_net_beside_the_solver_is_taken_where_its_path_leads_nowhere(tmp_path: Path) -> None:
    code, said = run(write(tmp_path, net=NET, solver=f'net: "models/small/net.prototxt" {SOLVER}'))
    assert code == 0 and load(tmp_path / "out").stages[0].model.name == "net.prototxt"
    assert "net `models/small/net.prototxt`:" in said and "beside the solver, is taken" in said


NORM = (
    'layer { name: "bn" type: "BatchNorm" bottom: "conv1" top: "conv1" %s batch_norm_param { use_global_stats: %s } }\n'
)


@pytest.mark.parametrize(
    ("phase", "value", "start", "listed"),
    [
        ("TRAIN", "true", "", "use_global_stats: the stage starts from fresh weights, and no pass has moved them"),
        ("TRAIN", "true", "--weights x.caffemodel", ""),
        ("TEST", "false", "", "use_global_stats: an evaluation normalises by its own batch"),
        ("TRAIN", "false", "", ""),
        ("TEST", "true", "", ""),
    ],
)
def test_batch_norm_with_statistics_unlike_its_phase(
    phase: str, value: str, start: str, listed: str, tmp_path: Path
) -> None:
    other = {"TRAIN": "TEST", "TEST": "TRAIN"}[phase]
    norms = NORM % (f"include {{ phase: {phase} }}", value)
    norms += (NORM % (f"include {{ phase: {other} }}", value)).replace(f"use_global_stats: {value}", "")
    net = NET.replace('layer { name: "ip"', norms + 'layer { name: "ip"')
    write(
        tmp_path,
        net=net,
        solver=f'net: "net.prototxt" {SOLVER}',
        README=f"caffe train --solver solver.prototxt {start}",
    )
    code, said = run(tmp_path)
    assert code == 0 and (listed in said if listed else "use_global_stats" not in said), said
