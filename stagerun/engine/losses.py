"""Losses of a device batch in training and of each image in an evaluation, and mixup and cutmix.

mixup: Zhang, Cisse, Dauphin and Lopez-Paz, arXiv:1710.09412. cutmix: Yun et al., arXiv:1905.04899, with the rectangle of
clovaai/CutMix-PyTorch: `rand_bbox` in train.py. A mixture is drawn from (seed, position of the batch's first image). A device batch is a
logical worker's, so a mixture doesn't depend on the number of workers, and needs no state: a resumed run draws the same.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stagerun.base import order
from stagerun.base.code import Code, Sources
from stagerun.base.errors import UsageError
from stagerun.base.order import Purpose, UInt64
from stagerun.base.recipe import LossType, Normalization, Precision, Solver
from stagerun.base.wings import require_wing
from stagerun.engine.device import autocast, dtype_of, to_device
from stagerun.system.code import called

# Indices of a device batch's random numbers: kind, row and column; then alternately the partners' and the share's, of unlimited count.
_PARTNERS, _SHARE = 4, 5

# Attempts at a Gamma number that are drawn at once; of 20 at least 19 succeed. Each takes three numbers.
_ATTEMPTS = 8
_STEP = 2.0**-24


# First index, count and step -> numbers.
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
    """`share` (0..1) is each image's part, in its label too; the rest comes from image `partners[i]` (int64[n], a permutation; on the device
    after `placed`), which fills the `box`; without a box the two are blended."""

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
        """Return the mixture of a device batch of `count` images of height x width, the first at `position`; None if both are off."""
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
    """Return a box of (1 - share) of the area, with the image's proportions, around a centre at `row`, `column` (0..1 of the image), clipped
    to the image, so the area may be less."""
    side = math.sqrt(1 - share)
    high, wide = int(height * side), int(width * side)
    y, x = int(row * height), int(column * width)
    top, left = y - high // 2, x - wide // 2
    return Box(max(0, top), max(0, left), min(height, y + high // 2), min(width, x + wide // 2))


def _numbers(seed: int, position: int, first: int, count: int, step: int = 1) -> UInt64:
    """Return the random numbers of one position at the indices first, first + step, ...: uint64[count]."""
    drawn = order.draws(seed, np.array([position], np.int64), first + count * step, Purpose.MIX)
    return drawn[0, first::step][:count]


def _beta(numbers: Numbers, alpha: float) -> float:
    """Return a number of Beta(alpha, alpha), 0..1: x / (x + y) for two of Gamma(alpha), which for a small alpha only their logarithms
    can distinguish. In steps of 2^-24: exact in 32 bits, and too coarse to show the last bit of a machine's logarithm."""
    x, y = (_log_gamma(numbers, alpha, which) for which in (0, 1))
    # The two parts apart: the second may be infinite, the sum is a number all the same.
    distance = (y[0] - x[0]) + (y[1] - x[1]) / alpha
    small = math.exp(-abs(distance))
    share = 1 / (1 + small) if distance < 0 else small / (1 + small)
    return round(share / _STEP) * _STEP


def _log_gamma(numbers: Numbers, alpha: float, which: int) -> tuple[float, float]:
    """Return (a, b) with a + b/alpha the logarithm of a number of Gamma(alpha): Marsaglia and Tsang, A simple method for generating
    gamma variables, ACM TOMS 26 (2000). For alpha below 1 use Gamma(alpha + 1), times u^(1/alpha)."""
    boosted = alpha < 1
    d = (alpha + 1 if boosted else alpha) - 1 / 3
    c = 1 / math.sqrt(9 * d)
    start = _SHARE + 2 * which  # every second of the share's indices
    boost = math.log(_open(numbers(start, 1)[0])) if boosted else 0.0
    for n in itertools.count():
        block = numbers(start + 4 * (1 + 3 * _ATTEMPTS * n), 3 * _ATTEMPTS, 4)
        for u1, u2, u in block.reshape(_ATTEMPTS, 3):
            normal = math.sqrt(-2 * math.log(_open(u1))) * math.cos(2 * math.pi * _open(u2))
            v = (1 + c * normal) ** 3
            if v > 0 and math.log(_open(u)) < normal * normal / 2 + d * (1 - v + math.log(v)):
                return math.log(d) + math.log(v), boost
    raise AssertionError  # the numbers never end


def _open(number: int) -> float:
    """Return a number between 0 and 1, exclusive: a multiple of 2^-53."""
    return ((int(number) >> 12) + 0.5) * 2.0**-52


def placed(mixture: Mixture | None, device: torch.device) -> Mixture | None:
    return None if mixture is None else replace(mixture, partners=to_device(mixture.partners, device))


