"""What SURFsara's fork trains, restated in float64 with torch's operators alone: one process, or several nodes with their own shard of
the records, the loss divided by their number, summed gradients, own running statistics, and gradients that wait for the next iteration."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from caffe_nets import array
from facade import caffe_pb2
from google.protobuf import text_format
from torch.nn import functional

Blobs = dict[str, list[torch.Tensor]]


@dataclass
class Restated:
    """`losses`: by iteration, the mean of all ranks. `snapshots`: by updates done as Caffe counts them, names as in a state_dict."""

    losses: list[float] = field(default_factory=list)
    snapshots: dict[int, dict[str, np.ndarray]] = field(default_factory=dict)


def first_blobs(path: Path) -> Blobs:
    layers = caffe_pb2.NetParameter.FromString(path.read_bytes()).layer
    return {layer.name: [torch.tensor(array(blob)) for blob in layer.blobs] for layer in layers if layer.blobs}


def restated(
    net: str, solver: str, start: Blobs, images: np.ndarray, labels: np.ndarray, rates: Callable[[int], float], *,
    ranks: int = 1, overlap: bool = False,
) -> Restated:  # fmt: skip
    """`rates` are LR(i). Blobs of `start` are left as they are."""
    layers = [
        layer
        for layer in text_format.Parse(net, caffe_pb2.NetParameter()).layer
        if layer.type != "Accuracy" and not any(rule.phase == caffe_pb2.TEST for rule in layer.include)
    ]
    says = text_format.Parse(solver, caffe_pb2.SolverParameter())
    norms = [layer for layer in layers if layer.type == "BatchNorm"]
    statistics = [{n.name: [b.clone() for b in start[n.name]] for n in norms} for _ in range(ranks)]
    weights = {n: [b.clone().requires_grad_() for b in blobs] for n, blobs in start.items() if n not in statistics[0]}
    steps = {n: [torch.zeros_like(b) for b in blobs] for n, blobs in weights.items()}
    made, waiting, size = Restated(), None, layers[0].data_param.batch_size

    def update(gradients: dict[str, list[torch.Tensor]], rate: float) -> None:
        for layer in layers:
            for k, blob in enumerate(weights.get(layer.name, ())):
                spec = layer.param[k] if k < len(layer.param) else caffe_pb2.ParamSpec()
                step, gradient = steps[layer.name][k], gradients[layer.name][k] / says.iter_size
                gradient = gradient + says.weight_decay * spec.decay_mult * blob.detach()
                step.copy_(says.momentum * step + rate * spec.lr_mult * gradient)
                with torch.no_grad():
                    blob -= step

    for i in range(says.max_iter):
        if waiting is not None:  # of the iteration before, with this one's rate
            update(waiting, rates(i))
        total = {n: [torch.zeros_like(b) for b in blobs] for n, blobs in weights.items()}
        losses = []
        for rank in range(ranks):
            for part in range(says.iter_size):
                batch = i * says.iter_size + part
                records = (rank + ranks * (batch * size + np.arange(size))) % len(images)
                x = torch.tensor(images[records], dtype=torch.float64) * layers[0].transform_param.scale
                loss = _loss(layers, weights, statistics[rank], x, torch.tensor(labels[records]))
                losses.append(loss.item())
                flat = [b for blobs in weights.values() for b in blobs]
                found = iter(torch.autograd.grad(loss / ranks, flat))
                for n, blobs in weights.items():
                    for k in range(len(blobs)):
                        total[n][k] += next(found)
        made.losses.append(float(np.mean(losses)))
        done = i + 1
        if not overlap or done == says.max_iter or (says.test_interval and done % says.test_interval == 0):
            update(total, rates(i))
            waiting = None
        else:
            waiting = total
        if done == says.max_iter or (says.snapshot and done % says.snapshot == 0):
            made.snapshots[done] = _saved(weights, statistics)
    return made


def _saved(weights: Blobs, statistics: Sequence[Blobs]) -> dict[str, np.ndarray]:
    state = {
        f"{n}.{part}": b.detach().numpy().copy()
        for n, bs in weights.items()
        for part, b in zip(("weight", "bias"), bs, strict=False)
    }
    for n in statistics[0]:
        mean, var, factor = (sum(rank[n][k] for rank in statistics) / len(statistics) for k in range(3))
        state |= {f"{n}.running_mean": (mean / factor).numpy(), f"{n}.running_var": (var / factor).numpy()}
    return state


def _loss(
    layers: Sequence[Any], weights: Blobs, statistics: Blobs, x: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    blobs = {"data": x}
    for layer in layers[1:]:
        below, own = [blobs[name] for name in layer.bottom if name != "label"], weights.get(layer.name, [])
        made = below[0]
        if layer.type == "Convolution":
            p = layer.convolution_param
            made = functional.conv2d(
                made, own[0], own[1] if own[1:] else None, (list(p.stride) or [1])[0], (list(p.pad) or [0])[0]
            )
        elif layer.type == "InnerProduct":
            made = functional.linear(made.flatten(1), own[0], own[1])
        elif layer.type == "Pooling":
            p = layer.pooling_param
            pool = functional.max_pool2d if p.pool == p.MAX else functional.avg_pool2d
            made = pool(made, p.kernel_size, p.stride, ceil_mode=True)
        elif layer.type == "ReLU":
            made = made.relu()
        elif layer.type == "Scale":
            made = made * own[0][:, None, None] + own[1][:, None, None]
        elif layer.type == "Eltwise":
            made = below[0] + below[1]
        elif layer.type == "BatchNorm":
            p, of = layer.batch_norm_param, made.numel() // made.shape[1]
            mean = made.mean((0, 2, 3))
            var = ((made - mean[:, None, None]) ** 2).mean((0, 2, 3))
            made = (made - mean[:, None, None]) / (var + p.eps).sqrt()[:, None, None]
            moved = (mean, var * of / (of - 1), torch.ones(1, dtype=torch.float64))
            for blob, new in zip(statistics[layer.name], moved, strict=True):
                blob.mul_(p.moving_average_fraction).add_(new.detach().reshape(blob.shape))
        else:
            assert layer.type == "SoftmaxWithLoss", layer.type
            return functional.cross_entropy(made, labels.long())
        blobs[layer.top[0]] = made
    raise AssertionError("the net has no loss")
