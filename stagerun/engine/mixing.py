"""mixup and cutmix on a device batch, drawn from (seed, position of its first image), and the loss of what they give.

mixup: Zhang, Cisse, Dauphin and Lopez-Paz, arXiv:1710.09412. cutmix: Yun et al., arXiv:1905.04899, whose rectangle is that of
clovaai/CutMix-PyTorch: `rand_bbox` in train.py. A device batch is a logical worker's, so a mixture doesn't depend on how many
workers there are, and needs no state: a resumed run draws the same ones.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from stagerun.base import order
from stagerun.base.order import Purpose, UInt64
from stagerun.engine.device import to_device

# Places of a device batch's random numbers: kind, row and column; then, in turn, those of the partners and of the share, of which
# no one knows how many there will be.
_PARTNERS, _SHARE = 4, 5

# Attempts at a Gamma number that are drawn at once; of 20 at least 19 succeed. Each takes three numbers.
_ATTEMPTS = 8
_STEP = 2.0**-24


@dataclass(frozen=True, slots=True)
class Box:
    """Rows top .. bottom-1, columns left .. right-1; may be empty."""

    top: int
    left: int
    bottom: int
    right: int


@dataclass(frozen=True, slots=True)
class Mixture:
    """`share` (0..1) is each image's own part, in its label too; the rest is of image `partners[i]` (int64[n], a permutation).

    With a `box` that is where the partner shows; without, the two are laid over each other.
    """

    share: float
    partners: NDArray[np.int64]
    box: Box | None = None


@dataclass(frozen=True, slots=True)
class Mixing:
    """A stage's mixup_alpha and cutmix_alpha, and its seed."""

    seed: int
    mixup_alpha: float
    cutmix_alpha: float

    def draw(self, position: int, count: int, height: int, width: int) -> Mixture | None:
        """The mixture of the device batch of `count` images of height x width whose first is at `position`; None if both are off."""
        if not (self.mixup_alpha or self.cutmix_alpha):
            return None
        numbers = _Numbers(self.seed, position)
        kind, row, column = numbers.get(0, 3)
        cut = not self.mixup_alpha or (self.cutmix_alpha > 0 and order.randint(kind, 2) == 1)
        share = _beta(numbers, self.cutmix_alpha if cut else self.mixup_alpha)
        partners = np.argsort(numbers.get(_PARTNERS, count, 2), kind="stable").astype(np.int64)
        if not cut:
            return Mixture(share, partners)
        box = rectangle(share, order.uniform(row), order.uniform(column), height, width)
        area = (box.bottom - box.top) * (box.right - box.left)
        return Mixture(1 - area / (height * width), partners, box)


NO_MIXING = Mixing(0, 0.0, 0.0)


