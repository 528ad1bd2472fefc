"""The two small nets of the golden runs, from their own files, and their weights from .caffemodel files."""

from pathlib import Path

import numpy as np
import torch

from stagerun.base.errors import Problems
from stagerun.base.net import Net
from stagerun.base.recipe import ParamRule
from stagerun.language.net import read, resolve
from stagerun.language.proto import caffe_pb2
from stagerun.models.net import Network, build

GOLDEN = Path(__file__).parents[1] / "golden" / "caffe"


def net_of(path: Path, shape: tuple[int, int, int] = (1, 28, 28)) -> Net:
    problems = Problems()
    text = read(path.read_text(), str(path), problems)
    net = resolve(text, shape, problems) if text is not None else None
    assert net is not None, problems.all()
    return net


def rules(net: Net) -> tuple[ParamRule, ...]:
    """What its `param { lr_mult decay_mult }` say."""
    blobs = [blob for layer in net.train.layers for blob in layer.blobs]
    return tuple(ParamRule(name=b.name, lr_mult=b.lr_mult, decay_mult=b.decay_mult) for b in blobs)


def _array(blob: caffe_pb2.BlobProto) -> np.ndarray:
    values = blob.double_data or blob.data
    return np.array(values, dtype=np.float64).reshape(tuple(blob.shape.dim))


def history(path: Path) -> list[np.ndarray]:
    """Momentum of a .solverstate, in parameter order."""
    return [_array(b) for b in caffe_pb2.SolverState.FromString(path.read_bytes()).history]


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


def load(net: Net, path: Path) -> Network:
    network = build(net).double()  # before the copy: most of the weights are doubles
    with torch.no_grad():
        live = network.state_dict()
        found = expected(path)
        assert found.keys() == {name for name in live if not name.endswith("num_batches_tracked")}
        for name, value in found.items():
            live[name].copy_(torch.from_numpy(value))
    return network
