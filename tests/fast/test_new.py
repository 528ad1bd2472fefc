"""`stagerun new`: a schedule of the gallery for other images. What it writes passes `check`; every mistake is named at once."""

import os
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import made_images
import pytest
from click.testing import CliRunner
from facade import RULES, Level, Schedule, lint

from stagerun.cli import main
from stagerun.data import index as data_index
from stagerun.language import load, read
from stagerun.tools.new import Images, fitted, gallery

ROOT = Path(__file__).parents[2]
# As many as ImageNet's are too few for no batch of the gallery.
MANY = Images(
    train=("/d/train", 200_000), val=("/d/val", 5000), classes=7, side=32, mean=(100.0, 110.0, 120.0), deviation=(50.0, 60.0, 70.0)
)  # fmt: skip


def stagerun(*arguments: object) -> tuple[int, str, str]:
    done = CliRunner().invoke(main, [str(a) for a in arguments])
    return done.exit_code, done.stdout, done.stderr


def made(
    folder: Path, images: int, size: tuple[int, int] = (24, 24), classes: int = 3, channels: int = 3, odd: int = 0
) -> Path:
    """An LMDB of pictures of one size (height, width), the first one `odd` pixels wider."""
    for i in range(images):
        path = folder / "files" / f"class{i % classes}" / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(made_images.png(i, size[0], size[1] + odd * (i == 0), channels))
    code, _, error = stagerun("data", "import", folder / "files", folder / "lmdb", "--threads", 1)
    assert code == 0, error
    return folder / "lmdb"


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    return made(tmp_path_factory.mktemp("train"), 400)


@pytest.fixture(scope="module")
def val(tmp_path_factory):
    return made(tmp_path_factory.mktemp("val"), 30)


def texts_of(schedule: Schedule, folder: Path) -> dict[str, str]:
    return {os.path.relpath(path, folder): text for path, text in schedule.files}


def epochs(schedule: Schedule) -> list[float]:
    return [s.solver.max_iter * s.solver.batch_size / schedule.data.train.images for s in schedule.stages]


@pytest.mark.parametrize("name", sorted(p.name for p in (ROOT / "solvers").iterdir()))
def test_every_schedule_of_the_gallery_keeps_its_epochs_and_loses_its_claims(name):
    folder = gallery() / name
    before = load(folder)
    texts = fitted(texts_of(before, folder), before, "other", "About.", MANY)
    after = read(texts, "/runs/other")
    assert [f for f in lint(after) if RULES[f.id].level is Level.WARNING] == []
    assert epochs(after) == pytest.approx(epochs(before), rel=0.01)
    assert [s.parent is None for s in after.stages] == [s.parent is None for s in before.stages]
    for stage, old in zip(after.stages, before.stages, strict=True):
        if stage.parent_iter is not None and old.parent_iter is not None:
            assert stage.parent_iter / after.data.train.images == pytest.approx(
                old.parent_iter / before.data.train.images, rel=1e-3
            )
        assert stage.solver.lr_policy == old.solver.lr_policy and stage.solver.batch_size == old.solver.batch_size
        order = slice(None, None, -1) if stage.solver.transform.channel_order.value == "RGB" else slice(None)
        assert stage.solver.transform.mean_value == MANY.mean[order]
        assert stage.solver.transform.std_value in (MANY.deviation[order], ())
    everything = "\n".join(texts.values())
    claims = r"top-1|hardware|accuracy|Stampede|minutes|updates|ImageNet|CIFAR|MNIST|arXiv|/datasets"
    assert not re.findall(claims, everything), everything


