"""Weights of the golden runs, from .caffemodel files."""

from pathlib import Path

import numpy as np

from stagerun.language.proto import caffe_pb2

GOLDEN = Path(__file__).parents[1] / "golden" / "caffe"


def _array(blob: caffe_pb2.BlobProto) -> np.ndarray:
    values = blob.double_data or blob.data
    return np.array(values, dtype=np.float64).reshape(tuple(blob.shape.dim))


def expected(path: Path) -> dict[str, np.ndarray]:
    """The state_dict as a .caffemodel has it; running statistics are accumulators divided by their factor there."""
    state = {}
    for layer in caffe_pb2.NetParameter.FromString(path.read_bytes()).layer:
        blobs = [_array(blob) for blob in layer.blobs]
        if layer.type == "BatchNorm":
            factor = blobs[2].item() or 1.0
            blobs = [blobs[0] / factor, blobs[1] / factor]
        names = ("running_mean", "running_var") if layer.type == "BatchNorm" else ("weight", "bias")
        state |= {f"{layer.name}.{name}": blob for name, blob in zip(names, blobs, strict=False)}
    return state
