"""pixels: a draw is carried out in one way, whether the whole image is there or only its region, and wherever the result goes."""

import importlib
import threading

import cv2
import numpy as np
import PIL.Image
import pytest
from drawn import examples
from hypothesis import given
from hypothesis import strategies as st
from test_data_transform import SOURCE, golden_draw, golden_rows

from stagerun.base.recipe import InterpMode, PadMode
from stagerun.data import pixels
from stagerun.data.datum import Image
from stagerun.data.jpeg import Rectangle
from stagerun.data.pixels import Draw, apply, finish, region, shrink
from stagerun.models.vision import torchvision_models


def noise(height: int, width: int, channels: int, seed: int = 0) -> Image:
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)


def cut(image: Image, part: Rectangle | None) -> Image:
    return image if part is None else image[part.top :, part.left :][: part.height, : part.width]


def rectangles_in(height: int, width: int) -> st.SearchStrategy[Rectangle]:
    def inside(sides: tuple[int, int]) -> st.SearchStrategy[Rectangle]:
        tops, lefts = st.integers(0, height - sides[0]), st.integers(0, width - sides[1])
        return st.builds(Rectangle, tops, lefts, st.just(sides[0]), st.just(sides[1]))

    return st.tuples(st.integers(1, height), st.integers(1, width)).flatmap(inside)


@st.composite
def images_and_draws(draw_from: st.DrawFn) -> tuple[Image, Draw]:
    height, width = draw_from(st.integers(2, 40)), draw_from(st.integers(2, 40))
    image = noise(height, width, draw_from(st.sampled_from([1, 3])))
    pad = draw_from(st.sampled_from([0, 0, min(height, width) - 1]))
    height, width = height + 2 * pad, width + 2 * pad
    part = draw_from(st.none() | rectangles_in(height, width))
    size = draw_from(st.tuples(st.integers(1, 40), st.integers(1, 40)) | (st.none() if part is None else st.nothing()))
    height, width = size or (height, width)
    crop = draw_from(st.none() | st.just(Rectangle(0, 0, height, width)) | rectangles_in(height, width))
    return image, Draw(
        pad=pad,
        pad_mode=draw_from(st.sampled_from(PadMode)),
        part=part,
        size=size,
        interp_mode=draw_from(st.sampled_from(InterpMode)),
        crop=crop,
        mirror=draw_from(st.booleans()),
    )


def step_by_step(image: Image, drawn: Draw) -> Image:
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
def test_a_draw_is_carried_out_in_one_way(case: tuple[Image, Draw]) -> None:
    image, drawn = case
    expected = step_by_step(image, drawn)
    assert np.array_equal(apply(image, drawn), expected)
    # Straight into one image of a batch, from the region alone, and nothing beside it.
    batch = np.full((3, *expected.shape), 77, np.uint8)
    result = finish(cut(image, region(drawn)).copy(), drawn, batch[1])
    assert np.shares_memory(result, batch)
    assert np.array_equal(batch[1], expected)
    assert (batch[[0, 2]] == 77).all()


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("mode", InterpMode)
def test_the_slot_is_written_in_place_for_every_interpolation(mode: InterpMode, channels: int) -> None:
    image = noise(70, 90, channels)
    drawn = Draw(part=Rectangle(3, 5, 60, 71), size=(32, 32), interp_mode=mode, crop=Rectangle(0, 0, 32, 32))
    out = np.zeros((32, 32, channels), np.uint8)
    assert finish(cut(image, region(drawn)), drawn, out) is out
    assert out.any() and np.array_equal(out, apply(image, drawn))


def test_regions_are_what_is_used_of_the_source() -> None:
    part, crop = Rectangle(1, 2, 3, 4), Rectangle(5, 6, 7, 8)
    assert region(Draw()) is None
    assert region(Draw(crop=crop)) == crop
    assert region(Draw(part=part, size=(9, 9), crop=crop)) == part
    assert region(Draw(size=(20, 20), crop=crop)) is None
    assert region(Draw(pad=1, crop=crop)) is None


