"""Methods that round each number at random to a few levels: QSGD and TernGrad."""

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from stagerun.wire.operators import (
    Draw,
    Fixed,
    OneRound,
    expect,
    from_bytes,
    joined,
    largest_of,
    nonzero,
    pack,
    picked,
    pieces,
    put,
    take,
    to_bytes,
    unpack,
    zeros,
)

BUCKET = 512


@dataclass(frozen=True, slots=True)
class Qsgd(OneRound):
    """d = N sign(c) l / s with l = floor(|c|/N s) or one more, with the probability of what floor has cut off, so that d is c on average
    (Alistarh et al., arXiv:1610.02132). N is the Euclidean norm of each 512 numbers, s is `qstates`.
    Where N isn't finite, d is NaN and the run notices.

    A message: the norms; a byte per 512 codes, the bits that the largest of them has; the codes of +-l (0, -1, 1, -2, ... are 0, 1, 2, 3, ...)
    packed, those of the fewest bits first. A code above 8 bits has its upper ones apart: packed likewise or, up to 255 states, where the
    only upper bit is rare, as uint32 places of those that have it.
    """

    residual: bool
    qstates: int

    def encode(self, vector: Tensor, draw: Draw) -> Tensor:
        n, device = vector.numel(), vector.device
        rows = -(-n // BUCKET)
        uniform = draw.uniform(device)
        low = zeros((rows, BUCKET), vector, torch.uint8)
        high = zeros((rows, BUCKET), vector, torch.uint8) if self.qstates > 255 else None
        norms = vector.new_empty(rows)
        widths = torch.empty(rows, dtype=torch.uint8, device=device)
        upper = []
        for p in pieces(n, device):
            row = slice(p.start // BUCKET, -(-p.stop // BUCKET))
            missing = -vector[p].numel() % BUCKET
            block = (torch.nn.functional.pad(vector[p], (0, missing)) if missing else vector[p]).view(-1, BUCKET)
            norms[row] = norm = _row_norms(block)
            codes = self._codes(block, norm, uniform(block.numel()).view(-1, BUCKET))
            low[row] = codes
            widths[row] = torch.frexp(codes.amax(1).float()).exponent.to(torch.uint8)
            if high is not None:
                high[row] = codes >> 8
            elif (widths[row] > 8).any():
                upper.append(nonzero(codes.view(-1) > 255) + p.start)
        parts = [to_bytes(norms), widths, *_packed(low, widths.clamp(max=8), n)]
        if high is not None:
            parts += _packed(high, widths.clamp(min=8) - 8, n)
        elif upper:
            parts.append(to_bytes(joined(upper).int()))
        message = joined(parts)
        if message.numel() < n * vector.element_size():
            return message
        decoded = torch.zeros_like(vector)
        self.decode(message, decoded, None)
        return to_bytes(decoded)

    def _codes(self, block: Tensor, norm: Tensor, uniform: Tensor) -> Tensor:
        """int32 [rows, 512]"""
        level = block.abs().div_(torch.where(norm == 0, 1, norm).view(-1, 1)).mul_(self.qstates)
        level.add_(uniform).clamp_(max=self.qstates)
        if not torch.isfinite(norm).all():
            level.nan_to_num_(0.0)
        whole = level.copysign_(block).int()  # cut off towards 0
        return (whole >> 31).bitwise_xor_(whole.add_(whole))

    def decode(self, message: Tensor, out: Tensor, vector: Tensor | None) -> None:
        n, device = out.numel(), out.device
        rows = -(-n // BUCKET)
        at = rows * out.element_size()
        norms, widths = from_bytes(message[:at], out.dtype), message[at : at + rows]
        low, at = _unpacked(message, at + rows, widths.clamp(max=8), n)
        high = upper = None
        if self.qstates > 255:
            high, at = _unpacked(message, at, widths.clamp(min=8) - 8, n)
        elif at < message.numel():
            upper = from_bytes(message[at:], torch.int32).long()
            at = message.numel()
        expect(message, at)
        if upper is not None:
            high = zeros((rows, BUCKET), low, torch.uint8)
            put(high.view(-1), upper, 1)
        for p in pieces(n, device):
            row = slice(p.start // BUCKET, -(-p.stop // BUCKET))
            codes = low[row].int()
            if high is not None:
                codes += high[row].int() << 8
            value = ((codes >> 1) ^ -(codes & 1)).to(out.dtype).div_(self.qstates)
            value.mul_(norms[row].view(-1, 1))
            take(value.view(-1)[: p.stop - p.start], out[p], None if vector is None else vector[p])


def _row_norms(block: Tensor) -> Tensor:
    """[rows]. Numbers of float64 are divided by the largest beforehand, so that the squares of tiny and huge ones neither vanish nor
    overflow."""
    if block.dtype == torch.float32:
        return torch.linalg.vector_norm(block, dim=1, dtype=torch.float64).float()
    top = block.abs().amax(1)
    shares = block / torch.where(top == 0, 1, top).view(-1, 1)
    return top * shares.square_().sum(1).sqrt_()


def _lengths(widths: Tensor, n: int) -> list[tuple[int, Tensor, int]]:
    """(width, its rows, bytes) of each width above 0 that there is. Of the last row of all only the codes of numbers go, but whole eights."""
    last, missing = len(widths) - 1, (-n % BUCKET) // 8
    found = []
    for width in np.unique(widths.cpu().numpy()).tolist():
        if width:
            rows = nonzero(widths == width)
            cut = missing if int(rows[-1]) == last else 0
            found.append((width, rows, (len(rows) * (BUCKET // 8) - cut) * width))
    return found


def _packed(codes: Tensor, widths: Tensor, n: int) -> list[Tensor]:
    return [pack(picked(codes, rows).view(-1), width)[:size] for width, rows, size in _lengths(widths, n)]


def _unpacked(message: Tensor, at: int, widths: Tensor, n: int) -> tuple[Tensor, int]:
    """Codes [rows, 512] and where in the message the next part begins."""
    codes = zeros((len(widths), BUCKET), message, torch.uint8)
    for width, rows, size in _lengths(widths, n):
        part, count = message[at : at + size], len(rows) * BUCKET
        expect(part, size)
        whole = joined((part, zeros((count // 8 * width - size,), part, torch.uint8)))
        put(codes, rows, unpack(whole, width, count).view(-1, BUCKET))
        at += size
    return codes, at


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

    def decode(self, message: Tensor, out: Tensor, vector: Tensor | None) -> None:
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
