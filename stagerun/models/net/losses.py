"""The losses of a net: SoftmaxWithLoss, as Caffe normalises it."""

import torch.nn.functional as F
from torch import Tensor

from stagerun.base.net import Net, Normalization, SoftmaxWithLoss, trained_losses
from stagerun.models.net.steps import steps_of

_NOTHING_IGNORED = -100  # torch's own


def losses(net: Net) -> tuple[SoftmaxWithLoss, ...]:
    """Those that training sums up, in the order of the logits of `Network`. Empty where the mean cross entropy of the logits is all there
    is."""
    found, planned = trained_losses(net.train), steps_of(net.train, training=True)
    plain = planned.losses in ((), (planned.logits,)) and all(loss == _plain(loss) for loss in found)
    return () if plain else found


def _plain(loss: SoftmaxWithLoss) -> SoftmaxWithLoss:
    """The mean cross entropy, by the same name of what it is averaged over where that is the batch."""
    by_batch = loss.normalization in (Normalization.VALID, Normalization.FULL, Normalization.BATCH_SIZE)
    return SoftmaxWithLoss(normalization=loss.normalization if by_batch else Normalization.VALID)


def loss_of(
    s: SoftmaxWithLoss, logits: Tensor, labels: Tensor, smoothing: float, class_weight: Tensor | None = None
) -> Tensor:
    """Without its `loss_weight`. `smoothing` is the stage's, and counts before the layer's own. An image of `ignore_label` counts for
    nothing."""
    ignored = _NOTHING_IGNORED if s.ignore_label is None else s.ignore_label
    smoothed = smoothing or s.label_smoothing
    each = F.cross_entropy(logits, labels, reduction="none", ignore_index=ignored, label_smoothing=smoothed)
    if class_weight is not None:
        each = each * class_weight.index_select(0, labels.clamp(0, logits.shape[1] - 1))
    return each.sum() / _normaliser(s, labels)


def _normaliser(s: SoftmaxWithLoss, labels: Tensor) -> Tensor | float:
    """At least 1, as Caffe has it."""
    if s.normalization is Normalization.NONE:
        return 1.0
    if s.normalization is Normalization.PRE_FIXED:
        return max(1.0, s.pre_fixed_normalizer)
    if s.normalization is Normalization.VALID and s.ignore_label is not None:
        return (labels != s.ignore_label).sum().clamp(min=1)
    return float(len(labels))
