"""Networks without memory for their numbers: names, shapes and kinds of their tensors, however large they are."""

from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from stagerun.base.recipe import Model
from stagerun.language.networks import from_outside
from stagerun.models import build


def without_memory(model: Model) -> nn.Module:
    """Torch's random state is left alone. A network from outside has memory: it may compute with its tensors."""
    with torch.random.fork_rng(devices=[]):
        if from_outside(model):
            return build(model)
        with _LayersWithoutMemory():
            return build(model)


_DRAWING = (nn.init.normal_, nn.init.uniform_, torch.Tensor.normal_, torch.Tensor.uniform_)


class _LayersWithoutMemory(TorchFunctionMode):
    """Tensors that layers are made of have no memory; those that are computed with have (RegNets compute their widths). Nothing is drawn for
    the former: torch would draw nothing either, but imports its compiler for that, which takes seconds."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.empty, torch.zeros, torch.ones):
            kwargs["device"] = "meta"
        if func in _DRAWING:
            tensor = kwargs["tensor"] if "tensor" in kwargs else args[0]
            if tensor.is_meta:
                return tensor
        return func(*args, **kwargs)


def shapes(network: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of parameters and buffers, by name."""
    return {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
