"""The golden runs of real Caffe: weights, from .caffemodel files, traces and images."""

import csv
import struct
from pathlib import Path

import numpy as np
from facade import caffe_pb2, write_lmdb

GOLDEN = Path(__file__).parents[1] / "golden" / "caffe"


def array(blob: caffe_pb2.BlobProto) -> np.ndarray:
    values = blob.double_data or blob.data
    return np.array(values, dtype=np.float64).reshape(tuple(blob.shape.dim))


def expected(path: Path) -> dict[str, np.ndarray]:
    """The state_dict as a .caffemodel has it; running statistics are accumulators divided by their factor there."""
    state = {}
    for layer in caffe_pb2.NetParameter.FromString(path.read_bytes()).layer:
        blobs = [array(blob) for blob in layer.blobs]
        if layer.type == "BatchNorm":
            factor = blobs[2].item() or 1.0
            blobs = [blobs[0] / factor, blobs[1] / factor]
        names = ("running_mean", "running_var") if layer.type == "BatchNorm" else ("weight", "bias")
        state |= {f"{layer.name}.{name}": blob for name, blob in zip(names, blobs, strict=False)}
    return state


def write_fashion(folder: Path, train: int, test: int) -> None:
    """The LMDBs that the golden nets name, as Caffe's converter writes them, of the first images."""
    stored = np.load(GOLDEN.parent / "fashion_9664.npz")
    for part, count in (("train", train), ("test", test)):
        shown = zip(stored["images"][:count], stored["labels"], strict=False)
        records = [caffe_pb2.Datum(channels=1, height=28, width=28, data=i.tobytes(), label=int(n)) for i, n in shown]
        write_lmdb(str(folder / f"fmnist_{part}_lmdb"), [record.SerializeToString() for record in records])


def trace(name: str) -> tuple[list[float], list[float], int]:
    """Learning rates and losses of a run, and its first iteration; the last row of the file, an extra forward pass, is left out."""
    with open(GOLDEN / name / "trace.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["lr"]]
    return [float(r["lr"]) for r in rows], [float(r["loss"]) for r in rows], int(rows[0]["iter"])


def single(x: float) -> float:
    """Caffe's solver fields are float32: a file that says 0.1 trains Caffe with float32's 0.1, even in double."""
    return struct.unpack("f", struct.pack("f", x))[0]
