"""From texts to a Schedule: inheritance, pairs, --set, defaults, order, identity."""

import dataclasses
import re
from pathlib import Path

import pytest

from stagerun import language
from stagerun.base import recipe
from stagerun.base.errors import RecipeError, UsageError
from stagerun.data.write import write_lmdb
from stagerun.language import ranges, tree
from stagerun.manual.fields import help_text
from stagerun.schedule import POLICIES, learning_rate

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
        read(**texts)  # type: ignore[arg-type]
    return [p.message for p in caught.value.problems]


def test_defaults_and_units() -> None:
    schedule = read()
    solver = schedule.stage("a").solver
    assert (schedule.name, schedule.seed, schedule.keep_snapshots) == ("small", 1, 3)
    assert schedule.data.train.path == "/runs/small/train"
    assert [val.path for val in schedule.data.val] == ["/val"]
    assert (solver.max_iter, solver.warmup_iter, solver.random_seed, solver.test_batch_size) == (25, 5, 1, 10)
    assert solver.type == "SGD" and solver.display == 100 and solver.carry_data and not solver.carry_momentum
    assert solver.test_transform == recipe.Transform(scale=0.5, crop_size=24, mean_value=(1, 2, 3))
    assert schedule.stage("b").parent == "a" and schedule.stage("a").parent is None
    assert [name for name, _ in schedule.files] == ["schedule.prototxt", "a.prototxt", "b.prototxt"]


def test_an_evaluation_sees_the_channels_of_training_and_nothing_drawn() -> None:
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


def test_a_message_merges_field_by_field_and_clear_takes_away() -> None:
    inherited = read().stage("a").solver.transform
    solver = read(a=A + "transform_param { crop_size: 20 }").stage("a").solver
    assert solver.transform == dataclasses.replace(inherited, crop_size=20)
    assert read(a=A + "transform_param { }").stage("a").solver.transform == inherited
    assert read(a=A + 'clear: "transform_param"').stage("a").solver.transform == recipe.Transform()
    only = read(a=A + 'clear: "transform_param" transform_param { crop_size: 20 }').stage("a").solver
    assert only.transform == recipe.Transform(crop_size=20)
    without = read(a=A + 'clear: "transform_param.crop_size"').stage("a").solver
    assert without.transform == dataclasses.replace(inherited, crop_size=None)


def test_repeated_fields_are_replaced_and_not_appended() -> None:
    shared = SCHEDULE.replace("momentum: 0.9", "momentum: 0.9 param { lr_mult: 2 } param { lr_mult: 3 }")
    schedule = read(shared, b=B + "param { lr_mult: 4 }")
    assert [p.lr_mult for p in schedule.stage("a").solver.param] == [2, 3]
    assert [p.lr_mult for p in schedule.stage("b").solver.param] == [4]
    assert read(shared, b=B + "param: []").stage("b").solver.param == ()


def test_clear_takes_away() -> None:
    solver = read(a=A + 'clear: "momentum" clear: "warmup_epoch" clear: "transform_param"').stage("a").solver
    assert (solver.momentum, solver.warmup_iter, solver.transform) == (0, 0, recipe.Transform())


def test_one_of_a_pair_replaces_the_inherited_other() -> None:
    assert read(a=A + "warmup_iter: 3").stage("a").solver.warmup_iter == 3
    changed = read(changes=("a.max_iter=7", "solver.warmup_iter=2"))
    assert (changed.stage("a").solver.max_iter, changed.stage("a").solver.warmup_iter) == (7, 2)


def test_zero_epochs_are_none_and_not_one_iteration() -> None:
    solver = read(a=A + "warmup_epoch: 0 test_epoch: 0 snapshot_epoch: 0.001").stage("a").solver
    assert (solver.warmup_iter, solver.test_interval, solver.snapshot) == (0, 0, 1)


