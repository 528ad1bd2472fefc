"""Networks without memory for their numbers: names, shapes and kinds of their tensors, however large they are."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from stagerun.base import recipe
from stagerun.language.networks import from_outside
from stagerun.models import build


def without_memory(model: recipe.Model) -> nn.Module:
    """Torch's random state is left alone. A network from outside has memory: it may compute with its tensors."""
    with torch.random.fork_rng(devices=[]):
        if from_outside(model):
            return build(model)
        try:
            with torch.device("meta"):
                return build(model)
        except NotImplementedError:  # torchvision's RegNets compute their widths with tensors, which must have memory
            with _LayersWithoutMemory():
                return build(model)


class _LayersWithoutMemory(TorchFunctionMode):
    """Inside it, the tensors that layers are made of have no memory; those that are computed with have."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.empty, torch.zeros, torch.ones):
            return func(*args, **{**(kwargs or {}), "device": "meta"})
        return func(*args, **(kwargs or {}))


def shapes(network: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of parameters and buffers, by name."""
    return {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
