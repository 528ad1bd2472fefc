"""The two small nets of the golden runs, in torch, and their weights from .caffemodel files."""

from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stagerun.language.proto import caffe_pb2
from stagerun.models import BatchNorm2d

# 0.95 in a float32 field, as in Caffe.
FRACTION = float(np.float32(0.95))
GOLDEN = Path(__file__).parents[1] / "golden" / "caffe"


class LeNet(nn.Module):
    """nets/lenet.prototxt"""

    # torch's parameter -> Caffe's layer and blob
    BLOBS: ClassVar = {
        f"{layer}.{part}": (layer, blob)
        for layer in ("conv1", "conv2", "ip1", "ip2")
        for part, blob in (("weight", 0), ("bias", 1))
    }

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 5), nn.Conv2d(8, 16, 5)
        self.ip1, self.ip2 = nn.Linear(256, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.conv1(x), 2)
        x = F.max_pool2d(self.conv2(x), 2)
        return self.ip2(F.relu(self.ip1(x.flatten(1))))


class BNNet(nn.Module):
    """nets/bnnet.prototxt: Caffe's BatchNorm + Scale is one BatchNorm2d here."""

    BLOBS: ClassVar = {
        "conv1.weight": ("conv1", 0),
        "conv1.bias": ("conv1", 1),
        "fc10.weight": ("fc10", 0),
        "fc10.bias": ("fc10", 1),
    } | {f"{layer}.weight": (layer, 0) for layer in ("res_b1", "res_b2a", "res_b2b", "res_b2c")}
    NORMS = ("conv1", "res_b1", "res_b2a", "res_b2b", "res_b2c")

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.res_b1 = nn.Conv2d(8, 16, 1, stride=2, bias=False)
        self.res_b2a = nn.Conv2d(8, 8, 1, bias=False)
        self.res_b2b = nn.Conv2d(8, 8, 3, stride=2, padding=1, bias=False)
        self.res_b2c = nn.Conv2d(8, 16, 1, bias=False)
        self.fc10 = nn.Linear(16, 10)
        for name in self.NORMS:
            self.add_module(f"bn_{name}", BatchNorm2d(getattr(self, name).out_channels, FRACTION))

    def _unit(self, name: str, x: Tensor) -> Tensor:
        return self.get_submodule(f"bn_{name}")(getattr(self, name)(x))

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self._unit("conv1", x)), 3, 2, ceil_mode=True)
        y = F.relu(self._unit("res_b2a", x))
        y = F.relu(self._unit("res_b2b", y))
        x = F.relu(self._unit("res_b1", x) + self._unit("res_b2c", y))
        return self.fc10(F.avg_pool2d(x, 7).flatten(1))


def _array(blob: caffe_pb2.BlobProto) -> np.ndarray:
    values = blob.double_data or blob.data
    return np.array(values, dtype=np.float64).reshape(tuple(blob.shape.dim))


def blobs(path: Path) -> dict[tuple[str, int], np.ndarray]:
    """(layer, blob number) -> float64 array of a .caffemodel."""
    net = caffe_pb2.NetParameter.FromString(path.read_bytes())
    return {(layer.name, i): _array(b) for layer in net.layer for i, b in enumerate(layer.blobs)}


def history(path: Path) -> list[np.ndarray]:
    """Momentum of a .solverstate, in parameter order."""
    return [_array(b) for b in caffe_pb2.SolverState.FromString(path.read_bytes()).history]


def expected(net: nn.Module, path: Path) -> dict[str, np.ndarray]:
    """The net's state_dict as a .caffemodel has it; running statistics are accumulators divided by their factor there."""
    found = blobs(path)
    state = {name: found[key] for name, key in net.BLOBS.items()}
    for name in getattr(net, "NORMS", ()):
        factor = found[f"bn_{name}", 2].item()
        for part, key, scale in (
            ("running_mean", (f"bn_{name}", 0), factor),
            ("running_var", (f"bn_{name}", 1), factor),
            ("weight", (f"scale_{name}", 0), 1.0),
            ("bias", (f"scale_{name}", 1), 1.0),
        ):
            state[f"bn_{name}.{part}"] = found[key] / scale if scale else found[key]
    return state


def load(net: nn.Module, path: Path) -> nn.Module:
    net.double()  # before the copy: most of the weights are doubles
    with torch.no_grad():
        live = net.state_dict()
        for name, value in expected(net, path).items():
            live[name].copy_(torch.from_numpy(value))
    return net