def test_set_reaches_everything() -> None:
    schedule = read(
        changes=(
            *("seed=2", "data.train.source=/x y", "data.scratch=/tmp", "solver.batch_size=50", "solver.momentum=0.5"),
            *("b.base_lr=2e-2", "b.lr_policy=poly", 'b.type="Nesterov"', "b.power=2", "b.precision=BF16"),
            *("b.max_iter=20", "a.transform_param.crop_size=12", "model.batch_norm_param.eps=1e-3"),
        )
    )
    a, b = schedule.stage("a").solver, schedule.stage("b").solver
    assert schedule.seed == 2 and a.random_seed == 2 and schedule.data.train.path == "/x y"
    assert (a.batch_size, b.batch_size, a.momentum, a.max_iter) == (50, 50, 0.5, 50)
    assert (b.base_lr, b.lr_policy, b.type, b.power, b.precision.value) == (0.02, "poly", "Nesterov", 2, "BF16")
    # A path into a message changes that field alone.
    assert a.transform.crop_size == 12 and a.transform.mirror and b.transform.crop_size == 24
    assert schedule.model.eps == 1e-3


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("resnet18", (0.9, 1e-5)),
        ("resnet50_intel_caffe", (0.95, 1e-5)),
        ("mobilenet_v3_small", (0.99, 1e-3)),
        ("vgg16", (0.9, 1e-5)),  # has none, and nothing reads them
    ],
)
def test_batch_norm_is_as_published_where_nothing_is_written(name: str, published: tuple[float, float]) -> None:
    schedule = read(changes=(f"model.name={name}", "solver.transform_param.crop_size=32"))
    assert (schedule.model.moving_average_fraction, schedule.model.eps) == published
    origins = schedule.stage("a").origins
    shown = [origins[f"model.batch_norm_param.{field}"] for field in ("moving_average_fraction", "eps")]
    assert [(float(o.text), o.layer) for o in shown] == [(v, "default") for v in published]
    if name != "vgg16":
        changed = read(changes=(f"model.name={name}", "model.batch_norm_param.eps=0.5"))
        assert (changed.model.moving_average_fraction, changed.model.eps) == (published[0], 0.5)


def test_set_can_give_what_the_files_lack() -> None:
    lacking = SCHEDULE.replace('name: "resnet18" ', "").replace("batch_size: 100 ", "")
    schedule = read(lacking, changes=("model.name=resnet50", "solver.batch_size=100"))
    assert schedule.model.name == "resnet50"


def test_any_number_of_wrong_sets() -> None:
    assert len(messages(changes=tuple(f"a.max_iter=x{i}" for i in range(300)))) > 100
    assert messages(changes=("a.ty\udcffpe=SGD",)) == ["the argument is not UTF-8"]


def test_a_stages_file_outranks_set_for_all_and_yields_to_set_for_it() -> None:
    third = SCHEDULE + 'stage { name: "c" solver: "b.prototxt" }'
    schedule = read(third, a=A + "momentum: 0.7", changes=("solver.momentum=0.5", "b.momentum=0.3"))
    assert [s.solver.momentum for s in schedule.stages] == [0.7, 0.3, 0.5]


def test_a_set_for_all_that_reaches_no_stage_is_a_mistake() -> None:
    for name in ("solver.max_iter", "solver.max_epoch", "solver.base_lr"):
        assert messages(changes=(f"{name}=3",)) == [f"`{name}` reaches no stage: each sets its own"]
    # One stage is enough, as is part of a message; and nothing is said beside a file that can't be read.
    assert read(a=A.replace("max_epoch: 2.5", ""), changes=("solver.max_iter=9",)).stage("a").solver.max_iter == 9
    with_own = A + "transform_param { pad: 2 }"
    changed = read(a=with_own, changes=("solver.transform_param.pad=1", "solver.transform_param.mirror=false"))
    assert [s.solver.transform.pad for s in changed.stages] == [2, 1]
    assert not any("reaches" in m for m in messages(a="base_lr: 0.1 max_iter: ", changes=("solver.max_iter=9",)))


def test_origins() -> None:
    schedule = read(a=A + "momentum: 0.7", changes=("a.display=5", "a.transform_param.pad=0"))
    origins = schedule.stage("a").origins
    layers = {k: (o.layer, o.text) for k, o in origins.items()}
    assert layers["solver.momentum"] == ("stage", "0.7")
    assert layers["solver.max_iter"] == ("stage", "max_epoch: 2.5")
    assert layers["solver.batch_size"] == ("schedule", "100")
    assert layers["solver.display"] == ("--set", "5")
    assert layers["solver.transform_param.pad"] == ("--set", "0")
    assert layers["solver.transform_param.mirror"] == ("schedule", "true")
    assert layers["solver.weight_decay"] == ("default", "0.0")
    assert layers["data.train.images"] == ("schedule", "1000")
    assert str(origins["solver.momentum"].span) == "a.prototxt:2:11"
    assert origins["solver.weight_decay"].span is None
    assert schedule.stage("a").identity.keys() < origins.keys()


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
def test_identity_does_not_depend_on_how_it_is_written(same: dict[str, str]) -> None:
    assert read(**same).stage("a").identity == read().stage("a").identity  # type: ignore[arg-type]
    assert language.digest(read(**same)) == language.digest(read())  # type: ignore[arg-type]


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
def test_identity_shows_what_changed(change: dict[str, str], key: str) -> None:
    before, after = read().stage("a").identity, read(**change).stage("a").identity  # type: ignore[arg-type]
    assert before[key] != after[key]
    assert language.digest(read()) != language.digest(read(**change))  # type: ignore[arg-type]


