"""mixup and cutmix on a device batch, and the loss of what they give."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from stagerun.engine.mixture import Mixture


@dataclass(frozen=True, slots=True)
class Mixed:
    """A mixture, and its partners on the device."""

    mixture: Mixture
    partners: Tensor


def placed(mixture: Mixture | None, device: torch.device) -> Mixed | None:
    return None if mixture is None else Mixed(mixture, torch.from_numpy(mixture.partners).to(device))


def blend(images: Tensor, mixed: Mixed) -> None:
    """Mixes images [N, C, H, W] in place."""
    box, share = mixed.mixture.box, mixed.mixture.share
    if box is None:
        # share*x1 + (1-share)*x2, as x1 + (1-share)*(x2 - x1): one pass.
        images.lerp_(images.index_select(0, mixed.partners), 1 - share)
        return
    part = images[:, :, box.top : box.bottom, box.left : box.right]
    part.copy_(part.index_select(0, mixed.partners))


def training_loss(logits: Tensor, labels: Tensor, smoothing: float, mixed: Mixed | None) -> Tensor:
    """Mean cross entropy of [N, classes] and int64 [N], with `smoothing` of each label spread evenly over all classes; of
    mixed images that with their own and that with their partners' labels, in the mixture's shares."""
    own = F.cross_entropy(logits, labels, label_smoothing=smoothing)
    if mixed is None:
        return own
    others = F.cross_entropy(logits, labels.index_select(0, mixed.partners), label_smoothing=smoothing)
    share = mixed.mixture.share
    return share * own + (1 - share) * others
