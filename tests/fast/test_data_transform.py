"""transform: Caffe's drawn numbers give Caffe's pixels; our own are drawn from the same distribution."""

import csv
from collections import Counter
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
from facade import (
    DataError,
    InterpMode,
    PadMode,
    RandomResize,
    RandomResizedCrop,
    Rectangle,
    Transform,
    order,
    pixels,
    recipe,
    transform,
)

Draw, apply, draw = pixels.Draw, pixels.apply, transform.draw

GOLDEN = Path(__file__).parents[1] / "golden" / "data"


FIRST_RARP = [
    (True, Rectangle(11, 65, 131, 89)),
    (False, Rectangle(76, 16, 158, 238)),
    (True, Rectangle(133, 75, 120, 114)),
]
FIRST_NO_AUG = [
    (True, Rectangle(7, 23, 224, 224)),
    (False, Rectangle(28, 12, 224, 224)),
    (True, Rectangle(9, 19, 224, 224)),
]


def read_png(path: Path) -> np.ndarray:
    image = cv2.imread(str(path), cv2.IMREAD_UNCHANGED)
    assert image is not None
    return np.asarray(image, np.uint8)


SOURCE = read_png(GOLDEN / "src_256x256.png")

RARP = Transform(
    mirror=True,
    crop_size=224,
    mean_value=(104.0, 117.0, 123.0),
    scale=0.0078125,
    random_aspect_ratio=recipe.RandomAspectRatio(
        min_area_ratio=0.08,
        max_area_ratio=1.0,
        aspect_ratio_change=0.75,
        max_attempt=10,
        interp_mode=InterpMode.CUBIC,
    ),
)
NO_AUG = Transform(mirror=True, crop_size=224, mean_value=(104.0, 117.0, 123.0), scale=0.0078125)


def golden_rows(name: str) -> list[dict[str, float]]:
    with (GOLDEN / f"{name}.csv").open() as stream:
        return [{key: float(value) for key, value in row.items()} for row in csv.DictReader(stream)]


def golden_draw(row: dict[str, float]) -> Draw:
    """What Caffe decided, in our words."""
    n = {key: int(value) for key, value in row.items()}
    part = Rectangle(n["y"], n["x"], n["new_h"], n["new_w"]) if n["attempts"] else None
    return Draw(
        part=part,
        size=(224, 224) if part else None,
        interp_mode=InterpMode.CUBIC,
        crop=Rectangle(n["h_off"], n["w_off"], 224, 224),
        mirror=bool(n["mirror"]),
    )


@pytest.mark.parametrize("name", ["rarp_256x256_seed7", "noaug_256x256_seed9"])
def test_caffes_numbers_give_caffes_pixels(name):
    for i, row in enumerate(golden_rows(name)):
        image = apply(SOURCE, golden_draw(row))
        if (png := GOLDEN / f"{name}_{i}.png").exists():
            assert np.array_equal(image, read_png(png))
        values = (image.astype(np.float64) - RARP.mean_value) * RARP.scale
        # Caffe's sums are printed with nine digits.
        assert values.sum() == pytest.approx(row["sum"], abs=1e-4)
        assert (values**2).sum() == pytest.approx(row["sumsq"], rel=1e-8)


def numbers(fields: list[tuple[int, int]], size: int) -> order.UInt64:
    row = np.zeros(size, np.uint64)
    for place, value in fields:
        row[place] = value
    return row


def test_caffes_rectangles_come_out_of_its_ratios():
    """The arithmetic of sides in float32: the ratios that Caffe drew, as remainders, give its sides and places."""
    for row in golden_rows("rarp_256x256_seed7"):
        area, change = round(row["area_ratio"] * 1000) - 80, round(row["aspect_change"] * 1000) - 750
        swap = 499 if row["swap"] else 500
        first = [(4, area), (5, change), (6, swap), (7, int(row["y"])), (8, int(row["x"]))]
        drawn = draw(RARP, numbers([(0, int(row["mirror"])), *first], 54), 256, 256)
        assert drawn.part is not None
        assert (drawn.part.height, drawn.part.width) == (row["new_h"], row["new_w"])
        assert (drawn.part.top, drawn.part.left) == (row["y"], row["x"])
        assert drawn == golden_draw(row)


def draws_of(param: Transform, height: int, width: int, n: int = 4000) -> list[Draw]:
    rows = order.draws(1, np.arange(n, dtype=np.int64), transform.numbers_needed(param))
    return [draw(param, row, height, width) for row in rows]


def test_where_no_rectangle_fits_the_shorter_side_is_resized():
    narrow = draws_of(RARP, 40, 4000, 50)
    fallback = [d for d in narrow if d.part is None]
    assert fallback
    assert all(d.size == (224, 22400) and d.crop and d.crop.left <= 22400 - 224 for d in fallback)
    assert len({d.crop.left for d in fallback if d.crop}) == len(fallback)


