"""A running average of the weights beside training."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Average:
    """Copies of a model's parameters and BatchNorm statistics (not of counters), in their dtype, that follow them:
    average = decay*average + (1-decay)*w, once every `interval` iterations. The decay is the same from the first step on.

    `tensors` are the copies, by the names of the model's state_dict. Make this after the model has its device, dtype and
    BatchStatistics: its tensors are looked up once.
    """

    def __init__(self, model: nn.Module, decay: float, interval: int) -> None:
        self.decay, self.interval = decay, interval
        self._live = {k: t for k, t in model.state_dict().items() if t.is_floating_point()}
        self.tensors: dict[str, Tensor] = {k: t.clone() for k, t in self._live.items()}

    def restart(self) -> None:
        """The average is what the weights are now."""
        _copy(self._live, self.tensors)

    @torch.no_grad()
    def follow(self, iter: int) -> None:
        """After the update that made the stage's iteration `iter`."""
        if iter % self.interval == 0:
            torch._foreach_lerp_(list(self.tensors.values()), list(self._live.values()), 1 - self.decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model has the averaged weights inside, and exactly its own again outside, whatever happens in between."""
        own = {k: t.clone() for k, t in self._live.items()}
        try:
            _copy(self.tensors, self._live)
            yield
        finally:
            _copy(own, self._live)


@torch.no_grad()
def _copy(source: dict[str, Tensor], target: dict[str, Tensor]) -> None:
    for name, tensor in source.items():
        target[name].copy_(tensor)
