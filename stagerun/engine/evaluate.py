"""Top-1, top-5 and loss over validation images, each once, the same for any number of workers; and what one image is seen as there."""

import enum
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stagerun.base.nets import ALL_COUNT, Ignored
from stagerun.base.recipe import Precision
from stagerun.comm import Comm
from stagerun.engine.device import autocast
from stagerun.engine.images import Batch, Normalise
from stagerun.engine.losses import EvaluationLoss, cross_entropy


class Views(enum.Enum):
    """What one image is seen as: itself; itself and its mirror; four corners and the centre, and their mirrors."""

    ONE = "one"
    FLIP = "flip"
    TEN_CROP = "10crop"


class Averaged(nn.Module):
    """Probabilities averaged over views, softmax's or, of a `binary` loss, sigmoid's: images [crops * N, C, H, W], all images of one crop
    after the other, and each as it is and mirrored -> log of the mean probability [N, classes], float64, or its logit.

    Top-1 and top-5 of that are those of the mean; cross entropy of it is -log of the mean probability of the label.
    """

    def __init__(self, model: nn.Module, crops: int, binary: bool = False) -> None:
        super().__init__()
        self.model, self.crops, self.binary = model, crops, binary

    def forward(self, images: Tensor) -> Tensor:
        answers = []
        for part in images.chunk(self.crops):
            # One view at a time: as much memory as an evaluation without views.
            for view in (part, part.flip(3)):
                answers.append(self.model(view).double())
        if self.binary:
            return torch.stack([z.sigmoid() for z in answers]).mean(0).logit()
        answers = [z.log_softmax(1) for z in answers]
        return torch.stack(answers).logsumexp(0) - math.log(len(answers))


@dataclass(frozen=True, slots=True)
class Score:
    """Shares 0..1 of the images that count, whose label is the first, one of the first five answers; mean loss."""

    images: int
    top1: float
    top5: float
    loss: float
    class_ap: tuple[float | None, ...] = ()  # average precision of each class, of images with several labels

    @property
    def mean_ap(self) -> float | None:
        """Over the classes that have an image; None if none has."""
        known = [one for one in self.class_ap if one is not None]
        return sum(known) / len(known) if known else None


@dataclass(frozen=True, slots=True)
class Classifier:
    """A trained network, which is in evaluation mode from here on, and how it takes a batch."""

    model: nn.Module
    normalise: Normalise
    precision: Precision

    def __post_init__(self) -> None:
        self.model.eval()

    def __call__(self, batch: Batch) -> Tensor:
        """Logits [N, classes] in the dtype of `normalise`."""
        with autocast(self.precision, self.normalise.device):
            logits: Tensor = self.model(self.normalise(batch.images))
        return logits.to(self.normalise.dtype)


@dataclass(frozen=True, slots=True)
class Measure:
    """What answers are measured by. `normalise` places the labels; `ignored` are those that don't count."""

    normalise: Normalise
    loss: EvaluationLoss = cross_entropy
    ignored: Ignored = ALL_COUNT


def best_of(logits: Tensor) -> Tensor:
    """int64 [N, 1 to 5]: the classes with the highest logits, the first answer first."""
    return logits.topk(min(5, logits.shape[1]), dim=1).indices


@torch.no_grad()
def score(
    answer: Callable[[Batch], Tensor],
    batches: Iterable[tuple[int, Batch]],
    num_batches: int,
    measure: Measure,
    comm: Comm,
    stop: Callable[[], bool],
) -> Score | None:
    """The Score of what answers a batch with [N, classes], logits or logarithms of probabilities. Collective.

    `batches`: this rank's (number, batch) of the `num_batches` that the images are cut into.

    Each batch is computed by one rank, the counts and losses of all are exchanged and added in order of their number: so
    neither the cut nor the sum depends on how many ranks there are. None when a rank is asked to stop on the way.
    """
    kept: list[tuple[int, Tensor, Tensor]] = []
    ignored, device = measure.ignored, measure.normalise.device
    table = torch.zeros(num_batches + 1, 7, dtype=torch.float64, device=device)
    for number, batch in batches:
        if stop():
            table[-1, 0] = 1
            break
        logits, labels = answer(batch), measure.normalise.labels(batch.labels)
        if labels.ndim == 2:
            kept.append((number, logits.double(), labels.double()))
            table[number, 4] = labels.shape[1]
        table[number, 0] = len(labels)
        counted = _counted(logits, labels, ignored.accuracy)
        best = best_of(counted[0])
        right = counted[1].gather(1, best) > 0 if labels.ndim == 2 else best == counted[1][:, None]
        table[number, 1] = right[:, 0].sum()
        table[number, 2] = right.any(dim=1).sum()
        table[number, 5] = len(right)
        counted = _counted(logits, labels, ignored.loss)
        table[number, 3] = measure.loss(*counted).double().sum()
        table[number, 6] = len(labels if ignored.of_all else counted[1])
    comm.all_reduce(table)()
    rows = comm.look(table)
    if rows.pop()[0]:
        return None
    _, top1, top5, total, _, images, divisor = (sum(column) for column in zip(*rows, strict=True))
    ranks = _ranked(kept, [int(row[0]) for row in rows], int(rows[0][4]), device, comm)
    each = max(images, 1)  # as Caffe: of no image at all, all are 0
    return Score(int(images), top1 / each, top5 / each, total / max(divisor, 1), ranks)


def _counted(logits: Tensor, labels: Tensor, ignored: int | None) -> tuple[Tensor, Tensor]:
    """Those of the images that count."""
    if ignored is None or labels.ndim == 2:
        return logits, labels
    counts = labels != ignored
    return logits[counts], labels[counts]


def _ranked(
    kept: Sequence[tuple[int, Tensor, Tensor]], sizes: Sequence[int], width: int, device: torch.device, comm: Comm
) -> tuple[float | None, ...]:
    """The average precision of each class, from the logits and labels that the ranks have `kept` by batch; () where `width`, the classes
    that an image may have several of, is 0. Collective. Each row is one rank's, and the others add zeros: so the order of images, and all
    bits, are the same for any number of ranks."""
    if not width:
        return ()
    table = torch.zeros(sum(sizes), 2 * width, dtype=torch.float64, device=device)
    for number, logits, labels in kept:
        first = sum(sizes[:number])
        table[first : first + len(logits)] = torch.cat([logits, labels], 1)
    comm.all_reduce(table)()
    return tuple(average_precision(table[:, c], table[:, width + c]) for c in range(width))


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
