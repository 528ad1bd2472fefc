"""`mean_file`: the mean of each pixel, by Caffe's rule, from the file to what the network takes; and what is said of one that doesn't fit."""

from pathlib import Path

import made_images
import numpy as np
import pytest
import torch
from contract import stagerun
from facade import ChannelOrder, ListRecords, Normalise, Transform, binary, caffe_pb2, looked_at, write_lmdb
from made_images import raw

from stagerun.language import load

CPU = torch.device("cpu")
HEIGHT, WIDTH, SIDE = 11, 13, 6
SCHEDULE = """
name: "mean"
model {{ name: "resnet_small" num_classes: 2 }}
data {{ train {{ source: "lmdb" images: 8 }} val {{ source: "lmdb" images: 8 }} }}
solver {{
  batch_size: 4 device_batch_size: 4 base_lr: 0.01 lr_policy: "fixed" max_iter: 2
  transform_param {{ mean_file: "mean.binaryproto" mirror: true crop_size: 8 scale: 0.01 {more} }}
}}
stage {{ name: "a" solver_param {{ }} }}
"""


IMAGES = np.random.default_rng(2).integers(0, 256, (8, 3, HEIGHT, WIDTH), dtype=np.uint8)
RECORDS = [raw(image.transpose(1, 2, 0), i % 2) for i, image in enumerate(IMAGES)]


def made(folder: Path, height: int = HEIGHT, more: str = "") -> np.ndarray:
    """A schedule with random images, and their mean: [channels, height, width]."""
    rng = np.random.default_rng(1)
    folder.mkdir(exist_ok=True)
    write_lmdb(str(folder / "lmdb"), RECORDS)
    mean = rng.uniform(0, 255, (3, height, WIDTH)).astype(np.float32)
    old = caffe_pb2.BlobProto(num=1, channels=3, height=height, width=WIDTH)  # as compute_image_mean writes it
    old.data.extend(mean.ravel().tolist())
    (folder / "mean.binaryproto").write_bytes(old.SerializeToString())
    (folder / "schedule.prototxt").write_text(SCHEDULE.format(more=more))
    return mean


def caffes(image: np.ndarray, mean: np.ndarray, top: int, left: int, mirror: bool, scale: float) -> np.ndarray:
    """DataTransformer::Transform of one datum, [channels, height, width], pixel by pixel."""
    out = np.zeros((3, SIDE, SIDE))
    for c, h, w in np.ndindex(out.shape):
        to = SIDE - 1 - w if mirror else w
        out[c, h, to] = (float(image[c, top + h, left + w]) - float(mean[c, top + h, left + w])) * scale
    return out


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("channels_last", [True, False])
def test_each_pixel_has_the_mean_of_its_place(train, channels_last, tmp_path):
    mean = made(tmp_path)
    path = str(tmp_path / "mean.binaryproto")
    param = Transform(mean_file="mean.binaryproto", mean_path=path, crop_size=SIDE, mirror=train, scale=0.5)
    batch = made_images.loader(ListRecords(RECORDS), param, train=train, channels=3, num_classes=2, seed=3).batch(0, 8)
    images, crop = np.array(batch.images), batch.crop
    normalise = Normalise(param, 3, CPU, torch.float64, channels_last, mean.transpose(1, 2, 0))
    found = normalise(images, crop=crop).numpy()
    places = crop if crop is not None else [((HEIGHT - SIDE) // 2, (WIDTH - SIDE) // 2, 0)] * 8
    assert (crop is not None) == train
    if train:
        assert len({tuple(place) for place in places}) > 4 and {place[2] for place in places} == {0, 1}
    for image, one, (top, left, mirror) in zip(IMAGES, found, places, strict=True):
        expected = caffes(image, mean, int(top), int(left), bool(mirror), 0.5)
        np.testing.assert_allclose(one, expected, atol=1e-12)


def test_channels_turn_with_the_pixels(tmp_path):
    mean = made(tmp_path).transpose(1, 2, 0)
    param = Transform(mean_file="m", mean_path=str(tmp_path / "mean.binaryproto"))
    turned = Transform(mean_file="m", mean_path=param.mean_path, channel_order=ChannelOrder.RGB)
    images = np.zeros((1, HEIGHT, WIDTH, 3), np.uint8)
    bgr, rgb = (Normalise(p, 3, CPU, torch.float32, True, mean)(images) for p in (param, turned))
    assert torch.equal(bgr.flip(1), rgb)


def test_a_run_and_another_mean(tmp_path):
    made(tmp_path)
    identity = looked_at(load(tmp_path), tmp_path / "out").stages[0].identity
    ended = stagerun(["run", ".", "--out", "out", "--nproc", 1, "--threads", 1], tmp_path)
    assert ended.exit_code == 0, ended.output
    assert "done" in stagerun(["plan", ".", "--out", "out"], tmp_path).output
    shown = stagerun(["eval", "out"], tmp_path)  # by what the snapshot says alone
    assert shown.exit_code == 0, shown.output
    (tmp_path / "mean.binaryproto").write_bytes(binary.blob_bytes(np.ones((1, 3, HEIGHT, WIDTH), np.float32)))
    assert looked_at(load(tmp_path), tmp_path / "out").stages[0].identity != identity
    assert "stale" in stagerun(["plan", ".", "--out", "out"], tmp_path).output
    (snapshot,) = (tmp_path / "out" / "snapshots").iterdir()
    shown = stagerun(["eval", snapshot], tmp_path)
    assert shown.exit_code == 65 and "mean.binaryproto is another file than before" in shown.output, shown.output


@pytest.mark.parametrize(
    ("height", "more", "said"),
    [
        (HEIGHT, "mean_value: 3", "`mean_file` and `mean_value` exclude each other"),
        (HEIGHT, "pad: 2", "`pad` with `mean_file`"),
        (HEIGHT, "random_resized_crop_param { }", "`random_resized_crop_param` with `mean_file`"),
        (HEIGHT + 1, "", f"the record is {HEIGHT} x {WIDTH}, and `mean_file` {HEIGHT + 1} x {WIDTH}"),
        (0, "", "is not a mean image of Caffe's (.binaryproto)"),
        (-1, "", "no such file"),
    ],
)
def test_one_that_does_not_fit(height, more, said, tmp_path):
    made(tmp_path, max(height, 0), more)
    if height < 0:
        (tmp_path / "mean.binaryproto").unlink()
    ended = stagerun(["run", ".", "--out", "out", "--nproc", 1], tmp_path)
    assert ended.exit_code not in (0, 1, 70) and said in ended.output, ended.output
