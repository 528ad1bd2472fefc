"""Images that grow within a stage: their side at each iteration, in the plan, the loader, on the device and in a run."""

from collections.abc import Iterator
from dataclasses import replace

import cv2
import jpeg_pictures
import numpy as np
import pytest
from facade import (
    Batch,
    DataError,
    InterpMode,
    ListRecords,
    Loader,
    RandomResize,
    RandomResizedCrop,
    Solver,
    Transform,
    crop_size,
    pictures,
    recipe,
    training_loader,
)
from made_images import raw, stored
from test_spec_resolve import read

CropSizeRamp = recipe.CropSizeRamp
IMAGES, HEIGHT, WIDTH = 30, 40, 52
RAMP = CropSizeRamp(start_size=16, start_epoch=1, end_epoch=3, multiple=8)
# Batches of 12 of 30 images: 2.5 iterations to an epoch, so that updates lie across its end.
SOLVER = Solver(
    base_lr=0.1, lr_policy="fixed", max_iter=12, batch_size=12, device_batch_size=4, random_seed=7, test_batch_size=4,
    epoch_iter=IMAGES / 12, transform=Transform(crop_size=32, mirror=True, crop_size_ramp=RAMP),
)  # fmt: skip
# e = floor(iter * 12 / 30) is 0 0 0 1 1 2 2 2 3 3 4 4
SIDES = [16] * 5 + [24] * 3 + [32] * 4


# ---- the function


def ramped(ramp: recipe.CropSizeRamp, last: int, epoch: int) -> int:
    """The side in an epoch of one iteration."""
    transform = Transform(crop_size=last, crop_size_ramp=ramp)
    return crop_size(replace(SOLVER, epoch_iter=1, transform=transform), epoch) or 0


# Epochs, start and end of the ramp (FACTS E1); sides of FFCV's get_resolution at each epoch in between.
FFCV = [
    (16, 11, 13, [160, 192, 192]),
    (24, 17, 20, [160, 160, 192, 192]),
    (32, 23, 27, [160, 160, 192, 192, 192]),
    (40, 29, 34, [160, 160, 160, 192, 192, 192]),
    (88, 65, 76, [160] * 6 + [192] * 6),
]


@pytest.mark.parametrize("length, start, end, between", FFCV)
def test_the_ramps_of_ffcv(length, start, end, between):
    ramp = CropSizeRamp(start_size=160, start_epoch=start, end_epoch=end)
    of_ffcv = [round(np.interp(e, [start, end], [160, 192]) / 32) * 32 for e in range(length)]
    assert [ramped(ramp, 192, e) for e in range(length)] == of_ffcv
    assert of_ffcv[start : end + 1] == between


def test_the_ends_are_exact_and_nothing_lies_beyond_them():
    ramp = CropSizeRamp(start_size=150, start_epoch=0.5, end_epoch=4.5)
    assert [ramped(ramp, 250, e) for e in range(6)] == [150, 160, 192, 224, 224, 250]
    down = CropSizeRamp(start_size=250, start_epoch=0.5, end_epoch=4.5)
    assert [ramped(down, 150, e) for e in range(6)] == [250, 224, 224, 192, 160, 150]
    coarse = CropSizeRamp(start_size=100, end_epoch=4, multiple=1000)
    assert [ramped(coarse, 120, e) for e in range(5)] == [100, 100, 100, 100, 120]


def test_it_moves_with_the_first_update_that_begins_in_an_epoch():
    assert [crop_size(SOLVER, i) for i in range(12)] == SIDES
    assert crop_size(replace(SOLVER, transform=Transform(crop_size=9)), 5) == 9
    assert crop_size(replace(SOLVER, transform=Transform()), 5) is None
    with pytest.raises(ValueError, match="epoch_iter"):
        crop_size(replace(SOLVER, epoch_iter=None), 0)


