"""Nets of Caffe's: what `language.net` has read as a module, and its losses. A new layer is a function in `layers` and a row there; what it
is called and what it may say is in `base.net`."""

from stagerun.base.net import Net
from stagerun.models.net.losses import losses
from stagerun.models.net.network import Blobs, Network

__all__ = ["Blobs", "Network", "build", "losses"]


def build(net: Net) -> Network:
    """With freshly drawn weights, from torch's global random state, in float32 on the CPU."""
    return Network(net)
