"""Test-time views: a network's answers to several pictures of one image, averaged."""

import enum
import math

import torch
from torch import Tensor, nn


class Views(enum.Enum):
    """What one image is seen as: itself; itself and its mirror; four corners and the centre, and their mirrors."""

    ONE = "one"
    FLIP = "flip"
    TEN_CROP = "10crop"


class Averaged(nn.Module):
    """Softmax outputs averaged over views: images [crops * N, C, H, W], all images of one crop after the other, and each
    as it is and mirrored -> log of the mean probability [N, classes], float64.

    Top-1 and top-5 of that are those of the mean; cross entropy of it is -log of the mean probability of the label.
    """

    def __init__(self, model: nn.Module, crops: int) -> None:
        super().__init__()
        self.model, self.crops = model, crops

    def forward(self, images: Tensor) -> Tensor:
        answers = []
        for part in images.chunk(self.crops):
            # One view at a time: as much memory as an evaluation without views.
            for view in (part, part.flip(3)):
                answers.append(self.model(view).double().log_softmax(1))
        return torch.stack(answers).logsumexp(0) - math.log(len(answers))
