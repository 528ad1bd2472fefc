"""What is special to ResNets: Intel Caffe's ResNet-50, where the scales start at zero, and blurring before every second pixel is taken
(Zhang, "Making Convolutional Networks Shift-Invariant Again", 2019).

As in FFCV's and Composer's recipes a convolution's input is blurred, which costs less than its output at single steps; the edge has zeros.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stagerun.base.recipe import Filler, Model, VarianceNorm, ZeroGamma
from stagerun.models.catalog import torchvision_network
from stagerun.models.layers import fill, start


def resnet50_intel_caffe(model: Model) -> nn.Module:
    """ResNet-50 as Intel's recipes for Caffe have it, parameters named as in torchvision's.

    Unlike torchvision's resnet50: conv1 has a bias; max pooling pads nothing and rounds up; convolutions are filled by the number of inputs, but
    for conv1; a group's last scale starts at zero; fc starts from normal(0, 0.01). Source: models/intel_optimized_models in sara-nl/caffe.
    """
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
    """Starts the last BatchNorm's scale at zero in the blocks of a ResNet that `which` names, and at one in the others."""
    for name, group in net.named_children():
        if name.startswith("layer"):
            *others, last = group if isinstance(group, nn.Sequential) else [group]
            for block in (*others, last):
                *_, norm = (layer for layer in block.children() if isinstance(layer, nn.BatchNorm2d))
                zero = which is ZeroGamma.ALL or (which is ZeroGamma.LAST and block is last)
                nn.init.constant_(norm.weight, 0.0 if zero else 1.0)


# The images themselves are not blurred: a convolution of fewer input channels stays as it is.
FEWEST_CHANNELS = 16


class Blur(nn.Module):
    """Each map by (1 2 1) x (1 2 1) / 16, exact in every dtype."""

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
    """The hook of a convolution that has a `blur`."""
    return conv.get_submodule("blur")(inputs[0])


class BlurMaxPool2d(nn.MaxPool2d):
    """`pool`, a square in steps of 2, in single steps, blurred, and of that every second pixel: as many pixels as `pool` itself gives."""

    def __init__(self, pool: nn.MaxPool2d, channels: int) -> None:
        super().__init__(pool.kernel_size, 1, pool.padding)
        assert isinstance(pool.kernel_size, int) and isinstance(pool.padding, int)
        self.lack, self.hangs = 2 * pool.padding - pool.kernel_size, pool.ceil_mode
        self.blur = Blur(channels, stride=2)

    def forward(self, x: Tensor) -> Any:
        if self.hangs:
            # The last window may hang over the edge by as much as it lacks for a whole step of 2.
            height, width = ((size + self.lack) % 2 for size in x.shape[-2:])
            x = F.pad(x, (0, width, 0, height), value=-torch.inf)
        return self.blur(super().forward(x))


def add_blur_pool(net: nn.Module) -> None:
    """Blurs a ResNet: each strided convolution of FEWEST_CHANNELS or more, those of shortcuts too, and the max pooling."""
    pool, first = net.get_submodule("maxpool"), net.get_submodule("conv1")
    assert isinstance(pool, nn.MaxPool2d) and isinstance(first, nn.Conv2d)
    net.maxpool = BlurMaxPool2d(pool, first.out_channels)
    for conv in list(net.modules()):
        if isinstance(conv, nn.Conv2d) and max(conv.stride) > 1 and conv.in_channels >= FEWEST_CHANNELS:
            conv.blur = Blur(conv.in_channels)
            conv.register_forward_pre_hook(blur_input)
