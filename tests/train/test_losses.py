"""`loss` of a stage: each against a formula of its own, and gradients against differences."""

from dataclasses import replace

import numpy as np
import torch
from engine_help import SOLVER
from facade import Mixture, Precision, losses, recipe
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn

Numbers = NDArray[np.float64]
Loss, LossType, Normalization = recipe.Loss, recipe.LossType, recipe.Normalization
Binary, Distilled, Softmax = losses.Binary, losses.Distilled, losses.Softmax
IMAGES = torch.zeros(1, 3, 2, 2)


class Fixed(nn.Module):
    """Answers with what it was given."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, images: Tensor) -> Tensor:
        return self.logits


def softmax(z: Numbers) -> Numbers:
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Numbers, Numbers, NDArray[np.int64], float, Mixture | None]:
    """Logits of two networks, labels, smoothing and how images are mixed."""
    n, classes = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    z, taught = rng.normal(0, 4, (2, n, classes))
    labels = rng.integers(0, classes, n)
    partners = rng.permutation(n)
    mixed = Mixture(float(rng.uniform()), torch.from_numpy(partners)) if draw(st.booleans()) else None
    return z, taught, labels, draw(st.sampled_from([0.0, 0.1, 0.9])), mixed


def wanted_outputs(labels: NDArray[np.int64], classes: int, smoothing: float, mixed: Mixture | None) -> Numbers:
    t = np.eye(classes)[labels] if labels.ndim == 1 else labels.astype(float)
    t = t * (1 - smoothing) + smoothing / classes
    share = mixed.share if mixed else 1.0
    return t if mixed is None else share * t + (1 - share) * t[mixed.partners]


def tensor(x: Numbers) -> Tensor:
    return torch.from_numpy(x)


@given(cases(), st.sampled_from(list(Normalization)), st.booleans())
def test_binary_is_caffes_sum_over_images_or_the_mean_over_all_outputs(case, how, several):
    """Of one label of an image, or of several."""
    z, _, labels, smoothing, mixed = case
    labels = np.random.default_rng(labels[0]).integers(0, 2, z.shape).astype(np.uint8) if several else labels
    t, s = wanted_outputs(labels, z.shape[1], smoothing, mixed), 1 / (1 + np.exp(-z))
    each = -(t * np.log(s) + (1 - t) * np.log(1 - s))
    expected = each.mean() if how is Normalization.FULL else each.sum() / len(z)
    found = Binary(smoothing, how)(tensor(z), tensor(labels), mixed, IMAGES)
    np.testing.assert_allclose(found.item(), expected, rtol=1e-9)


@given(cases(), st.sampled_from([1.0, 4.0, 20.0]), st.sampled_from([0.0, 0.5, 1.0]))
def test_distill_is_hintons_sum_of_two_losses(case, temperature, weight):
    z, taught, labels, smoothing, mixed = case
    t = wanted_outputs(labels, z.shape[1], smoothing, mixed)
    hard = -(t * np.log(softmax(z))).sum(1).mean()
    p, q = softmax(z / temperature), softmax(taught / temperature)
    soft = (q * np.log(q / p)).sum(1).mean()
    expected = (1 - weight) * hard + weight * temperature**2 * soft
    loss = Distilled(smoothing, Fixed(tensor(taught)), temperature, weight, Precision.FP64)
    found = loss(tensor(z), tensor(labels), mixed, IMAGES)
    np.testing.assert_allclose(found.item(), expected, rtol=1e-6, atol=1e-12)


def test_a_teacher_gets_no_gradient_and_the_gradient_of_a_perfect_student_is_none():
    teacher = nn.Flatten()
    images = torch.randn(
        3, 1, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True
    )
    z = images.detach().flatten(1).requires_grad_()
    Distilled(0.0, teacher, 4.0, 1.0, Precision.FP64)(z, torch.tensor([0, 1, 2]), None, images).backward()
    assert images.grad is None and z.grad is not None and z.grad.abs().max() < 1e-15


def test_an_evaluation_has_the_loss_without_smoothing_and_without_a_teacher():
    z, labels = torch.tensor([[1.0, -2.0], [0.5, 0.5]]), torch.tensor([0, 1])
    smooth = replace(SOLVER, label_smoothing=0.5)
    cross = nn.functional.cross_entropy(z, labels, reduction="none")
    for loss in (None, Loss(type=LossType.DISTILL, teacher="t"), Loss(type=LossType.PYTHON, function="a.py:b")):
        assert torch.equal(losses.evaluation_loss(replace(smooth, loss=loss))(z, labels), cross)
    each = nn.functional.binary_cross_entropy_with_logits(z, torch.eye(2)[labels], reduction="none")
    binary = Loss(type=LossType.BINARY)
    torch.testing.assert_close(losses.evaluation_loss(replace(smooth, loss=binary))(z, labels), each.sum(1))
    full = replace(binary, normalization=Normalization.FULL)
    torch.testing.assert_close(losses.evaluation_loss(replace(smooth, loss=full))(z, labels), each.mean(1))