def test_epochs_are_counted_exactly():
    """In doubles 1281167 / (1281167 / 300) is just below 300."""
    for images in (1281167, 50000, 9_007_199_254_740_991 // 10**6, 3):
        for batch in (1, 3, 300, 4096, 24576):
            ends = CropSizeRamp(start_size=16, start_epoch=batch - 1, end_epoch=batch)
            param = Transform(crop_size=32, crop_size_ramp=ends)
            solver = replace(SOLVER, batch_size=batch, epoch_iter=images / batch, transform=param)
            assert [crop_size(solver, i) for i in (images - 1, images)] == [16, 32]
    ramp = replace(SOLVER.transform, crop_size_ramp=CropSizeRamp(start_size=16, start_epoch=299, end_epoch=300))
    solver = replace(SOLVER, batch_size=300, epoch_iter=1281167 / 300, transform=ramp)
    assert [crop_size(solver, i) for i in (1281166, 1281167)] == [16, 32]


# ---- the loader


PICTURES = [jpeg_pictures.image(HEIGHT, WIDTH, seed=i) for i in range(IMAGES)]
RAW = ListRecords([raw(p, i % 10) for i, p in enumerate(PICTURES)], "/raw")
JPEGS = [cv2.imencode(".jpg", p)[1].tobytes() for p in PICTURES]
CODED = ListRecords([stored(data, i % 10) for i, data in enumerate(JPEGS)], "/coded")
SCHEDULE = read()
BOX = RandomResizedCrop(interp_mode=InterpMode.AUTO)
CAFFE_BOX = recipe.RandomAspectRatio(
    min_area_ratio=0.2, max_area_ratio=1, aspect_ratio_change=0.75, max_attempt=10, interp_mode=InterpMode.CUBIC
)
RESIZE = RandomResize(min_size=33, max_size=60, interp_mode=InterpMode.AREA)
TRANSFORMS = {
    "crop": {},
    "resized crop": {"random_resized_crop": BOX},
    "caffe": {"random_aspect_ratio": CAFFE_BOX},
    "resize": {"random_resize": RESIZE},
    "all": {"pad": 3, "cutout_size": 9, "random_resized_crop": RandomResizedCrop()},
}


def growing(start: int = 0, records: ListRecords = RAW, solver: Solver = SOLVER, **more: object) -> Loader:
    return training_loader(records, SCHEDULE, replace(SCHEDULE.stages[0], solver=solver), start=start, **more)


def asked(start: int, first: int = 0) -> Iterator[tuple[int, int]]:
    for i in range(first, SOLVER.max_iter):
        yield from ((start + 12 * i + 4 * k, 4) for k in range(3))


def same(one: Batch, two: Batch) -> None:
    for name in ("images", "labels", "positions", "cutout"):
        np.testing.assert_array_equal(getattr(one, name), getattr(two, name), name)


@pytest.mark.parametrize("records", [RAW, CODED], ids=["raw", "jpeg"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_pixels_are_those_of_a_transform_of_that_size(name, records):
    """In a stage that begins at position 1000, in the middle of an epoch of the data."""
    solver = replace(SOLVER, transform=replace(SOLVER.transform, **TRANSFORMS[name]))
    fixed = {
        side: growing(0, records, replace(solver, transform=replace(solver.transform, crop_size=side, crop_size_ramp=None)))
        for side in set(SIDES)
    }  # fmt: skip
    loader = growing(1000, records, solver)
    for i, side in enumerate(SIDES):
        for k in range(3):
            position = 1000 + 12 * i + 4 * k
            batch = loader.batch(position, 4)
            assert batch.images.shape == (4, side, side, 3)
            same(batch, fixed[side].batch(position, 4))


def test_threads_memory_and_the_place_where_it_goes_on_change_nothing():
    alone = growing(1000)
    straight = [alone.batch(*request) for request in asked(1000)]
    options = pictures.LoaderOptions(threads=3, memory=pictures.Decoded(IMAGES, HEIGHT, WIDTH, 3))
    for first in (0, 4, 7):
        with growing(1000, options=options).stream(asked(1000, first)) as batches:
            found = list(batches)
        assert len(found) == len(straight) - 3 * first
        for one, two in zip(found, straight[3 * first :], strict=True):
            same(one, two)
    assert all(options.memory.has(i) for i in range(IMAGES)), "each was decoded once, whatever the sizes"


def test_images_too_small_for_the_largest_size_are_found_before_the_run():
    little = ListRecords([raw(np.zeros((HEIGHT, WIDTH, 3), np.uint8))] * IMAGES)
    shrinking = replace(SOLVER.transform, crop_size=32, crop_size_ramp=replace(RAMP, start_size=48))
    with pytest.raises(DataError, match="too small for crop_size: 48"):
        growing(0, little, replace(SOLVER, transform=shrinking)).preflight()
    growing(0, little).preflight()
