"""From texts to a Schedule: inheritance, pairs, --set, defaults, order, identity."""

import dataclasses

import pytest
from facade import RecipeError, recipe, tree

from stagerun import language

SCHEDULE = """
model { name: "resnet18" num_classes: 10 }
data { train { source: "train" images: 1000 } val { source: "/val" images: 200 } }
solver {
  batch_size: 100 device_batch_size: 10 momentum: 0.9 warmup_epoch: 0.5
  transform_param { mirror: true crop_size: 24 pad: 2 mean_value: [1, 2, 3] scale: 0.5 }
}
stage { name: "a" }
stage { name: "b" }
"""
A = 'base_lr: 0.1 lr_policy: "poly" power: 1 max_epoch: 2.5\n'
B = 'base_lr: 0.01 lr_policy: "fixed" max_iter: 5\n'


def read(
    schedule: str = SCHEDULE, a: str = A, b: str = B, changes: tuple[str, ...] = (), **more: str
) -> recipe.Schedule:
    texts = {"schedule.prototxt": schedule, "a.prototxt": a, "b.prototxt": b}
    return language.read(texts | {f"{n}.prototxt": t for n, t in more.items()}, "/runs/small", changes)


def messages(**texts: object) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        read(**texts)
    return [p.message for p in caught.value.problems]


def test_an_evaluation_sees_the_channels_of_training_and_nothing_drawn():
    drawn = (
        "transform_param { channel_order: RGB mean_value: [3, 2, 1] std_value: [6, 5, 4] crop_size: 24 mirror: true"
        " cutout_size: 8 rand_augment_param { }"
        " random_resized_crop_param { } pad: 2 pad_mode: REFLECT }"
    )
    solver = read(a=A + drawn).stage("a").solver
    assert solver.test_transform == recipe.Transform(
        scale=0.5, channel_order=recipe.ChannelOrder.RGB, mean_value=(3, 2, 1), std_value=(6, 5, 4), crop_size=24
    )
    assert solver.transform.random_resized_crop == recipe.RandomResizedCrop()
    assert solver.transform.rand_augment == recipe.RandAugment()


