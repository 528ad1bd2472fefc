"""Random changes of an image's colours, by torchvision's functions on Pillow images.

RandAugment (Cubuk et al., arXiv:1909.13719) and TrivialAugment (Mueller and Hutter, arXiv:2103.10158) are torchvision's with their ranges
(pytorch/vision: torchvision/transforms/autoaugment.py) and its defaults: pixels are not interpolated, and pixels from outside are black.
Only the drawing differs: every decision follows from the image's random numbers, the same in any thread or worker. The random states of
torch and Python stay as they are.
"""

import importlib.metadata
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any, TypeAlias

import numpy as np
import PIL
import torch
from numpy.typing import NDArray
from PIL import Image

from stagerun.base.order import UInt64, randint
from stagerun.base.recipe import RandAugment, Transform
from stagerun.models.vision import torchvision_part

# A picture in R, G, B and its numbers -> the picture.
Step: TypeAlias = Callable[[Image.Image, UInt64], Image.Image]

BINS = 31  # steps from no effect to the strongest, of both policies


@dataclass(frozen=True, slots=True)
class Operation:
    """`change` takes torchvision's functions, a picture and a magnitude. `randaugment` and `trivial` are the policies' largest magnitudes;
    the smallest has no effect. `signed`: half of them are negative."""

    change: Callable[[Any, Image.Image, float], Image.Image]
    randaugment: float = 0.0
    trivial: float = 0.0
    signed: bool = False


def _sheared(f: Any, picture: Image.Image, across: float, down: float) -> Image.Image:
    """Shear about the corner, by the tangent itself."""
    shear = [math.degrees(math.atan(across)), math.degrees(math.atan(down))]
    return f.affine(picture, 0.0, [0, 0], 1.0, shear, center=[0, 0])  # type: ignore[no-any-return]


# torchvision's 14 operations, in its order. RandAugment translates by a part of the picture's side, TrivialAugment by pixels; Posterize
# drops bits, of 8; Solarize lowers the threshold from 255.
OPERATIONS = {
    "Identity": Operation(lambda f, p, m: p),
    "ShearX": Operation(lambda f, p, m: _sheared(f, p, m, 0.0), 0.3, 0.99, True),
    "ShearY": Operation(lambda f, p, m: _sheared(f, p, 0.0, m), 0.3, 0.99, True),
    "TranslateX": Operation(lambda f, p, m: f.affine(p, 0.0, [int(m), 0], 1.0, [0.0, 0.0]), 150 / 331, 32.0, True),
    "TranslateY": Operation(lambda f, p, m: f.affine(p, 0.0, [0, int(m)], 1.0, [0.0, 0.0]), 150 / 331, 32.0, True),
    "Rotate": Operation(lambda f, p, m: f.rotate(p, m), 30.0, 135.0, True),
    "Brightness": Operation(lambda f, p, m: f.adjust_brightness(p, 1.0 + m), 0.9, 0.99, True),
    "Color": Operation(lambda f, p, m: f.adjust_saturation(p, 1.0 + m), 0.9, 0.99, True),
    "Contrast": Operation(lambda f, p, m: f.adjust_contrast(p, 1.0 + m), 0.9, 0.99, True),
    "Sharpness": Operation(lambda f, p, m: f.adjust_sharpness(p, 1.0 + m), 0.9, 0.99, True),
    "Posterize": Operation(lambda f, p, m: f.posterize(p, int(m)), 4, 6),
    "Solarize": Operation(lambda f, p, m: f.solarize(p, m), 255.0, 255.0),
    "AutoContrast": Operation(lambda f, p, m: f.autocontrast(p)),
    "Equalize": Operation(lambda f, p, m: f.equalize(p)),
}
_NAMES = tuple(OPERATIONS)


class Augment:
    """Changes colours of images in B, G, R; thread safe. `numbers`: random numbers that an image needs."""

    def __init__(self, numbers: int, step: Step) -> None:
        self.numbers = numbers
        self._step = step

    def __call__(self, image: NDArray[np.uint8], numbers: UInt64) -> NDArray[np.uint8]:
        """uint8[height, width, 3] and uint64[`numbers`] -> uint8[height, width, 3]."""
        height, width = image.shape[:2]
        picture = Image.frombytes("RGB", (width, height), image.tobytes(), "raw", "BGR")
        picture = self._step(picture, numbers)
        return np.frombuffer(picture.tobytes("raw", "BGR"), np.uint8).reshape(height, width, 3)


def colours_made_by() -> str:
    """Return the libraries that change colours: other versions may give other pixels."""
    return f"torchvision {importlib.metadata.version('torchvision')}, pillow {PIL.__version__}"


def make_augment(transform: Transform) -> Augment | None:
    """Return the transform's changes of colours, or None."""
    if not transform.changes_colours:
        return None
    _functional()  # import it now, not in one of several threads
    if transform.rand_augment:
        return Augment(2 * transform.rand_augment.num_ops, partial(rand_augment, transform.rand_augment))
    return Augment(3, trivial_augment)  # the operation, its strength, its sign


def rand_augment(settings: RandAugment, picture: Image.Image, numbers: UInt64) -> Image.Image:
    for which, sign in zip(numbers[::2], numbers[1::2], strict=True):
        name = _NAMES[randint(which, len(_NAMES))]
        end = OPERATIONS[name].randaugment
        if name in ("TranslateX", "TranslateY"):
            end *= picture.width if name == "TranslateX" else picture.height
        picture = operate(picture, name, magnitudes(name, end, BINS)[settings.magnitude], sign)
    return picture


def trivial_augment(picture: Image.Image, numbers: UInt64) -> Image.Image:
    name = _NAMES[randint(numbers[0], len(_NAMES))]
    strengths = magnitudes(name, OPERATIONS[name].trivial, BINS)
    return operate(picture, name, strengths[randint(numbers[1], BINS)], numbers[2])


@lru_cache(1024)
def magnitudes(name: str, end: float, bins: int) -> tuple[float, ...]:
    """Return the `bins` magnitudes of an operation, by torch's arithmetic in 32 bits, which decides how they are rounded."""
    if name == "Posterize":
        values = 8 - (torch.arange(bins) / ((bins - 1) / end)).round()
    elif name == "Solarize":
        values = torch.linspace(end, 0.0, bins)
    else:
        values = torch.linspace(0.0, end, bins)
    return tuple(values.tolist())


def operate(picture: Image.Image, name: str, magnitude: float, sign: int) -> Image.Image:
    """Apply an operation. An odd `sign` negates the magnitude of a signed one."""
    operation = OPERATIONS[name]
    if operation.signed and randint(sign, 2):
        magnitude = -magnitude
    return operation.change(_functional(), picture, magnitude)


@cache
def _functional():  # type: ignore[no-untyped-def]
    """Return torchvision.transforms.functional; imported only if colours are changed, since it takes a second."""
    return torchvision_part("torchvision.transforms.functional")
