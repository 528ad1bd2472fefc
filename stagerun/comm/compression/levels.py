"""Methods that send each number as one of a few levels of a scale."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from stagerun.comm.compression.operator import (
    Draw,
    Fixed,
    from_bytes,
    largest_of,
    pieces,
    take,
    to_bytes,
)
from stagerun.comm.compression.pack import pack


class Levels(Fixed):
    """A message is the scale and `width` bits for each number. A subclass gives codes and what they mean."""

    width: int
    random = False

    def scale(self, vector: Tensor) -> Tensor:
        """[1]"""
        raise NotImplementedError

    def values(self, scale: Tensor) -> Tensor:
        """What each code stands for: [2**width]."""
        raise NotImplementedError

    def codes(self, vector: Tensor, scale: Tensor, uniform: Tensor | None) -> Tensor:
        """A code for each number of a piece of the vector: bool or uint8."""
        raise NotImplementedError

    def coded(self, n: int, element_size: int) -> int:
        return element_size + (n * self.width + 7) // 8

    def encode_all(self, vector: Tensor, draw: Draw) -> Tensor:
        n, device, scale = vector.numel(), vector.device, self.scale(vector)
        start = vector.element_size()
        message = torch.empty(self.coded(n, start), dtype=torch.uint8, device=device)
        message[:start] = to_bytes(scale)
        following = draw.uniform(device) if self.random else None
        for p in pieces(n, device):
            count = p.stop - p.start
            codes = torch.zeros(count + -count % 8, dtype=torch.uint8, device=device)
            codes[:count] = self.codes(vector[p], scale, following(count) if following else None)
            part = message[start + p.start * self.width // 8 : start + (p.stop * self.width + 7) // 8]
            part.copy_(pack(codes, self.width)[: part.numel()])
        return message

    def decode_all(self, message: Tensor, out: Tensor, vector: Tensor | None) -> None:
        start = out.element_size()
        scale = from_bytes(message[:start], out.dtype)
        per, table = 8 // self.width, self.values(scale)[_codes_of_bytes(self.width, out.device)]
        for p in pieces(out.numel(), out.device):
            part = message[start + p.start // per : start + -(-p.stop // per)]
            value = table.index_select(0, part.int()).view(-1)[: p.stop - p.start]
            take(value, out[p], None if vector is None else vector[p])


@cache
def _codes_of_bytes(width: int, device: torch.device) -> Tensor:
    """The codes in each byte that there is: [256, 8 // width]. A byte is decoded at once."""
    shifts = torch.arange(0, 8, width, device=device)
    return (torch.arange(256, device=device)[:, None] >> shifts) & (2**width - 1)


@dataclass(frozen=True, slots=True)
class TernGrad(Levels):
    """d = s sign(c) b with b = 1 with the probability min(|c|, s)/s, else 0; s = min(max |c|, 2.5 sigma), sigma the root of the mean c^2
    (Wen et al., arXiv:1705.07878)."""

    residual: bool
    width = 2
    random = True

    def scale(self, vector: Tensor) -> Tensor:
        top = largest_of(vector)
        divisor = torch.where(top == 0, 1, top)
        total = torch.zeros(1, dtype=torch.float64, device=vector.device)
        for p in pieces(vector.numel(), vector.device):
            total += torch.linalg.vector_norm(vector[p] / divisor, dtype=torch.float64).square_()
        sigma = (total / vector.numel()).sqrt_()  # in units of the largest
        return (top * torch.clamp(2.5 * sigma, max=1.0)).to(vector.dtype)

    def values(self, scale: Tensor) -> Tensor:
        return torch.cat((0 * scale, scale, -scale, 0 * scale))  # 0 of what isn't finite is NaN

    def codes(self, vector: Tensor, scale: Tensor, uniform: Tensor | None) -> Tensor:
        assert uniform is not None
        share = vector / torch.where(scale == 0, 1, scale)
        return (share > uniform).to(torch.uint8).add_(-share > uniform, alpha=2)
