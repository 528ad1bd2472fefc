"""Several trained networks as one: the mean of their answers, or of their weights."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stagerun.base.recipe import EnsembleRule, Precision
from stagerun.comm import Comm
from stagerun.engine.averages import BatchStatistics
from stagerun.engine.device import autocast
from stagerun.engine.images import Batch, Normalise
from stagerun.engine.update import Arithmetic, explained, forward

_ROWS_AT_ONCE = 16  # of the table of BatchNorm statistics, which for a ResNet-50 are half a megabyte each


@dataclass(frozen=True, slots=True)
class Member:
    """A network, and how it takes a batch of an evaluation."""

    model: nn.Module
    normalise: Normalise
    precision: Precision

    def logits(self, batch: Batch) -> Tensor:
        """float64 [N, classes]."""
        with autocast(self.precision, self.normalise.device):
            logits: Tensor = self.model(self.normalise(batch.images))
        return logits.double()


def together(members: Sequence[Member], rule: EnsembleRule) -> Callable[[Batch], Tensor]:
    """What the members say of a batch, float64 [N, classes], one after the other, added up in their order."""
    combine = mean_logit if rule is EnsembleRule.MEAN_LOGIT else log_mean_probability
    for member in members:
        member.model.eval()
    return lambda batch: combine(torch.stack([member.logits(batch) for member in members]))


def mean_logit(logits: Tensor) -> Tensor:
    """[members, N, classes] -> [N, classes]."""
    return logits.mean(0)


def log_mean_probability(logits: Tensor) -> Tensor:
    """[members, N, classes] -> [N, classes]: log of the mean over members of softmax.

    Its order is that of the mean, and its cross entropy is -log of the mean probability of the label, since the
    probabilities of a mean sum to 1.
    """
    return logits.log_softmax(2).logsumexp(0) - math.log(len(logits))


def batch_norm_names(model: nn.Module) -> frozenset[str]:
    """The names, in the model's state_dict, of BatchNorm's running statistics and of the counts beside them."""
    return frozenset(
        statistic if module is model else f"{name}.{statistic}"  # a layer of a net may have an empty name, too
        for name, module in model.named_modules()
        if "batch_mean" in module._buffers
        for statistic in ("running_mean", "running_var", "num_batches_tracked")
    )


class WeightMean:
    """The mean of several networks' weights, plain or weighted, added up in float64 in the order in which they come; one of them is in
    memory at a time, besides the sum."""

    def __init__(self, model: nn.Module) -> None:
        """`model`: any network of the kind."""
        self._statistics = batch_norm_names(model)
        self._sums: dict[str, Tensor] = {}
        self._whole = 0.0

    def add(self, weights: Mapping[str, Tensor], share: float | None = None) -> None:
        """Parameters and buffers by name. `share`: what they count for, of 1 in all; None: as much as each other one. ValueError naming a
        buffer of whole numbers that is not the same in all."""
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
        """float64, but for whole numbers. BatchNorm's statistics are the mean of statistics, not those of the mean."""
        return {k: t / self._whole if t.is_floating_point() else t for k, t in self._sums.items()}


@torch.no_grad()
def take_statistics(
    model: nn.Module,
    statistics: BatchStatistics,
    frozen: Sequence[nn.Module],
    batches: Iterator[Batch],
    iterations: int,
    run: range,
    how: Arithmetic,
    comm: Comm,
    stop: Callable[[], bool],
) -> bool:
    """Sets BatchNorm's running statistics, but those of `frozen` layers, to the plain mean of those of `iterations` x `how.logical_workers`
    device batches. Collective. False if a rank is asked to stop; the statistics are then as they were.

    `batches`: one for each iteration and logical worker of this rank's `run`, in that order. Each logical worker's are added
    up by themselves, in order of the iterations, and then those sums in order of the workers: so the bits don't depend on
    how many ranks there are. (mean, unbiased variance) of a device batch as in training, with what training mixes and drops.

    The sums, 8 bytes x `statistics.n` for each logical worker of this rank, are in main memory: those of a ResNet-50 and 2048
    logical workers on one rank would take 0.87 GB of a GPU's.
    """
    device = how.normalise.device
    sums = torch.zeros(len(run), statistics.n, dtype=torch.float64)
    stopping = torch.zeros(1, device=device)
    model.train()
    for layer in frozen:
        layer.eval()
    for _ in range(iterations):
        for row in sums:
            batch = next(batches)
            with explained(len(batch.labels)):
                forward(model, batch, how)
            row += statistics.batch.cpu()
        stopping.fill_(stop())
        comm.all_reduce(stopping)()
        if stopping.item():
            return False
    total = torch.zeros(statistics.n, dtype=torch.float64, device=device)
    for first in range(0, how.logical_workers, _ROWS_AT_ONCE):
        workers = range(first, min(first + _ROWS_AT_ONCE, how.logical_workers))
        table = torch.zeros(len(workers), statistics.n, dtype=torch.float64, device=device)
        for worker in workers:
            if worker in run:
                table[worker - first] = sums[worker - run.start]
        comm.all_reduce(table)()  # every row is one rank's, and the others add zeros
        for row in table:
            total += row
    statistics.running.copy_(total / (iterations * how.logical_workers))
    for layer in statistics.layers:
        layer.num_batches_tracked.fill_(iterations)
    return True
