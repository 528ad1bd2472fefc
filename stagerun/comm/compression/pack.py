"""Codes of a few bits, packed: code i of each eight is in bits i*width and up of the eight codes' `width` bytes, lowest first.

Eight codes are moved at a time, as the bytes of one 64-bit word. Words are little-endian, as on every machine that torch runs on.
"""

import torch
from torch import Tensor

from stagerun.comm.compression.operator import pieces
from stagerun.comm.compression.places import zeros

_LOW = (0x00FF00FF00FF00FF, 0x0000FFFF0000FFFF, 0x00000000FFFFFFFF)
_HIGH = (-0x00FF00FF00FF0100, -0x0000FFFF00010000, -0x0000000100000000)


def pack(codes: Tensor, width: int) -> Tensor:
    """uint8 [m width] from codes uint8 [8 m], each below 2**width. A width of 0 gives nothing."""
    if width == 8:
        return codes
    words = codes.view(torch.int64)
    packed = torch.empty(len(words), width, dtype=torch.uint8, device=codes.device)
    for p in pieces(len(words) if width else 0, codes.device):
        word = words[p]
        for step, (low, high) in enumerate(zip(_LOW, _HIGH, strict=True)):
            word = (word & low) | ((word & high) >> ((8 - width) << step))
        packed[p] = word.view(torch.uint8).view(-1, 8)[:, :width]
    return packed.view(-1)


def unpack(packed: Tensor, width: int, count: int) -> Tensor:
    """The codes again: uint8 [count], a multiple of 8."""
    if width == 8:
        return packed
    codes = zeros((count,), packed, torch.uint8)
    words, rows = codes.view(torch.int64), packed.view(-1, width) if width else packed
    for p in pieces(len(words) if width else 0, packed.device):
        word = words[p]
        word.view(torch.uint8).view(-1, 8)[:, :width] = rows[p]
        for step in (2, 1, 0):
            bits = width << step  # of what is now one lane's lower half
            lanes = sum(((1 << bits) - 1) << at for at in range(0, 64, 16 << step))
            word = (word & lanes) | ((word & (lanes << bits)) << ((8 << step) - bits))
        words[p] = word
    return codes
