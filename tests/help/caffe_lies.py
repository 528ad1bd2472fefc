"""Files that are no .caffemodel, though they begin like one."""

import numpy as np
from facade import binary, caffe_pb2


def _varint(n: int) -> bytes:
    return bytes([n]) if n < 128 else bytes([n & 127 | 128]) + _varint(n >> 7)


def field(number: int, data: bytes) -> bytes:
    """As protobuf writes it."""
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def layer_bytes(name: str, type: str) -> bytes:
    return caffe_pb2.LayerParameter(name=name, type=type).SerializeToString()


def layer_with(blob: bytes) -> bytes:
    """A net of one layer with a blob that is these bytes."""
    return field(100, layer_bytes("a", "Convolution") + field(7, blob))


# What is said of each, and the file.
LIES = {
    "ends too early": binary.net_bytes("n", [(layer_bytes("a", ""), [np.ones(9, np.float32)])])[:-3],
    "a field claims 4294967295 bytes": b"\xa2\x06\xff\xff\xff\xff\x0f",
    "claims 4611686018427387904 x 4": layer_with(field(7, field(1, b"\x80\x80\x80\x80\x80\x80\x80\x80\x40\x04"))),
    "which is 4 numbers, and has 3": layer_with(b"\x2a\x0c" + bytes(12) + b"\x3a\x03\x0a\x01\x04"),
    "-1 x -1": layer_with(b"\x2a\x04" + bytes(4) + field(7, field(1, (b"\xff" * 9 + b"\x01") * 2))),
    "more than 32 axes": layer_with(b"\x2a\x04" + bytes(4) + field(7, field(1, b"\x01" * 33))),
    "something other than numbers": layer_with(b"\x2a\x03" + bytes(3)),
    "more than 100000 fields": b"\xa2\x06\x00" * 1_000_000,
    "more than 100000 blobs": field(100, b"\x3a\x00" * 60_000) * 2,
    "two layers with blobs are called `a`": layer_with(binary.blob_bytes(np.ones(1, np.float32))) * 2,
    "has no end": b"\xff" * 100,
    "is not text": field(100, field(1, b"\xff\xfe")),
    "does not start a field": b"\x00\x00",
    "fields in one message": layer_with((b"\x2d" + bytes(4) + b"\x08\x01") * 2_000_000),
}  # fmt: skip
