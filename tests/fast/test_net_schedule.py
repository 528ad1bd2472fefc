"""Schedules that name a net of Caffe's: what comes from it and what wins over it; tests/cases/net_schedule_mistakes.txt has mistakes. Without torch."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from facade import Datum, RecipeError, caffe_pb2, read_recipe, recipe, write_lmdb

from stagerun.language import canonical, load

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
def write(tmp_path):
    """A schedule beside the net, whose images lie where Caffe was started: in the folder above both."""
    (tmp_path / "nets").mkdir()
    (tmp_path / "one").mkdir()
    for name, images in (("train", 9), ("test", 6)):
        grey = [Datum(channels=1, height=8, width=8, data=bytes(64), label=i) for i in range(images)]
        write_lmdb(str(tmp_path / "images" / name), [one.SerializeToString() for one in grey])

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


def test_a_solver_of_a_few_words_is_a_schedule(write, tmp_path):
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


def test_the_schedule_wins(write):
    more = 'transform_param { scale: 2 } batch_size: 8 device_batch_size: 2 param { name: "ip.bias" lr_mult: 3 }'
    solver = write(stage=more).stages[0].solver
    assert (solver.batch_size, solver.device_batch_size, solver.transform.scale) == (8, 2, 2)
    assert not solver.transform.mirror  # a field replaces the one below it whole
    assert [r.name for r in solver.param] == ["ip.bias", "*.bias"]  # the first that fits counts
    assert write(stage='clear: "transform_param"').stages[0].solver.transform.scale == 1


def test_a_layers_name_is_no_pattern_for_others(write):
    said, other = "lr_mult: 1 } param { lr_mult: 2 decay_mult: 0 }\n  inner", "lr_mult: 3 }\n  inner"
    net = NET.replace('"ip"', '"a[b]?"').replace(said, other).replace('name: "conv1"', 'name: "*"')
    found = {rule.name: rule.lr_mult for rule in write(net=net).stages[0].solver.param}
    assert found == {"[*].bias": 2.0, "a[[]b][?].weight": 3.0}


def test_what_makes_a_snapshot_stale(write):
    before = write().stages[0].identity
    defaults = NET.replace("name:", "# a comment\nname:", 1).replace("num_output: 6", "num_output: 6 bias_term: true")
    assert write(net=defaults.replace('"small"', '"other"')).stages[0].identity == before
    after = write(net=NET.replace("kernel_size: 5", "kernel_size: 3")).stages[0].identity
    assert {key for key in before if before[key] != after[key]} == {recipe.NET}


def test_a_stored_recipe_holds_the_net(write):
    schedule = write()
    stored = read_recipe(canonical(schedule))
    assert stored.model == replace(schedule.model, spare_classes=False)
    assert stored.stages[0].model.net == schedule.stages[0].model.net and "conv1" in (stored.model.net or "")


def test_a_model_beside_the_net_says_the_same_thing(write):
    assert "`model` and `net` set the same thing" in mistakes(write, stage='model { name: "resnet18" num_classes: 2 }')


def test_a_net_teaches_another_network(write):
    schedule = 'model { name: "resnet_small" num_classes: 10 channels: 1 } data { train { source: "../images/train" } }'
    big = f'stage {{ name: "big" from: "" solver_param {{ {SOLVER.replace("test_interval: 5", "")}  transform_param {{ crop_size: 8 }} }} }}'
    plain = 'batch_size: 4 device_batch_size: 4 base_lr: 0.1 lr_policy: "fixed" max_iter: 2 transform_param { crop_size: 8 }'
    taught = 'loss { type: DISTILL teacher: "big" }'
    found = write(schedule=f"{schedule}\n{big}", solver=plain, stage=taught)
    assert found.stage("main").solver.teacher == "big"


def test_a_model_without_a_name_says_more_of_the_net_that_the_solver_names(write):
    plain = write()
    schedule = write(schedule="model { num_classes: 10 }")
    assert schedule.stages[0].model == plain.stages[0].model
    assert schedule.stages[0].solver.model is None
    assert write(schedule="model { spare_classes: true }").stages[0].model.spare_classes


def mean(*shape: int, data: list[float]) -> bytes:
    sizes = zip(("num", "channels", "height", "width"), shape, strict=True)
    return caffe_pb2.BlobProto(**dict(sizes), data=data).SerializeToString()


@pytest.mark.parametrize(
    ("file", "said"),
    [
        (mean(2, 1, 1, 1, data=[1, 2]), "is not a mean image"),
        (mean(1, 1, 1, 2, data=[1]), "is not a mean image"),
        (mean(1, 1, 1, 1, data=[math.nan]), "not a mean"),
        (mean(1, 3, 1, 1, data=[1, 2, 3]), "../broken.mean has 3 channels, and the images have 1"),
    ],
)
def test_a_broken_mean_file_is_found_where_the_schedule_names_it(file, said, write, tmp_path):
    (tmp_path / "broken.mean").write_bytes(file)
    found = mistakes(write, stage='test_transform_param { mean_file: "../broken.mean" }')
    assert said in found and "one/schedule.prototxt:2:" in found and found.count("mistake") == 0


def test_a_mean_file_that_is_missing_is_asked_for_first(write):
    said = mistakes(write, net=NET.replace("mean_value: 7", 'mean_file: "mean.binaryproto"', 1))
    assert "mean.binaryproto is missing" in said and "hint: write its path, or `mean_value`" in said
