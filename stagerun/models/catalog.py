"""torchvision's classifiers, with stagerun's BatchNorm and any number of colour channels."""

import math
import re
from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from stagerun.base.recipe import Model
from stagerun.models.layers import FAN_OUT, keep_statistics
from stagerun.models.vision import torchvision_models

# For logits alone, of the images as they come, and weights as published rather than by torch's defaults.
_AUXILIARY = {"aux_logits": False, "transform_input": False, "init_weights": True}
ARGUMENTS: dict[str, dict[str, bool]] = {"googlenet": _AUXILIARY, "inception_v3": _AUXILIARY}


def torchvision_network(name: str, model: Model) -> nn.Module:
    """The network of that name in torchvision, with fresh weights as torchvision draws them."""
    arguments = ARGUMENTS.get(name, {})
    net: nn.Module = torchvision_models().get_model(name, weights=None, num_classes=model.num_classes, **arguments)
    for layer in net.modules():
        if isinstance(layer, nn.BatchNorm2d):
            keep_statistics(layer, 0.9 if model.moving_average_fraction is None else model.moving_average_fraction)
            layer.eps = 1e-5 if model.eps is None else model.eps
    if model.channels != 3:
        first = next(layer for layer in net.modules() if isinstance(layer, nn.Conv2d))
        # The letters that a name begins with are its family: `resnet` of resnet50, `wide` of wide_resnet50_2.
        _change_channels(first, model.channels, FIRST_FILLS[re.split("[^a-z]", name)[0]])
    return net


def _change_channels(conv: nn.Conv2d, channels: int, fill: Callable[[Tensor], Tensor] | None) -> None:
    """Makes a first convolution one for images of other channels, filled by the network's rule, or as torch fills it."""
    conv.in_channels = channels
    conv.weight = nn.Parameter(conv.weight.new_empty(conv.out_channels, channels, *conv.kernel_size))
    conv.reset_parameters()
    if fill is not None:
        fill(conv.weight)
        if conv.bias is not None:
            nn.init.zeros_(conv.bias)


def _patches(weight: Tensor) -> Tensor:
    return nn.init.trunc_normal_(weight, std=math.sqrt(1 / weight[0].numel()))


# The normal ones are cut off at +-2, which is many times each std.
_NORMAL_001, _NORMAL_002, _NORMAL_01 = (partial(nn.init.trunc_normal_, std=std) for std in (0.01, 0.02, 0.1))

# How torchvision fills the first convolution, by family; None: by torch's own weights and biases, else biases start at zero.
FIRST_FILLS: dict[str, Callable[[Tensor], Tensor] | None] = {
    **dict.fromkeys(("alexnet", "shufflenet", "swin"), None),
    **dict.fromkeys(("efficientnet", "mnasnet", "mobilenet", "regnet", "resnet", "resnext", "vgg", "wide"), FAN_OUT),
    "convnext": _NORMAL_002,
    "densenet": nn.init.kaiming_normal_,
    "googlenet": _NORMAL_001,
    "inception": _NORMAL_01,
    "maxvit": _NORMAL_002,
    "squeezenet": nn.init.kaiming_uniform_,
    "vit": _patches,
}
