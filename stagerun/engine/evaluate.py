"""Top-1, top-5 and loss over validation images, each once, the same for any number of workers."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from stagerun.comm import Comm
from stagerun.engine.device import autocast
from stagerun.engine.images import Batch, Normalise
from stagerun.recipe import Precision


@dataclass(frozen=True, slots=True)
class Score:
    """Shares 0..1 of the images whose label is the first, one of the first five answers; mean loss."""

    images: int
    top1: float
    top5: float
    loss: float


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[tuple[int, Batch]],
    num_batches: int,
    normalise: Normalise,
    precision: Precision,
    comm: Comm,
    stop: Callable[[], bool],
) -> Score | None:
    """Collective. `batches`: this rank's (number, batch) of the `num_batches` that the images are cut into.

    Each batch is computed by one rank, the counts and losses of all are exchanged and added in order of their number: so
    neither the cut nor the sum depends on how many ranks there are. None when a rank was told to stop on the way.
    """
    model.eval()
    table = torch.zeros(num_batches + 1, 4, dtype=torch.float64, device=normalise.device)
    for number, batch in batches:
        if stop():
            table[-1, 0] = 1
            break
        with autocast(precision, normalise.device):
            logits = model(normalise(batch.images))
        labels = normalise.labels(batch.labels)
        logits = logits.to(normalise.dtype)
        best = logits.topk(min(5, logits.shape[1]), dim=1).indices
        right = best == labels[:, None]
        table[number, 0] = len(labels)
        table[number, 1] = right[:, 0].sum()
        table[number, 2] = right.any(dim=1).sum()
        table[number, 3] = F.cross_entropy(logits, labels, reduction="none").double().sum()
    comm.all_reduce(table)()
    rows = table.tolist()
    if rows.pop()[0]:
        return None
    images, top1, top5, loss = (sum(column) for column in zip(*rows, strict=True))
    return Score(int(images), top1 / images, top5 / images, loss / images)
