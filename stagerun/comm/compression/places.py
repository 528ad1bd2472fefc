"""Numbers at some places of a vector, and vectors made of others.

On a CPU numpy does it. For these torch starts threads at a few thousand elements; with backward on all cores, waiting for them has taken
100 ms for 40 kB.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def nonzero(mask: Tensor) -> Tensor:
    """Where a vector isn't 0: int64, growing."""
    if mask.device.type != "cpu":
        return torch.nonzero(mask).view(-1)
    return torch.from_numpy(np.flatnonzero(mask.numpy()))


def picked(vector: Tensor, index: Tensor) -> Tensor:
    if vector.device.type != "cpu":
        return vector[index]
    return torch.from_numpy(vector.numpy()[index.numpy()])


def put(vector: Tensor, index: Tensor, values: Tensor | float) -> None:
    if vector.device.type != "cpu":
        vector[index] = values
    else:
        vector.numpy()[index.numpy()] = values.numpy() if isinstance(values, Tensor) else values


def joined(parts: Sequence[Tensor]) -> Tensor:
    if parts[0].device.type != "cpu":
        return torch.cat(list(parts))
    return torch.from_numpy(np.concatenate([p.numpy() for p in parts]))


def zeros(shape: tuple[int, ...], like: Tensor, dtype: torch.dtype) -> Tensor:
    """On the device of `like`."""
    if like.device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=like.device)
    return torch.from_numpy(np.zeros(shape, torch.empty(0, dtype=dtype).numpy().dtype))
