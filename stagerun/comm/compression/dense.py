"""Methods that make every number shorter by itself."""

from dataclasses import dataclass

import torch
from torch import Tensor

from stagerun.comm.compression.operator import Draw, Fixed, from_bytes, pieces, take, to_bytes


@dataclass(frozen=True, slots=True)
class Dense(Fixed):
    """d = c: NONE, for parameters that a rule leaves as they are."""

    residual: bool

    def wire(self, dtype: torch.dtype) -> torch.dtype | None:
        return dtype

    def coded(self, n: int, element_size: int) -> int:
        return n * element_size


@dataclass(frozen=True, slots=True)
class BFloat16(Fixed):
    """d = c rounded to bfloat16, to nearest even; float64 is rounded to float32 first. Without a memory slices are added up by one rank
    each, which hands out the sum rounded once more: so the bytes fall to a half for any number of workers, and not for a few alone. A
    residual would not have that second error, so with a memory every sender's d goes to all."""

    residual: bool

    def wire(self, dtype: torch.dtype) -> torch.dtype | None:
        return None if self.residual else torch.bfloat16

    def coded(self, n: int, element_size: int) -> int:
        return 2 * n

    def encode_all(self, vector: Tensor, draw: Draw) -> Tensor:
        message = torch.empty_like(vector, dtype=torch.bfloat16)
        for p in pieces(vector.numel(), vector.device):
            message[p] = vector[p].float()
        return to_bytes(message)

    def decode_all(self, message: Tensor, out: Tensor, vector: Tensor | None) -> None:
        values = from_bytes(message, torch.bfloat16)
        for p in pieces(out.numel(), out.device):
            take(values[p].to(out.dtype), out[p], None if vector is None else vector[p])
