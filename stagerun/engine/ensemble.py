"""Several trained networks as one: the mean of their answers, or of their weights."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from stagerun.base.recipe import EnsembleRule
from stagerun.comm import Comm
from stagerun.engine.averages import BatchStatistics
from stagerun.engine.evaluate import Classifier
from stagerun.engine.images import Batch
from stagerun.engine.update import Arithmetic, explained, forward

_ROWS_AT_ONCE = 16  # of the table of BatchNorm statistics, which for a ResNet-50 are half a megabyte each


def together(members: Sequence[Classifier], rule: EnsembleRule) -> Callable[[Batch], Tensor]:
    """What the members answer to a batch, one after the other, added up in their order: float64 [N, classes], the mean logits or the
    logarithms of the mean probabilities.

    The order of the latter is that of the mean, and their cross entropy is -log of the mean probability of the label, since the
    probabilities of a mean sum to 1.
    """

    def answer(batch: Batch) -> Tensor:
        logits = torch.stack([member(batch).double() for member in members])
        if rule is EnsembleRule.MEAN_LOGIT:
            return logits.mean(0)
        return logits.log_softmax(2).logsumexp(0) - math.log(len(members))

    return answer


def batch_norm_names(model: nn.Module) -> frozenset[str]:
    """The names, in the model's state_dict, of BatchNorm's running statistics and of the counts beside them."""
    return frozenset(
        statistic if module is model else f"{name}.{statistic}"  # a layer of a net may have an empty name, too
        for name, module in model.named_modules()
        if any(held == "batch_mean" for held, _ in module.named_buffers(recurse=False))
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
    statistics: BatchStatistics,
    batches: Iterator[Batch],
    iterations: int,
    run: range,
    how: Arithmetic,
    comm: Comm,
    stop: Callable[[], bool],
) -> bool:
    """Sets BatchNorm's running statistics to the plain mean of those of `iterations` x `how.logical_workers` device batches. Collective. False if a rank is asked to stop; the statistics are then as they were.

    `batches`: one for each iteration and logical worker of this rank's `run`, in that order. Each logical worker's are added
    up by themselves, in order of the iterations, and then those sums in order of the workers: so the bits don't depend on
    how many ranks there are. (mean, unbiased variance) of a device batch as in training, with what training mixes and drops.

    The sums, 8 bytes x `statistics.n` for each logical worker of this rank, are in main memory: those of a ResNet-50 and 2048
    logical workers on one rank would take 0.87 GB of a GPU's.
    """
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
        comm.all_reduce(table)()  # every row is one rank's, and the others add zeros
        for row in table:
            total += row
    statistics.running.copy_(total / (iterations * how.logical_workers))
    for layer in statistics.layers:
        layer.num_batches_tracked.fill_(iterations)
    return True