def test_a_file_however_it_is_written(tmp_path):
    one = """model { num_classes: 9 name: "resnet_small" } data { train { source: "a" "b" images: 1000 } val { source: "v" images: 9 } }
solver { batch_size: 100 device_batch_size: 50 transform_param { pad: 1 crop_size: 20 mean_value: 1 mirror: true mean_value: 2
  mean_value: 3 scale: 0.5 std_value: [1, # of B
   2, 3] } knot { iter: 5 factor: 1 } knot: [{ iter: 10 factor: 2 }, { epoch: 3 factor: 1 }] }
# max_iter: 7
stage { name: "x" solver_param { base_lr: 1 lr_policy: "piecewise_linear" max_iter: 50; display: 0, snapshot: 20 } }  # lint: ignore no-test
stage { name: "y" from: "x@30" sweep { name: "l" solver { base_lr: 2 lr_policy: "multistep" gamma: 1 stepvalue: 10 stepvalue: [20] max_iter: 40 batch_size: 50 } } }
"""
    one = f"\N{BYTE ORDER MARK}# A head.\n{one}keep_snapshots: 4 name: 'one' # the last line"
    before = read({"schedule.prototxt": one}, "/runs/one")
    text = fitted({"schedule.prototxt": one}, before, "two", "About.", MANY)["schedule.prototxt"]
    after = read({"schedule.prototxt": text}, "/runs/two")
    assert (after.model.num_classes, after.data.train.path, after.data.train.images) == (7, "/d/train", 200_000)
    x, y = after.stages
    assert (x.solver.max_iter, x.solver.display, x.solver.snapshot, y.solver.max_iter) == (10_000, 0, 4000, 8000)
    assert (y.parent_iter, y.solver.transform.mean_value) == (6000, MANY.mean)
    seen = x.solver.transform
    assert (seen.std_value, seen.mirror, seen.crop_size) == (MANY.deviation, True, 32)
    assert "stepvalue_epoch: [0.5, 1]" in text and re.search("knot { epoch: 1 +factor: 2 }", text)
    assert "# lint: ignore no-test" in text and "of B" not in text and "A head" not in text


def test_grey_pictures_in_a_schedule_of_colour_ones(tmp_path):
    grey = made(tmp_path, 60, classes=2, channels=1)
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "schedule.prototxt").write_text(
        'model { name: "resnet_small" num_classes: 9 } data { train { source: "t" images: 99 } val { source: "v" images: 9 } }\n'
        'solver { batch_size: 20 device_batch_size: 20 max_epoch: 1 lr_policy: "fixed" base_lr: 0.1 transform_param { mean_value: [1, 2, 3] scale: 0.1 } }\n'
        'stage { name: "x" solver_param { } }\n'
    )
    assert stagerun("new", tmp_path / "out", "--from", folder, "--train", grey, "--val", grey)[0] == 0
    schedule = load(tmp_path / "out")
    assert (schedule.model.channels, len(schedule.stages[0].solver.transform.mean_value)) == (1, 1)
    side_file = data_index.load(str(grey))
    assert side_file is not None
    assert schedule.stages[0].solver.transform.mean_value == pytest.approx(side_file.facts.mean_bgr, rel=1e-3)
    assert schedule.stages[0].solver.transform.std_value == pytest.approx(side_file.facts.deviation_bgr, rel=1e-3)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("there --train TRAIN --val VAL", 64, "already exists"),
        ("out --train TRAIN --val VAL --from fashion_collaps", 64, "did you mean `fashion_collapse`?"),
        ("out --train MIXED --val OTHER", 65, "with class3"),
        ("out --train MIXED --val VAL --from fashion_collapse", 65, "takes 128 images, and the set has 20"),
        ("out --train VAL --val VAL --from resnet50_72ep", 65, "4096 images"),
        ("'a b' --train TRAIN --val VAL", 64, "can't be the name of a schedule"),
    ],
)
def test_a_mistake_and_nothing_is_written(tmp_path, train, val, words, code, message):
    mixed, other = made(tmp_path / "mixed", 20, odd=9), made(tmp_path / "other", 20, classes=4)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    named = {"TRAIN": train, "VAL": val, "MIXED": mixed, "OTHER": other}
    first, *others = [str(named.get(word, word)) for word in shlex.split(words)]
    exit_code, _, said = stagerun("new", tmp_path / first, *others)
    assert exit_code == code and message in said
    assert os.listdir(tmp_path / "there") == ["file"] and sorted(os.listdir(tmp_path)) == ["mixed", "other", "there"]


