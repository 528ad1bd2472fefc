"""pixels: a draw is carried out in one way, whether the whole image is there or only its region, and wherever the result goes."""

import numpy as np
import PIL.Image
import pytest
from drawn import examples
from facade import InterpMode, PadMode, Rectangle, pixels
from hypothesis import given
from hypothesis import strategies as st

Draw, apply, finish = pixels.Draw, pixels.apply, pixels.finish


def noise(height: int, width: int, channels: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)


def cut(image: np.ndarray, part: Rectangle | None) -> np.ndarray:
    return image if part is None else image[part.top :, part.left :][: part.height, : part.width]


def rectangles_in(height: int, width: int) -> st.SearchStrategy[Rectangle]:
    def inside(sides: tuple[int, int]) -> st.SearchStrategy[Rectangle]:
        tops, lefts = st.integers(0, height - sides[0]), st.integers(0, width - sides[1])
        return st.builds(Rectangle, tops, lefts, st.just(sides[0]), st.just(sides[1]))

    return st.tuples(st.integers(1, height), st.integers(1, width)).flatmap(inside)


@st.composite
def images_and_draws(draw_from: st.DrawFn) -> tuple[np.ndarray, Draw]:
    height, width = draw_from(st.integers(2, 40)), draw_from(st.integers(2, 40))
    image = noise(height, width, draw_from(st.sampled_from([1, 3])))
    pad = draw_from(st.sampled_from([0, 0, min(height, width) - 1]))
    height, width = height + 2 * pad, width + 2 * pad
    part = draw_from(st.none() | rectangles_in(height, width))
    size = draw_from(st.tuples(st.integers(1, 40), st.integers(1, 40)) | (st.none() if part is None else st.nothing()))
    height, width = size or (height, width)
    crop = draw_from(st.none() | st.just(Rectangle(0, 0, height, width)) | rectangles_in(height, width))
    modes = draw_from(st.tuples(st.sampled_from(PadMode), st.sampled_from(InterpMode)))
    mirror = draw_from(st.booleans())
    return image, Draw(pad=pad, pad_mode=modes[0], part=part, size=size, interp_mode=modes[1], crop=crop, mirror=mirror)


def step_by_step(image: np.ndarray, drawn: Draw) -> np.ndarray:
    """The same in the plainest words: each step makes a new image."""
    pads = ((drawn.pad, drawn.pad), (drawn.pad, drawn.pad), (0, 0))
    image = np.pad(image, pads, mode="reflect" if drawn.pad_mode is PadMode.REFLECT else "constant")
    image = cut(image, drawn.part).copy()
    if drawn.size:
        image = apply(image, Draw(size=drawn.size, interp_mode=drawn.interp_mode)).copy()
    image = cut(image, drawn.crop).copy()
    return image[:, ::-1].copy() if drawn.mirror else image


@examples(300)
@given(images_and_draws())
def test_a_draw_is_carried_out_in_one_way(case):
    image, drawn = case
    expected = step_by_step(image, drawn)
    assert np.array_equal(apply(image, drawn), expected)
    # Straight into one image of a batch, from the region alone, and nothing beside it.
    batch = np.full((3, *expected.shape), 77, np.uint8)
    result = finish(cut(image, pixels.region(drawn)).copy(), drawn, batch[1])
    assert np.shares_memory(result, batch)
    assert np.array_equal(batch[1], expected)
    assert (batch[[0, 2]] == 77).all()


@examples(200)
@given(*[st.integers(1, 90)] * 2, *[st.integers(1, 60)] * 2, st.sampled_from([1, 3]), st.booleans())
def test_antialias_is_pillows(height, width, new_height, new_width, channels, hard):
    """One side at a time, so that Pillow's version makes no difference."""
    image = noise(height, width, channels)
    if hard:
        image = np.where(image > 127, np.uint8(255), np.uint8(0))
    picture = PIL.Image.fromarray(image[:, :, 0] if channels == 1 else image)
    picture = picture.resize((new_width, height), PIL.Image.Resampling.BILINEAR)
    picture = picture.resize((new_width, new_height), PIL.Image.Resampling.BILINEAR)
    expected = np.asarray(picture).reshape(new_height, new_width, channels)
    out = np.zeros((new_height, new_width, channels), np.uint8)
    pixels.antialias(image, out)
    assert np.array_equal(out, expected)


@pytest.mark.parametrize(
    ("height", "width", "times"),
    [(447, 900, 1), (448, 900, 2), (900, 448, 2), (895, 2000, 2), (896, 896, 4), (1792, 1791, 4), (4000, 4000, 8)],
)
def test_auto_halves_as_long_as_both_sides_stay_long_enough(height, width, times):
    whole = Draw(size=(224, 224), interp_mode=InterpMode.AUTO)
    assert pixels.shrink(whole, height, width) == times
    part = Draw(part=Rectangle(1, 1, height, width), size=(224, 224), interp_mode=InterpMode.AUTO)
    assert pixels.shrink(part, 5000, 5000) == times
    # What comes of it is never smaller than the result, even rounded down.
    assert min(height // times, width // times) >= 224 or times == 1


@pytest.mark.parametrize(
    ("height", "width", "mode"),
    [
        (47, 47, InterpMode.LINEAR),
        (48, 40, InterpMode.AREA),
        (30, 48, InterpMode.AREA),
        (10, 9, InterpMode.LINEAR),
        (300, 300, InterpMode.AREA),
    ],
)
def test_auto_is_linear_below_one_and_a_half_and_area_above(height, width, mode):
    image = noise(height, width, 3)
    auto = apply(image, Draw(size=(32, 32), interp_mode=InterpMode.AUTO))
    assert np.array_equal(auto, apply(image, Draw(size=(32, 32), interp_mode=mode)))
