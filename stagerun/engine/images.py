"""Batches of bytes from the loader -> tensors that the network takes."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from stagerun.recipe import Transform


class Batch(Protocol):
    """What the engine needs to know of a batch: images uint8 [N, H, W, C], labels int64 [N], positions int64 [N]. The first
    two may lie on the device already (`engine.feed`)."""

    @property
    def images(self) -> np.ndarray | Tensor: ...
    @property
    def labels(self) -> np.ndarray | Tensor: ...
    @property
    def positions(self) -> np.ndarray: ...


class Normalise:
    """(pixel - mean_value) * scale on the device, in the network's dtype and memory format."""

    def __init__(
        self, transform: Transform, channels: int, device: torch.device, dtype: torch.dtype, channels_last: bool
    ) -> None:
        mean: Sequence[float] = transform.mean_value or (0.0,)
        self.mean = torch.tensor(mean, dtype=dtype, device=device).expand(channels).reshape(1, channels, 1, 1)
        self.scale = transform.scale
        self.device, self.dtype = device, dtype
        self.format = torch.channels_last if channels_last else torch.contiguous_format
        self.shifted = any(mean)

    def __call__(self, images: np.ndarray | Tensor) -> Tensor:
        """uint8 [N, H, W, C] -> [N, C, H, W], scaled."""
        pixels = self._placed(images).permute(0, 3, 1, 2)
        x = pixels.to(self.dtype, memory_format=self.format)
        if self.shifted:
            x.sub_(self.mean)
        return x.mul_(self.scale) if self.scale != 1.0 else x

    def labels(self, labels: np.ndarray | Tensor) -> Tensor:
        """int64 [N] on the device."""
        return self._placed(labels)

    def _placed(self, values: np.ndarray | Tensor) -> Tensor:
        return (torch.from_numpy(values) if isinstance(values, np.ndarray) else values).to(self.device)
