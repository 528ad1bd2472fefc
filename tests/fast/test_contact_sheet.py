"""`stagerun data show`: the pictures on the sheet are the records, or what the loader gives a stage; mistakes are told."""

import errno
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
import tiny
from click.testing import CliRunner, Result
from facade import LmdbSource, Loader, caffe_pb2, write_lmdb

from stagerun.cli import main
from stagerun.data import datum, index, indexing
from stagerun.language import load
from stagerun.system import files
from stagerun.tools.data.show import ShowOptions, shown_of

SCHEDULE = """
name: "colours"
model {{ name: "resnet18" num_classes: 3 }}
data {{ train {{ source: "{data}" images: 12 }} val {{ source: "{data}" images: 12 }} }}
solver {{
  batch_size: 4 device_batch_size: 4 base_lr: 0.1 lr_policy: "fixed" max_iter: 5 test_batch_size: 4 mixup_alpha: 0.2
  transform_param {{
    crop_size: 16 mirror: true channel_order: RGB mean_value: 124 mean_value: 116 mean_value: 104
    cutout_size: 4 random_resized_crop_param {{ }} {colours}
  }}
  test_transform_param {{ crop_size: 16 random_resize_param {{ min_size: 18 }} {rectangular} }}
}}
stage {{ name: "one" }}
stage {{ name: "two" solver: "one.prototxt" }}
"""


def record(i: int) -> bytes:
    """A small picture of its own shape and colours."""
    rng = np.random.default_rng(i)
    soft = rng.integers(0, 256, (3, 3, 3), dtype=np.uint8)
    picture = cv2.resize(soft, (24 + 3 * i, 30), interpolation=cv2.INTER_CUBIC)
    return caffe_pb2.Datum(
        encoded=True, data=cv2.imencode(".png", picture)[1].tobytes(), label=i % 3
    ).SerializeToString()


@pytest.fixture
def lmdb(tmp_path: Path) -> Path:
    """12 pictures in colour with a side file that names the classes."""
    folder = tmp_path / "lmdb"
    write_lmdb(str(folder), [record(i) for i in range(12)])
    index.save(indexing.build(str(folder), classes=("ankle boot", "cat", "dog")), str(folder))
    return folder


def make_schedule(folder: Path, data: Path, colours: str = "", rectangular: str = "") -> Path:
    folder.mkdir()
    text = SCHEDULE.format(data=data, colours=colours, rectangular=rectangular)
    (folder / "schedule.prototxt").write_text(text)
    (folder / "one.prototxt").write_text("display: 1\n")
    return folder


def show(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["data", "show", *map(str, arguments)])


def options(folder: Path, **given: object) -> ShowOptions:
    usual = ShowOptions(
        folder=str(folder),
        overrides=(),
        stage=None,
        val=False,
        number=4,
        first=0,
        size=64,
        output="sheet.png",
    )
    return replace(usual, **given)  # type: ignore[arg-type]


def is_on(paper: np.ndarray, picture: np.ndarray) -> bool:
    """Whether the picture is there, pixel for pixel, anywhere."""
    if picture.shape[2] == 1:
        picture = np.repeat(picture, 3, axis=2)
    found = cv2.minMaxLoc(cv2.matchTemplate(paper, picture, cv2.TM_SQDIFF))
    left, top = found[2]
    return np.array_equal(paper[top : top + picture.shape[0], left : left + picture.shape[1]], picture)


def read(path: Path) -> np.ndarray:
    image = cv2.imread(str(path))
    assert image is not None
    return np.asarray(image)


def test_records_are_shown_as_they_are_stored(tmp_path: Path) -> None:
    """Grey images of 28 pixels in boxes of 64 are enlarged twice, each pixel to four alike."""
    tiny.make_data(tmp_path)
    path = tmp_path / "sheet.png"
    shown = show(tmp_path / "train_lmdb", "--number", 6, "--first", 3, "--size", 64, "--output", path)
    assert shown.exit_code == 0, shown.output
    assert "records 3 to 8 of 600" in shown.output and "6 pictures" in shown.output
    stored = np.load(tiny.STORED)["images"]
    on_it = {i for i in range(12) if is_on(read(path), stored[i].reshape(28, 28, 1).repeat(2, 0).repeat(2, 1))}
    assert on_it == {3, 4, 5, 6, 7, 8}


def test_a_stage_shows_what_its_network_gets(lmdb: Path, tmp_path: Path) -> None:
    """Position by position the loader's images, the second stage going on where the first stopped: 5 iterations of 4 images."""
    folder = make_schedule(tmp_path / "schedule", lmdb)
    solver = load(folder).stages[0].solver
    loader = Loader(
        LmdbSource(str(lmdb)),
        solver.transform,
        train=True,
        channels=3,
        num_classes=3,
        seed=1,
        images=12,
        shuffle=True,
    )
    for stage, start in (("one", 0), ("two", 20)):
        tiles = shown_of(options(folder, stage=stage, first=2)).tiles
        batch = loader.batch(start + 2, 4)
        assert batch.cutout is not None
        for n, tile in enumerate(tiles):
            top, left, side, _ = batch.cutout[n].tolist()
            expected = batch.images[n].copy()
            expected[top : top + side, left : left + side] = (104, 116, 124)
            assert np.array_equal(tile.picture, expected)
            assert tile.lines[1].split()[0] == str(batch.labels[n])
    path = tmp_path / "sheet.png"
    shown = show(folder, "--stage", "two", "--number", 4, "--first", 2, "--output", path)
    assert shown.exit_code == 0, shown.output
    assert "stage two, training: images 2 to 5" in shown.output
    assert "not shown: mixup_alpha" in shown.output
    assert all(
        is_on(read(path), tile.picture.repeat(10, 0).repeat(10, 1)) for tile in tiles if tile.picture is not None
    )


def test_a_bad_record_is_told_of_and_the_others_are_shown(tmp_path: Path) -> None:
    folder, path = tmp_path / "lmdb", tmp_path / "sheet.png"
    cut_off = caffe_pb2.Datum(encoded=True, data=b"\x89PNG\r\n\x1a\n12", label=1).SerializeToString()
    write_lmdb(str(folder), [record(0), cut_off, record(2)])
    shown = show(folder, "--output", path)
    assert shown.exit_code == 65
    assert f"{folder}: record `00000001`: the image is cut off" in shown.output
    stored = [datum.decode(record(i), 3, 3)[0] for i in (0, 2)]
    assert all(
        is_on(read(path), image.repeat(times, 0).repeat(times, 1)) for image, times in zip(stored, (5, 5), strict=True)
    )
    tiles = shown_of(options(folder, number=3)).tiles
    assert [bool(tile.wrong) for tile in tiles] == [False, True, False]
    staged = show(
        make_schedule(tmp_path / "schedule", folder), "--stage", "one", "--output", path, "--set", "data.train.images=3"
    )
    assert staged.exit_code == 65 and "record `00000001`" in staged.output


def test_a_sheet_that_cannot_be_written_is_reported(
    lmdb: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(files, "write_whole", full)
    shown = show(lmdb, "--output", tmp_path / "sheet.png")
    assert shown.exit_code == 74 and "choose another place with --output" in shown.output
