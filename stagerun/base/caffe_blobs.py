"""The tensors of a .caffemodel by names like torch's, `conv1.weight`, and the order of what a .solverstate remembers. Pure."""

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from stagerun.base import caffe_file, caffe_h5
from stagerun.base.caffe_file import Blob, CaffeNet, Layer, Numbers, Shape
from stagerun.base.net import BatchNorm, Net, statistics_passes
from stagerun.base.net import Layer as NetLayer
from stagerun.base.text import count
from stagerun.base.weights import COUNTER, FACTOR, LONG, MEAN, MERGED, VARIANCE

_ENDS = (".caffemodel", ".caffemodel.h5")


def is_caffes(start: bytes, name: str) -> bool:
    """Whether a file of weights is a .caffemodel, by its name and its first nine bytes."""
    other = is_safetensors(start) or start[:2] == b"PK" or start[:1] == b"\x80"
    return not other and (name.endswith(_ENDS) or start.startswith(caffe_h5.MAGIC))


def is_safetensors(start: bytes) -> bool:
    """By its first nine bytes: the length of a header, of which no one knows one of 4 GB, and its brace."""
    return start[8:9] == b"{" and start[4:8] == bytes(4)


def is_hdf5(data: bytes | memoryview) -> bool:
    return bytes(data[:8]) == caffe_h5.MAGIC


def net_in(data: bytes | memoryview, of: Net | None = None) -> CaffeNet:
    """In Caffe's binary form, or in HDF5. That says of its layers no more than their names: of those that `of` has, the rest is as there."""
    if not is_hdf5(data):
        return caffe_file.read_net(data)
    found = caffe_h5.read_net(bytes(data))
    said = {layer.name: layer for one in (of.test, of.train) for layer in one.layers} if of is not None else {}
    layers = (_as_said(layer, said[layer.name]) if layer.name in said else layer for layer in found.layers)
    return replace(found, layers=tuple(layers))


def _as_said(layer: Layer, said: NetLayer) -> Layer:
    settings = said.settings
    fraction = settings.moving_average_fraction if isinstance(settings, BatchNorm) else None
    return replace(layer, type=said.type, bottoms=len(said.bottoms), fraction=fraction)


def parts(layer: Layer) -> tuple[str, ...]:
    """What each blob of the layer is called. ValueError for a BatchNorm of a kind that no Caffe writes."""
    n = len(layer.blobs)
    alike = n in (3, 5) and layer.blobs[2].data.size == 1
    if layer.type == "BatchNorm" or (not layer.type and alike):  # HDF5 says no types
        if not alike:
            text = f"BatchNorm layer `{layer.name}` has {count(n, 'blob')}"
            raise ValueError(f"{text}: BVLC's Caffe writes 3, and Intel's 5, the third of one number")
        return MERGED[:n]
    if layer.type == "Bias" or (layer.type == "Scale" and layer.bottoms > 1):
        return ("bias",) if n == 1 else tuple(f"blob{i}" for i in range(n))
    return tuple(("weight", "bias")[i] if i < 2 else f"blob{i}" for i in range(n))


def _own(net: CaffeNet) -> Iterator[tuple[Layer, dict[str, Blob]]]:
    """The blobs of each layer by part, without those that it shares with a layer before: Caffe writes these each time."""
    seen: set[str] = set()
    for layer in net.layers:
        found: dict[str, Blob] = {}
        for part, blob, name in zip(parts(layer), layer.blobs, (*layer.shared, *[""] * len(layer.blobs)), strict=False):
            if not name or name not in seen:
                found[part] = blob
            seen.add(name)
        yield layer, found


def learnable(net: CaffeNet) -> tuple[str, ...]:
    """`LAYER.PART` in the order of a history: a blob that is shared comes where it is first."""
    return tuple(f"{layer.name}.{part}" for layer, named in _own(net) for part in named)


def shapes(net: CaffeNet) -> dict[str, Shape]:
    """The shape of each of the `tensors`."""
    found: dict[str, Shape] = {}
    for layer, named in _own(net):
        for part, blob in named.items():
            if part == FACTOR:
                found[f"{layer.name}.{COUNTER}"] = ()
            else:
                found[f"{layer.name}.{part}"] = shape_of(blob, layer.type, part)
    return found


def shape_of(blob: Blob, type_: str, part: str) -> Shape:
    """The blob's; of an old one, which has four axes, without the leading ones that the layer's has not."""
    axes = 2 if type_ == "InnerProduct" and part == "weight" else 4 if part == "weight" else 1
    if not blob.legacy or any(size != 1 for size in blob.shape[: 4 - axes]):
        return blob.shape
    return blob.shape[4 - axes :]


def tensors(net: CaffeNet) -> dict[str, Numbers]:
    """Arrays by name, a shared one by that of the layer which has it first. Of a BatchNorm the mean and the variance, divided as Caffe does in
    testing, and how many passes went into them."""
    found: dict[str, Numbers] = {}
    wanted = shapes(net)
    for layer, named in _own(net):
        factor = named.pop(FACTOR).data if FACTOR in named else None
        if factor is not None:
            scale = factor.dtype.type(0 if factor[0] == 0 else 1 / factor[0])
            found[f"{layer.name}.{COUNTER}"] = np.array(passes(float(factor[0]), layer.fraction), np.int64)
        for part, blob in named.items():
            values = blob.data if factor is None or part not in (MEAN, VARIANCE) else blob.data * scale
            found[f"{layer.name}.{part}"] = values.reshape(wanted[f"{layer.name}.{part}"])
    return found


def passes(factor: float, fraction: float | None) -> int:
    """How many went into statistics that are divided by that. With 1 someone has divided before, who converted or exported the file.
    Without the fraction it can't be told.

    >>> passes(0, 0.95), passes(1, 0.95), passes(1.95, 0.95)
    (0, 1000000, 2)
    """
    if not factor > 0 or not math.isfinite(factor):
        return 0
    if factor == 1 or fraction is None or not 0 <= fraction <= 1:
        return LONG
    return min(statistics_passes(fraction, factor), LONG)