def test_an_image_that_is_not_the_region_is_refused() -> None:
    drawn = Draw(part=Rectangle(0, 0, 20, 20), size=(5, 5), interp_mode=InterpMode.AUTO)
    with pytest.raises(ValueError, match="is not Rectangle"):
        finish(noise(21, 20, 3), drawn)
    assert finish(noise(5, 5, 3), drawn, shrunk=4).shape == (5, 5, 3)
    with pytest.raises(ValueError, match="does not fit"):
        finish(noise(20, 20, 3), drawn, np.zeros((6, 5, 3), np.uint8))
    with pytest.raises(ValueError, match="does not fit"):
        finish(noise(20, 20, 3), Draw(mirror=True), np.zeros((6, 5, 3), np.uint8))


def test_padding_is_zeros_and_the_crop_may_reach_into_it() -> None:
    image = np.full((28, 28, 1), 9, np.uint8)
    padded = apply(image, Draw(pad=2, crop=Rectangle(0, 4, 28, 28)))
    assert padded.shape == (28, 28, 1)
    assert not padded[:2].any() and not padded[:, -2:].any() and (padded[2:, :-2] == 9).all()


def test_reflected_padding_does_not_repeat_the_edge() -> None:
    image = np.array([[[1], [2], [3]], [[4], [5], [6]], [[7], [8], [9]]], np.uint8)
    padded = apply(image, Draw(pad=2, pad_mode=PadMode.REFLECT))
    assert padded[2, :, 0].tolist() == [3, 2, 1, 2, 3, 2, 1]
    assert padded[:, 0, 0].tolist() == [9, 6, 3, 6, 9, 6, 3]
    assert np.array_equal(padded, np.pad(image, ((2, 2), (2, 2), (0, 0)), mode="reflect"))


@pytest.mark.parametrize("channels", [1, 3])
def test_antialias_is_what_torchvision_makes_of_a_pil_image(channels: int) -> None:
    """To the bit where Pillow goes across first; where newer ones go down first, a value may be one higher or lower."""
    torchvision_models()  # imports torchvision beside any build of torch
    functional = importlib.import_module("torchvision.transforms.functional")
    image = noise(97, 130, channels)
    picture = PIL.Image.fromarray(image[:, :, 0] if channels == 1 else image)
    for part, size, apart in [
        (Rectangle(5, 7, 60, 81), (32, 32), 0),
        (Rectangle(0, 0, 97, 130), (47, 31), 0),
        (Rectangle(90, 1, 7, 9), (64, 64), 0),  # grows
        (Rectangle(10, 10, 32, 40), (32, 32), 0),  # one side stays
        (Rectangle(10, 10, 40, 32), (32, 32), 0),
        (Rectangle(0, 0, 97, 40), (20, 30), 1),  # much less high
    ]:
        theirs = functional.resized_crop(picture, part.top, part.left, part.height, part.width, list(size))
        ours = apply(image, Draw(part=part, size=size, interp_mode=InterpMode.ANTIALIAS))
        difference = ours.astype(int) - np.asarray(theirs).reshape(*size, channels)
        assert np.abs(difference).max() <= apart


@examples(200)
@given(
    st.integers(1, 90),
    st.integers(1, 90),
    st.integers(1, 60),
    st.integers(1, 60),
    st.sampled_from([1, 3]),
    st.booleans(),
)
def test_antialias_is_pillows_with_or_without_what_is_compiled(
    height: int, width: int, new_height: int, new_width: int, channels: int, hard: bool
) -> None:
    """One side at a time, so that Pillow's version makes no difference."""
    image = noise(height, width, channels)
    if hard:
        image = np.where(image > 127, np.uint8(255), np.uint8(0))
    picture = PIL.Image.fromarray(image[:, :, 0] if channels == 1 else image)
    picture = picture.resize((new_width, height), PIL.Image.Resampling.BILINEAR)
    picture = picture.resize((new_width, new_height), PIL.Image.Resampling.BILINEAR)
    expected = np.asarray(picture).reshape(new_height, new_width, channels)
    out = np.zeros((2, new_height, new_width, channels), np.uint8)
    pixels.antialias(image, out[0])
    pixels._by_pillow(image, out[1])
    assert np.array_equal(out[0], expected) and np.array_equal(out[1], expected)


def test_antialias_is_compiled_where_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    assert pixels._compiled() is not None
    monkeypatch.setattr(pixels, "_by_pillow", lambda image, out: out.fill(0))
    pixels._compiled.cache_clear()
    assert pixels._compiled() is None  # other pixels: not used
    pixels._compiled.cache_clear()


