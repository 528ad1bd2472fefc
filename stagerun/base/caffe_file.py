"""Caffe's binary files as values and back: .caffemodel, .solverstate and .binaryproto. Pure.

The messages are walked here rather than by protobuf: numbers stay where they are in the file, and a file can't take more memory than a
few times its own length. Field numbers are those of protos/caffe.proto. What is wrong with a file is a ValueError.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

Shape = tuple[int, ...]
Numbers = NDArray[Any]

# Nets have hundreds of layers; a file of millions of empty ones would take gigabytes as values.
MOST_LAYERS = 100_000
_MOST_AXES = 32  # Caffe's
_MOST_PIECES = 1000  # of a blob's numbers; Caffe writes one
_VARINT, _EIGHT, _LENGTH, _FOUR = 0, 1, 2, 5
# Layers with blobs in V1LayerParameter.LayerType.
_V1_TYPES = {4: "Convolution", 14: "InnerProduct", 39: "Deconvolution"}
_V0_TYPES = {"conv": "Convolution", "innerproduct": "InnerProduct"}


@dataclass(frozen=True, slots=True, eq=False)
class Blob:
    """`data`: float32 or float64 [n]. `legacy`: the shape is num, channels, height, width of a file from before BlobShape."""

    shape: Shape
    data: Numbers
    legacy: bool = False

    def array(self) -> Numbers:
        return self.data.reshape(self.shape)


@dataclass(frozen=True, slots=True)
class Layer:
    """`type` is '' where the file does not say it. `shared`: the names that blobs share by, '' for a blob's own. `fraction`: a BatchNorm's
    moving_average_fraction; None where the file can't say it."""

    name: str
    type: str
    blobs: tuple[Blob, ...] = ()
    shared: tuple[str, ...] = ()
    bottoms: int = 1
    fraction: float | None = 0.999


@dataclass(frozen=True, slots=True)
class CaffeNet:
    name: str
    layers: tuple[Layer, ...]


@dataclass(frozen=True, slots=True)
class SolverState:
    iter: int
    learned_net: str
    history: tuple[Blob, ...]
    current_step: int = 0


# -- reading


def read_net(data: bytes | memoryview) -> CaffeNet:
    """A .caffemodel: of BVLC's, Intel's or SURFsara's Caffe, or of one as old as V0."""
    name, layers, blobs = "", [], 0
    for number, value in _fields(data):
        if number == 1:
            name = _text(value, "the net's name")
        elif number in (2, 100):
            layers.append(_layer(_message(value)) if number == 100 else _v1_layer(_message(value)))
            blobs += len(layers[-1].blobs)
        if len(layers) > MOST_LAYERS or blobs > MOST_LAYERS:
            raise ValueError(f"it has more than {MOST_LAYERS} layers or blobs")
    seen = set()
    for layer in layers:
        if layer.blobs and layer.name in seen:
            raise ValueError(f"two layers with blobs are called `{layer.name}`")
        if layer.blobs:
            seen.add(layer.name)
    return CaffeNet(name, tuple(layers))


def read_state(data: bytes | memoryview) -> SolverState:
    iter, learned, step = 0, "", 0
    history: list[Blob] = []
    for fields, (number, value) in enumerate(_fields(data), 1):
        if number == 1:
            iter = _whole(value)
        elif number == 2:
            learned = _text(value, "learned_net")
        elif number == 3:
            history.append(_blob(_message(value), f"blob {len(history)} of the history"))
        elif number == 4:
            step = _whole(value)
        if fields > MOST_LAYERS:
            raise ValueError(f"it has more than {MOST_LAYERS} fields")
    return SolverState(iter, learned, tuple(history), step)


def read_mean(data: bytes | memoryview) -> Numbers:
    """A .binaryproto: [channels, height, width]."""
    blob = _blob(memoryview(data), "the mean")
    shape = blob.shape[1:] if len(blob.shape) == 4 and blob.shape[0] == 1 else blob.shape
    if len(shape) != 3 or not blob.data.size:
        raise ValueError(f"its blob is {' x '.join(map(str, blob.shape)) or 'empty'}, not the mean of one image")
    return blob.data.reshape(shape)