def rectangle(share: float, row: float, column: float, height: int, width: int) -> Box:
    """(1 - share) of the area, with the image's own proportions, around a centre at `row`, `column` (0..1 of the image); what
    lies outside is cut off, so the area may be less."""
    side = math.sqrt(1 - share)
    high, wide = int(height * side), int(width * side)
    y, x = int(row * height), int(column * width)
    top, left = y - high // 2, x - wide // 2
    return Box(max(0, top), max(0, left), min(height, y + high // 2), min(width, x + wide // 2))


class _Numbers:
    """The random numbers of one position, by place."""

    def __init__(self, seed: int, position: int) -> None:
        self._seed, self._position = seed, np.array([position], np.int64)

    def get(self, first: int, count: int, step: int = 1) -> UInt64:
        """Those at first, first + step, ...: uint64[count]."""
        return order.draws(self._seed, self._position, first + count * step, Purpose.MIX)[0, first::step][:count]


def _beta(numbers: _Numbers, alpha: float) -> float:
    """A number of Beta(alpha, alpha), 0..1: x / (x + y) for two of Gamma(alpha), which for a small alpha only their logarithms
    can distinguish. In steps of 2^-24: exact in 32 bits, and too coarse to show the last bit of a machine's logarithm."""
    x, y = (_log_gamma(numbers, alpha, which) for which in (0, 1))
    # The two parts apart: the second may be infinite, the sum is a number all the same.
    distance = (y[0] - x[0]) + (y[1] - x[1]) / alpha
    small = math.exp(-abs(distance))
    share = 1 / (1 + small) if distance < 0 else small / (1 + small)
    return round(share / _STEP) * _STEP


def _log_gamma(numbers: _Numbers, alpha: float, which: int) -> tuple[float, float]:
    """(a, b) with a + b/alpha the logarithm of a number of Gamma(alpha): Marsaglia and Tsang, A simple method for generating
    gamma variables, ACM TOMS 26 (2000). Below 1 it is one of Gamma(alpha + 1), times u^(1/alpha)."""
    boosted = alpha < 1
    d = (alpha + 1 if boosted else alpha) - 1 / 3
    c = 1 / math.sqrt(9 * d)
    own = _SHARE + 2 * which  # every second one of the share's places
    boost = math.log(_open(numbers.get(own, 1)[0])) if boosted else 0.0
    for n in itertools.count():
        block = numbers.get(own + 4 * (1 + 3 * _ATTEMPTS * n), 3 * _ATTEMPTS, 4)
        for u1, u2, u in block.reshape(_ATTEMPTS, 3):
            normal = math.sqrt(-2 * math.log(_open(u1))) * math.cos(2 * math.pi * _open(u2))
            v = (1 + c * normal) ** 3
            if v > 0 and math.log(_open(u)) < normal * normal / 2 + d * (1 - v + math.log(v)):
                return math.log(d) + math.log(v), boost
    raise AssertionError  # the numbers never end


def _open(number: int) -> float:
    """Between 0 and 1, neither of them: a multiple of 2^-53."""
    return ((int(number) >> 12) + 0.5) * 2.0**-52


@dataclass(frozen=True, slots=True)
class Mixed:
    """A mixture, and its partners on the device."""

    mixture: Mixture
    partners: Tensor


def placed(mixture: Mixture | None, device: torch.device) -> Mixed | None:
    return None if mixture is None else Mixed(mixture, to_device(mixture.partners, device))


def blend(images: Tensor, mixed: Mixed) -> None:
    """Mixes images [N, C, H, W] in place."""
    box, share = mixed.mixture.box, mixed.mixture.share
    if box is None:
        # share*x1 + (1-share)*x2, as x1 + (1-share)*(x2 - x1): one pass.
        images.lerp_(images.index_select(0, mixed.partners), 1 - share)
        return
    part = images[:, :, box.top : box.bottom, box.left : box.right]
    part.copy_(part.index_select(0, mixed.partners))


def of_both(loss: Callable[[Tensor], Tensor], labels: Tensor, mixed: Mixed | None) -> Tensor:
    """What `loss` gives for `labels`; of mixed images for their own and for their partners' labels, in the mixture's shares."""
    own = loss(labels)
    if mixed is None:
        return own
    share = mixed.mixture.share
    return share * own + (1 - share) * loss(labels.index_select(0, mixed.partners))


def training_loss(
    logits: Tensor, labels: Tensor, smoothing: float, mixed: Mixed | None, class_weight: Tensor | None = None
) -> Tensor:
    """Mean cross entropy of [N, classes] and int64 [N], with `smoothing` of each label spread evenly over all classes. With `class_weight`
    [classes] the cross entropy of each label is multiplied by its class's, and the mean is one over N all the same."""

    def mean(labels: Tensor) -> Tensor:
        if class_weight is None:
            return F.cross_entropy(logits, labels, label_smoothing=smoothing)
        # Not by cross_entropy's own `weight`: that divides by the sum of the weights, and with smoothing weighs the other classes' parts.
        each = F.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="none")
        return (each * class_weight.index_select(0, labels)).mean()

    return of_both(mean, labels, mixed)
