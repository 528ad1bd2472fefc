"""torchvision's classifiers, with stagerun's BatchNorm and any number of colour channels."""

import math
import re
from collections.abc import Callable

from torch import nn

from stagerun import recipe
from stagerun.models.layers import BatchNorm2d
from stagerun.models.vision import torchvision_models

# What is asked of a network besides its number of classes: logits alone, of the images as they come. To leave the weights
# to torch's defaults would be another network than the published one.
_AUXILIARY = {"aux_logits": False, "transform_input": False, "init_weights": True}
ARGUMENTS: dict[str, dict[str, bool]] = {"googlenet": _AUXILIARY, "inception_v3": _AUXILIARY}


def torchvision_network(name: str, model: recipe.Model) -> nn.Module:
    """The network of that name in torchvision, with fresh weights as torchvision draws them."""
    net: nn.Module = torchvision_models().get_model(
        name, weights=None, num_classes=model.num_classes, **ARGUMENTS.get(name, {})
    )
    for path, module in list(net.named_modules()):
        if isinstance(module, nn.BatchNorm2d):
            _put(net, path, _batch_norm(module, model))
    if model.channels != 3:
        path, first = next((p, m) for p, m in net.named_modules() if isinstance(m, nn.Conv2d))
        _put(net, path, _of_channels(first, model.channels, FIRST_FILLS[family(name)]))
    return net


def family(name: str) -> str:
    """The letters that a name begins with: `resnet` of resnet50, `wide` of wide_resnet50_2."""
    found = re.match("[a-z]+", name)
    assert found
    return found[0]


def _put(net: nn.Module, path: str, module: nn.Module) -> None:
    owner, _, last = path.rpartition(".")
    setattr(net.get_submodule(owner), last, module)


def _batch_norm(theirs: nn.BatchNorm2d, model: recipe.Model) -> BatchNorm2d:
    """Ours with the parameters of theirs."""
    ours = BatchNorm2d(theirs.num_features, model.moving_average_fraction, model.eps)
    ours.weight, ours.bias = theirs.weight, theirs.bias
    return ours


def _of_channels(conv: nn.Conv2d, channels: int, fill: Callable[[nn.Conv2d], None]) -> nn.Conv2d:
    """A first convolution for images of other channels, filled by the network's rule."""
    assert conv.groups == 1 and not isinstance(conv.padding, str)
    shape = (conv.kernel_size, conv.stride, conv.padding)
    new = nn.Conv2d(channels, conv.out_channels, *shape, bias=conv.bias is not None)  # type: ignore[arg-type]
    fill(new)
    if new.bias is not None and fill is not _as_torch:
        nn.init.zeros_(new.bias)
    return new


def _as_torch(conv: nn.Conv2d) -> None:
    """torch's own weights and biases stay."""


def _fan_out(conv: nn.Conv2d) -> None:
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")


def _fan_in(conv: nn.Conv2d) -> None:
    nn.init.kaiming_normal_(conv.weight)


def _fan_in_uniform(conv: nn.Conv2d) -> None:
    nn.init.kaiming_uniform_(conv.weight)


def _patches(conv: nn.Conv2d) -> None:
    fan_in = conv.weight[0].numel()
    nn.init.trunc_normal_(conv.weight, std=math.sqrt(1 / fan_in))


def _normal(std: float) -> Callable[[nn.Conv2d], None]:
    """Cut off at +-2, which is many times every std that is used."""

    def fill(conv: nn.Conv2d) -> None:
        nn.init.trunc_normal_(conv.weight, std=std)

    return fill


# How torchvision fills the first convolution, by family; biases, where there are any, start at zero, but for torch's own.
FIRST_FILLS: dict[str, Callable[[nn.Conv2d], None]] = {
    "alexnet": _as_torch,
    "convnext": _normal(0.02),
    "densenet": _fan_in,
    "efficientnet": _fan_out,
    "googlenet": _normal(0.01),
    "inception": _normal(0.1),
    "maxvit": _normal(0.02),
    "mnasnet": _fan_out,
    "mobilenet": _fan_out,
    "regnet": _fan_out,
    "resnet": _fan_out,
    "resnext": _fan_out,
    "shufflenet": _as_torch,
    "squeezenet": _fan_in_uniform,
    "swin": _as_torch,
    "vgg": _fan_out,
    "vit": _patches,
    "wide": _fan_out,
}
