"""Caffe's binary files as values and back: .caffemodel, .solverstate and .binaryproto; tensors by names like torch's, `conv1.weight`. Pure.

The messages are parsed here rather than by protobuf: numbers are views into the file's bytes, and a file can't take more memory than a
few times its length. Field numbers are from protos/caffe.proto. A damaged file is a ValueError."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stagerun.base.text import count
from stagerun.base.weights import COUNTER, FACTOR, LONG, MEAN, MERGED, VARIANCE, is_hdf5

Shape = tuple[int, ...]
Numbers = NDArray[Any]

# Fields of a message, layers and blobs of a net, which has hundreds: millions of empty values would take gigabytes.
MOST = 100_000
_MOST_AXES = 32  # Caffe's
_VARINT, _LENGTH = 0, 2
_FIXED = {1: 8, 5: 4}  # kinds of numbers, and their bytes
# Layers with blobs in V1LayerParameter.LayerType.
_V1_TYPES = {4: "Convolution", 14: "InnerProduct", 39: "Deconvolution"}


@dataclass(frozen=True, slots=True, eq=False)
class Blob:
    """`data`: float32 or float64 [n]. `legacy`: the shape is num, channels, height, width of a file from before BlobShape."""

    shape: Shape
    data: Numbers
    legacy: bool = False


class Layer(NamedTuple):
    """A layer. `type`: '' if unknown. `shared`: the names that blobs are shared by, '' if not shared. `fraction`: a BatchNorm's
    moving_average_fraction."""

    name: str
    type: str
    blobs: tuple[Blob, ...] = ()
    shared: tuple[str, ...] = ()
    bottoms: int = 1
    fraction: float = 0.999


class SolverState(NamedTuple):
    iter: int
    learned_net: str
    history: tuple[Blob, ...]
    current_step: int = 0


def read_net(data: bytes | memoryview) -> tuple[Layer, ...]:
    """Return the layers of a .caffemodel from BVLC's, Intel's or SURFsara's Caffe of 2014 or later."""
    net = _file(data)
    layers: list[Layer] = []
    blobs = 0
    for number, read in ((2, _v1_layer), (100, _layer)):
        for part in net.parts(number):
            layers.append(read(_Message(part)))
            blobs += len(layers[-1].blobs)
            if blobs > MOST:
                raise ValueError(f"it has more than {MOST} blobs")
    for name, times in Counter(layer.name for layer in layers if layer.blobs).items():
        if times > 1:
            raise ValueError(f"two layers with blobs are called `{name}`")
    return tuple(layers)


def read_state(data: bytes | memoryview) -> SolverState:
    state = _file(data)
    history = (_blob(part, f"blob {i} of the history") for i, part in enumerate(state.parts(3)))
    return SolverState(state.whole(1), state.text(2, "learned_net"), tuple(history), state.whole(4))


def _file(data: bytes | memoryview) -> "_Message":
    if is_hdf5(data):
        raise ValueError("it is HDF5, which is not read: let Caffe write it with `snapshot_format: BINARYPROTO`")
    return _Message(data)


def read_mean(data: bytes | memoryview) -> Numbers:
    """Return the mean image in a .binaryproto: [channels, height, width]."""
    blob = _blob(memoryview(data), "the mean")
    shape = blob.shape[1:] if len(blob.shape) == 4 and blob.shape[0] == 1 else blob.shape
    if len(shape) != 3 or not blob.data.size:
        raise ValueError(f"its blob is {' x '.join(map(str, blob.shape)) or 'empty'}, not the mean of one image")
    return blob.data.reshape(shape)


def _layer(layer: "_Message") -> Layer:
    name, fraction = layer.text(1, "a layer's name"), 0.999
    for norm in layer.parts(139):
        for number in _Message(norm).parts(2):
            if len(number) == 4:
                fraction = float(np.frombuffer(number, "<f4")[0])
    shared = tuple(_Message(spec).text(1, "the name of a parameter") for spec in layer.parts(6))
    kind = layer.text(2, f"the type of layer `{name}`")
    return Layer(name, kind, _blobs(layer.parts(7), name), shared, len(layer.parts(3)), fraction)


def _v1_layer(layer: "_Message") -> Layer:
    if layer.parts(1):
        raise ValueError("it has Caffe's form of 2013: upgrade it by Caffe's `upgrade_net_proto_binary`")
    name, shared = layer.text(4, "a layer's name"), layer.parts(1001)
    names = tuple(_text(part, "the name of a parameter") for part in shared)
    return Layer(name, _V1_TYPES.get(layer.whole(5), ""), _blobs(layer.parts(6), name), names)


def _blobs(parts: Sequence[memoryview], layer: str) -> tuple[Blob, ...]:
    return tuple(_blob(part, f"blob {i} of layer `{layer}`") for i, part in enumerate(parts))