def blend(images: Tensor, mixed: Mixture) -> None:
    """Mix images [N, C, H, W] in place."""
    box = mixed.box
    if box is None:
        # share*x1 + (1-share)*x2, as x1 + (1-share)*(x2 - x1): one pass.
        images.lerp_(images.index_select(0, mixed.partners), 1 - mixed.share)
        return
    part = images[:, :, box.top : box.bottom, box.left : box.right]
    part.copy_(part.index_select(0, mixed.partners))


def of_both(loss: Callable[[Tensor], Tensor], labels: Tensor, mixed: Mixture | None) -> Tensor:
    """Return `loss` of `labels`; of mixed images the mean, in the mixture's shares, with `loss` of the partners' labels."""
    first = loss(labels)
    if mixed is None:
        return first
    return mixed.share * first + (1 - mixed.share) * loss(labels.index_select(0, mixed.partners))


def training_loss(
    logits: Tensor, labels: Tensor, smoothing: float, mixed: Mixture | None, class_weight: Tensor | None = None
) -> Tensor:
    """Return the mean cross entropy of [N, classes] and int64 [N], with `smoothing` of each label spread evenly over all classes. With
    `class_weight` [classes] the cross entropy of each label is multiplied by its class's, and the sum is still divided by N."""

    def mean(labels: Tensor) -> Tensor:
        if class_weight is None:
            return F.cross_entropy(logits, labels, label_smoothing=smoothing)
        # Not by cross_entropy's `weight`: that divides by the sum of the weights, and with smoothing weighs the other classes' parts.
        each = F.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="none")
        return (each * class_weight.index_select(0, labels)).mean()

    return of_both(mean, labels, mixed)


