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
            with torch.device("meta"), _NothingDrawn():
                return build(model)
        except NotImplementedError:  # torchvision's RegNets compute their widths with tensors, which must have memory
            with _LayersWithoutMemory():
                return build(model)


_DRAWING = (nn.init.normal_, nn.init.uniform_, torch.Tensor.normal_, torch.Tensor.uniform_)


class _NothingDrawn(TorchFunctionMode):
    """Inside it, no numbers are drawn for tensors without memory. Torch would draw none either, but imports its compiler for that, which takes
    seconds."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DRAWING:
            tensor = kwargs["tensor"] if "tensor" in kwargs else args[0]
            if tensor.is_meta:
                return tensor
        return func(*args, **kwargs)


class _LayersWithoutMemory(_NothingDrawn):
    """Inside it, the tensors that layers are made of have no memory; those that are computed with have."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.empty, torch.zeros, torch.ones):
            kwargs = {**(kwargs or {}), "device": "meta"}
        return super().__torch_function__(func, types, args, kwargs)


def shapes(network: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of parameters and buffers, by name."""
    return {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