def _layer(data: memoryview) -> Layer:
    name, type_, blobs, shared, bottoms, fraction = "", "", [], [], 0, 0.999
    for number, value in _fields(data):
        match number:
            case 1:
                name = _text(value, "a layer's name")
            case 2:
                type_ = _text(value, f"the type of layer `{name}`")
            case 3:
                bottoms += 1
            case 6:
                shared.append(_first_text(_message(value)))
            case 7:
                blobs.append(_message(value))
            case 139:
                fraction = _fraction(_message(value))
    return Layer(name, type_, _blobs(blobs, name), tuple(shared), bottoms, fraction)


def _v1_layer(data: memoryview) -> Layer:
    name, type_, blobs, shared, old = "", "", [], [], None
    for number, value in _fields(data):
        match number:
            case 1:
                old = _message(value)
            case 4:
                name = _text(value, "a layer's name")
            case 5:
                type_ = _V1_TYPES.get(_whole(value), "")
            case 6:
                blobs.append(_message(value))
            case 1001:
                shared.append(_text(value, "the name of a parameter"))
    for number, value in _fields(old) if old is not None else ():
        match number:
            case 1:
                name = _text(value, "a layer's name")
            case 2:
                type_ = _V0_TYPES.get(_text(value, f"the type of layer `{name}`"), "")
            case 50:
                blobs.append(_message(value))
    return Layer(name, type_, _blobs(blobs, name), tuple(shared))


def _blobs(found: Sequence[memoryview], layer: str) -> tuple[Blob, ...]:
    if len(found) > MOST_LAYERS:
        raise ValueError(f"layer `{layer}` has more than {MOST_LAYERS} blobs")
    return tuple(_blob(data, f"blob {i} of layer `{layer}`") for i, data in enumerate(found))


def _blob(data: memoryview, what: str) -> Blob:
    old: dict[int, int] = {}
    shape: Shape | None = None
    floats: list[Numbers] = []
    doubles: list[Numbers] = []
    for number, value in _fields(data, repeated={5: _FOUR, 8: _EIGHT}):
        match number:
            case 1 | 2 | 3 | 4:
                old[number] = _whole(value)
            case 5:
                floats.append(_numbers(value, "<f4", what))
            case 8:
                doubles.append(_numbers(value, "<f8", what))
            case 7:
                shape = _shape(_message(value), what)
        if len(floats) + len(doubles) > _MOST_PIECES:
            raise ValueError(f"the numbers of {what} come in more than {_MOST_PIECES} pieces")
    values = doubles or floats
    if doubles and floats:
        raise ValueError(f"{what} has float and double data")
    numbers: Numbers = values[0] if len(values) == 1 else np.concatenate(values or [np.zeros(0, np.float32)])
    legacy = shape is None and bool(old)
    if shape is None:
        shape = tuple(old.get(axis, 0) for axis in (1, 2, 3, 4)) if old else (numbers.size,)
        if not old and numbers.size == 1:
            shape = ()  # Caffe writes no shape of a blob without axes
    if any(size < 0 for size in shape) or prod(shape) != numbers.size:
        raise ValueError(f"{what} says {_by(shape)}, which is {prod(shape)} numbers, and has {numbers.size}")
    return Blob(shape, numbers, legacy)


def _shape(data: memoryview, what: str) -> Shape:
    dims: list[int] = []
    for number, value in _fields(data):
        if number == 1 and isinstance(value, int):
            dims.append(_signed(value))
        elif number == 1:
            packed, at = _message(value), 0
            while at < len(packed) and len(dims) <= _MOST_AXES:
                one, at = _varint(packed, at)
                dims.append(_signed(one))
        if len(dims) > _MOST_AXES:
            raise ValueError(f"{what} has more than {_MOST_AXES} axes")
    return tuple(dims)


def _by(shape: Shape) -> str:
    return " x ".join(map(str, shape)) or "one number"


def _first_text(data: memoryview) -> str:
    """`name` of a ParamSpec."""
    return next((_text(value, "the name of a parameter") for number, value in _fields(data) if number == 1), "")


def _fraction(data: memoryview) -> float:
    found = 0.999
    for number, value in _fields(data):
        if number == 2 and not isinstance(value, int) and len(value) == 4:
            found = float(np.frombuffer(value, "<f4")[0])
    return found


