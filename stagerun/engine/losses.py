"""What a stage minimises: the loss of one device batch, and of an evaluation that of each image by itself."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stagerun.base.code import Code, Sources
from stagerun.base.errors import UsageError
from stagerun.base.recipe import LossType, Normalization, Precision, Solver
from stagerun.base.wings import require_wing
from stagerun.engine.device import autocast, dtype_of
from stagerun.engine.mixing import Mixture, of_both, training_loss
from stagerun.system.code import called

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
    """The losses of a net of Caffe's by their weights; of mixed images each with their own and with their partners' labels."""

    losses: Sequence[Any]  # caffe.layers.SoftmaxWithLoss
    smoothing: float = 0.0
    class_weight: Tensor | None = None

    def __call__(self, answers: Answers, labels: Tensor, mixed: Mixture | None, images: Tensor) -> Tensor:
        each = (answers,) * len(self.losses) if isinstance(answers, Tensor) else answers[1:]
        loss_of_net = require_wing("caffe.functions.loss_of")

        def total(labels: Tensor) -> Tensor:
            found = labels.new_zeros((), dtype=each[0].dtype)
            for loss, logits in zip(self.losses, each, strict=True):
                one = loss_of_net(loss, logits, labels, self.smoothing, self.class_weight)
                found = torch.add(found, one, alpha=loss.loss_weight)
            return found

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
    """Hinton, Vinyals and Dean, arXiv:1503.02531. `teacher` is in evaluation mode, and stays as it is."""

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
class Own:
    """The user's: `function` is what `code` has built."""

    smoothing: float
    code: Code
    sources: Sources
    function: Callable[[Tensor, Tensor], Tensor]

    def __call__(self, logits: Tensor, labels: Tensor, mixed: Mixture | None, images: Tensor) -> Tensor:
        found = called(self.code, self.sources, self.function, logits, targets(labels, logits, self.smoothing, mixed))
        if not isinstance(found, Tensor) or found.ndim or not found.is_floating_point():
            what = f"a tensor {tuple(found.shape)} of {found.dtype}" if isinstance(found, Tensor) else f"{found!r:.40}"
            hint = "return one floating-point number for the batch, as `loss.mean()` does"
            raise UsageError(f"the loss of `{self.code}` is {what}, not a scalar", hint)
        return found


def try_out(own: Own, classes: int, device: torch.device, dtype: torch.dtype) -> None:
    """UsageError for a loss that no gradient comes from. Torch's random state is left alone."""
    values = torch.linspace(-1, 1, 4 * classes, dtype=dtype, device=device).reshape(4, classes)
    logits, labels = values.requires_grad_(), torch.arange(4, device=device) % classes
    with torch.random.fork_rng():
        found = own(logits, labels, None, logits)
    if not found.requires_grad:
        hint = "compute it with torch's functions of the logits, without `.item()`, `.detach()` or `argmax`"
        raise UsageError(f"the loss of `{own.code}` doesn't depend on the logits by a gradient", hint)
    found.backward()
    if not torch.isfinite(found) or logits.grad is None or not torch.isfinite(logits.grad).all():
        raise UsageError(
            f"the loss of `{own.code}` is {found.item():g} for ordinary logits, or its gradient is not finite",
            "take `log_softmax` in place of `log(softmax)`, or add a small number before a logarithm or a division",
        )


def distance(logits: Tensor, taught: Tensor, temperature: float) -> Tensor:
    """T^2 times the mean over images of the Kullback-Leibler divergence of softmax(logits / T) from softmax(taught / T)."""
    own, others = ((z / temperature).log_softmax(1) for z in (logits, taught))
    return temperature**2 * F.kl_div(own, others, reduction="batchmean", log_target=True)


def targets(labels: Tensor, logits: Tensor, smoothing: float, mixed: Mixture | None) -> Tensor:
    """What each output should be, [N, classes] in the dtype of `logits`."""
    wanted = multi_hot(labels, logits)
    if smoothing:
        wanted = (1 - smoothing) * wanted + smoothing / logits.shape[1]
    if mixed is not None:
        wanted = mixed.share * wanted + (1 - mixed.share) * wanted.index_select(0, mixed.partners)
    return wanted


def multi_hot(labels: Tensor, logits: Tensor) -> Tensor:
    """1 for the classes of an image, 0 for the others, in shape and dtype of `logits`."""
    if labels.ndim == 2:
        return labels.to(logits.dtype)
    return torch.zeros_like(logits).scatter_(1, labels[:, None], 1.0)


def loss_of(
    solver: Solver,
    teacher: nn.Module | None = None,
    own: Own | None = None,
    device: torch.device | None = None,
    of_net: Sequence[Any] = (),
) -> Loss:
    """The loss that a stage trains with on `device`; `teacher` for one of type DISTILL, `own` for PYTHON. `of_net`: the losses of a net of
    Caffe's, which count where the stage has none."""
    how, smoothing = solver.loss, solver.label_smoothing
    if how is None or how.type is LossType.SOFTMAX:
        weights, dtype = solver.class_weight, dtype_of(solver.precision)
        by_class = torch.tensor(weights, dtype=dtype, device=device) if weights else None
        return OfNet(of_net, smoothing, by_class) if how is None and of_net else Softmax(smoothing, by_class)
    if how.type is LossType.BINARY:
        return Binary(smoothing, how.normalization)
    if how.type is LossType.PYTHON:
        assert own is not None
        return own
    assert teacher is not None
    return Distilled(smoothing, teacher, how.temperature, how.weight, solver.precision)


# -- in an evaluation


# Logits and labels -> float [N]. Without smoothing, and without a teacher.
EvaluationLoss = Callable[[Tensor, Tensor], Tensor]


def is_binary(solver: Solver) -> bool:
    """Whether the network's answers are probabilities by sigmoid, and not by softmax."""
    return solver.loss is not None and solver.loss.type is LossType.BINARY


def probabilities(solver: Solver, logits: Tensor) -> Tensor:
    return logits.sigmoid() if is_binary(solver) else logits.softmax(1)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="none")


def evaluation_loss(solver: Solver) -> EvaluationLoss:
    """BINARY as it is trained, with the labels as they are; cross entropy of all others."""
    how = solver.loss
    if how is None or not is_binary(solver):
        return cross_entropy

    def binary(logits: Tensor, labels: Tensor) -> Tensor:
        each = F.binary_cross_entropy_with_logits(logits, multi_hot(labels, logits), reduction="none")
        return each.mean(1) if how.normalization is Normalization.FULL else each.sum(1)

    return binary
