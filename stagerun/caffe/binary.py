"""Caffe's binary files as values and back: .caffemodel, .solverstate and .binaryproto. Pure.

The messages are walked here rather than by protobuf: numbers stay where they are in the file, and a file can't take more memory than a
few times its own length. Field numbers are those of protos/caffe.proto. A damaged file is a ValueError."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

Shape = tuple[int, ...]
Numbers = NDArray[Any]

# Fields of a message, layers and blobs of a net, which has hundreds: millions of empty ones would take gigabytes as values.
MOST = 100_000
_MOST_AXES = 32  # Caffe's
_VARINT, _LENGTH = 0, 2
_FIXED = {1: 8, 5: 4}  # kinds of numbers, and their bytes
# Layers with blobs in V1LayerParameter.LayerType, and in V0LayerParameter.
_V1_TYPES = {4: "Convolution", 14: "InnerProduct", 39: "Deconvolution"}
_V0_TYPES = {"conv": "Convolution", "innerproduct": "InnerProduct"}


@dataclass(frozen=True, slots=True, eq=False)
class Blob:
    """`data`: float32 or float64 [n]. `legacy`: the shape is num, channels, height, width of a file from before BlobShape."""

    shape: Shape
    data: Numbers
    legacy: bool = False


@dataclass(frozen=True, slots=True)
class Layer:
    """`type`: '' if the file doesn't say it. `shared`: the names that blobs share by, '' for a blob's own. `fraction`: a BatchNorm's
    moving_average_fraction; None if the file can't say it."""

    name: str
    type: str
    blobs: tuple[Blob, ...] = ()
    shared: tuple[str, ...] = ()
    bottoms: int = 1
    fraction: float | None = 0.999


@dataclass(frozen=True, slots=True)
class SolverState:
    iter: int
    learned_net: str
    history: tuple[Blob, ...]
    current_step: int = 0


def read_net(data: bytes | memoryview) -> tuple[Layer, ...]:
    """Return the layers of a .caffemodel: of BVLC's, Intel's or SURFsara's Caffe, or of one as old as V0."""
    net = _Message(data)
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
    state = _Message(data)
    history = (_blob(part, f"blob {i} of the history") for i, part in enumerate(state.parts(3)))
    return SolverState(state.whole(1), state.text(2, "learned_net"), tuple(history), state.whole(4))


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
    name, kind, blobs = layer.text(4, "a layer's name"), _V1_TYPES.get(layer.whole(5), ""), layer.parts(6)
    for v0 in map(_Message, layer.parts(1)):
        name = v0.text(1, "a layer's name")
        kind, blobs = _V0_TYPES.get(v0.text(2, f"the type of layer `{name}`"), ""), blobs + v0.parts(50)
    shared = tuple(_text(part, "the name of a parameter") for part in layer.parts(1001))
    return Layer(name, kind, _blobs(blobs, name), shared)


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
        raise ValueError(f"{what} holds something else than numbers")
    numbers = np.frombuffer(data, kind)
    legacy = not shapes and any(axis in blob.values for axis in (1, 2, 3, 4))
    if shapes:
        shape = tuple(islice(_Message(shapes[-1]).wholes(1), _MOST_AXES + 1))
    elif legacy:
        shape = tuple(blob.whole(axis) for axis in (1, 2, 3, 4))
    else:
        shape = () if numbers.size == 1 else (numbers.size,)  # Caffe writes no shape of a blob without axes
    if len(shape) > _MOST_AXES:
        raise ValueError(f"{what} has more than {_MOST_AXES} axes")
    if any(size < 0 for size in shape) or prod(shape) != numbers.size:
        said = " x ".join(map(str, shape)) or "one number"
        raise ValueError(f"{what} says {said}, which is {prod(shape)} numbers, and has {numbers.size}")
    return Blob(shape, numbers, legacy)


class _Message:
    """A message as protobuf writes it: a key before each value, number << 3 | kind. `values`: those of each field."""

    def __init__(self, data: bytes | memoryview) -> None:
        self.values: defaultdict[int, list[int | memoryview]] = defaultdict(list)
        view, at, fields = memoryview(data), 0, 0
        while at < len(view):
            start, fields = at, fields + 1
            key, at = _varint(view, at)
            number, kind = key >> 3, key & 7
            if number == 0 or kind not in (_VARINT, _LENGTH, *_FIXED):
                raise ValueError(f"at byte {start} stands no field of a kind that Caffe writes")
            if fields > MOST:
                raise ValueError(f"it has more than {MOST} fields in one message")
            if kind == _VARINT:
                value, at = _varint(view, at)
                self.values[number].append(value)
                continue
            length, at = (_FIXED[kind], at) if kind in _FIXED else _varint(view, at)
            if length > len(view) - at:
                raise ValueError(f"it ends too early: a field says {length} bytes, and {len(view) - at} are left")
            self.values[number].append(view[at : at + length])
            at += length

    def parts(self, number: int) -> list[memoryview]:
        """Return the bytes of each value: messages, texts, or numbers."""
        found = [value for value in self.values.get(number, ()) if not isinstance(value, int)]
        if len(found) < len(self.values.get(number, ())):
            raise ValueError("a field of bytes holds a number")
        return found

    def text(self, number: int, what: str) -> str:
        return _text(self.parts(number)[-1], what) if number in self.values else ""

    def wholes(self, number: int) -> Iterator[int]:
        """Yield numbers, also of those that come several in a value."""
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
            raise ValueError("a number is expected where it has something else")
        return _signed(value)


def _text(data: memoryview, what: str) -> str:
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{what} is not text") from None


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    found = shift = 0
    while at < len(view) and shift < 70:
        byte = view[at]
        found |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return found & (1 << 64) - 1, at
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
