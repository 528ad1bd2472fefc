"""`sampling` and `class_weight`: in a schedule, in its plan, over an LMDB; and the order that comes of them."""

from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from contract import stagerun
from facade import DataError, LmdbSource, Schedule, order, pictures, preflight, shares, training_loader, write_lmdb
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
        assert stagerun(["data", "verify", "--index", "lmdb"], folder).exit_code == 0
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
    threads = pictures.LoaderOptions(threads=3)
    one = training_loader(LmdbSource(made.data.train.path), made, made.stages[0], options=threads)
    for start in (0, 60, 600):
        batch = one.batch(start, 60)
        assert np.bincount(batch.labels).tolist() == [15, 15, 15, 15]
        assert (batch.images[:, 0, 0, 0] == batch.labels).all()
    with one.stream([(60, 20), (80, 40)]) as stream:
        assert np.array_equal(np.concatenate([batch.labels for batch in stream]), one.batch(60, 60).labels)


def test_it_is_looked_at_before_a_run_in_a_stage_that_is_else_like_another(tmp_path):
    b = '} } stage { name: "b" solver_param { sampling: BALANCED'
    with pytest.raises(DataError, match="needs the labels of all records") as error:
        preflight(schedule(b, source=make(tmp_path, indexed=False)))
    assert error.value.hint == f"make it with `stagerun data verify --index {tmp_path / 'lmdb'}`"


def test_labels_beyond_the_network_are_refused(tmp_path):
    made = schedule("sampling: BALANCED", make(tmp_path), classes=2)
    with pytest.raises(DataError, match="has label 3, and `num_classes` is 2"):
        training_loader(LmdbSource(made.data.train.path), made, made.stages[0])


def test_classes_without_images_are_left_out_of_balanced(tmp_path):
    made = schedule("sampling: BALANCED", source=make(tmp_path), classes=6)
    batch = training_loader(LmdbSource(made.data.train.path), made, made.stages[0]).batch(0, 60)
    assert np.bincount(batch.labels).tolist() == [15, 15, 15, 15]


# -- order.Sampled: classes in their shares, exactly, and the images of a class equally often, at any position

LABELS = np.repeat(np.arange(4), [1, 7, 60, 332])[np.random.default_rng(1).permutation(400)]
EVEN = shares([Fraction(1)] * 4, 400)


@pytest.mark.parametrize(
    ("weights", "images", "expected"),
    [
        ([1, 1, 1], 100, [34, 33, 33]),
        ([1, 2, 0, 4], 10, [1, 3, 0, 6]),
        (["0.1", "0.2", "0.7"], 10, [1, 2, 7]),
        ([1] * 10, 12406, [1241] * 6 + [1240] * 4),
    ],
)
def test_shares_are_within_one_and_sum_up(weights, images, expected):
    assert shares([Fraction(w) for w in weights], images) == expected


def test_every_epoch_has_each_class_exactly_as_often_as_its_share():
    one = order.Sampled(3, LABELS, [10, 0, 250, 140])
    for epoch in (0, 1, 17):
        found = LABELS[one.at(epoch * 400, 400)]
        assert np.bincount(found, minlength=4).tolist() == [10, 0, 250, 140]


def test_the_images_of_a_class_come_equally_often_within_one_and_none_twice_before_all():
    found = order.Sampled(5, LABELS, EVEN).at(0, 400 * 7)
    for label in range(4):
        own = found[LABELS[found] == label]
        times = np.bincount(own, minlength=400)[label == LABELS]
        assert times.max() - times.min() <= 1, label
    # The largest class: 100 of 332 in an epoch, and others in the next.
    assert len(set(found[: 400 * 3][LABELS[found[: 400 * 3]] == 3].tolist())) == 300


def test_any_cut_into_stretches_gives_the_same_images():
    one = order.Sampled(5, LABELS, EVEN)
    whole = one.at(0, 2000)
    cuts = [0, 1, 2, 64, 399, 400, 401, 1203, 1999, 2000]
    assert np.array_equal(np.concatenate([one.at(a, b - a) for a, b in pairwise(cuts)]), whole)
    assert np.array_equal(one.at(10**12, 5), order.Sampled(5, LABELS, EVEN).at(10**12, 5))


def test_the_orders_are_frozen():
    assert order.Sampled(1, LABELS, EVEN).at(0, 8).tolist() == [29, 194, 151, 194, 147, 149, 5, 148]


def test_records_without_a_label_are_never_drawn():
    labels = np.array([-1, 0, 1, 1, -1, 0])
    assert set(order.Sampled(1, labels, [3, 3]).at(0, 60).tolist()) == {1, 2, 3, 5}
