"""Networks by name. A new one is a function in one of these modules and a row of `language.networks`, which names it."""

# ruff: noqa: F401 (its imports are its names)

from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from stagerun.base.errors import UsageError
from stagerun.base.recipe import Model, ZeroGamma
from stagerun.base.wings import of_model, require_wing
from stagerun.language.networks import NETWORKS, TORCHVISION, from_outside, is_foreign, network_of
from stagerun.models.catalog import add_blur_pool, set_gamma, torchvision_network
from stagerun.models.foreign import foreign_network
from stagerun.models.layers import BatchNorm2d, fill, norms


def build(model: Model) -> nn.Module:
    """Return the network with random weights, from torch's global random state, in float32 on the CPU. It maps images
    [N, model.channels, H, W] to logits [N, model.num_classes]. Images of a wrong size raise UsageError. `language`
    refuses settings without effect."""
    net = _built(model)
    for norm in norms(net):
        if model.moving_average_passes is not None:
            norm.moving_average_passes = model.moving_average_passes
    return net


def _built(model: Model) -> nn.Module:
    if model.net is not None:
        built: nn.Module = require_wing("caffe.network.build")(of_model(model))
        return built
    if is_foreign(model.name):
        return foreign_network(model)
    if model.name in TORCHVISION:
        net = torchvision_network(model.name, model)
    else:
        module, _, function = NETWORKS[model.name].made_by.partition(".")
        net = getattr(import_module(f"stagerun.models.{module}"), function)(model)
    if model.zero_gamma is not ZeroGamma.AS_PUBLISHED:
        set_gamma(net, model.zero_gamma)
    if model.blur_pool:
        add_blur_pool(net)
    if model.fc_weight_filler or model.fc_bias_filler:
        *_, last = (module for module in net.modules() if isinstance(module, nn.Linear))
        if model.fc_weight_filler:
            fill(last.weight, model.fc_weight_filler)
        if model.fc_bias_filler:
            fill(last.bias, model.fc_bias_filler)
    net.register_forward_pre_hook(partial(_refuse_size, model.name))
    return net


def _refuse_size(name: str, net: nn.Module, inputs: tuple[Tensor]) -> None:
    height, width = inputs[0].shape[-2:]
    if not network_of(name).fits(height, width):
        raise UsageError(
            f"`{name}` takes images of {network_of(name).sizes}, and these have {height} x {width}",
            "cut them with `crop_size`, or resize them with `random_resize_param`, in transform_param and "
            "test_transform_param; or take another network",
        )


# -- networks without memory for their values: only names, shapes and kinds of tensors, however large


def without_memory(model: Model) -> nn.Module:
    """Return a network without memory; keep torch's random state. A network from outside has memory: it may compute with its tensors."""
    with torch.random.fork_rng(devices=[]):
        if from_outside(model):
            return build(model)
        with _LayersWithoutMemory():
            return build(model)


_DRAWING = (nn.init.normal_, nn.init.uniform_, torch.Tensor.normal_, torch.Tensor.uniform_)


class _LayersWithoutMemory(TorchFunctionMode):
    """Makes the tensors of layers without memory; other tensors have memory (RegNets compute their widths). Skips random draws for the former:
    torch would draw nothing either, but imports its compiler first, which takes seconds."""

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
    """Return the shapes of parameters and buffers, by name."""
    return {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