# Logits [N, classes], or what a net of Caffe's with several losses answers with in training.
Answers = Tensor | tuple[Tensor, ...]
# Logits, labels int64 [N] or multi-hot [N, classes], how the images were mixed, and the images that the network saw -> a scalar.
Loss = Callable[[Any, Tensor, Mixture | None, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Softmax:
    smoothing: float = 0.0
    class_weight: Tensor | None = None  # [classes], on the device

    def __call__(self, logits: Tensor, labels: Tensor, mixed: Mixture | None, images: Tensor) -> Tensor:
        return training_loss(logits, labels, self.smoothing, mixed, self.class_weight)


SOFTMAX = Softmax()


@dataclass(frozen=True, slots=True)
class OfNet:
    """The weighted losses of a Caffe net, each by `of_both`."""

    losses: Sequence[Any]  # caffe.layers.SoftmaxWithLoss
    smoothing: float = 0.0
    class_weight: Tensor | None = None

    def __call__(self, answers: Answers, labels: Tensor, mixed: Mixture | None, images: Tensor) -> Tensor:
        each = (answers,) * len(self.losses) if isinstance(answers, Tensor) else answers[1:]
        loss_of_net = require_wing("caffe.network.loss_of")

        def total(labels: Tensor) -> Tensor:
            result = labels.new_zeros((), dtype=each[0].dtype)
            for loss, logits in zip(self.losses, each, strict=True):
                one = loss_of_net(loss, logits, labels, self.smoothing, self.class_weight)
                result = torch.add(result, one, alpha=loss.loss_weight)
            return result

        return of_both(total, labels, mixed)


@dataclass(frozen=True, slots=True)
class Binary:
    smoothing: float
    normalization: Normalization

    def __call__(self, logits: Tensor, labels: Tensor, mixed: Mixture | None, images: Tensor) -> Tensor:
        wanted = targets(labels, logits, self.smoothing, mixed)
        total = F.binary_cross_entropy_with_logits(logits, wanted, reduction="sum")
        return total / (logits.numel() if self.normalization is Normalization.FULL else len(logits))


@dataclass(frozen=True, slots=True)
class Distilled:
    """Hinton, Vinyals and Dean, arXiv:1503.02531. `teacher` is in evaluation mode, and doesn't change."""

    smoothing: float
    teacher: nn.Module
    temperature: float
    weight: float
    precision: Precision

    def __call__(self, logits: Tensor, labels: Tensor, mixed: Mixture | None, images: Tensor) -> Tensor:
        with torch.no_grad(), autocast(self.precision, images.device):
            taught: Tensor = self.teacher(images).to(logits.dtype)
        hard = training_loss(logits, labels, self.smoothing, mixed)
        return (1 - self.weight) * hard + self.weight * distance(logits, taught, self.temperature)


@dataclass(frozen=True, slots=True)
class Custom:
    """The user's loss: `code` has built `function`."""

    smoothing: float
    code: Code
    sources: Sources
    function: Callable[[Tensor, Tensor], Tensor]

    def __call__(self, logits: Tensor, labels: Tensor, mixed: Mixture | None, images: Tensor) -> Tensor:
        loss = called(self.code, self.sources, self.function, logits, targets(labels, logits, self.smoothing, mixed))
        if not isinstance(loss, Tensor) or loss.ndim or not loss.is_floating_point():
            what = f"a tensor {tuple(loss.shape)} of {loss.dtype}" if isinstance(loss, Tensor) else f"{loss!r:.40}"
            hint = "return one floating-point number for the batch, as `loss.mean()` does"
            raise UsageError(f"the loss of `{self.code}` is {what}, not a scalar", hint)
        return loss


def try_out(custom: Custom, classes: int, device: torch.device, dtype: torch.dtype) -> None:
    """Raise UsageError for a loss without a finite gradient. Torch's random state stays as it is."""
    values = torch.linspace(-1, 1, 4 * classes, dtype=dtype, device=device).reshape(4, classes)
    logits, labels = values.requires_grad_(), torch.arange(4, device=device) % classes
    with torch.random.fork_rng():
        loss = custom(logits, labels, None, logits)
    if not loss.requires_grad:
        hint = "compute it with torch's functions of the logits, without `.item()`, `.detach()` or `argmax`"
        raise UsageError(f"the loss of `{custom.code}` doesn't depend on the logits by a gradient", hint)
    loss.backward()
    if not torch.isfinite(loss) or logits.grad is None or not torch.isfinite(logits.grad).all():
        raise UsageError(
            f"the loss of `{custom.code}` is {loss.item():g} for ordinary logits, or its gradient is not finite",
            "use `log_softmax` instead of `log(softmax)`, or add a small number before a logarithm or a division",
        )


def distance(logits: Tensor, taught: Tensor, temperature: float) -> Tensor:
    """Return T^2 times the mean over images of the Kullback-Leibler divergence of softmax(logits / T) from softmax(taught / T)."""
    student, teacher = ((z / temperature).log_softmax(1) for z in (logits, taught))
    return temperature**2 * F.kl_div(student, teacher, reduction="batchmean", log_target=True)


def targets(labels: Tensor, logits: Tensor, smoothing: float, mixed: Mixture | None) -> Tensor:
    """Return the target of each output, [N, classes] in the dtype of `logits`."""
    wanted = multi_hot(labels, logits)
    if smoothing:
        wanted = (1 - smoothing) * wanted + smoothing / logits.shape[1]
    if mixed is not None:
        wanted = mixed.share * wanted + (1 - mixed.share) * wanted.index_select(0, mixed.partners)
    return wanted


def multi_hot(labels: Tensor, logits: Tensor) -> Tensor:
    """Return 1 for the classes of an image, 0 for the others, in shape and dtype of `logits`."""
    if labels.ndim == 2:
        return labels.to(logits.dtype)
    return torch.zeros_like(logits).scatter_(1, labels[:, None], 1.0)


def loss_of(
    solver: Solver,
    teacher: nn.Module | None = None,
    custom: Custom | None = None,
    device: torch.device | None = None,
    of_net: Sequence[Any] = (),
) -> Loss:
    """Return the loss that a stage trains with on `device`; `teacher` for type DISTILL, `custom` for PYTHON. `of_net`: the losses of a Caffe
    net, for a stage without a loss."""
    how, smoothing = solver.loss, solver.label_smoothing
    if how is None or how.type is LossType.SOFTMAX:
        weights, dtype = solver.class_weight, dtype_of(solver.precision)
        by_class = torch.tensor(weights, dtype=dtype, device=device) if weights else None
        return OfNet(of_net, smoothing, by_class) if how is None and of_net else Softmax(smoothing, by_class)
    if how.type is LossType.BINARY:
        return Binary(smoothing, how.normalization)
    if how.type is LossType.PYTHON:
        assert custom is not None
        return custom
    assert teacher is not None
    return Distilled(smoothing, teacher, how.temperature, how.weight, solver.precision)


# -- in an evaluation


# Logits and labels -> float [N]. Without smoothing, and without a teacher.
EvaluationLoss = Callable[[Tensor, Tensor], Tensor]


def is_binary(solver: Solver) -> bool:
    """Return whether the network's answers become probabilities by sigmoid, not by softmax."""
    return solver.loss is not None and solver.loss.type is LossType.BINARY


def probabilities(solver: Solver, logits: Tensor) -> Tensor:
    return logits.sigmoid() if is_binary(solver) else logits.softmax(1)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="none")


def evaluation_loss(solver: Solver) -> EvaluationLoss:
    """Return the loss of an evaluation: BINARY as in training, with plain labels; cross entropy for all others."""
    how = solver.loss
    if how is None or not is_binary(solver):
        return cross_entropy

    def binary(logits: Tensor, labels: Tensor) -> Tensor:
        each = F.binary_cross_entropy_with_logits(logits, multi_hot(labels, logits), reduction="none")
        return each.mean(1) if how.normalization is Normalization.FULL else each.sum(1)

    return binary
