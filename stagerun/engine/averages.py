"""Averages during training: BatchNorm's running statistics, gathered from every logical worker and moved once per iteration or,
as Caffe does, once per pass, and a running average of the weights."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from stagerun.engine.device import to_device
from stagerun.models import norms
from stagerun.models.layers import KeptStatistics


class BatchStatistics:
    """The batch and running statistics of all BatchNorm layers of a model, each kind as one flat vector [n].

    The layers' buffers become views into the vectors, so make this after the model has its device and dtype. Layers that have the same
    moving_average_fraction and have seen as many passes move together. Reinitialised layers, and layers that were frozen before, continue
    from their values. A layer that the network's `train` keeps in evaluation mode stays."""

    def __init__(self, model: nn.Module, frozen: Sequence[nn.Module] = ()) -> None:
        """`frozen`: layers whose statistics don't move."""
        self.model, self.frozen = model, frozen
        held = set(map(id, frozen))
        layers = [m for m in norms(model) if id(m) not in held]
        was = model.training
        model.train()
        self.layers = [layer for layer in layers if layer.training]
        model.train(was)
        # Kept here: in a forward pass, which may run in another thread than `move`, a layer with a custom forward replaces the counter by a
        # copy.
        self._counters = [layer.num_batches_tracked for layer in self.layers]
        self._seen: list[int] = []  # passes, by layer
        self._last_passes: list[int] = []
        self.n = sum(2 * m.num_features for m in self.layers)
        sample = next(model.parameters())
        dtype = self.layers[0].running_mean.dtype if self.layers else sample.dtype
        self.batch = torch.zeros(self.n, dtype=dtype, device=sample.device)
        self.running = torch.zeros(self.n, dtype=dtype, device=sample.device)
        self._parts: list[slice] = []
        start = 0
        for layer in self.layers:
            middle, stop = start + layer.num_features, start + 2 * layer.num_features
            self.running[start:middle].copy_(layer.running_mean)
            self.running[middle:stop].copy_(layer.running_var)
            layer.batch_mean, layer.batch_var = self.batch[start:middle], self.batch[middle:stop]
            layer.running_mean, layer.running_var = self.running[start:middle], self.running[middle:stop]
            self._parts.append(slice(start, stop))
            start = stop

    def to_training(self) -> None:
        """Put the model in training mode, except for frozen layers."""
        self.model.train()
        for layer in self.frozen:
            layer.eval()

    @torch.no_grad()
    def forget(self) -> None:
        """Clear the statistics of a failed iteration: a forward pass adds its statistics to 0 times the last ones, and 0 times infinity
        is not a number."""
        self.batch.zero_()

    def once_more(self) -> None:
        """Prepare the next move for another replica and the same iteration; its buffers are in place."""
        self._seen = [n - k for n, k in zip(self._seen, self._last_passes, strict=True)]

    @torch.no_grad()
    def share_of(self, worker: int, logical_workers: int) -> Tensor:
        """Return [n]: the addend of logical worker `worker`, from its last forward pass, for the sum that `move` takes.

        With k passes in an iteration, of as many workers each in their order, A below becomes f^k * A + the sum of f^(k-1-i) * x_i, x_i the
        mean over the workers of pass i. So workers of a later pass weigh more; their weights have the mean 1."""
        weights = [_share(layer, worker, logical_workers) for layer in self.layers]
        if all(weight == 1 for weight in weights):
            return self.batch
        each = np.repeat(weights, [part.stop - part.start for part in self._parts])
        return self.batch * to_device(torch.from_numpy(each).to(self.batch.dtype), self.batch.device)

    @torch.no_grad()
    def move(self, total: Tensor, logical_workers: int) -> None:
        """Move the running statistics by an iteration. `total` float64 [n]: `share_of` summed over the logical workers.

        Caffe keeps A = f*A + x and c = f*c + 1 and reads A/c, with f the moving_average_fraction. After t passes
        c = (1 - f^t) / (1 - f), so that A/c moves by (x - A/c) * (1 - f^k) / (1 - f^t) in an iteration of k: the first x counts whole."""
        if not self.layers:
            return
        if not self._seen:  # read once, after any restoring, because on a GPU it waits for the device
            self._seen = torch.stack(self._counters).tolist()
        passes = self._last_passes = [_passes(layer, logical_workers) for layer in self.layers]
        self._seen = [n + k for n, k in zip(self._seen, passes, strict=True)]
        torch._foreach_add_(self._counters, passes)
        mean = (total / logical_workers).to(self.running.dtype)
        seen = zip(self.layers, self._seen, passes, strict=True)
        weights = [_weight(layer.moving_average_fraction, n, k) for layer, n, k in seen]
        if len(set(weights)) == 1:
            self.running.lerp_(mean, weights[0])
            return
        for part, weight in zip(self._parts, weights, strict=True):
            self.running[part].lerp_(mean[part], weight)


def _passes(layer: KeptStatistics, logical_workers: int) -> int:
    return layer.moving_average_passes or logical_workers


def _share(layer: KeptStatistics, worker: int, logical_workers: int) -> float:
    passes, f = _passes(layer, logical_workers), layer.moving_average_fraction
    if passes == 1 or f == 1:
        return 1.0
    later = passes - 1 - worker * passes // logical_workers
    return passes * f**later * (1 - f) / (1 - f**passes)


def _weight(fraction: float, seen: int, passes: int) -> float:
    """Return the weight of the newest iteration's passes among all `seen`; with a fraction of 1 all count alike."""
    return passes / seen if fraction == 1 else (1 - fraction**passes) / (1 - fraction**seen)


class Average:
    """Copies of a model's parameters and BatchNorm statistics (not of counters), in their dtype, that follow them:
    average = decay*average + (1-decay)*w, once every `interval` iterations. The decay is the same from the first step on.

    `tensors` are the copies, by the names of the model's state_dict. Make this after the model has its device, dtype and
    BatchStatistics: its tensors are looked up once."""

    def __init__(self, model: nn.Module, decay: float, interval: int) -> None:
        self.decay, self.interval = decay, interval
        self._live = {k: t for k, t in model.state_dict().items() if t.is_floating_point()}
        self.tensors: dict[str, Tensor] = {k: t.clone() for k, t in self._live.items()}

    def restart(self) -> None:
        """Set the average to the current weights."""
        _copy(self._live, self.tensors)

    @torch.no_grad()
    def follow(self, iter: int) -> None:
        """Move the average after the update that made the stage's iteration `iter`."""
        if iter % self.interval == 0:
            torch._foreach_lerp_(list(self.tensors.values()), list(self._live.values()), 1 - self.decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Give the model the averaged weights inside the context, and exactly the trained ones afterwards, even after an exception."""
        trained = {k: t.clone() for k, t in self._live.items()}
        try:
            _copy(self.tensors, self._live)
            yield
        finally:
            _copy(trained, self._live)


@torch.no_grad()
def _copy(source: dict[str, Tensor], target: dict[str, Tensor]) -> None:
    for name, tensor in source.items():
        target[name].copy_(tensor)
