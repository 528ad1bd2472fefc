"""Rectangular validation: sorted by shape, cropped batch by batch, the same however the batches are shared."""

import cv2
import made_schedules
import numpy as np
import pytest
from facade import DataError, Datum, InterpMode, LmdbSource, RandomResize, Stage, Transform, pictures, write_lmdb
from made_images import stored

from stagerun.data.index import Facts, Index
from stagerun.data.loaders import RectangularLoader, centre, crop_of
from stagerun.train import images

# height, width
SIZES = [(60, 90), (90, 60), (80, 80), (60, 120), (120, 60), (64, 80), (80, 64), (60, 90), (70, 70), (60, 300)]
PARAM = Transform(
    crop_size=32, rectangular=True, random_resize=RandomResize(min_size=40, max_size=40, interp_mode=InterpMode.LINEAR)
)


@pytest.fixture
def source(tmp_path):
    def datum(i: int, height: int, width: int) -> bytes:
        image = cv2.resize(np.random.default_rng(i).integers(0, 256, (5, 7, 3), np.uint8), (width, height))
        return stored(cv2.imencode(".png", image)[1].tobytes(), i)

    path = str(tmp_path / "lmdb")
    write_lmdb(path, [datum(i, *size) for i, size in enumerate(SIZES)])
    found = LmdbSource(path)
    found.index = index(SIZES)
    return found


def index(sizes: list[tuple[int, int]]) -> Index:
    zeros = np.zeros(len(sizes), np.int64)
    heights, widths = (np.array(side, np.int32) for side in zip(*sizes, strict=True))
    return Index(
        facts=Facts(records=len(sizes), file_size=0, transaction=0, fingerprint=""),
        offsets=zeros, lengths=zeros, labels=zeros.astype(np.int32), heights=heights, widths=widths,
        digests=zeros.astype(np.uint64), keys=np.zeros(0, np.uint8), key_ends=np.zeros(len(sizes) + 1, np.int64),
    )  # fmt: skip


def make(source: LmdbSource, batch_size: int = 4) -> RectangularLoader:
    return RectangularLoader(source, PARAM, pictures.NetworkInput(channels=3, num_classes=10), batch_size)


def test_every_image_comes_once_from_the_tallest_to_the_widest(source):
    loader = make(source)
    batches = list(loader.stream([(0, 4), (4, 4), (8, 2)]))
    labels = np.concatenate([batch.labels for batch in batches]).tolist()
    assert labels == [4, 1, 6, 2, 8, 5, 0, 7, 3, 9]  # those of one shape by number
    ratios = [SIZES[i][1] / SIZES[i][0] for i in labels]
    assert ratios == sorted(ratios)
    shapes = [batch.images.shape[1:3] for batch in batches]
    assert shapes == [crop_of(float(np.mean(ratios[at : at + 4])), 32) for at in (0, 4, 8)]
    assert shapes[0][0] > shapes[0][1] and shapes[2][1] > shapes[2][0]


def test_a_batch_is_the_same_whoever_asks_and_when(source):
    whole = make(source)
    for position, count in ((4, 4), (8, 2)):
        assert np.array_equal(make(source).batch(position, count).images, whole.batch(position, count).images)
    # Some images of a batch alone have the crop of the batch.
    assert np.array_equal(whole.batch(4, 2).images, whole.batch(4, 4).images[:2])
    assert np.array_equal(whole.batch(6, 2).images, whole.batch(4, 4).images[2:])
    with pytest.raises(ValueError):
        whole.batch(2, 4)


def test_pixels_are_the_centre_of_the_resized_image(source):
    batch = make(source, 1).batch(6, 1)  # record 0: 60 x 90, alone in its batch
    picture = cv2.imdecode(np.frombuffer(Datum.FromString(source.get(0)[1]).data, np.uint8), cv2.IMREAD_COLOR)
    resized = cv2.resize(picture, (60, 40), interpolation=cv2.INTER_LINEAR)
    assert batch.images.shape == (1, 32, 48, 3)
    assert np.array_equal(batch.images[0], resized[4:36, 6:54])


def test_an_image_that_is_less_elongated_than_the_mean_has_black_beside_it():
    image, out = np.full((4, 6, 1), 9, np.uint8), np.full((2, 10, 1), 7, np.uint8)
    centre(image, out)
    assert out[:, :, 0].tolist() == [[0, 0, 9, 9, 9, 9, 9, 9, 0, 0]] * 2


def test_sizes_are_needed_and_looked_at(source):
    make(source).preflight()
    source.index = index([(0, 0), *SIZES[1:]])
    with pytest.raises(DataError, match="1 record can't be used, says the side file"):
        make(source)
    source.index = None
    with pytest.raises(DataError) as error:
        make(source)
    assert "stagerun data verify --index" in error.value.hint


def test_other_evaluations_begin_at_the_first_image():
    assert images.evaluated(stage_of(Transform()), 7, 3) == [0, 1, 2]
    assert images.evaluated(stage_of(PARAM), 7, 3) == [1, 3, 5]
    for param in (Transform(), PARAM):
        assert images.evaluated(stage_of(param), 7, None) == images.evaluated(stage_of(param), 7, 9) == list(range(7))


def stage_of(param: Transform) -> Stage:
    return made_schedules.stage("a", base_lr=1, lr_policy="fixed", max_iter=1, test_transform=param)
