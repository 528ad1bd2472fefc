"""The tensors of a .caffemodel by names like torch's, `conv1.weight`, and the order of what a .solverstate remembers. Pure."""

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from stagerun.base.text import count
from stagerun.base.weights import COUNTER, FACTOR, LONG, MEAN, MERGED, VARIANCE, is_hdf5
from stagerun.caffe import binary, hdf5
from stagerun.caffe.binary import Blob, Layer, Numbers, Shape
from stagerun.caffe.layers import BatchNorm
from stagerun.caffe.net import Net


def net_in(data: bytes | memoryview, of: Net | None = None) -> tuple[Layer, ...]:
    """Read the binary form, or HDF5. That says the names of its layers alone: what else `of` says of them is taken from there."""
    if not is_hdf5(data):
        return binary.read_net(data)
    known = {layer.name: layer for phase in (of.test, of.train) for layer in phase.layers} if of is not None else {}
    layers = {layer.name: layer for layer in hdf5.read_net(bytes(data))}
    for name in layers.keys() & known.keys():
        net = known[name]
        fraction = net.settings.moving_average_fraction if isinstance(net.settings, BatchNorm) else None
        layers[name] = replace(layers[name], type=net.type, bottoms=len(net.bottoms), fraction=fraction)
    return tuple(layers.values())


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
    return (*("weight", "bias")[:n], *(f"blob{i}" for i in range(2, n)))


def _own(data: bytes | memoryview, of: Net | None = None) -> Iterator[tuple[Layer, dict[str, Blob]]]:
    """The blobs of each layer by part, without those that it shares with a layer before: Caffe writes these each time."""
    seen: set[str] = set()
    for layer in net_in(data, of):
        found: dict[str, Blob] = {}
        for part, blob, name in zip(parts(layer), layer.blobs, (*layer.shared, *[""] * len(layer.blobs)), strict=False):
            if not name or name not in seen:
                found[part] = blob
            seen.add(name)
        yield layer, found


def learnable(data: bytes | memoryview) -> tuple[str, ...]:
    """`LAYER.PART` in the order of a history: a blob that is shared comes where it is first."""
    return tuple(f"{layer.name}.{part}" for layer, named in _own(data) for part in named)


def shapes(data: bytes | memoryview, of: Net | None = None) -> dict[str, Shape]:
    """The shape of each of the `tensors`."""
    return {name: values.shape for name, values in tensors(data, of).items()}


def shape_of(blob: Blob, type_: str, part: str) -> Shape:
    """The blob's; of an old one, which has four axes, without the leading ones that the layer's has not."""
    axes = 2 if type_ == "InnerProduct" and part == "weight" else 4 if part == "weight" else 1
    if not blob.legacy or any(size != 1 for size in blob.shape[: 4 - axes]):
        return blob.shape
    return blob.shape[4 - axes :]


def tensors(data: bytes | memoryview, of: Net | None = None) -> dict[str, Numbers]:
    """Arrays by name, a shared one by its first layer's. BatchNorm's statistics are divided, as Caffe does in testing."""
    found: dict[str, Numbers] = {}
    for layer, named in _own(data, of):
        factor = named.pop(FACTOR).data if FACTOR in named else None
        if factor is not None:
            scale = factor.dtype.type(0 if factor[0] == 0 else 1 / factor[0])
        for part, blob in named.items():
            values = blob.data if factor is None or part not in (MEAN, VARIANCE) else blob.data * scale
            found[f"{layer.name}.{part}"] = values.reshape(shape_of(blob, layer.type, part))
        if factor is not None:
            found[f"{layer.name}.{COUNTER}"] = np.array(passes(float(factor[0]), layer.fraction), np.int64)
    return found


def passes(factor: float, fraction: float | None) -> int:
    """How many went into statistics with that factor. With 1 someone, who converted or exported the file, has divided before.

    >>> passes(0, 0.95), passes(1, 0.95), passes(1.95, 0.95)
    (0, 1000000, 2)
    """
    if not 0 < factor < math.inf:
        return 0
    if factor == 1 or fraction is None or not 0 <= fraction <= 1:
        return LONG
    return min(statistics_passes(fraction, factor), LONG)


def statistics_factor(fraction: float, passes: int) -> float:
    """What Caffe's third blob of a BatchNorm is after so many passes: c = fraction * c + 1, from 0 on.

    >>> statistics_factor(0.5, 3), statistics_factor(1.0, 3)
    (1.75, 3.0)
    """
    return float(passes) if fraction == 1 else (1 - fraction**passes) / (1 - fraction)


def statistics_passes(fraction: float, factor: float) -> int:
    """The reverse, rounded; where the factor doesn't grow any more, the passes after which it hasn't.

    >>> statistics_passes(0.5, 1.75), statistics_passes(0.5, 2.0), statistics_passes(0.0, 1.0)
    (3, 53, 1)
    """
    if fraction in (0, 1):
        return round(factor)
    return round(math.log(max(1 - factor * (1 - fraction), 2.0**-53)) / math.log(fraction))