def _blob(data: memoryview, what: str) -> Blob:
    blob = _Message(data)
    floats, doubles, shapes = blob.parts(5), blob.parts(8), blob.parts(7)
    if floats and doubles:
        raise ValueError(f"{what} has float and double data")
    pieces, kind = (doubles, np.dtype("<f8")) if doubles else (floats, np.dtype("<f4"))
    data = pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))
    if len(data) % kind.itemsize:
        raise ValueError(f"{what} holds something other than numbers")
    numbers = np.frombuffer(data, kind)
    legacy = not shapes and any(axis in blob.values for axis in (1, 2, 3, 4))
    if shapes:
        shape = tuple(islice(_Message(shapes[-1]).wholes(1), _MOST_AXES + 1))
    elif legacy:
        shape = tuple(blob.whole(axis) for axis in (1, 2, 3, 4))
    else:
        shape = () if numbers.size == 1 else (numbers.size,)  # Caffe writes no shape for a blob without axes
    if len(shape) > _MOST_AXES:
        raise ValueError(f"{what} has more than {_MOST_AXES} axes")
    if any(size < 0 for size in shape) or prod(shape) != numbers.size:
        claimed = " x ".join(map(str, shape)) or "one number"
        raise ValueError(f"{what} claims {claimed}, which is {prod(shape)} numbers, and has {numbers.size}")
    return Blob(shape, numbers, legacy)


class _Message:
    """A message as protobuf writes it: a key before each value, number << 3 | kind. `values`: by field number."""

    def __init__(self, data: bytes | memoryview) -> None:
        self.values: defaultdict[int, list[int | memoryview]] = defaultdict(list)
        view, at, fields = memoryview(data), 0, 0
        while at < len(view):
            start, fields = at, fields + 1
            key, at = _varint(view, at)
            number, kind = key >> 3, key & 7
            if number == 0 or kind not in (_VARINT, _LENGTH, *_FIXED):
                raise ValueError(f"byte {start} does not start a field of a kind that Caffe writes")
            if fields > MOST:
                raise ValueError(f"it has more than {MOST} fields in one message")
            if kind == _VARINT:
                value, at = _varint(view, at)
                self.values[number].append(value)
                continue
            length, at = (_FIXED[kind], at) if kind in _FIXED else _varint(view, at)
            if length > len(view) - at:
                raise ValueError(f"it ends too early: a field claims {length} bytes, and {len(view) - at} remain")
            self.values[number].append(view[at : at + length])
            at += length

    def parts(self, number: int) -> list[memoryview]:
        """Return the bytes of each value: messages, texts, or numbers."""
        values = self.values.get(number, [])
        parts = [value for value in values if not isinstance(value, int)]
        if len(parts) < len(values):
            raise ValueError("a field of bytes holds a number")
        return parts

    def text(self, number: int, what: str) -> str:
        return _text(self.parts(number)[-1], what) if number in self.values else ""

    def wholes(self, number: int) -> Iterator[int]:
        """Yield numbers, packed or not."""
        for value in self.values.get(number, ()):
            if isinstance(value, int):
                yield _signed(value)
                continue
            at = 0
            while at < len(value):
                one, at = _varint(value, at)
                yield _signed(one)

    def whole(self, number: int) -> int:
        value = self.values.get(number, [0])[-1]
        if not isinstance(value, int):
            raise ValueError("it has something else in place of a number")
        return _signed(value)


