"""Schedules that name a net of Caffe's: what comes from it, what wins over it, and mistakes. Without torch."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from stagerun.base import recipe
from stagerun.base.errors import RecipeError
from stagerun.base.snapshots import Inventory
from stagerun.base.weights import fits
from stagerun.data.synthetic import write_synthetic
from stagerun.language import canonical, load
from stagerun.language.net import net_of
from stagerun.language.nets import multipliers
from stagerun.language.proto import caffe_pb2
from stagerun.language.stored import read_recipe
from stagerun.language.values import leaves
from stagerun.launch.ssh import named_files
from stagerun.plan import make_plan
from stagerun.plan.render import render_text

NET = """name: "small"
layer {
  name: "data" type: "Data" top: "data" top: "label" include { phase: TRAIN }
  transform_param { scale: 0.5 mirror: true mean_value: 7 }
  data_param { source: "images/train" batch_size: 4 backend: LMDB }
}
layer {
  name: "data" type: "Data" top: "data" top: "label" include { phase: TEST }
  transform_param { scale: 0.5 mirror: true mean_value: 7 }
  data_param { source: "images/test" batch_size: 3 backend: LMDB }
}
layer {
  name: "conv1" type: "Convolution" bottom: "data" top: "conv1"
  param { lr_mult: 1 } param { lr_mult: 2 decay_mult: 0 }
  convolution_param { num_output: 6 kernel_size: 5 }
}
layer {
  name: "ip" type: "InnerProduct" bottom: "conv1" top: "ip" param { lr_mult: 1 } param { lr_mult: 2 decay_mult: 0 }
  inner_product_param { num_output: 10 }
}
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
"""
SOLVER = 'net: "../nets/small.prototxt" base_lr: 0.01 lr_policy: "fixed" max_iter: 10 test_interval: 5'

Write = Callable[..., recipe.Schedule]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """A schedule beside the net, whose images lie where Caffe was started: in the folder above both."""
    (tmp_path / "nets").mkdir()
    (tmp_path / "one").mkdir()
    write_synthetic(str(tmp_path / "images" / "train"), 9, 8, 8, 1, 10, False)
    write_synthetic(str(tmp_path / "images" / "test"), 6, 8, 8, 1, 10, False)

    def written(stage: str = "", schedule: str = "", net: str = NET, solver: str = SOLVER) -> recipe.Schedule:
        (tmp_path / "nets" / "small.prototxt").write_text(net)
        text = f'{schedule}\nstage {{ name: "main" solver_param {{ {solver} {stage} }} }}\n'
        (tmp_path / "one" / "schedule.prototxt").write_text(text)
        return load(tmp_path / "one")

    return written


def mistakes(write: Write, **texts: str) -> str:
    with pytest.raises(RecipeError) as error:
        write(**texts)
    return "\n".join(problem.render() for problem in error.value.problems)


def test_a_solver_of_a_few_words_is_a_schedule(write: Write, tmp_path: Path) -> None:
    schedule = write()
    (stage,) = schedule.stages
    solver = stage.solver
    assert (stage.model.name, stage.model.num_classes, stage.model.channels) == ("../nets/small.prototxt", 10, 1)
    assert stage.model.input_shape == (1, 8, 8)  # of the first record: nothing is cut
    assert (solver.batch_size, solver.device_batch_size, solver.test_batch_size) == (4, 4, 3)
    assert (solver.transform.scale, solver.transform.mirror, solver.transform.mean_value) == (0.5, True, (7.0,))
    assert (solver.test_transform.scale, solver.test_transform.mirror) == (0.5, False)
    assert (schedule.data.train.path, schedule.data.train.images) == (str(tmp_path / "images" / "train"), 9)
    assert [(val.path, val.images) for val in schedule.data.val] == [(str(tmp_path / "images" / "test"), 6)]
    assert not schedule.data.shuffle  # Caffe reads a database in its order
    assert [(r.name, r.lr_mult, r.decay_mult) for r in solver.param] == [("*.bias", 2.0, 0.0)]
    assert stage.origins["solver.batch_size"].layer == "net"


def test_the_schedule_wins(write: Write) -> None:
    more = 'transform_param { scale: 2 } batch_size: 8 device_batch_size: 2 param { name: "ip.bias" lr_mult: 3 }'
    solver = write(stage=more).stages[0].solver
    assert (solver.batch_size, solver.device_batch_size, solver.transform.scale) == (8, 2, 2)
    assert not solver.transform.mirror  # a field replaces the one below it whole
    assert [r.name for r in solver.param] == ["ip.bias", "*.bias"]  # the first that fits counts
    assert write(stage='clear: "transform_param"').stages[0].solver.transform.scale == 1


def test_a_layers_name_is_no_pattern_for_others() -> None:
    layer = 'layer {{ name: "{0}" type: "InnerProduct" bottom: "{1}" top: "{2}" {3} inner_product_param {{ num_output: 2 }} }}'
    chain = (
        ("a", "data", "a", ""),
        ("*", "a", "b", "param { lr_mult: 0 }"),
        ("a[b]?", "b", "c", "param { lr_mult: 3 }"),
    )
    text = 'layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 1 dim: 2 } } }'
    text = text.replace("dim: 1 dim: 2", "dim: 1 dim: 1 dim: 2 dim: 2")
    found = multipliers(net_of(text + "".join(layer.format(*one) for one in chain), (1, 2, 2)))
    assert found == [("[*].weight", 0.0, 1.0), ("a[[]b][?].weight", 3.0, 1.0)]
    assert fits("*.weight", ["[*].weight"]) and not fits("a.weight", ["[*].weight"])


def test_plan_counts(write: Write) -> None:
    said = render_text(make_plan(write(), Inventory()))
    # 6 x 25 + 6 and 10 x 96 + 10; 150 weights at 16 places, and 960 once.
    assert "1126 parameters, 0.00336 million multiply-adds for an image of 1 x 8 x 8" in said


def test_sync_carries_the_net(write: Write, tmp_path: Path) -> None:
    assert list(named_files(write())) == ["../nets/small.prototxt"]


@pytest.mark.parametrize(
    ("change", "same"),
    [
        (("name:", "# a comment\nname:"), True),
        (('"small"', '"other"'), True),
        (("num_output: 6", "num_output: 6 bias_term: true"), True),  # a default
        (("kernel_size: 5", "kernel_size: 3"), False),
        (("include { phase: TEST }", "include { phase: TEST } "), True),
    ],
)
def test_what_makes_a_snapshot_stale(change: tuple[str, str], same: bool, write: Write) -> None:
    before, after = write().stages[0].identity, write(net=NET.replace(*change, 1)).stages[0].identity
    assert (before == after) is same
    assert {key for key in before if before[key] != after[key]} == (set() if same else {recipe.NET})


def test_a_stored_recipe_holds_the_net(write: Write) -> None:
    schedule = write()
    stored = read_recipe(canonical(schedule))
    assert stored.model == replace(schedule.model, spare_classes=False)
    assert stored.stages[0].model.net == schedule.stages[0].model.net and "conv1" in (stored.model.net or "")
    assert "\n" not in dict(leaves(schedule.model, "model"))[recipe.NET]


def test_mistakes_of_net_and_schedule_come_at_once(write: Write) -> None:
    said = mistakes(write, net=NET.replace("num_output: 6", "num_output: 6 group: 5"), stage="momentum: 2")
    assert "small.prototxt:15:" in said and "group 5" in said
    assert "`momentum` must be" in said


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ({"solver": SOLVER.replace("small", "smal")}, "smal.prototxt: there is no such file"),
        ({"schedule": 'model { caffe_net: "../nets/small.prototxt" num_classes: 3 }'}, "the net has 10 outputs"),
        (
            {"schedule": 'model { caffe_net: "../nets/small.prototxt" blur_pool: true }'},
            "`blur_pool` beside `caffe_net`",
        ),
        ({"stage": 'model { name: "resnet18" num_classes: 2 }'}, "say the same thing"),
        ({"stage": "test_transform_param { crop_size: 6 }"}, "`ip.weight` is 10 x 96 for images of 8 x 8"),
        ({"schedule": 'data { train { source: "gone" images: 5 } }'}, "how large the images are isn't known"),
    ],
)
def test_mistakes(texts: dict[str, str], said: str, write: Write) -> None:
    found = mistakes(write, **texts)
    assert said in found and "^" in found


def test_a_net_teaches_another_network(write: Write) -> None:
    schedule = 'model { name: "resnet_small" num_classes: 10 channels: 1 } data { train { source: "../images/train" } }'
    big = f'stage {{ name: "big" from: "" solver_param {{ {SOLVER.replace("test_interval: 5", "")}  transform_param {{ crop_size: 8 }} }} }}'
    plain = 'batch_size: 4 device_batch_size: 4 base_lr: 0.1 lr_policy: "fixed" max_iter: 2 transform_param { crop_size: 8 }'
    taught = 'loss { type: DISTILL teacher: "big" }'
    found = write(schedule=f"{schedule}\n{big}", solver=plain, stage=taught)
    assert found.stage("main").solver.teacher == "big"


TAUGHT = """
stage {{ name: "big" solver_param {{ net: "../nets/big.prototxt" {own} transform_param {{ crop_size: 7 }} }} }}
stage {{ name: "small" from: "" solver_param {{ net: "../nets/small.prototxt" {own} {crop} loss {{ type: DISTILL teacher: "big" }} }} }}
"""
POOLED = "pooling_param { pool: AVE global_pooling: true }"


@pytest.mark.parametrize(("crop", "size"), [("transform_param { crop_size: 6 }", "6 x 6"), ("", "8 x 8")])
@pytest.mark.parametrize("pooled", [False, True])
def test_a_teacher_that_is_a_net_takes_the_images_of_what_it_teaches(
    crop: str, size: str, pooled: bool, write: Write, tmp_path: Path
) -> None:
    pooling = f'layer {{ name: "p" type: "Pooling" bottom: "conv1" top: "p" {POOLED} }}\nlayer {{\n  name: "ip"'
    big = NET.replace('layer {\n  name: "ip"', pooling).replace('bottom: "conv1" top: "ip"', 'bottom: "p" top: "ip"')
    (tmp_path / "nets" / "big.prototxt").write_text(big if pooled else NET)
    (tmp_path / "nets" / "small.prototxt").write_text(NET)
    own = 'base_lr: 0.01 lr_policy: "fixed" max_iter: 10'
    (tmp_path / "one" / "schedule.prototxt").write_text(TAUGHT.format(own=own, crop=crop))
    if pooled:
        assert load(tmp_path / "one").stage("small").solver.teacher == "big"
        return
    with pytest.raises(RecipeError) as error:
        load(tmp_path / "one")
    (problem,) = error.value.problems
    shape = {"6 x 6": "10 x 24", "8 x 8": "10 x 96"}[size]
    assert problem.message == (
        "its teacher `big` doesn't take its images: layer parameter `ip.weight` is 10 x 54 for images of 7 x 7, and "
        f"{shape} for {size}"
    )
    assert "schedule.prototxt:3:" in problem.render()


def test_a_model_without_a_name_says_more_of_the_net_that_the_solver_names(write: Write) -> None:
    plain = write()
    schedule = write(schedule="model { num_classes: 10 }")
    assert schedule.stages[0].model == plain.stages[0].model
    assert schedule.stages[0].solver.model is None
    assert write(schedule="model { spare_classes: true }").stages[0].model.spare_classes
    (said,) = mistakes(write, schedule="model { num_classes: 9 }").split("\n\n")
    assert "`num_classes` is 9, and the net has 10 outputs" in said


@pytest.mark.parametrize(
    ("mean", "said"),
    [
        (b"no mean", "../broken.mean is not a mean image of Caffe's (.binaryproto)"),
        (
            caffe_pb2.BlobProto(num=2, channels=1, height=1, width=1, data=[1, 2]).SerializeToString(),
            "is not a mean image",
        ),
        (
            caffe_pb2.BlobProto(num=1, channels=1, height=1, width=2, data=[1]).SerializeToString(),
            "is not a mean image",
        ),
        (caffe_pb2.BlobProto(num=1, channels=1, height=1, width=1, data=[math.nan]).SerializeToString(), "not a mean"),
        (
            caffe_pb2.BlobProto(num=1, channels=3, height=1, width=1, data=[1, 2, 3]).SerializeToString(),
            "../broken.mean has 3 channels, and the images have 1",
        ),
    ],
)
def test_a_broken_mean_file_is_found_where_the_schedule_names_it(
    mean: bytes, said: str, write: Write, tmp_path: Path
) -> None:
    (tmp_path / "broken.mean").write_bytes(mean)
    found = mistakes(write, stage='test_transform_param { mean_file: "../broken.mean" }')
    assert said in found and "one/schedule.prototxt:2:" in found and found.count("mistake") == 0


def test_a_mean_file_that_is_elsewhere_is_no_mistake_of_the_text(write: Write) -> None:
    write(stage='test_transform_param { mean_file: "/not/here.mean" }')


def test_a_mean_file_that_is_missing_is_asked_for_first(write: Write) -> None:
    said = mistakes(write, net=NET.replace("mean_value: 7", 'mean_file: "mean.binaryproto"', 1))
    assert "mean.binaryproto is not there" in said and "hint: put the file there" in said
    assert "one number" in said and "B, G, R" not in said  # the images are grey
