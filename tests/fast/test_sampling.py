"""`sampling` and `class_weight`: in a schedule, in its plan, and over an LMDB."""

from pathlib import Path

import numpy as np
import pytest
from facade import DataError, LmdbSource, Schedule, caffe_pb2, order, training_loader, write_lmdb

from stagerun.base.shares import told
from stagerun.data import index
from stagerun.data.indexing import build
from stagerun.data.preflight import opened, require_usable
from stagerun.data.sampling import order_of
from stagerun.language import canonical, read
from stagerun.system.lmdb_file import class_sizes, with_sets

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

    def datum(label: int) -> bytes:
        return caffe_pb2.Datum(channels=1, height=4, width=4, data=bytes([label] * 16), label=label).SerializeToString()

    labels = np.random.default_rng(1).permutation(np.repeat(np.arange(4), SIZES))
    write_lmdb(str(folder / "lmdb"), [datum(int(label)) for label in labels])
    if indexed:
        index.save(build(str(folder / "lmdb")), str(folder / "lmdb"))
    return str(folder / "lmdb")


# -- in the language


def test_a_schedule_without_them_says_nothing_of_them() -> None:
    plain = schedule("")
    assert not [k for k in plain.stages[0].identity if "sampl" in k or "class_weight" in k]
    assert "sampl" not in canonical(plain) and "class_weight" not in canonical(plain)
    assert schedule("sampling: UNIFORM").stages[0].identity == plain.stages[0].identity


# -- what `plan` says


def test_the_plan_says_what_it_does_to_an_epoch(tmp_path: Path) -> None:
    source = make(tmp_path)
    assert class_sizes(source, 4) == SIZES and class_sizes(source, 3) == () and class_sizes(str(tmp_path), 4) == ()
    balanced = with_sets(schedule("sampling: BALANCED", source=source), lambda stage: None)
    assert told(balanced.stages[0].solver, balanced.class_sizes_of(balanced.stages[0]), 60) == (
        "BALANCED: an epoch has 35 of 60 images; each of class 3 (1) 15 times, of class 0 (40) 0.375 times"
    )
    assert told(balanced.stages[0].solver, (), 60) == "BALANCED"


@pytest.mark.parametrize(("ignored", "classes"), [(0, 4), (3, 3)])
def test_an_ignored_label_has_no_share(ignored: int, classes: int, tmp_path: Path) -> None:
    """Whether it is a class or not. An epoch has as many places as there are records."""
    found = with_sets(schedule("sampling: BALANCED", source=make(tmp_path), classes=classes), lambda stage: ignored)
    (stage,) = found.stages
    sizes = tuple(0 if label == ignored else size for label, size in enumerate(SIZES[:classes]))
    assert found.class_sizes_of(stage) == sizes
    said = {
        0: "20 of 60 images; each of class 3 (1) 20 times, of class 1 (12) 1.67 times",
        3: "39 of 60 images; each of class 2 (7) 2.86 times, of class 0 (40) 0.5 times",
    }[ignored]
    assert told(stage.solver, sizes, 60) == f"BALANCED: an epoch has {said}"


# -- over an LMDB


def test_a_loader_gives_every_class_its_share_in_every_epoch(tmp_path: Path) -> None:
    made = schedule("sampling: BALANCED", source=make(tmp_path))
    records = LmdbSource(made.data.train.path)
    one = training_loader(records, made, made.stages[0], threads=3)
    for start in (0, 60, 600):
        batch = one.batch(start, 60)
        assert np.bincount(batch.labels).tolist() == [15, 15, 15, 15]
        assert (batch.images[:, 0, 0, 0] == batch.labels).all()
    with one.stream([(60, 20), (80, 40)]) as stream:
        assert np.array_equal(np.concatenate([batch.labels for batch in stream]), one.batch(60, 60).labels)


def test_uniform_is_the_order_that_it_was(tmp_path: Path) -> None:
    made = schedule("sampling: UNIFORM", source=make(tmp_path, indexed=False))
    records = LmdbSource(made.data.train.path)
    found = order_of(records, made, made.stages[0]).at(50, 100)
    assert np.array_equal(found, order.indices(1, 60, 50, 100, True))


def test_without_a_side_file_it_says_what_makes_one(tmp_path: Path) -> None:
    made = schedule("sampling: BALANCED", source=make(tmp_path, indexed=False))
    records = LmdbSource(made.data.train.path)
    with pytest.raises(DataError, match="needs the labels of all records") as error:
        order_of(records, made, made.stages[0])
    assert error.value.hint == f"make it with `stagerun data index {records.name}`"


def test_it_is_looked_at_before_a_run_in_a_stage_that_is_else_like_another(tmp_path: Path) -> None:
    source = make(tmp_path, indexed=False)
    text = TEXT.format(solver="", source=source, classes=4)
    more = 'stage { name: "b" solver_param { sampling: BALANCED } }\n'
    made = read({"schedule.prototxt": text + more}, "/schedules/s")
    with pytest.raises(DataError, match="needs the labels of all records"):
        require_usable(made, opened(made), lambda stage: None, lambda stage: None)


def test_labels_beyond_the_network_are_refused(tmp_path: Path) -> None:
    made = schedule("sampling: BALANCED", make(tmp_path), classes=2)
    with pytest.raises(DataError, match="has label 3, and `num_classes` is 2"):
        order_of(LmdbSource(made.data.train.path), made, made.stages[0])


def test_classes_without_images_are_left_out_of_balanced(tmp_path: Path) -> None:
    made = schedule("sampling: BALANCED", source=make(tmp_path), classes=6)
    found = order_of(records := LmdbSource(made.data.train.path), made, made.stages[0]).at(0, 60)
    assert records.index is not None
    assert np.bincount(records.index.labels[found]).tolist() == [15, 15, 15, 15]