def _text(data: memoryview, what: str) -> str:
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{what} is not text") from None


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(view) and shift < 70:
        byte = view[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value & (1 << 64) - 1, at
    raise ValueError("a number in it has no end")


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def net_bytes(name: str, layers: Iterable[tuple[bytes, Iterable[Numbers]]]) -> bytes:
    """Return a NetParameter. `layers`: a serialised LayerParameter without blobs, and its blobs."""
    parts = [_field(1, name.encode())]
    for layer, blobs in layers:
        parts.append(_field(100, layer + b"".join(_field(7, blob_bytes(blob)) for blob in blobs)))
    return b"".join(parts)


def state_bytes(iter: int, learned_net: str, history: Iterable[Numbers], current_step: int = 0) -> bytes:
    blobs = (_field(3, blob_bytes(blob)) for blob in history)
    name = _field(2, learned_net.encode(errors="surrogateescape"))
    return b"".join((_key(1, _VARINT, iter), name, *blobs, _key(4, _VARINT, current_step)))


def blob_bytes(values: Numbers) -> bytes:
    """Return a BlobProto of doubles or floats."""
    double = values.dtype == np.float64
    data = np.ascontiguousarray(values, "<f8" if double else "<f4").tobytes()
    return _field(8 if double else 5, data) + _field(7, _field(1, b"".join(map(_as_varint, values.shape))))


def _field(number: int, data: bytes) -> bytes:
    return _key(number, _LENGTH, len(data)) + data


def _key(number: int, kind: int, value: int) -> bytes:
    """Return a field's key, and its number or length."""
    return _as_varint(number << 3 | kind) + _as_varint(value)


def _as_varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + _as_varint(value >> 7)


# -- tensors by name


def parts(layer: Layer) -> tuple[str, ...]:
    """Return the name of each blob of the layer. ValueError for a BatchNorm of a kind that no Caffe writes."""
    n = len(layer.blobs)
    if layer.type == "BatchNorm":
        if n not in (3, 5) or layer.blobs[2].data.size != 1:
            text = f"BatchNorm layer `{layer.name}` has {count(n, 'blob')}"
            raise ValueError(f"{text}: BVLC's Caffe writes 3, and Intel's 5, the third of one number")
        return MERGED[:n]
    if layer.type == "Bias" or (layer.type == "Scale" and layer.bottoms > 1):
        return ("bias",) if n == 1 else tuple(f"blob{i}" for i in range(n))
    return (*("weight", "bias")[:n], *(f"blob{i}" for i in range(2, n)))


def _unshared(data: bytes | memoryview) -> Iterator[tuple[Layer, dict[str, Blob]]]:
    """Yield the blobs of each layer by part, except blobs shared with an earlier layer, which Caffe writes again."""
    seen: set[str] = set()
    for layer in read_net(data):
        blobs: dict[str, Blob] = {}
        for part, blob, name in zip(parts(layer), layer.blobs, (*layer.shared, *[""] * len(layer.blobs)), strict=False):
            if not name or name not in seen:
                blobs[part] = blob
            seen.add(name)
        yield layer, blobs


def learnable(data: bytes | memoryview) -> tuple[str, ...]:
    """Return `LAYER.PART` in the order of a history; a shared blob comes at its first layer."""
    return tuple(f"{layer.name}.{part}" for layer, named in _unshared(data) for part in named)


def shapes(data: bytes | memoryview) -> dict[str, Shape]:
    """Return the shape of each of the `tensors`."""
    return {name: values.shape for name, values in tensors(data).items()}


def shape_of(blob: Blob, type_: str, part: str) -> Shape:
    """Return the blob's shape; drop the leading axes of 1 that an old file has, which writes four axes always."""
    axes = 2 if type_ == "InnerProduct" and part == "weight" else 4 if part == "weight" else 1
    if not blob.legacy or any(size != 1 for size in blob.shape[: 4 - axes]):
        return blob.shape
    return blob.shape[4 - axes :]


def tensors(data: bytes | memoryview) -> dict[str, Numbers]:
    """Return arrays by name; a shared array is named after its first layer. BatchNorm's statistics are divided, as Caffe does in testing."""
    arrays: dict[str, Numbers] = {}
    for layer, named in _unshared(data):
        factor = named.pop(FACTOR).data if FACTOR in named else None
        if factor is not None:
            scale = factor.dtype.type(0 if factor[0] == 0 else 1 / factor[0])
        for part, blob in named.items():
            values = blob.data if factor is None or part not in (MEAN, VARIANCE) else blob.data * scale
            arrays[f"{layer.name}.{part}"] = values.reshape(shape_of(blob, layer.type, part))
        if factor is not None:
            arrays[f"{layer.name}.{COUNTER}"] = np.array(passes(float(factor[0]), layer.fraction), np.int64)
    return arrays


def passes(factor: float, fraction: float) -> int:
    """Return the number of passes behind statistics with that factor. A factor of 1 means that a converter has divided already.

    >>> passes(0, 0.95), passes(1, 0.95), passes(1.95, 0.95)
    (0, 1000000, 2)
    """
    if not 0 < factor < math.inf:
        return 0
    if factor == 1 or not 0 <= fraction <= 1:
        return LONG
    return min(statistics_passes(fraction, factor), LONG)


def statistics_factor(fraction: float, passes: int) -> float:
    """Return Caffe's third blob of a BatchNorm after so many passes: c = fraction * c + 1, starting at 0.

    >>> statistics_factor(0.5, 3), statistics_factor(1.0, 3)
    (1.75, 3.0)
    """
    return float(passes) if fraction == 1 else (1 - fraction**passes) / (1 - fraction)


def statistics_passes(fraction: float, factor: float) -> int:
    """Return the passes behind a factor, rounded; once the factor has converged, the passes after which it did.

    >>> statistics_passes(0.5, 1.75), statistics_passes(0.5, 2.0), statistics_passes(0.0, 1.0)
    (3, 53, 1)
    """
    if fraction in (0, 1):
        return round(factor)
    return round(math.log(max(1 - factor * (1 - fraction), 2.0**-53)) / math.log(fraction))
