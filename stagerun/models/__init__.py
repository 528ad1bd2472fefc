"""Networks by name. A new one is a class in one of these modules and a row of `language.networks`, which names it."""

from collections.abc import Callable
from functools import partial
from importlib import import_module

from torch import Tensor, nn

from stagerun.base import recipe
from stagerun.base.errors import UsageError
from stagerun.base.recipe import ZeroGamma
from stagerun.language.nets import of_model
from stagerun.language.networks import NETWORKS, TORCHVISION, is_foreign, network_of
from stagerun.models.catalog import torchvision_network
from stagerun.models.foreign import foreign_network
from stagerun.models.layers import BatchNorm2d, fill, norms
from stagerun.models.net import build as build_net
from stagerun.models.resnet import add_blur_pool, set_gamma

__all__ = ["BatchNorm2d", "build", "maker", "norms"]


def maker(name: str) -> Callable[[recipe.Model], nn.Module]:
    """What makes the network of that name."""
    if name in TORCHVISION:
        return partial(torchvision_network, name)
    module, _, what = NETWORKS[name].made_by.partition(".")
    made: Callable[[recipe.Model], nn.Module] = getattr(import_module(f"stagerun.models.{module}"), what)
    return made


def build(model: recipe.Model) -> nn.Module:
    """The network with freshly drawn weights, from torch's global random state, in float32 on the CPU.

    Images come as [N, model.channels, H, W]; it answers with logits [N, model.num_classes]. Images of a size that the
    network does not take are a UsageError. Settings that mean nothing for a network are refused by `language`, not here.
    """
    net = _built(model)
    for norm in norms(net):
        if model.moving_average_passes is not None:
            norm.moving_average_passes = model.moving_average_passes
    return net


def _built(model: recipe.Model) -> nn.Module:
    if model.net is not None:
        return build_net(of_model(model), model.moving_average_fraction, model.eps)
    if is_foreign(model.name):
        return foreign_network(model)
    net = maker(model.name)(model)
    if model.zero_gamma is not ZeroGamma.AS_PUBLISHED:
        set_gamma(net, model.zero_gamma)
    if model.blur_pool:
        add_blur_pool(net)
    _fill_last(net, model.fc_weight_filler, model.fc_bias_filler)
    net.register_forward_pre_hook(partial(_refuse_size, model.name))
    return net


def _fill_last(net: nn.Module, weight: recipe.Filler | None, bias: recipe.Filler | None) -> None:
    """Fills the last linear layer where a filler is given."""
    if weight is None and bias is None:
        return
    last = [module for module in net.modules() if isinstance(module, nn.Linear)][-1]
    if weight is not None:
        fill(last.weight, weight)
    if bias is not None:
        fill(last.bias, bias)


def _refuse_size(name: str, net: nn.Module, inputs: tuple[Tensor]) -> None:
    height, width = inputs[0].shape[-2:]
    if not network_of(name).fits(height, width):
        raise UsageError(
            f"`{name}` takes images of {network_of(name).sizes}, and these have {height} x {width}",
            "cut them with `crop_size`, or resize them with `random_resize_param`, in transform_param and "
            "test_transform_param; or take another network",
        )
