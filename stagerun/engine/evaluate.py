"""Top-1, top-5 and loss over validation images, each once, the same for any number of workers; and ensembles of networks."""

import enum
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stagerun.base.recipe import EnsembleRule, Precision
from stagerun.base.wings import ALL_COUNT, Ignored
from stagerun.comm import Comm
from stagerun.engine.averages import BatchStatistics
from stagerun.engine.device import autocast
from stagerun.engine.images import Batch, Normalise
from stagerun.engine.losses import EvaluationLoss, cross_entropy
from stagerun.engine.update import Arithmetic, Stop, explained, forward


class Views(enum.Enum):
    """Views of an image: itself; itself and its mirror; four corners and the centre, and their mirrors."""

    ONE = "one"
    FLIP = "flip"
    TEN_CROP = "10crop"


class Averaged(nn.Module):
    """Probabilities averaged over views, softmax's or, of a `binary` loss, sigmoid's: images [crops * N, C, H, W], all images of one crop
    after the other, and each as it is and mirrored -> log of the mean probability [N, classes], float64, or its logit.

    Its top-1 and top-5 equal the mean's; its cross entropy is -log of the mean probability of the label."""

    def __init__(self, model: nn.Module, crops: int, binary: bool) -> None:
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
    """Shares 0..1 of the images that count, whose label is the first, or among the first five answers; mean loss."""

    images: int
    top1: float
    top5: float
    loss: float
    class_ap: tuple[float | None, ...] = ()  # average precision of each class, of images with several labels
    # Images with one label: means over classes, of the share of a class's images that are right, and of F1.
    balanced_accuracy: float | None = None
    macro_f1: float | None = None

    @property
    def mean_ap(self) -> float | None:
        """Return the mean over the classes that have an image, or None."""
        values = [one for one in self.class_ap if one is not None]
        return sum(values) / len(values) if values else None


@dataclass(frozen=True, slots=True)
class Classifier:
    """A trained network, which this puts in evaluation mode, with its normalisation."""

    model: nn.Module
    normalise: Normalise
    precision: Precision

    def __post_init__(self) -> None:
        self.model.eval()

    def __call__(self, batch: Batch) -> Tensor:
        """Return logits [N, classes] in the dtype of `normalise`."""
        with autocast(self.precision, self.normalise.device):
            logits: Tensor = self.model(self.normalise(batch.images))
        return logits.to(self.normalise.dtype)


@dataclass(frozen=True, slots=True)
class Measure:
    """The measure of answers. `normalise` moves the labels to the device; `ignored` labels don't count."""

    normalise: Normalise
    loss: EvaluationLoss = cross_entropy
    ignored: Ignored = ALL_COUNT


def best_of(logits: Tensor) -> Tensor:
    """Return int64 [N, 1 to 5]: the classes with the highest logits, the first answer first."""
    return logits.topk(min(5, logits.shape[1]), dim=1).indices


@torch.no_grad()
def score(
    answer: Callable[[Batch], Tensor],
    batches: Iterable[tuple[int, Batch]],
    num_batches: int,
    measure: Measure,
    comm: Comm,
    stop: Stop,
) -> Score | None:
    """Return the Score of `answer`, which returns [N, classes] for a batch, logits or logarithms of probabilities. Collective. None when a
    rank is asked to stop.

    `batches`: this rank's (number, batch) of all `num_batches`. Each batch is computed by one rank, the counts and losses of all are
    exchanged and added in order of their number: so neither the cut nor the sum depends on the number of ranks."""
    kept: list[tuple[int, Tensor, Tensor]] = []
    tally: Tensor | None = None
    ignored, device = measure.ignored, measure.normalise.device
    table = torch.zeros(num_batches + 1, 8, dtype=torch.float64, device=device)
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
        if labels.ndim == 1:
            tally = _tally(*counted) if tally is None else tally + _tally(*counted)
            table[number, 7] = logits.shape[1]
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
    _, top1, top5, total, _, images, divisor, _ = (sum(column) for column in zip(*rows, strict=True))
    precisions: tuple[float | None, ...] = ()
    if width := int(rows[0][4]):  # the classes of images with several labels
        # Each row comes from one rank, and the others add zeros: so the order of images, and all bits, are the same for any number of ranks.
        sizes = [int(row[0]) for row in rows]
        table = torch.zeros(sum(sizes), 2 * width, dtype=torch.float64, device=device)
        for number, logits, labels in kept:
            first = sum(sizes[:number])
            table[first : first + len(logits)] = torch.cat([logits, labels], 1)
        comm.all_reduce(table)()
        precisions = tuple(average_precision(table[:, c], table[:, width + c]) for c in range(width))
    means: tuple[float | None, float | None] = (None, None)
    if classes := int(max((row[7] for row in rows), default=0)):
        tally = torch.zeros(3, classes, dtype=torch.float64, device=device) if tally is None else tally
        comm.all_reduce(tally)()
        means = class_means(tally.cpu())
    each = max(images, 1)  # as Caffe: of no image at all, all are 0
    return Score(int(images), top1 / each, top5 / each, total / max(divisor, 1), precisions, *means)


def _tally(logits: Tensor, labels: Tensor) -> Tensor:
    """Return whole numbers, float64 [3, classes]: the images of each class, its answers, and its right answers."""
    classes = torch.arange(logits.shape[1], device=logits.device)
    labelled, answered = labels[:, None] == classes, best_of(logits)[:, :1] == classes
    return torch.stack([one.sum(0) for one in (labelled, answered, labelled & answered)]).double()


