"""torchvision's classifiers, with stagerun's BatchNorm and any number of colour channels; variants of its ResNets: Intel Caffe's ResNet-50,
whose scales start at zero, and blurring before strides (Zhang, "Making Convolutional Networks Shift-Invariant Again", 2019).

As in FFCV's and Composer's recipes, a convolution's input is blurred, which costs less than its output without stride; the edge has zeros.
"""

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stagerun.base.recipe import Filler, Model, VarianceNorm, ZeroGamma
from stagerun.models.layers import FAN_OUT, fill, keep_statistics, start
from stagerun.models.vision import torchvision_models

# For only the logits, unchanged input, and weights as published rather than torch's defaults.
_AUXILIARY = {"aux_logits": False, "transform_input": False, "init_weights": True}
ARGUMENTS: dict[str, dict[str, bool]] = {"googlenet": _AUXILIARY, "inception_v3": _AUXILIARY}


def torchvision_network(name: str, model: Model) -> nn.Module:
    """Return the network of that name in torchvision, with random weights as torchvision draws them."""
    arguments = ARGUMENTS.get(name, {})
    net: nn.Module = torchvision_models().get_model(name, weights=None, num_classes=model.num_classes, **arguments)
    for layer in net.modules():
        if isinstance(layer, nn.BatchNorm2d):
            keep_statistics(layer, 0.9 if model.moving_average_fraction is None else model.moving_average_fraction)
            layer.eps = 1e-5 if model.eps is None else model.eps
    if model.channels != 3:
        first = next(layer for layer in net.modules() if isinstance(layer, nn.Conv2d))
        # The leading letters of a name are its family: `resnet` of resnet50, `wide` of wide_resnet50_2.
        first_fill = FIRST_FILLS[re.split("[^a-z]", name)[0]]
        first.in_channels = model.channels
        first.weight = nn.Parameter(first.weight.new_empty(first.out_channels, model.channels, *first.kernel_size))
        first.reset_parameters()
        if first_fill is not None:
            first_fill(first.weight)
            if first.bias is not None:
                nn.init.zeros_(first.bias)
    return net


# The normal distributions are cut off at +-2, which is many times each std.
_NORMAL_001, _NORMAL_002, _NORMAL_01 = (partial(nn.init.trunc_normal_, std=std) for std in (0.01, 0.02, 0.1))

# torchvision's filling of the first convolution, by family; None: torch's default weights and biases, else biases start at zero.
FIRST_FILLS: dict[str, Callable[[Tensor], Tensor] | None] = {
    **dict.fromkeys(("alexnet", "shufflenet", "swin"), None),
    **dict.fromkeys(("efficientnet", "mnasnet", "mobilenet", "regnet", "resnet", "resnext", "vgg", "wide"), FAN_OUT),
    "convnext": _NORMAL_002,
    "densenet": nn.init.kaiming_normal_,
    "googlenet": _NORMAL_001,
    "inception": _NORMAL_01,
    "maxvit": _NORMAL_002,
    "squeezenet": nn.init.kaiming_uniform_,
    "vit": lambda weight: nn.init.trunc_normal_(weight, std=math.sqrt(1 / weight[0].numel())),
}


def resnet50_intel_caffe(model: Model) -> nn.Module:
    """Return ResNet-50 as in Intel's recipes for Caffe, with torchvision's names of parameters. Unlike torchvision's
    resnet50: conv1 has a bias; max pooling has no padding and rounds up; convolutions except conv1 are filled by the
    number of inputs; a group's last scale starts at zero; fc starts from normal(0, 0.01). Source:
    models/intel_optimized_models in sara-nl/caffe."""
    net = torchvision_network("resnet50", model)
    first = net.conv1 = nn.Conv2d(model.channels, 64, 7, stride=2, padding=3)
    net.maxpool = nn.MaxPool2d(3, stride=2, ceil_mode=True)

    def conv(weight: Tensor) -> None:
        norm = VarianceNorm.FAN_OUT if weight is first.weight else VarianceNorm.FAN_IN
        fill(weight, Filler(type="msra", variance_norm=norm))

    start(net, conv, partial(fill, filler=Filler(type="gaussian", std=0.01)))
    set_gamma(net, ZeroGamma.LAST)
    return net


def set_gamma(net: nn.Module, which: ZeroGamma) -> None:
    """Start the last BatchNorm's scale at zero in the blocks of a ResNet that `which` names, and at one in the others."""
    for name, group in net.named_children():
        if name.startswith("layer"):
            *others, last = group if isinstance(group, nn.Sequential) else [group]
            for block in (*others, last):
                *_, norm = (layer for layer in block.children() if isinstance(layer, nn.BatchNorm2d))
                zero = which is ZeroGamma.ALL or (which is ZeroGamma.LAST and block is last)
                nn.init.constant_(norm.weight, 0.0 if zero else 1.0)


# The images are not blurred: a convolution with fewer input channels stays as it is.
FEWEST_CHANNELS = 16


class Blur(nn.Module):
    """Filters each map by (1 2 1) x (1 2 1) / 16, exact in every dtype."""

    filter: Tensor

    def __init__(self, channels: int, stride: int = 1) -> None:
        super().__init__()
        self.channels, self.stride = channels, stride
        line = torch.tensor([1.0, 2.0, 1.0]) / 4
        filter = torch.outer(line, line).expand(channels, 1, 3, 3).contiguous()
        self.register_buffer("filter", filter, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.filter, stride=self.stride, padding=1, groups=self.channels)


def blur_input(conv: nn.Module, inputs: tuple[Tensor]) -> Any:
    """Blur the input of a convolution that has a `blur`, as its hook."""
    return conv.get_submodule("blur")(inputs[0])


class BlurMaxPool2d(nn.MaxPool2d):
    """`pool`, a square with stride 2, with stride 1, then blurred with stride 2: the output has the size of `pool`'s."""

    def __init__(self, pool: nn.MaxPool2d, channels: int) -> None:
        super().__init__(pool.kernel_size, 1, pool.padding)
        assert isinstance(pool.kernel_size, int) and isinstance(pool.padding, int)
        self.lack, self.hangs = 2 * pool.padding - pool.kernel_size, pool.ceil_mode
        self.blur = Blur(channels, stride=2)

    def forward(self, x: Tensor) -> Any:
        if self.hangs:
            # The last window may extend over the edge to complete a step of 2.
            height, width = ((size + self.lack) % 2 for size in x.shape[-2:])
            x = F.pad(x, (0, width, 0, height), value=-torch.inf)
        return self.blur(super().forward(x))


def add_blur_pool(net: nn.Module) -> None:
    """Blur a ResNet: each strided convolution with FEWEST_CHANNELS or more, even in shortcuts, and the max pooling."""
    pool, first = net.get_submodule("maxpool"), net.get_submodule("conv1")
    assert isinstance(pool, nn.MaxPool2d) and isinstance(first, nn.Conv2d)
    net.maxpool = BlurMaxPool2d(pool, first.out_channels)
    for conv in list(net.modules()):
        if isinstance(conv, nn.Conv2d) and max(conv.stride) > 1 and conv.in_channels >= FEWEST_CHANNELS:
            conv.blur = Blur(conv.in_channels)
            conv.register_forward_pre_hook(blur_input)
