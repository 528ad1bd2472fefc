"""Colours at random: torchvision's operations at torchvision's strengths, decided by the numbers that an image is given."""

import itertools
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from facade import Transform, augment, order, recipe, torchvision_part
from PIL import Image

OPERATIONS, RandAugment = augment.OPERATIONS, recipe.RandAugment

transforms = torchvision_part("torchvision.transforms")
autoaugment = torchvision_part("torchvision.transforms.autoaugment")
functional = torchvision_part("torchvision.transforms.functional")
NEAREST = transforms.InterpolationMode.NEAREST


def picture(height: int = 40, width: int = 56) -> np.ndarray:
    """uint8[height, width, 3] in B, G, R: soft areas, edges and noise, and no channel like another."""
    rng = np.random.default_rng(3)
    y, x = np.mgrid[:height, :width]
    soft = np.stack([120 + 60 * np.sin(x / 7), 90 + 1.2 * y, 30 + 2 * x], -1)
    soft[10:20, 5:30] = (200, 40, 90)
    return np.clip(soft + rng.normal(0, 12, soft.shape), 0, 255).astype(np.uint8)


def pillow(bgr: np.ndarray) -> Image.Image:
    return Image.fromarray(np.ascontiguousarray(bgr[..., ::-1]))


def bgr(image: Image.Image) -> np.ndarray:
    return np.asarray(image)[..., ::-1]


def draws(positions: int, count: int, seed: int = 1) -> np.ndarray:
    return order.draws(seed, np.arange(positions), count, order.Purpose.COLOUR)


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("of", ["RandAugment", "TrivialAugmentWide"])
def test_each_operation_at_each_strength_is_torchvisions(name, of):
    image = pillow(picture())
    bins = 31
    if of == "RandAugment":
        space = autoaugment.RandAugment()._augmentation_space(bins, (image.height, image.width))
        side = {"TranslateX": image.width, "TranslateY": image.height}.get(name, 1)
        mine = augment.magnitudes(name, OPERATIONS[name].randaugment * side, bins)
    else:
        space = autoaugment.TrivialAugmentWide()._augmentation_space(bins)
        mine = augment.magnitudes(name, OPERATIONS[name].trivial, bins)
    strengths, signed = space[name]
    assert signed == OPERATIONS[name].signed
    for i, sign in itertools.product(range(0, bins, 3) if strengths.ndim else [0], (0, 1)):
        theirs = float(strengths[i]) if strengths.ndim else 0.0
        assert not strengths.ndim or mine[i] == theirs
        expected = autoaugment._apply_op(image, name, -theirs if signed and sign else theirs, NEAREST, None)
        assert augment.operate(image, name, mine[i], sign).tobytes() == expected.tobytes(), (name, i, sign)


@pytest.mark.parametrize("bins, size", [(2, (32, 32)), (11, (224, 224)), (31, (192, 160)), (64, (33, 47))])
def test_strengths_are_torchvisions_for_other_bins_and_sizes(bins, size):
    space = autoaugment.RandAugment(num_magnitude_bins=bins)._augmentation_space(bins, size)
    assert list(space) == list(OPERATIONS)
    for name, (strengths, _) in space.items():
        side = {"TranslateX": size[1], "TranslateY": size[0]}.get(name, 1)
        if strengths.ndim:
            assert list(augment.magnitudes(name, OPERATIONS[name].randaugment * side, bins)) == strengths.tolist(), name


def chosen(made: augment.Augment, count: int, magnitudes: dict[str, list[float]]) -> list[tuple[str, float]]:
    """(operation, magnitude with its sign) of each image that an operation changed, told from its pixels."""
    image, known = picture(), {}
    for name, strengths in magnitudes.items():
        for magnitude, sign in itertools.product(strengths, (0, 1)):
            signed = -magnitude if OPERATIONS[name].signed and sign else magnitude
            changed = augment.operate(pillow(image), name, magnitude, sign)
            known[bgr(changed).tobytes()] = name, signed
    known[image.tobytes()] = "Identity", 0.0
    return [known[made(image, numbers).tobytes()] for numbers in draws(count, made.numbers)]


def test_randaugment_draws_every_operation_evenly_at_one_strength():
    made = augment.make_augment(Transform(rand_augment=RandAugment(num_ops=1, magnitude=9)))
    assert made is not None and made.numbers == 2
    sides = {"TranslateX": 56, "TranslateY": 40}
    ends = {name: strength.randaugment * sides.get(name, 1) for name, strength in OPERATIONS.items()}
    seen = chosen(made, 4500, {name: [augment.magnitudes(name, end, 31)[9]] for name, end in ends.items()})
    for name in OPERATIONS:
        assert abs([each for each, _ in seen].count(name) - 4500 / 14) < 5 * (4500 / 14) ** 0.5, name
    rotations = [m for name, m in seen if name == "Rotate"]
    assert set(np.round(rotations, 4)) == {-9.0, 9.0}
    assert abs(np.mean(rotations)) < 9 * 5 / len(rotations) ** 0.5


def test_one_operation_says_nothing_about_the_next():
    made = augment.make_augment(Transform(rand_augment=RandAugment(num_ops=2, magnitude=9)))
    first = augment.make_augment(Transform(rand_augment=RandAugment(num_ops=1, magnitude=9)))
    assert made is not None and first is not None and made.numbers == 4
    image, numbers = picture(), draws(60, 4)
    for both in numbers:
        assert np.array_equal(made(image, both), first(first(image, both[:2]), both[2:]))


def test_trivialaugment_draws_one_operation_at_any_strength():
    made = augment.make_augment(Transform(trivial_augment=True))
    assert made is not None and made.numbers == 3
    strengths = {name: list(augment.magnitudes(name, each.trivial, 31)) for name, each in OPERATIONS.items()}
    seen = chosen(made, 9000, strengths)
    rotations = [m for name, m in seen if name == "Rotate"]
    assert abs(len(rotations) - 9000 / 14 * 30 / 31) < 5 * (9000 / 14) ** 0.5
    assert len(set(np.abs(rotations))) == 30 and min(rotations) == -135 and max(rotations) == 135
    assert {m for name, m in seen if name == "Posterize"} == set(range(2, 8))


def test_the_numbers_decide_and_nothing_else():
    made = augment.make_augment(Transform(rand_augment=RandAugment()))
    assert made is not None and made.numbers == 4
    image, numbers = picture(), draws(24, made.numbers)
    torch.manual_seed(1)
    random.seed(1)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    once = [made(image, n) for n in numbers]
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    assert (np.random.get_state()[1] == before[2]).all()
    torch.manual_seed(2)
    random.seed(2)
    with ThreadPoolExecutor(3) as pool:
        again = list(pool.map(lambda n: made(image, n), numbers))
    np.testing.assert_array_equal(once, again)
    assert len({a.tobytes() for a in once}) > 20
    assert once[0].shape == image.shape and once[0].dtype == np.uint8
