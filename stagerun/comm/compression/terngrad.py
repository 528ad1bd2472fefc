"""TernGrad: each number is sent as one of three levels of a scale, in two bits."""

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

WIDTH = 2


@dataclass(frozen=True, slots=True)
class TernGrad(Fixed):
    """d = s sign(c) b with b = 1 with the probability min(|c|, s)/s, else 0; s = min(max |c|, 2.5 sigma), sigma the root of the mean c^2
    (Wen et al., arXiv:1705.07878). A message is the scale and two bits for each number."""

    residual: bool

    def coded(self, n: int, element_size: int) -> int:
        return element_size + (n * WIDTH + 7) // 8

    def encode_all(self, vector: Tensor, draw: Draw) -> Tensor:
        n, device, scale = vector.numel(), vector.device, _scale(vector)
        start = vector.element_size()
        message = torch.empty(self.coded(n, start), dtype=torch.uint8, device=device)
        message[:start] = to_bytes(scale)
        uniform = draw.uniform(device)
        for p in pieces(n, device):
            count = p.stop - p.start
            share, chance = vector[p] / torch.where(scale == 0, 1, scale), uniform(count)
            codes = torch.zeros(count + -count % 8, dtype=torch.uint8, device=device)
            codes[:count] = (share > chance).to(torch.uint8).add_(-share > chance, alpha=2)
            part = message[start + p.start * WIDTH // 8 : start + (p.stop * WIDTH + 7) // 8]
            part.copy_(pack(codes, WIDTH)[: part.numel()])
        return message

    def decode_all(self, message: Tensor, out: Tensor, vector: Tensor | None) -> None:
        start = out.element_size()
        scale = from_bytes(message[:start], out.dtype)
        values = torch.cat((0 * scale, scale, -scale, 0 * scale))  # 0 of what isn't finite is NaN
        per, table = 8 // WIDTH, values[_codes_of_bytes(out.device)]
        for p in pieces(out.numel(), out.device):
            part = message[start + p.start // per : start + -(-p.stop // per)]
            value = table.index_select(0, part.int()).view(-1)[: p.stop - p.start]
            take(value, out[p], None if vector is None else vector[p])


def _scale(vector: Tensor) -> Tensor:
    """[1]"""
    top = largest_of(vector)
    divisor = torch.where(top == 0, 1, top)
    total = torch.zeros(1, dtype=torch.float64, device=vector.device)
    for p in pieces(vector.numel(), vector.device):
        total += torch.linalg.vector_norm(vector[p] / divisor, dtype=torch.float64).square_()
    sigma = (total / vector.numel()).sqrt_()  # in units of the largest
    return (top * torch.clamp(2.5 * sigma, max=1.0)).to(vector.dtype)


@cache
def _codes_of_bytes(device: torch.device) -> Tensor:
    """The codes in each byte that there is: [256, 4]. A byte is decoded at once."""
    shifts = torch.arange(0, 8, WIDTH, device=device)
    return (torch.arange(256, device=device)[:, None] >> shifts) & (2**WIDTH - 1)
