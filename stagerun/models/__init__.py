"""Networks by name. A new one is a row in MODELS (and in `spec.check`, which a test holds equal)."""

from collections.abc import Callable
from functools import partial

from torch import nn

from stagerun import recipe
from stagerun.models.batch_norm import BatchNorm2d
from stagerun.models.resnet_small import ResNetSmall
from stagerun.models.vision import torchvision_models

__all__ = ["MODELS", "BatchNorm2d", "build"]


def _torchvision(name: str, model: recipe.Model) -> nn.Module:
    norm = partial(BatchNorm2d, moving_average_fraction=model.moving_average_fraction, eps=model.eps)
    net: nn.Module = getattr(torchvision_models(), name)(num_classes=model.num_classes, norm_layer=norm)
    if model.channels != 3:
        net.conv1 = nn.Conv2d(model.channels, 64, 7, stride=2, padding=3, bias=False)
        nn.init.kaiming_normal_(net.conv1.weight, mode="fan_out", nonlinearity="relu")  # torchvision's own filler
    return net


MODELS: dict[str, Callable[[recipe.Model], nn.Module]] = {
    "resnet18": partial(_torchvision, "resnet18"),
    "resnet34": partial(_torchvision, "resnet34"),
    "resnet50": partial(_torchvision, "resnet50"),
    "resnet101": partial(_torchvision, "resnet101"),
    "resnet152": partial(_torchvision, "resnet152"),
    "resnet_small": ResNetSmall,
}


def build(model: recipe.Model) -> nn.Module:
    """The network with freshly drawn weights, from torch's global random state, in float32 on the CPU.

    Images come as [N, model.channels, H, W]; it answers with logits [N, model.num_classes].
    """
    return MODELS[model.name](model)
