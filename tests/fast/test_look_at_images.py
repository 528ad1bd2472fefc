"""What is wrong with the images of any set is said before anything is trained, with the place of the setting that doesn't fit them."""

from pathlib import Path

import made_images
import numpy as np
import pytest
from contract import stagerun
from facade import DataError, preflight, write_lmdb

from stagerun.language import load

SETS = ("train", "val", "second", "other")
SCHEDULE = """model { name: "resnet_small" num_classes: 10 channels: 1 }
data {
  train { source: "train" }
  val { name: "v1" source: "val" }
  val { name: "v2" source: "second" }
}
solver { batch_size: 8 device_batch_size: 4 base_lr: 0.1 lr_policy: "fixed" max_iter: 10
  transform_param { crop_size: 8 } }
stage { name: "a" solver_param { } }
stage { name: "b" solver_param {
  model { name: "resnet_small" num_classes: 5 channels: 1 }
  data { train { source: "other" } val { source: "other" } }
  transform_param { crop_size: 8 } } }
"""


def make(folder: Path, **wrong: int) -> str:
    """A schedule with its LMDBs of 200 images of 8 x 8, the 58th of a set with another label. They have side files."""
    (folder / "schedule.prototxt").write_text(SCHEDULE)
    for name in SETS:
        labels = [i % 5 for i in range(200)]
        labels[57] = wrong.get(name, 0)
        path = str(folder / name)
        write_lmdb(path, [made_images.raw(np.zeros((8, 8, 1), np.uint8), label) for label in labels])
        assert stagerun(["data", "verify", "--index", name], folder).exit_code == 0
    return str(folder)


@pytest.mark.parametrize(("name", "label"), [("train", 10), ("val", 99), ("second", 10), ("other", 5)])
def test_a_label_out_of_range_is_found_among_all_records(tmp_path, name, label):
    folder = make(tmp_path, **{name: label})
    with pytest.raises(DataError) as error:
        preflight(load(folder))
    assert f"{folder}/{name}: record `00000057`: the label is {label}, " in error.value.message
    assert "change `num_classes`" in error.value.hint


def test_a_crop_that_is_larger_than_the_images(tmp_path):
    folder = make(tmp_path)
    preflight(load(folder))
    for field in (
        "solver.transform_param.crop_size=9",
        "b.transform_param.crop_size=9",
        "b.test_transform_param={crop_size: 9}",
    ):
        with pytest.raises(DataError) as error:
            preflight(load(folder, [field]))
        assert "too small for crop_size: 9" in error.value.message
        assert "lower `crop_size`" in error.value.hint


def test_pictures_and_classes_are_held_against_each_other(tmp_path):
    """One image too small for the last stage's crop, and classes that validation counts otherwise."""
    for name, classes in (("train", ("cat", "dog")), ("val", ("dog", "other"))):
        images = [made_images.jpeg(i, 20 if (name, i) == ("train", 5) else 40, 50) for i in range(8)]
        write_lmdb(str(tmp_path / name), [made_images.stored(data, i % 2) for i, data in enumerate(images)])
        (tmp_path / "classes").write_text("\n".join(classes))
        assert stagerun(["data", "verify", "--index", name, "--classes", "classes"], tmp_path).exit_code == 0
    (tmp_path / "schedule.prototxt").write_text("""
model { name: "resnet_small" num_classes: 2 }
data { train { source: "train" } val { source: "val" } }
solver { batch_size: 8 device_batch_size: 4 base_lr: 0.1 lr_policy: "fixed" max_iter: 10 }
stage { name: "a" solver_param { transform_param { crop_size: 20 } } }
stage { name: "b" solver_param { transform_param { crop_size: 32 pad: 2 pad_mode: REFLECT } } }
""")
    with pytest.raises(DataError) as error:
        preflight(load(str(tmp_path)))
    said = error.value.render()
    assert f"label 0 is `cat` in {tmp_path}/train" in said and f"and `dog` in {tmp_path}/val" in said
    assert "`00000005`: the image is 20 x 50 pixels (height x width), 24 x 54 pixels once padded" in said
