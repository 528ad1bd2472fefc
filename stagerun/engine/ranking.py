"""Average precision: how well scores rank the images of a class before the others."""

from collections.abc import Sequence

import torch
from torch import Tensor


def average_precision(scores: Tensor, positive: Tensor) -> float | None:
    """The sum over thresholds, from the highest score down, of (recall - recall before) * precision; images of equal scores are at
    one threshold. None without a positive image.

    >>> round(average_precision(torch.tensor([0.9, 0.8, 0.7]), torch.tensor([1, 0, 1])), 6)
    0.833333
    """
    total = int(positive.sum())
    if not total:
        return None
    order = torch.argsort(scores, descending=True, stable=True)
    ranked, right = scores[order], positive[order].double().cumsum(0)
    last = torch.ones_like(ranked, dtype=torch.bool)
    last[:-1] = ranked[1:] != ranked[:-1]
    places = torch.arange(1, len(ranked) + 1, dtype=torch.float64, device=scores.device)
    found, seen = right[last], places[last]
    gained = torch.diff(found, prepend=found.new_zeros(1))
    return float((gained * found / seen).sum() / total)


def of_classes(scores: Tensor, positive: Tensor) -> tuple[float | None, ...]:
    """That of each class; both are [images, classes]."""
    return tuple(average_precision(scores[:, c], positive[:, c]) for c in range(scores.shape[1]))


def mean(found: Sequence[float | None]) -> float | None:
    """Over the classes that have an image; None if none has."""
    known = [one for one in found if one is not None]
    return sum(known) / len(known) if known else None