def test_digest_is_of_the_tree_and_not_of_names() -> None:
    renamed = SCHEDULE.replace('name: "a"', 'name: "z" solver: "a.prototxt"')
    assert language.digest(read(renamed)) == language.digest(read())
    assert language.digest(read(SCHEDULE.replace('name: "b"', 'name: "b" from: ""'))) != language.digest(read())


def test_running_order() -> None:
    tree_of = 'stage { name: "a" from: "c" } stage { name: "b" from: "" }'
    tree_of += 'stage { name: "c" from: "d" } stage { name: "d" from: "" }'
    head = SCHEDULE[: SCHEDULE.index("stage {")]
    schedule = read(head + tree_of, c=B, d=B)
    assert [(s.name, s.parent) for s in schedule.stages] == [("d", None), ("c", "d"), ("a", "c"), ("b", None)]


def test_canonical_text() -> None:
    text = language.canonical(read())
    assert text == language.canonical(read(a="# x\n" + A.replace("max_epoch: 2.5", "max_iter: 25")))
    assert text.count("\nstage {") == 2 and "    max_iter: 25\n" in text and "      crop_size: 24\n" in text


# Numbers whose range is not an interval, or depends on another field.
FREE = {
    *("Solver.gamma", "Model.channels", "FillerParameter.value", "FillerParameter.min", "FillerParameter.max"),
    *(
        "TransformParameter.scale",
        "TransformParameter.mean_value",
        "TransformParameter.std_value",
    ),
}


def test_every_number_has_bounds() -> None:
    unbounded = {
        f"{m.name}.{f.name}"
        for m in (b for b in tree.SCHEDULE.file.message_types_by_name.values())
        for f in tree.fields(m)
        if f.type in (f.TYPE_INT64, f.TYPE_DOUBLE) and not ranges.bounds(f)
    }
    assert unbounded == FREE


def test_load_reads_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    for name, text in (("schedule", SCHEDULE), ("a", A), ("b", B)):
        (folder / f"{name}.prototxt").write_text(text)
    assert dataclasses.replace(language.load(folder), files=()).stages[0].solver == read().stages[0].solver
    (folder / "b.prototxt").unlink()
    (folder / "b.prototxt").mkdir()
    with pytest.raises(RecipeError, match="1 mistake") as caught:
        language.load(folder)
    assert f"{folder}/b.prototxt: this is not a regular file" in caught.value.render()


def test_load_of_no_schedule(tmp_path: Path) -> None:
    for folder, message in ((tmp_path / "x", "no such folder"), (tmp_path, "no such file")):
        with pytest.raises(RecipeError) as caught:
            language.load(folder)
        assert message in caught.value.render()
    (tmp_path / "schedule.prototxt").write_text("")
    with pytest.raises(RecipeError, match="1 mistake") as caught:
        language.load(tmp_path / "schedule.prototxt")
    assert f"hint: give {tmp_path}" in caught.value.render()


def test_the_folders_name_must_do_as_the_schedules() -> None:
    with pytest.raises(RecipeError) as caught:
        language.read({"schedule.prototxt": SCHEDULE, "a.prototxt": A, "b.prototxt": B}, "/runs/my run")
    assert "`my run`" in caught.value.render()


def test_the_published_recipe() -> None:
    schedule = language.load(Path(__file__).parents[2] / "solvers" / "resnet50_72ep")
    stages = {s.name: s.solver for s in schedule.stages}
    assert {n: s.max_iter for n, s in stages.items()} == {
        "init": 7800,
        "cyc1": 3750,
        "cyc2": 4750,
        "cyc3": 4750,
        "collapse": 1560,
    }
    last = [learning_rate(s)(s.max_iter - 1) for s in stages.values()]
    assert last == pytest.approx([0.9334, 0.2551, 0.1028, 0.0770, 0.0], abs=1e-4)
    joints = [learning_rate(stages[n])(stages[n].warmup_iter) for n in ("init", "cyc2", "cyc3")]
    assert joints == pytest.approx([1.4667, 0.5738, 0.4296], abs=1e-4)
    assert stages["collapse"].weight_decay == 2e-4 and stages["cyc3"].weight_decay == 5e-5
    assert stages["collapse"].transform.random_aspect_ratio is None and stages["cyc3"].transform.random_aspect_ratio
    assert stages["collapse"].test_transform == stages["init"].test_transform
    assert stages["init"].logical_workers == 128