def test_random_resize_sets_the_shorter_side_and_keeps_the_shape():
    param = Transform(crop_size=20, random_resize=RandomResize(min_size=24, max_size=26, interp_mode=InterpMode.LINEAR))
    sizes = {d.size for d in draws_of(param, 30, 41, 100)}
    assert sizes == {(24, 32), (25, 34), (26, 35)}  # long side rounded down
    assert {d.size for d in draws_of(param, 41, 30, 100)} == {(32, 24), (34, 25), (35, 26)}
    image = np.arange(30 * 41 * 3, dtype=np.uint32).astype(np.uint8).reshape(30, 41, 3)
    assert all(apply(image, d).shape == (20, 20, 3) for d in draws_of(param, 30, 41, 10))


def test_an_evaluation_crops_the_centre_rounded_down_and_draws_nothing():
    image = np.arange(31 * 30 * 1, dtype=np.uint32).astype(np.uint8).reshape(31, 30, 1)
    param = Transform(crop_size=24, mirror=True)
    assert draw(param, None, 31, 30) == Draw(crop=Rectangle(3, 3, 24, 24), mirror=False)
    assert np.array_equal(apply(image, draw(param, None, 31, 30)), image[3:27, 3:27])
    caffes_test = Transform(
        crop_size=224, random_resize=RandomResize(min_size=256, max_size=256, interp_mode=InterpMode.CUBIC)
    )
    assert draw(caffes_test, None, 375, 500) == Draw(
        size=(256, 341), interp_mode=InterpMode.CUBIC, crop=Rectangle(16, 58, 224, 224)
    )


def test_an_image_smaller_than_the_crop_is_refused_with_its_size():
    for row in (None, numbers([], 4)):
        with pytest.raises(DataError, match=r"200 x 300 pixels .* crop_size: 224"):
            draw(NO_AUG, row, 200, 300)


def test_what_was_drawn_before_there_was_more_to_draw_is_drawn_still():
    """An image's numbers keep their places: these were drawn by the first version that trained (RARP, seed 1, positions 0 .. 2)."""
    assert [(d.mirror, d.part) for d in draws_of(RARP, 256, 256, 3)] == FIRST_RARP
    crops = [(d.mirror, d.crop) for d in draws_of(NO_AUG, 256, 256, 3)]
    assert crops == FIRST_NO_AUG


def test_a_feature_draws_nothing_of_another():
    for plain in (
        NO_AUG,
        RARP,
        Transform(crop_size=224, random_resized_crop=RandomResizedCrop()),
        Transform(pad=4, pad_mode=PadMode.REFLECT, crop_size=32),
    ):
        before = draws_of(plain, 256, 256, 20)
        assert [replace(d, mirror=False) for d in draws_of(replace(plain, mirror=True), 256, 256, 20)] == [
            replace(d, mirror=False) for d in before
        ]
        cut = draws_of(replace(plain, cutout_size=8), 256, 256, 20)
        assert [replace(d, cutout=None) for d in cut] == before and all(d.cutout for d in cut)


def test_cutouts_lie_inside_and_reach_every_place_as_often():
    """cifar10-fast: x0 of 0 .. W - side, y0 of 0 .. H - side, each pair as likely."""
    param = Transform(pad=1, crop_size=11, cutout_size=8)
    places = Counter((d.cutout.top, d.cutout.left) for d in draws_of(param, 9, 10) if d.cutout)
    assert set(places) == {(top, left) for top in range(4) for left in range(4)}
    expected = 4000 / 16
    assert sum((n - expected) ** 2 / expected for n in places.values()) < 37.7  # chi-square of 15 degrees, 1 in 1000
    assert {(d.cutout.height, d.cutout.width) for d in draws_of(param, 9, 10, 9) if d.cutout} == {(8, 8)}


def test_a_cutout_lies_in_the_image_as_it_is_at_the_end():
    """Without a crop that is the padded or resized image, whatever its shape."""
    padded = draws_of(Transform(pad=2, cutout_size=10), 8, 30)
    assert {d.cutout.top for d in padded if d.cutout} == {0, 1, 2}
    assert max(d.cutout.left for d in padded if d.cutout) == 24
    with pytest.raises(DataError, match=r"12 x 34 pixels .* cutout_size: 13"):
        draws_of(Transform(pad=2, cutout_size=13), 8, 30, 1)


def test_reflected_padding_needs_more_pixels_than_it_adds():
    param = Transform(pad=4, pad_mode=PadMode.REFLECT)
    assert draw(param, None, 5, 5) == Draw(pad=4, pad_mode=PadMode.REFLECT)
    with pytest.raises(DataError, match=r"4 x 9 pixels .* pad: 4"):
        draw(param, None, 4, 9)
