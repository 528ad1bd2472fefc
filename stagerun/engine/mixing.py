"""mixup and cutmix on a device batch, drawn from (seed, position of its first image), and the loss of what they give.

mixup: Zhang, Cisse, Dauphin and Lopez-Paz, arXiv:1710.09412. cutmix: Yun et al., arXiv:1905.04899, whose rectangle is that of
clovaai/CutMix-PyTorch: `rand_bbox` in train.py. A device batch is a logical worker's, so a mixture doesn't depend on how many
workers there are, and needs no state: a resumed run draws the same ones.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
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


# First place, count and step -> the numbers there.
Numbers = Callable[..., UInt64]


@dataclass(frozen=True, slots=True)
class Box:
    """Rows top .. bottom-1, columns left .. right-1; may be empty."""

    top: int
    left: int
    bottom: int
    right: int


@dataclass(frozen=True, slots=True)
class Mixture:
    """`share` (0..1) is each image's own part, in its label too; the rest is of image `partners[i]` (int64[n], a permutation; on the device
    where it is `placed`). With a `box` that is where the partner shows; without, the two are laid over each other.
    """

    share: float
    partners: Tensor
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
        numbers = partial(_numbers, self.seed, position)
        kind, row, column = numbers(0, 3)
        cut = not self.mixup_alpha or (self.cutmix_alpha > 0 and order.randint(kind, 2) == 1)
        share = _beta(numbers, self.cutmix_alpha if cut else self.mixup_alpha)
        order_of_draws = np.argsort(numbers(_PARTNERS, count, 2), kind="stable").astype(np.int64)
        partners = torch.from_numpy(order_of_draws)
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


def _numbers(seed: int, position: int, first: int, count: int, step: int = 1) -> UInt64:
    """The random numbers of one position at the places first, first + step, ...: uint64[count]."""
    drawn = order.draws(seed, np.array([position], np.int64), first + count * step, Purpose.MIX)
    return drawn[0, first::step][:count]


def _beta(numbers: Numbers, alpha: float) -> float:
    """A number of Beta(alpha, alpha), 0..1: x / (x + y) for two of Gamma(alpha), which for a small alpha only their logarithms
    can distinguish. In steps of 2^-24: exact in 32 bits, and too coarse to show the last bit of a machine's logarithm."""
    x, y = (_log_gamma(numbers, alpha, which) for which in (0, 1))
    # The two parts apart: the second may be infinite, the sum is a number all the same.
    distance = (y[0] - x[0]) + (y[1] - x[1]) / alpha
    small = math.exp(-abs(distance))
    share = 1 / (1 + small) if distance < 0 else small / (1 + small)
    return round(share / _STEP) * _STEP


def _log_gamma(numbers: Numbers, alpha: float, which: int) -> tuple[float, float]:
    """(a, b) with a + b/alpha the logarithm of a number of Gamma(alpha): Marsaglia and Tsang, A simple method for generating
    gamma variables, ACM TOMS 26 (2000). Below 1 it is one of Gamma(alpha + 1), times u^(1/alpha)."""
    boosted = alpha < 1
    d = (alpha + 1 if boosted else alpha) - 1 / 3
    c = 1 / math.sqrt(9 * d)
    own = _SHARE + 2 * which  # every second one of the share's places
    boost = math.log(_open(numbers(own, 1)[0])) if boosted else 0.0
    for n in itertools.count():
        block = numbers(own + 4 * (1 + 3 * _ATTEMPTS * n), 3 * _ATTEMPTS, 4)
        for u1, u2, u in block.reshape(_ATTEMPTS, 3):
            normal = math.sqrt(-2 * math.log(_open(u1))) * math.cos(2 * math.pi * _open(u2))
            v = (1 + c * normal) ** 3
            if v > 0 and math.log(_open(u)) < normal * normal / 2 + d * (1 - v + math.log(v)):
                return math.log(d) + math.log(v), boost
    raise AssertionError  # the numbers never end


def _open(number: int) -> float:
    """Between 0 and 1, neither of them: a multiple of 2^-53."""
    return ((int(number) >> 12) + 0.5) * 2.0**-52


def placed(mixture: Mixture | None, device: torch.device) -> Mixture | None:
    return None if mixture is None else replace(mixture, partners=to_device(mixture.partners, device))


def blend(images: Tensor, mixed: Mixture) -> None:
    """Mixes images [N, C, H, W] in place."""
    box = mixed.box
    if box is None:
        # share*x1 + (1-share)*x2, as x1 + (1-share)*(x2 - x1): one pass.
        images.lerp_(images.index_select(0, mixed.partners), 1 - mixed.share)
        return
    part = images[:, :, box.top : box.bottom, box.left : box.right]
    part.copy_(part.index_select(0, mixed.partners))


def of_both(loss: Callable[[Tensor], Tensor], labels: Tensor, mixed: Mixture | None) -> Tensor:
    """What `loss` gives for `labels`; of mixed images for their own and for their partners' labels, in the mixture's shares."""
    own = loss(labels)
    if mixed is None:
        return own
    return mixed.share * own + (1 - mixed.share) * loss(labels.index_select(0, mixed.partners))


def training_loss(
    logits: Tensor, labels: Tensor, smoothing: float, mixed: Mixture | None, class_weight: Tensor | None = None
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
