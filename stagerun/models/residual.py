"""What is special to ResNets: where the scales start at zero, and Intel Caffe's ResNet-50."""

from torch import nn

from stagerun import recipe
from stagerun.models.catalog import torchvision_network
from stagerun.models.fillers import fill
from stagerun.recipe import Filler, VarianceNorm, ZeroGamma


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
