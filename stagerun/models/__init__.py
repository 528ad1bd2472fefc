"""Networks by name. A new one is a function in one of these modules and a row of `language.networks`, which names it."""

from functools import partial
from importlib import import_module

from torch import Tensor, nn

from stagerun.base.errors import UsageError
from stagerun.base.nets import of_model
from stagerun.base.recipe import Model, ZeroGamma
from stagerun.base.wings import require_wing
from stagerun.language.networks import NETWORKS, TORCHVISION, is_foreign, network_of
from stagerun.models.catalog import torchvision_network
from stagerun.models.foreign import foreign_network
from stagerun.models.layers import BatchNorm2d, fill, norms
from stagerun.models.resnet import add_blur_pool, set_gamma

__all__ = ["BatchNorm2d", "build", "norms"]


def build(model: Model) -> nn.Module:
    """The network with freshly drawn weights, from torch's global random state, in float32 on the CPU.

    Images come as [N, model.channels, H, W]; it answers with logits [N, model.num_classes]. Images of a size that the
    network does not take are a UsageError. Settings that mean nothing for a network are refused by `language`, not here.
    """
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