INHERITED = recipe.Transform(mirror=True, crop_size=24, pad=2, mean_value=(1, 2, 3), scale=0.5)
PARAMS = SCHEDULE.replace("momentum: 0.9", "momentum: 0.9 param { lr_mult: 2 } param { lr_mult: 3 }")
LACKING = SCHEDULE.replace('name: "resnet18" ', "").replace("batch_size: 100 ", "")
THIRD = SCHEDULE + 'stage { name: "c" solver: "b.prototxt" }'


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        # A message merges field by field; `clear` takes away.
        ({}, {"a.transform": INHERITED}),
        ({"a": A + "transform_param { }"}, {"a.transform": INHERITED}),
        ({"a": A + "transform_param { crop_size: 20 }"}, {"a.transform": dataclasses.replace(INHERITED, crop_size=20)}),
        ({"a": A + 'clear: "transform_param.crop_size"'}, {"a.transform": dataclasses.replace(INHERITED, crop_size=None)}),
        ({"a": A + 'clear: "transform_param" transform_param { crop_size: 20 }'}, {"a.transform": recipe.Transform(crop_size=20)}),
        ({"a": A + 'clear: "momentum" clear: "warmup_epoch" clear: "transform_param"'}, {"a.momentum": 0, "a.warmup_iter": 0, "a.transform": recipe.Transform()}),
        # Repeated fields are replaced and not appended.
        ({"schedule": PARAMS, "b": B + "param { lr_mult: 4 }"}, {"a.param": (recipe.ParamRule(lr_mult=2), recipe.ParamRule(lr_mult=3)), "b.param": (recipe.ParamRule(lr_mult=4),)}),
        ({"schedule": PARAMS, "b": B + "param: []"}, {"b.param": ()}),
        # One of a pair replaces the inherited other; a duration of 0 epochs is none, and a short one an iteration.
        ({"a": A + "warmup_iter: 3"}, {"a.warmup_iter": 3}),
        ({"changes": ("a.max_iter=7", "solver.warmup_iter=2")}, {"a.max_iter": 7, "a.warmup_iter": 2}),
        ({"a": A + "warmup_epoch: 0 test_epoch: 0 snapshot_epoch: 0.001"}, {"a.warmup_iter": 0, "a.test_interval": 0, "a.snapshot": 1}),
        ({"a": A.replace("2.5", "2.55f")}, {"a.max_iter": 26}),
        ({"a": A.replace("2.5", "2.5F")}, {"a.max_iter": 25}),
        ({"a": A.replace("2.5", ".5e1")}, {"a.max_iter": 50}),
        # `--set` reaches everything; a path into a message changes that field alone.
        ({"changes": ("solver.batch_size=50", "solver.momentum=0.5", "b.max_iter=20")}, {"a.batch_size": 50, "b.batch_size": 50, "a.momentum": 0.5, "a.max_iter": 50}),
        ({"changes": ("b.base_lr=2e-2", "b.lr_policy=poly", 'b.type="Nesterov"', "b.power=2", "b.max_iter=20", "b.precision=BF16")}, {"b.base_lr": 0.02, "b.lr_policy": "poly", "b.type": "Nesterov", "b.power": 2, "b.max_iter": 20, "b.precision": recipe.Precision.BF16}),
        ({"changes": ("a.transform_param.crop_size=12",)}, {"a.transform": dataclasses.replace(INHERITED, crop_size=12), "b.transform": INHERITED}),
        ({"schedule": LACKING, "changes": ("model.name=resnet50", "solver.batch_size=100")}, {"a.batch_size": 100}),
        ({"schedule": THIRD, "a": A + "momentum: 0.7", "changes": ("solver.momentum=0.5", "b.momentum=0.3")}, {"a.momentum": 0.7, "b.momentum": 0.3, "c.momentum": 0.5}),
        # For all stages: one that it reaches is enough, as is part of a message.
        ({"a": A.replace("max_epoch: 2.5", ""), "changes": ("solver.max_iter=9",)}, {"a.max_iter": 9}),
        ({"a": A + "transform_param { pad: 2 }", "changes": ("solver.transform_param.pad=1",)}, {"a.transform": INHERITED, "b.transform": dataclasses.replace(INHERITED, pad=1)}),
    ],
)  # fmt: skip
def test_the_value_of_a_field(texts, expected):
    schedule = read(**texts)
    found = {name: getattr(schedule.stage(name.partition(".")[0]).solver, name.partition(".")[2]) for name in expected}
    assert found == expected


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("resnet18", (0.9, 1e-5)),
        ("resnet50_intel_caffe", (0.95, 1e-5)),
        ("mobilenet_v3_small", (0.99, 1e-3)),
        ("vgg16", (0.9, 1e-5)),  # has none, and nothing reads them
    ],
)
def test_batch_norm_is_as_published_where_nothing_is_written(name, published):
    schedule = read(changes=(f"model.name={name}", "solver.transform_param.crop_size=32"))
    assert (schedule.model.moving_average_fraction, schedule.model.eps) == published
    origins = schedule.stage("a").origins
    shown = [origins[f"model.batch_norm_param.{field}"] for field in ("moving_average_fraction", "eps")]
    assert [(float(o.text), o.layer) for o in shown] == [(v, "default") for v in published]
    if name != "vgg16":
        changed = read(changes=(f"model.name={name}", "model.batch_norm_param.eps=0.5"))
        assert (changed.model.moving_average_fraction, changed.model.eps) == (published[0], 0.5)


def test_any_number_of_wrong_sets():
    assert len(messages(changes=tuple(f"a.max_iter=x{i}" for i in range(300)))) > 100
    assert messages(changes=("a.ty\udcffpe=SGD",)) == ["the argument is not UTF-8"]


SAME = [
    {"a": A.replace("max_epoch: 2.5", "max_iter: 25")},
    {"a": "# a comment\n" + A.replace("0.1", "1e-1").replace(" ", "\n  ") + "weight_decay: -0.0 type: 'SGD' carry { }"},
    {"a": A + "momentum: 0.90", "schedule": SCHEDULE},
    {"schedule": 'seed: 1 name: "other" determinism: FIXED keep_snapshots: 9' + SCHEDULE},
    {"schedule": SCHEDULE.replace('"train"', '"/elsewhere"').replace("images: 200", "images: 150")},
    {"schedule": SCHEDULE.replace("num_classes: 10", "num_classes: 0xa channels: 3 batch_norm_param { eps: 0.00001 }")},
    {"a": A + "display: 1 snapshot: 3 test_interval: 4 test_batch_size: 7 test_transform_param { }"},
    {"a": A + "random_seed: 1"},
    {"changes": ("a.momentum=0.9",)},
]


