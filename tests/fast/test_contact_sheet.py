"""`stagerun data show`: the pictures on the sheet are the records, or what the loader gives a stage. tests/cases has its mistakes."""

from pathlib import Path

import contract
import cv2
import made_images
import numpy as np
import tiny
from facade import LmdbSource, write_lmdb
from log_help import room
from made_images import stored

from stagerun import load

SCHEDULE = """
name: "colours"
model { name: "resnet18" num_classes: 3 }
data { train { source: "lmdb" images: 12 } val { source: "lmdb" images: 12 } }
solver {
  batch_size: 4 device_batch_size: 4 base_lr: 0.1 lr_policy: "fixed" max_iter: 5 test_batch_size: 4 mixup_alpha: 0.2
  transform_param {
    crop_size: 16 mirror: true channel_order: RGB mean_value: 124 mean_value: 116 mean_value: 104
    cutout_size: 4 random_resized_crop_param { }
  }
  test_transform_param { crop_size: 16 random_resize_param { min_size: 18 } }
}
stage { name: "one" }
stage { name: "two" solver: "one.prototxt" }
"""


def record(i: int) -> bytes:
    """A small picture of its own shape and colours."""
    rng = np.random.default_rng(i)
    soft = rng.integers(0, 256, (3, 3, 3), dtype=np.uint8)
    picture = cv2.resize(soft, (24 + 3 * i, 30), interpolation=cv2.INTER_CUBIC)
    return stored(cv2.imencode(".png", picture)[1].tobytes(), i % 3)


def is_on(paper: np.ndarray, picture: np.ndarray, times: int) -> bool:
    """Whether the picture is there, each pixel enlarged to `times` x `times`, anywhere."""
    picture = picture.repeat(times, 0).repeat(times, 1)
    if picture.shape[2] == 1:
        picture = np.repeat(picture, 3, axis=2)
    found = cv2.minMaxLoc(cv2.matchTemplate(paper, picture, cv2.TM_SQDIFF))
    left, top = found[2]
    return np.array_equal(paper[top : top + picture.shape[0], left : left + picture.shape[1]], picture)


def sheet(folder: Path, *words: object) -> tuple[np.ndarray, str]:
    """The picture, and what was said."""
    shown = contract.stagerun(["data", "show", *words], folder)
    assert shown.exit_code == 0, shown.output
    image = cv2.imread(str(folder / "sheet.png"))
    assert image is not None
    return np.asarray(image), shown.output


def test_records_are_shown_as_they_are_stored(tmp_path):
    """Grey images of 28 pixels in squares of 84 are enlarged, each pixel to nine alike."""
    tiny.make_data(tmp_path)
    paper, said = sheet(tmp_path, "train_lmdb", "--number", 6, "--first", 3, "--size", 84)
    assert "6 of 600 images" in said
    stored = np.load(tiny.STORED)["images"]
    assert {i for i in range(12) if is_on(paper, stored[i].reshape(28, 28, 1), 3)} == {3, 4, 5, 6, 7, 8}
    with room(1000):
        shown = contract.stagerun(["data", "show", "train_lmdb"], tmp_path)
    assert shown.exit_code == 74 and "choose another file with --output" in shown.output


def test_a_stage_shows_what_its_network_gets(tmp_path):
    """The loader's images, the second stage going on where the first stopped: 5 iterations of 4 images."""
    write_lmdb(str(tmp_path / "lmdb"), [record(i) for i in range(12)])
    (tmp_path / "schedule.prototxt").write_text(SCHEDULE)
    (tmp_path / "one.prototxt").write_text("display: 1\n")
    param, about = load(tmp_path).stages[0].solver.transform, {"channels": 3, "num_classes": 3}
    loader = made_images.loader(LmdbSource(str(tmp_path / "lmdb")), param, train=True, seed=1, shuffle=True, **about)
    for stage, start in (("one", 0), ("two", 20)):
        paper, said = sheet(tmp_path, ".", "--stage", stage, "--number", 4, "--first", 2)
        assert "4 of 12 images" in said
        batch = loader.batch(start + 2, 4)
        assert batch.cutout is not None
        for image, cutout in zip(batch.images, batch.cutout.tolist(), strict=True):
            top, left, side, _ = cutout
            expected = image.copy()
            expected[top : top + side, left : left + side] = 0
            assert is_on(paper, expected, 10)
