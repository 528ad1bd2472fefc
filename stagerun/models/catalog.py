"""torchvision's classifiers, with stagerun's BatchNorm and any number of colour channels."""

import math
import re
from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from stagerun.base import recipe
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


def _of_channels(conv: nn.Conv2d, channels: int, fill: Callable[[Tensor], Tensor] | None) -> nn.Conv2d:
    """A first convolution for images of other channels, filled by the network's rule, or as torch fills it."""
    assert conv.groups == 1 and not isinstance(conv.padding, str)
    shape = (conv.kernel_size, conv.stride, conv.padding)
    new = nn.Conv2d(channels, conv.out_channels, *shape, bias=conv.bias is not None)  # type: ignore[arg-type]
    if fill is not None:
        fill(new.weight)
        if new.bias is not None:
            nn.init.zeros_(new.bias)
    return new


def _patches(weight: Tensor) -> Tensor:
    return nn.init.trunc_normal_(weight, std=math.sqrt(1 / weight[0].numel()))


def _normal(std: float) -> Callable[[Tensor], Tensor]:
    """Cut off at +-2, which is many times every std that is used."""
    return partial(nn.init.trunc_normal_, std=std)


_FAN_OUT = partial(nn.init.kaiming_normal_, mode="fan_out", nonlinearity="relu")

# How torchvision fills the first convolution, by family; None: by torch's own weights and biases, else biases start at zero.
FIRST_FILLS: dict[str, Callable[[Tensor], Tensor] | None] = {
    "alexnet": None,
    "convnext": _normal(0.02),
    "densenet": nn.init.kaiming_normal_,
    "efficientnet": _FAN_OUT,
    "googlenet": _normal(0.01),
    "inception": _normal(0.1),
    "maxvit": _normal(0.02),
    "mnasnet": _FAN_OUT,
    "mobilenet": _FAN_OUT,
    "regnet": _FAN_OUT,
    "resnet": _FAN_OUT,
    "resnext": _FAN_OUT,
    "shufflenet": None,
    "squeezenet": nn.init.kaiming_uniform_,
    "swin": None,
    "vgg": _FAN_OUT,
    "vit": _patches,
    "wide": _FAN_OUT,
}