@pytest.mark.parametrize("same", SAME)
def test_identity_does_not_depend_on_how_it_is_written(same):
    assert read(**same).stage("a").identity == read().stage("a").identity
    assert language.digest(read(**same)) == language.digest(read())


DIFFERENT = [
    ({"a": A.replace("0.1", "0.2")}, "solver.base_lr"),
    ({"a": A + 'clear: "transform_param.crop_size"'}, "solver.transform_param.crop_size"),
    ({"schedule": SCHEDULE.replace("images: 1000", "images: 1010")}, "data.train.images"),
    ({"schedule": SCHEDULE.replace("train {", "shuffle: false train {")}, "data.shuffle"),
    ({"schedule": "determinism: ELASTIC" + SCHEDULE}, "determinism"),
    ({"a": A + "carry { momentum: KEEP }"}, "solver.carry.momentum"),
    ({"changes": ("seed=2",)}, "seed"),
    ({"a": A + "param { kind: NORM decay_mult: 0 }"}, "solver.param"),
]


@pytest.mark.parametrize(("change", "key"), DIFFERENT)
def test_identity_shows_what_changed(change, key):
    before, after = read().stage("a").identity, read(**change).stage("a").identity
    assert before[key] != after[key]
    assert language.digest(read()) != language.digest(read(**change))


def test_every_number_has_bounds():
    """But for those whose range is no interval, or depends on another field."""
    numbers = [
        f
        for m in tree.SCHEDULE.file.message_types_by_name.values()
        for f in tree.fields(m)
        if f.type in (f.TYPE_INT64, f.TYPE_DOUBLE)
    ]
    bounds = {"at_least", "above", "below", "at_most"}
    stated = {f: {option.name for option, _ in f.GetOptions().ListFields()} for f in numbers}
    assert {f"{f.containing_type.name}.{f.name}" for f in numbers if not stated[f] & bounds} == {
        "Solver.gamma", "Model.channels", "FillerParameter.value", "FillerParameter.min", "FillerParameter.max",
        "TransformParameter.scale", "TransformParameter.mean_value", "TransformParameter.std_value",
    }  # fmt: skip


def test_load_reads_a_folder_and_says_what_is_no_schedule(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    for name, text in (("schedule", SCHEDULE), ("a", A), ("b", B)):
        (folder / f"{name}.prototxt").write_text(text)
    assert language.load(folder).stages[0].solver == read().stages[0].solver
    (folder / "b.prototxt").unlink()
    (folder / "b.prototxt").mkdir()
    for path, message in (
        (folder, f"{folder}/b.prototxt: this is not a regular file"),
        (folder / "schedule.prototxt", f"hint: give {folder}"),
        (tmp_path / "x", "no such folder"),
        (tmp_path, "no such file"),
    ):
        with pytest.raises(RecipeError, match="1 mistake") as caught:
            language.load(path)
        assert message in caught.value.render()


def test_the_folders_name_must_do_as_the_schedules():
    with pytest.raises(RecipeError) as caught:
        language.read({"schedule.prototxt": SCHEDULE, "a.prototxt": A, "b.prototxt": B}, "/runs/my run")
    assert "`my run`" in caught.value.render()


UNCOUNTED = SCHEDULE.replace(" images: 1000", "").replace(" images: 200", "")


def test_images_that_are_not_written_are_those_of_the_lmdb():
    texts = {"schedule.prototxt": UNCOUNTED, "a.prototxt": A, "b.prototxt": B}
    counted = language.read(texts, "/runs/small", (), "", {"/runs/small/train": 1000, "/val": 200}.__getitem__)
    assert language.canonical(counted) == language.canonical(read()) and language.digest(counted) == language.digest(
        read()
    )
    assert counted.stage("a").identity == read().stage("a").identity
    origin = counted.stage("a").origins["data.train.images"]
    assert (origin.text, origin.layer, origin.span) == ("1000", "LMDB", None)
    # What is written is not looked up.
    written = language.read(texts | {"schedule.prototxt": SCHEDULE}, "/runs/small", (), "", {}.__getitem__)
    assert written.data.train.images == 1000


def test_spare_classes_are_no_part_of_what_a_snapshot_is_made_from():
    spare = read(SCHEDULE.replace("num_classes: 10", "num_classes: 10 spare_classes: true"))
    assert spare.model.spare_classes and language.canonical(spare) == language.canonical(read())
    assert language.digest(spare) == language.digest(read())
    assert [s.identity for s in spare.stages] == [s.identity for s in read().stages]
