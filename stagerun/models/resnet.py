"""What is special to ResNets: Intel Caffe's ResNet-50, where the scales start at zero, and blurring before every second pixel is taken
(Zhang, "Making Convolutional Networks Shift-Invariant Again", 2019).

It blurs as the recipes of FFCV and MosaicML's Composer do: a convolution's input in place of its output at single steps, which would cost four
times the convolution; and the edge is padded with zeros, which works for a map of any size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stagerun.base import recipe
from stagerun.base.recipe import Filler, VarianceNorm, ZeroGamma
from stagerun.models.catalog import torchvision_network
from stagerun.models.layers import fill


def resnet50_intel_caffe(model: recipe.Model) -> nn.Module:
    """ResNet-50 as Intel's recipes for Caffe have it, parameters named as in torchvision's.

    Unlike torchvision's resnet50 (and like it with the stride in the 3x3 convolutions): conv1 has a bias; max pooling
    pads nothing and rounds up; convolutions are filled by the number of inputs, but for conv1; the last scale of the last
    block of each group starts at zero; fc starts from normal(0, 0.01). Source: models/intel_optimized_models in sara-nl/caffe.
    """
    net = torchvision_network("resnet50", model)
    net.conv1 = nn.Conv2d(model.channels, 64, 7, stride=2, padding=3)
    net.maxpool = nn.MaxPool2d(3, stride=2, ceil_mode=True)
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            norm = VarianceNorm.FAN_OUT if module is net.conv1 else VarianceNorm.FAN_IN
            fill(module.weight, Filler(type="msra", variance_norm=norm))
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    fc = net.get_submodule("fc")
    assert isinstance(fc, nn.Linear)
    fill(fc.weight, Filler(type="gaussian", std=0.01))
    fill(fc.bias, Filler(type="constant", value=0))
    set_gamma(net, ZeroGamma.LAST)
    return net


def set_gamma(net: nn.Module, which: ZeroGamma) -> None:
    """Starts the last BatchNorm's scale at zero in the blocks of a ResNet that `which` names, and at one in the others."""
    groups = [group for name, group in net.named_children() if name.startswith("layer")]
    for group in groups:
        blocks = list(group) if isinstance(group, nn.Sequential) else [group]
        for block in blocks:
            zero = which is ZeroGamma.ALL or (which is ZeroGamma.LAST and block is blocks[-1])
            norms = [norm for name, norm in block.named_children() if name.startswith("bn")]
            assert isinstance(norms[-1], nn.BatchNorm2d)
            nn.init.constant_(norms[-1].weight, 0.0 if zero else 1.0)


# The images themselves are not blurred: a convolution of fewer input channels stays as it is.
FEWEST_CHANNELS = 16


def blur_filter(channels: int, like: Tensor) -> Tensor:
    """[channels, 1, 3, 3]: (1 2 1) x (1 2 1) / 16, exact in every dtype."""
    line = torch.tensor([1.0, 2.0, 1.0], dtype=like.dtype, device=like.device) / 4
    return torch.outer(line, line).expand(channels, 1, 3, 3).contiguous()


class BlurConv2d(nn.Conv2d):
    """A convolution whose input is blurred first. It takes over the parameters of `conv`, under the same names."""

    blur: Tensor

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__(
            conv.in_channels,
            conv.out_channels,
            conv.kernel_size,  # type: ignore[arg-type]
            conv.stride,  # type: ignore[arg-type]
            conv.padding,  # type: ignore[arg-type]
            groups=conv.groups,
            bias=conv.bias is not None,
            device="meta",  # so that nothing is drawn
        )
        self.weight, self.bias = conv.weight, conv.bias
        self.register_buffer("blur", blur_filter(conv.in_channels, conv.weight.detach()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.conv2d(x, self.blur, padding=1, groups=self.in_channels))


class BlurMaxPool2d(nn.MaxPool2d):
    """`pool` in single steps, blurred, and of that every second pixel: as many pixels as `pool` itself gives.

    `pool`: a square, in steps of 2, without dilation.
    """

    blur: Tensor

    def __init__(self, pool: nn.MaxPool2d, channels: int, like: Tensor) -> None:
        super().__init__(pool.kernel_size, 1, pool.padding)
        assert isinstance(pool.kernel_size, int) and isinstance(pool.padding, int)
        self.lack = 2 * pool.padding - pool.kernel_size
        self.ceil = pool.ceil_mode
        self.register_buffer("blur", blur_filter(channels, like), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.ceil:
            # The last window may hang over the edge by as much as it lacks for a whole step of 2.
            over = [(size + self.lack) % 2 for size in x.shape[-2:]]
            x = F.pad(x, (0, over[1], 0, over[0]), value=-torch.inf)
        return F.conv2d(super().forward(x), self.blur, stride=2, padding=1, groups=x.shape[1])


def add_blur_pool(net: nn.Module) -> None:
    """Blurs a ResNet: each strided convolution of FEWEST_CHANNELS or more, those of shortcuts too, and the max pooling."""
    pool, first = net.get_submodule("maxpool"), net.get_submodule("conv1")
    assert isinstance(pool, nn.MaxPool2d) and isinstance(first, nn.Conv2d)
    net.maxpool = BlurMaxPool2d(pool, first.out_channels, first.weight.detach())
    for name, conv in list(net.named_modules()):
        if isinstance(conv, nn.Conv2d) and max(conv.stride) > 1 and conv.in_channels >= FEWEST_CHANNELS:
            owner, _, last = name.rpartition(".")
            setattr(net.get_submodule(owner), last, BlurConv2d(conv))
