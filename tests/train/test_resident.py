"""Images that stay on the device: batches made there are those of the loader, byte for byte."""

from collections.abc import Iterator
from dataclasses import replace

import made_images
import numpy as np
import pytest
import torch
from engine_help import CPU, SOLVER
from facade import Batch, DataError, ListRecords, Loader, PadMode, Transform, crop_size, order, recipe
from made_images import raw

from stagerun.engine.images import Resident, read_all
from stagerun.train import resident as runner

RECORDS, HEIGHT, WIDTH = 37, 14, 18


def pictures(height: int = HEIGHT) -> np.ndarray:
    return np.random.default_rng(2).integers(0, 256, (RECORDS, height, WIDTH, 3), dtype=np.uint8)


def loader(param: Transform, shuffle: bool = True, **more: object) -> Loader:
    values = [raw(image, i % 10) for i, image in enumerate(pictures())]
    settings = {"train": True, "channels": 3, "num_classes": 10, "seed": SOLVER.random_seed, **more}
    return made_images.loader(ListRecords(values), param, shuffle=shuffle, **settings)


def in_order(values: list[bytes] | None = None) -> Loader:
    """Of all the images as they are."""
    values = values or [raw(image, i % 10) for i, image in enumerate(pictures())]
    return made_images.loader(ListRecords(values), Transform(), train=False, channels=3, num_classes=10)


def whole(batches: Loader) -> Iterator[Batch]:
    for first in range(0, RECORDS, 8):
        yield batches.batch(first, min(8, RECORDS - first))


def filled() -> Resident:
    found = read_all(whole(in_order()), RECORDS, CPU, lambda n: True, lambda: False)
    assert found is not None
    return found


CASES = {
    "as they are": Transform(),
    "mirror": Transform(mirror=True),
    "crop": Transform(crop_size=11, mirror=True),
    "cifar": Transform(pad=4, crop_size=14, mirror=True),
    "reflected": Transform(pad=4, pad_mode=PadMode.REFLECT, crop_size=14, mirror=True),
    "as far as it goes": Transform(pad=13, pad_mode=PadMode.REFLECT, crop_size=30),
    "wide": Transform(pad=20, crop_size=16, mirror=True),
    "not cropped": Transform(pad=2, mirror=True),
    "not cropped, reflected": Transform(pad=3, pad_mode=PadMode.REFLECT),
    "all": Transform(pad=2, crop_size=13, mirror=True, cutout_size=5),
    "cutout of all": Transform(cutout_size=9, mirror=True),
}


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_batches_are_the_loaders(case, shuffle):
    """Over the end of an epoch, a batch of one among them."""
    param = CASES[case]
    source, resident = loader(param, shuffle=shuffle), filled()
    asked = [(0, 8), (8, 1), (30, 12), (5 * RECORDS - 3, 9), (10**9, 4)]
    solver = replace(SOLVER, transform=param)
    cuts = runner.cuts(solver, order.EveryRecord(solver.random_seed, RECORDS, shuffle), resident, asked)
    made = resident.batches(cuts, param.pad, param.pad_mode is PadMode.REFLECT)
    for (position, count), batch in zip(asked, made, strict=True):
        expected = source.batch(position, count)
        assert batch.images.dtype == torch.uint8 and batch.images.is_contiguous()
        np.testing.assert_array_equal(batch.images.numpy(), expected.images)
        np.testing.assert_array_equal(batch.labels.numpy(), expected.labels)
        np.testing.assert_array_equal(batch.positions, expected.positions)
        assert (batch.cutout is None) == (expected.cutout is None)
        if batch.cutout is not None:
            assert batch.cutout.dtype == expected.cutout.dtype
            np.testing.assert_array_equal(batch.cutout, expected.cutout)


def test_classes_in_shares_are_the_loaders_too():
    param, resident = CASES["cifar"], filled()
    sampled = order.Sampled(SOLVER.random_seed, resident.labels.numpy(), [4] * 7 + [3] * 3)
    cuts = runner.cuts(replace(SOLVER, transform=param), sampled, resident, [(3, 20)])
    made = resident.batches(cuts, param.pad, False)
    expected = loader(param, shuffle=True, sampling=sampled).batch(3, 20)
    np.testing.assert_array_equal(next(made).images.numpy(), expected.images)


def test_those_that_grow_within_a_stage_too():
    """The loader cuts them alike (`test_image_size`)."""
    ramp = recipe.CropSizeRamp(start_size=8, start_epoch=1, end_epoch=3, multiple=4)
    param = Transform(pad=2, crop_size=14, mirror=True, cutout_size=7, crop_size_ramp=ramp)
    solver = replace(SOLVER, transform=param, batch_size=12, epoch_iter=RECORDS / 12)
    resident, asked = filled(), [(1000 + 4 * n, 4) for n in range(40)]
    cuts = runner.cuts(solver, order.EveryRecord(solver.random_seed, RECORDS, True), resident, asked, 1000)
    made = resident.batches(cuts, param.pad, False)
    source = loader(param, side=lambda position: crop_size(solver, (position - 1000) // 12))
    sides = set()
    for (position, count), batch in zip(asked, made, strict=True):
        expected = source.batch(position, count)
        np.testing.assert_array_equal(batch.images.numpy(), expected.images)
        np.testing.assert_array_equal(batch.cutout, expected.cutout)
        sides.add(batch.images.shape[1])
    assert sides == {8, 12, 14}


# ---- filling


def test_images_of_other_sizes_are_refused():
    values, others = [raw(p) for p in pictures()], [raw(p) for p in pictures(height=15)]
    for end, said in ((9, r"not of one size|others are"), (16, "not of one size")):  # one, and a whole batch of them
        values[8:end] = others[8:end]
        with pytest.raises(DataError, match=said):
            read_all(whole(in_order(values)), RECORDS, CPU, lambda n: True, lambda: False)


def test_nothing_is_kept_where_there_is_no_room_or_the_run_is_to_stop():
    asked: list[int] = []
    source = in_order()
    assert read_all(whole(source), RECORDS, CPU, lambda n: bool(asked.append(n)), lambda: False) is None
    assert asked == [RECORDS * HEIGHT * WIDTH * 3]
    assert read_all(whole(source), RECORDS, CPU, lambda n: True, lambda: True) is None
