"""`sampling` and `class_weight`: in a schedule, in its plan, and over an LMDB."""

from pathlib import Path

import numpy as np
import pytest
from contract import stagerun
from facade import DataError, LmdbSource, Schedule, preflight, training_loader, write_lmdb
from made_images import raw

from stagerun.language import canonical, read

SIZES = (40, 12, 7, 1)
TEXT = """model {{ name: "resnet_small" num_classes: {classes} channels: 1 }}
data {{ train {{ source: "{source}" images: 60 }} }}
solver {{ batch_size: 8 device_batch_size: 4 base_lr: 0.1 lr_policy: "fixed" max_iter: 10 transform_param {{ mirror: true }} }}
stage {{ name: "a" solver_param {{ {solver} }} }}
"""


def schedule(solver: str, source: str = "/x", classes: int = 4) -> Schedule:
    return read({"schedule.prototxt": TEXT.format(solver=solver, source=source, classes=classes)}, "/schedules/s")


def make(folder: Path, indexed: bool = True) -> str:
    """The images of class c are all of brightness c."""
    labels = np.random.default_rng(1).permutation(np.repeat(np.arange(4), SIZES)).tolist()
    write_lmdb(str(folder / "lmdb"), [raw(np.full((4, 4, 1), label, np.uint8), label) for label in labels])
    if indexed:
        assert stagerun(["data", "index", "lmdb"], folder).exit_code == 0
    return str(folder / "lmdb")


def test_a_schedule_without_them_says_nothing_of_them():
    plain = schedule("")
    assert not [k for k in plain.stages[0].identity if "sampl" in k or "class_weight" in k]
    assert "sampl" not in canonical(plain) and "class_weight" not in canonical(plain)
    assert schedule("sampling: UNIFORM").stages[0].identity == plain.stages[0].identity


NET = """layer {{ name: "data" type: "Data" top: "data" top: "label" transform_param {{ mirror: true }} data_param {{ source: "{source}" batch_size: 4 backend: LMDB }} }}
layer {{ name: "ip" type: "InnerProduct" bottom: "data" top: "ip" inner_product_param {{ num_output: {classes} }} }}
layer {{ name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" loss_param {{ ignore_label: {ignored} }} }}
"""


@pytest.mark.parametrize(
    ("indexed", "ignored", "classes", "told"),
    [
        (True, None, 4, "BALANCED: an epoch has 35 of 60 images; each of class 3 (1) 15 times, of class 0 (40) 0.375 times"),
        (False, None, 4, "BALANCED\n"),
        (True, 0, 4, "BALANCED: an epoch has 20 of 60 images; each of class 3 (1) 20 times, of class 1 (12) 1.67 times"),
        (True, 3, 3, "BALANCED: an epoch has 39 of 60 images; each of class 2 (7) 2.86 times, of class 0 (40) 0.5 times"),
    ],
    ids=["all", "without a side file", "ignored class", "ignored label"],
)  # fmt: skip
def test_the_plan_says_what_it_does_to_an_epoch(indexed, ignored, classes, told, tmp_path):
    """A label that the net ignores has no share, whether it is a class or not."""
    source = make(tmp_path, indexed)
    text = TEXT.format(solver="sampling: BALANCED", source=source, classes=classes)
    if ignored is not None:
        (tmp_path / "net.prototxt").write_text(NET.format(source=source, classes=classes, ignored=ignored))
        text = text.replace(text[: text.index("}") + 1], "").replace("solver {", 'solver { net: "net.prototxt"', 1)
        text = text.replace(" transform_param { mirror: true }", "")
    (tmp_path / "schedule.prototxt").write_text(text)
    shown = stagerun(["plan", "."], tmp_path)
    assert shown.exit_code == 0 and told in shown.output, shown.output


def test_a_loader_gives_every_class_its_share_in_every_epoch(tmp_path):
    made = schedule("sampling: BALANCED", source=make(tmp_path))
    one = training_loader(LmdbSource(made.data.train.path), made, made.stages[0], threads=3)
    for start in (0, 60, 600):
        batch = one.batch(start, 60)
        assert np.bincount(batch.labels).tolist() == [15, 15, 15, 15]
        assert (batch.images[:, 0, 0, 0] == batch.labels).all()
    with one.stream([(60, 20), (80, 40)]) as stream:
        assert np.array_equal(np.concatenate([batch.labels for batch in stream]), one.batch(60, 60).labels)


def test_without_a_side_file_it_says_what_makes_one(tmp_path):
    made = schedule("sampling: BALANCED", source=make(tmp_path, indexed=False))
    records = LmdbSource(made.data.train.path)
    with pytest.raises(DataError, match="needs the labels of all records") as error:
        training_loader(records, made, made.stages[0])
    assert error.value.hint == f"make it with `stagerun data index {records.name}`"


def test_it_is_looked_at_before_a_run_in_a_stage_that_is_else_like_another(tmp_path):
    b = '} } stage { name: "b" solver_param { sampling: BALANCED'
    with pytest.raises(DataError, match="needs the labels of all records"):
        preflight(schedule(b, source=make(tmp_path, indexed=False)))


def test_labels_beyond_the_network_are_refused(tmp_path):
    made = schedule("sampling: BALANCED", make(tmp_path), classes=2)
    with pytest.raises(DataError, match="has label 3, and `num_classes` is 2"):
        training_loader(LmdbSource(made.data.train.path), made, made.stages[0])


def test_classes_without_images_are_left_out_of_balanced(tmp_path):
    made = schedule("sampling: BALANCED", source=make(tmp_path), classes=6)
    batch = training_loader(LmdbSource(made.data.train.path), made, made.stages[0]).batch(0, 60)
    assert np.bincount(batch.labels).tolist() == [15, 15, 15, 15]
