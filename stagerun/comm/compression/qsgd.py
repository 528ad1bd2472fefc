"""QSGD: numbers rounded at random to a few levels of their norm."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stagerun.comm.compression.operator import (
    Draw,
    OneRound,
    expect,
    from_bytes,
    pieces,
    take,
    to_bytes,
)
from stagerun.comm.compression.pack import pack, unpack
from stagerun.comm.compression.places import joined, nonzero, picked, put, zeros

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

    def size(self, n: int, element_size: int) -> int | None:
        return None

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
            block = _rows(vector[p])
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
        self._decode(message, decoded, None)
        return to_bytes(decoded)

    def _codes(self, block: Tensor, norm: Tensor, uniform: Tensor) -> Tensor:
        """int32 [rows, 512]"""
        level = block.abs().div_(torch.where(norm == 0, 1, norm).view(-1, 1)).mul_(self.qstates)
        level.add_(uniform).clamp_(max=self.qstates)
        if not torch.isfinite(norm).all():
            level.nan_to_num_(0.0)
        whole = level.copysign_(block).int()  # cut off towards 0
        return (whole >> 31).bitwise_xor_(whole.add_(whole))

    def add(self, message: Tensor, out: Tensor, draw: Draw, vector: Tensor | None = None) -> None:
        if message.numel() == out.numel() * out.element_size():
            take(from_bytes(message, out.dtype), out, vector)
        else:
            self._decode(message, out, vector)

    def _decode(self, message: Tensor, out: Tensor, vector: Tensor | None) -> None:
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


def _rows(piece: Tensor) -> Tensor:
    """[rows, 512], with zeros behind the last number."""
    missing = -piece.numel() % BUCKET
    return (torch.nn.functional.pad(piece, (0, missing)) if missing else piece).view(-1, BUCKET)


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