@pytest.mark.parametrize("name", ["Solver.base_lr", "solver.base_lr"])
def test_help(name: str) -> None:
    text = "Solver.base_lr   number\n  Learning rate that the policy starts from. 0 or more. Required. Caffe's."
    assert help_text(name) == text
    both = help_text("base_lr")  # of every message that has one
    assert both == f"{text}\n\n{help_text('OuterParameter.base_lr')}" and "outer update" in both


def test_help_explains_every_policy() -> None:
    assert set(POLICIES) <= set(re.findall(r"\w+", help_text("lr_policy")))
    assert help_text("one_cycle").startswith("one_cycle was retired: write `lr_policy:")


def test_help_of_messages_enums_and_mistakes() -> None:
    assert "default: 0.5" in help_text("min_area_ratio")
    assert "transform_param" in help_text("Solver") and "TransformParameter" in help_text("")
    assert "BF16" in help_text("Precision") and "KEEP" in help_text("Carry.Start")
    assert "Model.name" in help_text("name") and "StageEntry.name" in help_text("name")
    assert "makes no snapshot stale" in help_text("display") and "stale" not in help_text("momentum")
    for net in ("Solver.net", "caffe_net"):  # what is in the file counts
        assert "makes no snapshot stale" not in help_text(net) and "A change of" in help_text(net)
    for wrong, hint in (("base_ir", "base_lr"), ("Sollver", "Solver"), ("model.base_lr", ""), ("a.b.base_lr", "")):
        with pytest.raises(UsageError) as caught:
            help_text(wrong)
        assert hint in caught.value.hint


UNCOUNTED = SCHEDULE.replace(" images: 1000", "").replace(" images: 200", "")


def test_images_that_are_not_written_are_those_of_the_lmdb() -> None:
    texts = {"schedule.prototxt": UNCOUNTED, "a.prototxt": A, "b.prototxt": B}
    counts = {"/runs/small/train": 1000, "/val": 200}
    counted = language.read(texts, "/runs/small", (), "", counts.__getitem__)
    assert language.canonical(counted) == language.canonical(read())
    assert language.digest(counted) == language.digest(read())
    assert counted.stage("a").identity == read().stage("a").identity
    origin = counted.stage("a").origins["data.train.images"]
    assert (origin.text, origin.layer, origin.span) == ("1000", "LMDB", None)


def test_what_is_written_is_not_looked_up() -> None:
    def never(path: str) -> int:
        raise AssertionError(path)

    texts = {"schedule.prototxt": SCHEDULE, "a.prototxt": A, "b.prototxt": B}
    assert language.read(texts, "/runs/small", (), "", never).data.train.images == 1000


def test_where_there_is_no_lmdb_no_number_is_made_up(tmp_path: Path) -> None:
    assert messages(schedule=UNCOUNTED) == ["Source lacks `images`"] * 2
    for name, text in (("schedule", UNCOUNTED), ("a", A), ("b", B)):
        (tmp_path / f"{name}.prototxt").write_text(text)
    write_lmdb(str(tmp_path / "train"), [b"a", b"b", b"c"])
    with pytest.raises(RecipeError) as caught:
        language.load(tmp_path)
    (problem,) = caught.value.problems
    assert problem.message == "Source lacks `images`, and its images can't be counted: /val: no such folder"
    assert problem.span.line == 3 and "write `images: N`" in problem.hint and not re.search("[0-9]", problem.hint)
    assert language.load(tmp_path, ["data.val.images=2"]).data.train.images == 3


def test_spare_classes_are_no_part_of_what_a_snapshot_is_made_from() -> None:
    spare = read(SCHEDULE.replace("num_classes: 10", "num_classes: 10 spare_classes: true"))
    assert spare.model.spare_classes and language.canonical(spare) == language.canonical(read())
    assert language.digest(spare) == language.digest(read())
    assert [s.identity for s in spare.stages] == [s.identity for s in read().stages]
