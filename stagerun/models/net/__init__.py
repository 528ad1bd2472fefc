"""Nets of Caffe's: what `language.net` has read as a module, and its losses. A new layer is a function in `layers` and a row there; what it
is called and what it may say is in `base.net`."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from stagerun.base.net import BatchNorm, Net, Pass
from stagerun.models.net.held import Blobs
from stagerun.models.net.losses import losses
from stagerun.models.net.network import Network

__all__ = ["Blobs", "Network", "build", "losses"]


def build(net: Net, moving_average_fraction: float | None = None, eps: float | None = None) -> Network:
    """With freshly drawn weights, from torch's global random state, in float32 on the CPU. What is given is for all BatchNorm layers, in the
    place of what they say."""
    given = {"moving_average_fraction": moving_average_fraction, "eps": eps}
    changes = {name: value for name, value in given.items() if value is not None}
    return Network(_with_norms(net, changes) if changes else net)


def _with_norms(net: Net, changes: Mapping[str, Any]) -> Net:
    def changed(one: Pass) -> Pass:
        layers = (
            replace(layer, settings=replace(layer.settings, **changes))
            if isinstance(layer.settings, BatchNorm)
            else layer
            for layer in one.layers
        )
        return replace(one, layers=tuple(layers))

    return replace(net, train=changed(net.train), test=changed(net.test))