# -- the wire: a key, number << 3 | kind, before each value


def _fields(data: bytes | memoryview, repeated: dict[int, int] | None = None) -> Iterator[tuple[int, int | memoryview]]:
    """(number, value) of each field. Of `repeated` numbers, with their kind, the values that follow each other unpacked are one."""
    view, at = memoryview(data), 0
    while at < len(view):
        start = at
        key, at = _varint(view, at)
        number, kind = key >> 3, key & 7
        if number == 0:
            raise ValueError(f"at byte {start} stands no field")
        if kind == _VARINT:
            whole, at = _varint(view, at)
            yield number, whole
            continue
        if repeated is not None and repeated.get(number) == kind and kind in (_FOUR, _EIGHT):
            size = 4 if kind == _FOUR else 8
            rows = _run(view[start:], size + 1)
            if n := len(rows):
                at = start + n * (size + 1)
                yield number, memoryview(rows[:, 1:].tobytes())
                continue
        if kind == _LENGTH:
            length, at = _varint(view, at)
        elif kind in (_EIGHT, _FOUR):
            length = 8 if kind == _EIGHT else 4
        else:
            raise ValueError(f"at byte {start} stands no field of a kind that Caffe writes")
        if length > len(view) - at:
            raise ValueError(f"it ends too early: a field says {length} bytes, and {len(view) - at} are left")
        yield number, view[at : at + length]
        at += length


def _run(view: memoryview, step: int) -> NDArray[np.uint8]:
    """[n, step]: the rows at the beginning that start with the same byte. The stretch looked at doubles, so that many short runs take no
    longer than a long one."""
    n, look = 0, 16
    rows = np.frombuffer(view, np.uint8, len(view) // step * step).reshape(-1, step)
    while n < len(rows):
        other = np.flatnonzero(rows[n : n + look, 0] != rows[0, 0])
        if len(other):
            return rows[: n + int(other[0])]
        n, look = min(n + look, len(rows)), 2 * look
    return rows


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


def _whole(value: int | memoryview) -> int:
    if not isinstance(value, int):
        raise ValueError("a number is expected where it has something else")
    return _signed(value)


def _message(value: int | memoryview) -> memoryview:
    if isinstance(value, int):
        raise ValueError("a field that is a message holds a number")
    return value


def _text(value: int | memoryview, what: str) -> str:
    try:
        return str(_message(value), "utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{what} is not text") from None


def _numbers(value: int | memoryview, kind: str, what: str) -> Numbers:
    if isinstance(value, int) or len(value) % np.dtype(kind).itemsize:
        raise ValueError(f"{what} holds something else than numbers")
    found: Numbers = np.frombuffer(value, kind)
    return found


# -- writing


def net_bytes(name: str, layers: Iterable[tuple[bytes, Sequence[Numbers]]]) -> bytes:
    """A NetParameter. `layers`: a serialised LayerParameter without blobs, and its blobs."""
    parts = [_field(1, name.encode())]
    for layer, blobs in layers:
        parts.append(_field(100, layer + b"".join(_field(7, blob_bytes(blob)) for blob in blobs)))
    return b"".join(parts)


def layer_bytes(name: str, type: str) -> bytes:
    return _field(1, name.encode()) + _field(2, type.encode())


def state_bytes(iter: int, learned_net: str, history: Iterable[Numbers], current_step: int = 0) -> bytes:
    blobs = (_field(3, blob_bytes(blob)) for blob in history)
    return b"".join(
        (_number(1, iter), _field(2, learned_net.encode(errors="surrogateescape")), *blobs, _number(4, current_step))
    )


def blob_bytes(values: Numbers) -> bytes:
    """A BlobProto, of doubles or floats."""
    dims = b"".join(map(_as_varint, values.shape))
    double = values.dtype == np.float64
    data = np.ascontiguousarray(values, "<f8" if double else "<f4").tobytes()
    return _field(8 if double else 5, data) + _field(7, _field(1, dims))


def _field(number: int, data: bytes) -> bytes:
    return b"".join((_as_varint(number << 3 | _LENGTH), _as_varint(len(data)), data))


def _number(number: int, value: int) -> bytes:
    return _as_varint(number << 3) + _as_varint(value)


def _as_varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return bytes(found)