def test_without_a_side_file_the_records_are_read(tmp_path, train, val):
    bare = tmp_path / "lmdb"
    bare.mkdir()
    (bare / "data.mdb").symlink_to(train / "data.mdb")
    assert stagerun("new", tmp_path / "out", "--train", bare, "--val", val)[0] == 0
    assert load(tmp_path / "out").model.num_classes == 3 and os.listdir(bare) == ["data.mdb"]


def test_the_gallery_ships_with_the_package():
    listed = re.findall(r"^stagerun = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.M)[0]
    patterns = re.findall('"(gallery.*?)"', listed)
    packed = {path.relative_to(ROOT / "stagerun" / "gallery") for p in patterns for path in (ROOT / "stagerun").glob(p)}
    there = {path.relative_to(ROOT / "solvers") for path in (ROOT / "solvers").rglob("*.*")}
    assert packed == {path for path in there if "__pycache__" not in path.parts}


def test_class_weights_are_those_of_the_images_at_hand():
    before = load(gallery() / "fashion_longtail")
    images = replace(MANY, classes=3, sizes=(60, 20, 10))
    texts = fitted(texts_of(before, gallery() / "fashion_longtail"), before, "other", "About.", images)
    after = read(texts, "/runs/other")
    assert after.stage("main_weighted").solver.class_weight == (0.5, 1.5, 3.0)
    assert after.stage("main_balanced").solver.sampling.value == "BALANCED"


@pytest.mark.parametrize("base", ["fashion_collapse", "cifar10_resnet9_24ep"])
def test_pictures_of_many_sizes_are_cropped_and_resized_by_the_schedule(tmp_path, val, base):
    mixed = made(tmp_path / "mixed", 520, (70, 80), odd=9)
    code, _, said = stagerun("new", tmp_path / "out", "--from", base, "--train", mixed, "--val", val)
    assert code == 0 and "images of many sizes" in said, said
    for stage in load(tmp_path / "out").stages:
        train, test = stage.solver.transform, stage.solver.test_transform
        assert train.random_resize if stage.name == "collapse" else train.random_resized_crop
        assert (train.crop_size, test.crop_size, train.pad) == (24, 24, 0)
        assert test.random_resize is not None and test.random_resize.min_size == 27
        for name in ("mean_value", "std_value", "channel_order"):
            assert getattr(train, name) == getattr(test, name)
    code, _, said = stagerun("check", tmp_path / "out", "--strict")
    assert code == 0, said


def test_more_pictures_move_no_others_to_the_other_side(tmp_path):
    def sides() -> list[set[str]]:
        assert stagerun("data", "import", tmp_path / "files", tmp_path / "out", "--split-val", "20%")[0] == 0
        parts = [data_index.load(str(tmp_path / f"out-{part}_lmdb")) for part in ("train", "val")]
        for part in ("train", "val"):
            shutil.rmtree(tmp_path / f"out-{part}_lmdb")
        return [{part.key(i).decode().partition("_")[2] for i in range(len(part))} for part in parts if part]

    for i in range(60):
        path = tmp_path / "files" / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(made_images.png(i, 8, 8))
    before = sides()
    for i in range(60, 90):
        (tmp_path / "files" / "a" / f"0{i}.png").write_bytes(made_images.png(i, 8, 8))
    after = sides()
    assert all(small < large for small, large in zip(before, after, strict=True))
    assert [len(part) for part in before] == [51, 9]


def test_validation_images_that_lack_a_class_keep_the_labels_of_the_others(tmp_path):
    for i, name in enumerate(["train/a", "train/b", "train/c", "val/a", "val/c"] * 3):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / name / f"{i}.png").write_bytes(made_images.png(i, 8, 8))
    assert stagerun("new", tmp_path / "out", "--train", tmp_path / "train", "--val", tmp_path / "val")[0] == 0
    made = data_index.load(str(tmp_path / "out-val_lmdb"))
    assert made is not None and sorted({*made.labels.tolist()}) == [0, 2] and made.facts.classes == ("a", "b", "c")