def test_antialias_takes_views_and_what_may_not_be_written_to() -> None:
    image = noise(50, 60, 3)
    image.flags.writeable = False
    view, out, expected = image[3:40, 5:50], np.empty((16, 16, 3), np.uint8), np.empty((16, 16, 3), np.uint8)
    pixels.antialias(view, out)
    pixels._by_pillow(view.copy(), expected)
    assert np.array_equal(out, expected)


@pytest.mark.parametrize(
    ("height", "width", "times"),
    [(447, 900, 1), (448, 900, 2), (900, 448, 2), (895, 2000, 2), (896, 896, 4), (1792, 1791, 4), (4000, 4000, 8)],
)
def test_auto_halves_as_long_as_both_sides_stay_long_enough(height: int, width: int, times: int) -> None:
    whole = Draw(size=(224, 224), interp_mode=InterpMode.AUTO)
    assert shrink(whole, height, width) == times
    part = Draw(part=Rectangle(1, 1, height, width), size=(224, 224), interp_mode=InterpMode.AUTO)
    assert shrink(part, 5000, 5000) == times
    # What comes of it is never smaller than the result, even rounded down.
    assert min(height // times, width // times) >= 224 or times == 1


def test_only_auto_shrinks_and_never_what_is_padded_or_not_resized() -> None:
    for mode in InterpMode:
        assert shrink(Draw(size=(10, 10), interp_mode=mode), 900, 900) == (8 if mode is InterpMode.AUTO else 1)
    assert shrink(Draw(crop=Rectangle(0, 0, 10, 10), interp_mode=InterpMode.AUTO), 900, 900) == 1
    assert shrink(Draw(pad=1, size=(10, 10), interp_mode=InterpMode.AUTO), 900, 900) == 1


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
def test_auto_is_linear_below_one_and_a_half_and_area_above(height: int, width: int, mode: InterpMode) -> None:
    image = noise(height, width, 3)
    auto = apply(image, Draw(size=(32, 32), interp_mode=InterpMode.AUTO))
    assert np.array_equal(auto, apply(image, Draw(size=(32, 32), interp_mode=mode)))


def test_auto_does_not_alias_where_linear_does() -> None:
    """Stripes finer than the result can show: their mean is grey, and LINEAR makes other stripes of them."""
    stripes = np.zeros((330, 330, 1), np.uint8)
    stripes[:, ::2] = 255
    spread = {
        mode: float(apply(stripes, Draw(size=(100, 100), interp_mode=mode)).std())
        for mode in (InterpMode.LINEAR, InterpMode.AUTO, InterpMode.ANTIALIAS)
    }
    assert spread[InterpMode.AUTO] < 30 and spread[InterpMode.ANTIALIAS] < 30 < spread[InterpMode.LINEAR]


def test_pixels_do_not_depend_on_the_thread_nor_on_what_came_before() -> None:
    """OpenCV's settings are each thread's own, and a flip uses others than a resize."""
    row = golden_draw(golden_rows("rarp_256x256_seed7")[0])
    first = apply(SOURCE, row)
    found: list[np.ndarray] = []

    def work() -> None:
        finish(SOURCE, Draw(mirror=True), np.empty_like(SOURCE))
        found.append(apply(SOURCE, row))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    work()
    assert all(np.array_equal(image, first) for image in found) and len(found) == 2


def test_threads_that_flip_at_once_do_not_meet() -> None:
    """The array between a resize and its flip is each thread's own."""
    images = [noise(60, 60, 3, seed) for seed in range(4)]
    drawn = Draw(part=Rectangle(0, 0, 60, 60), size=(40, 40), mirror=True, interp_mode=InterpMode.CUBIC)
    expected = [apply(image, drawn).copy() for image in images]
    wrong: list[int] = []

    def work(which: int) -> None:
        out = np.empty((40, 40, 3), np.uint8)
        for _ in range(200):
            finish(images[which], drawn, out)
            if not np.array_equal(out, expected[which]):
                wrong.append(which)

    threads = [threading.Thread(target=work, args=(which,)) for which in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_mirror_flips_columns() -> None:
    image = noise(5, 7, 3)
    assert np.array_equal(apply(image, Draw(mirror=True)), image[:, ::-1])
    assert np.array_equal(cv2.flip(image, 1), finish(image, Draw(mirror=True), np.empty_like(image)))
