"""From a folder of JPEGs to a trained network: imported, indexed, and trained with everything that can be done to an image."""

import re
from pathlib import Path

import numpy as np
import photos
import pytest
import small
from click.testing import CliRunner

from stagerun.base.errors import DataError, RecipeError
from stagerun.cli import main
from stagerun.data.preflight import preflight
from stagerun.language import canonical, load

SCHEDULE = """
name: "photos"
model {{ name: "resnet_small" num_classes: 3 }}
data {{
  train {{ source: "{data}/train_lmdb" images: 72 }}
  val {{ source: "{data}/val_lmdb" images: 24 }}
  {settings}
}}
solver {{
  batch_size: 16
  device_batch_size: 4
  momentum: 0.9
  display: 1
}}
stage {{ name: "trunk" }}
stage {{ name: "collapse" }}
"""
TRUNK = """
base_lr: 0.05 lr_policy: "poly_cyc" power: 1 max_iter: 4 lr_iter: 8
mixup_alpha: 0.2 cutmix_alpha: 1 label_smoothing: 0.1
transform_param {
  channel_order: RGB mean_value: [123.675, 116.28, 103.53] std_value: [58.395, 57.12, 57.375]
  crop_size: 32 mirror: true random_resized_crop_param { resize_param { interp_mode: AUTO } }
  rand_augment_param { } cutout_size: 8
}
test_transform_param {
  channel_order: RGB mean_value: [123.675, 116.28, 103.53] std_value: [58.395, 57.12, 57.375]
  crop_size: 32 random_resize_param { min_size: 36 } rectangular: true
}
"""
COLLAPSE = """
base_lr: 0.01 lr_policy: "poly" power: 2 max_iter: 2
transform_param { crop_size: 32 mirror: true mean_value: [104, 117, 123] scale: 0.017 pad: 2 pad_mode: REFLECT }
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    for name, per_class, seed in (("train", 24, 1), ("val", 8, 2)):
        photos.make_folder(folder / name, per_class, seed=seed)
        data_command("import", folder / name, folder / f"{name}_lmdb")
    return folder


def data_command(*words: str | Path) -> None:
    """`stagerun data ...`, in this process."""
    done = CliRunner().invoke(main, ["data", *map(str, words)])
    assert done.exit_code == 0, done.output


def schedule(folder: Path, data: Path, settings: str = "") -> Path:
    folder.mkdir()
    (folder / "schedule.prototxt").write_text(SCHEDULE.format(data=data, settings=settings))
    (folder / "trunk.prototxt").write_text(TRUNK)
    (folder / "collapse.prototxt").write_text(COLLAPSE)
    return folder


@pytest.mark.process
def test_what_the_side_files_know_is_found_before_the_first_iteration(tmp_path: Path, data: Path) -> None:
    """One image too small for the last stage's crop, and classes that validation counts otherwise."""
    photos.make_folder(tmp_path / "val", 8, seed=2)
    (tmp_path / "val" / "class0").rename(tmp_path / "val" / "other")
    photos.make_folder(tmp_path / "train", 24, seed=1)
    small_one = photos.jpeg(np.zeros((20, 50, 3), np.uint8))
    (tmp_path / "train" / "class1" / "005.jpg").write_bytes(small_one)
    for name in ("train", "val"):
        assert small.stagerun("data", "import", tmp_path / name, tmp_path / f"{name}_lmdb").returncode == 0
    done = small.run(schedule(tmp_path / "s", tmp_path), tmp_path / "out")
    assert done.returncode == 65
    assert "label 0 is `class0` in" in done.stderr and "and `class1` in" in done.stderr
    assert (
        "_class1/005.jpg`: the image is 20 x 50 pixels (height x width), 24 x 54 pixels once padded" in done.stderr
    ), done.stderr
    assert not list((tmp_path / "out" / "snapshots").iterdir())


def looked_at(folder: str | Path, *changes: str) -> str:
    """What `run` says before anything is started; '' where nothing is wrong."""
    try:
        preflight(load(folder, changes))
    except (RecipeError, DataError) as error:
        assert error.exit_code == (64 if isinstance(error, RecipeError) else 65)
        return error.render()
    return ""


def test_another_number_of_classes_than_the_side_file_names(tmp_path: Path, data: Path) -> None:
    folder = str(schedule(tmp_path / "s", data))
    assert looked_at(folder) == ""
    assert looked_at(folder, "model.num_classes=10", "model.spare_classes=true") == ""
    spare = looked_at(folder, "model.num_classes=10")
    assert spare.startswith(
        f"--set:1:19: `num_classes` is 10, but {data}/train_lmdb has 3 classes: class0, class1, class2"
    )
    assert "write `num_classes: 3`; if outputs without a class are meant, add `spare_classes: true`" in spare
    few = looked_at(folder, "model.num_classes=2", "model.spare_classes=true")
    assert "`num_classes` is 2" in few and "spare" not in few and "the label is 2" not in few

    text = Path(folder, "schedule.prototxt").read_text()
    Path(folder, "schedule.prototxt").write_text(text.replace("num_classes: 3", "num_classes: 4"))
    place = f"{folder}/schedule.prototxt:3:43"
    assert looked_at(folder).startswith(f"{place}: `num_classes` is 4") and "      ^" in looked_at(folder)
    for words, said in (
        (["check", folder], f"no mistakes, 1 finding, digest [0-9a-f]*\nnote: .*\n{place}"),
        (["plan", folder], place),
    ):
        done = CliRunner().invoke(main, words)
        assert done.exit_code == 0 and re.search(said, done.output), done.output


def test_images_that_are_not_written_are_read_and_said_to_be(tmp_path: Path, data: Path) -> None:
    folder = schedule(tmp_path / "s", data)
    whole = canonical(load(folder))
    text = (folder / "schedule.prototxt").read_text()
    (folder / "schedule.prototxt").write_text(re.sub(r" images: \d+", "", text))
    assert canonical(load(folder)) == whole and looked_at(folder) == ""
    planned = CliRunner().invoke(main, ["plan", str(folder)]).output
    assert f"note: data.val.images: 24, read from LMDB {data}/val_lmdb" in planned
    explained = CliRunner().invoke(main, ["plan", str(folder), "--why", "data.train.images"]).output
    assert explained.startswith("data.train.images   72\n\nnot written: read from the LMDB")