def class_means(tally: Tensor) -> tuple[float | None, float | None]:
    """Return balanced accuracy, the mean recall of the classes with images, and macro F1, the mean F1 of the classes with images or answers.

    >>> class_means(torch.tensor([[3.0, 1, 0], [2, 1, 1], [2, 1, 0]]))
    (0.8333333333333333, 0.6)
    """
    labelled, answered, right = tally.double()

    def mean(values: Tensor) -> float | None:  # 0 / 0 is a class that doesn't count
        counted = values[~values.isnan()]
        return float(counted.mean()) if len(counted) else None

    return mean(right / labelled), mean(2 * right / (labelled + answered))


def _counted(logits: Tensor, labels: Tensor, ignored: int | None) -> tuple[Tensor, Tensor]:
    """Return the logits and labels of the images that count."""
    if ignored is None or labels.ndim == 2:
        return logits, labels
    counts = labels != ignored
    return logits[counts], labels[counts]


def average_precision(scores: Tensor, positive: Tensor) -> float | None:
    """Return the sum over thresholds, from the highest score down, of (recall - previous recall) * precision; images of equal scores share
    a threshold. None without a positive image.

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
    counts = torch.arange(1, len(ranked) + 1, dtype=torch.float64, device=scores.device)
    hits, seen = right[last], counts[last]
    gained = torch.diff(hits, prepend=hits.new_zeros(1))
    return float((gained * hits / seen).sum() / total)


_ROWS_AT_ONCE = 16  # of the table of BatchNorm statistics, which for a ResNet-50 are half a megabyte each


def together(members: Sequence[Classifier], rule: EnsembleRule) -> Callable[[Batch], Tensor]:
    """Return a function that adds up the members' answers to a batch, in order: float64 [N, classes], the mean logits or the logarithms of
    the mean probabilities, which sum to 1, so that cross entropy is -log of the mean probability of the label."""

    def answer(batch: Batch) -> Tensor:
        logits = torch.stack([member(batch).double() for member in members])
        if rule is EnsembleRule.MEAN_LOGIT:
            return logits.mean(0)
        return logits.log_softmax(2).logsumexp(0) - math.log(len(members))

    return answer


class WeightMean:
    """The mean of several networks' weights, plain or weighted, added up in float64 in order; only one network and the sum are in memory."""

    def __init__(self, model: nn.Module) -> None:
        """`model`: any network of the kind."""
        # The names of BatchNorm's running statistics and their counters.
        self._statistics = {
            statistic if module is model else f"{name}.{statistic}"  # a layer of a net may have an empty name, too
            for name, module in model.named_modules()
            if any(held == "batch_mean" for held, _ in module.named_buffers(recurse=False))
            for statistic in ("running_mean", "running_var", "num_batches_tracked")
        }
        self._sums: dict[str, Tensor] = {}
        self._whole = 0.0

    def add(self, weights: Mapping[str, Tensor], share: float | None = None) -> None:
        """Add parameters and buffers by name. `share`: their weight, of 1 in all; None: equal weights. ValueError naming a buffer of whole
        numbers that differs."""
        self._whole = 1.0 if share is not None else self._whole + 1
        for name, tensor in weights.items():
            if tensor.is_floating_point():
                part = tensor.double() if share is None else tensor.double() * share
                self._sums[name] = self._sums[name].add_(part) if name in self._sums else part.clone()
            elif name not in self._sums:
                self._sums[name] = tensor.clone()
            elif name not in self._statistics and not torch.equal(self._sums[name], tensor):
                raise ValueError(f"`{name}` holds whole numbers, which have no mean, and differs")

    def mean(self) -> dict[str, Tensor]:
        """Return the mean, float64 except for whole numbers. BatchNorm's statistics are averaged, not recomputed."""
        return {k: t / self._whole if t.is_floating_point() else t for k, t in self._sums.items()}


@torch.no_grad()
def take_statistics(
    statistics: BatchStatistics,
    batches: Iterator[Batch],
    iterations: int,
    run: range,
    how: Arithmetic,
    comm: Comm,
    stop: Stop,
) -> bool:
    """Set BatchNorm's running statistics to their plain mean over `iterations` x `how.logical_workers` device batches. Collective. Return
    False, and leave the statistics, if a rank is asked to stop.

    `batches`: one for each iteration and logical worker of this rank's `run`, in that order. The statistics, (mean, unbiased variance)
    as in training with its mixing and dropout, are added up for each logical worker in order of the iterations, then these sums in order
    of the workers: so the bits don't depend on the number of ranks.

    The sums, 8 bytes x `statistics.n` for each logical worker of this rank, are in main memory: for a ResNet-50 and 2048 logical workers
    on one rank they would take 0.87 GB of a GPU's."""
    device = how.normalise.device
    sums = torch.zeros(len(run), statistics.n, dtype=torch.float64)
    stopping = torch.zeros(1, device=device)
    statistics.to_training()
    for _ in range(iterations):
        for row in sums:
            batch = next(batches)
            with explained(len(batch.labels)):
                forward(statistics.model, batch, how)
            row += statistics.batch.cpu()
        stopping.fill_(stop())
        comm.all_reduce(stopping)()
        if any(comm.look(stopping)):
            return False
    total = torch.zeros(statistics.n, dtype=torch.float64, device=device)
    for first in range(0, how.logical_workers, _ROWS_AT_ONCE):
        workers = range(first, min(first + _ROWS_AT_ONCE, how.logical_workers))
        table = torch.zeros(len(workers), statistics.n, dtype=torch.float64, device=device)
        for worker in workers:
            if worker in run:
                table[worker - first] = sums[worker - run.start]
        comm.all_reduce(table)()  # every row comes from one rank, and the others add zeros
        for row in table:
            total += row
    statistics.running.copy_(total / (iterations * how.logical_workers))
    for layer in statistics.layers:
        layer.num_batches_tracked.fill_(iterations)
    return True
