"""CRC-32C (Castagnoli; RFC 3720, B.4) with numpy: 0.5 ms for an image of 110 KB, where a loop over its bytes takes 10.

A CRC is linear: the data are cut into rows of 64 bytes, all rows go two bytes forward at a time, and then neighbours are
joined, the left one moved on by as many zero bytes as the right one has.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray

_POLYNOMIAL = 0x82F63B78  # reflected
_ROW = 64
_BYTES_OF_A_CRC = 4

Crcs = NDArray[np.uint32]


def _by_byte() -> Crcs:
    table: Crcs = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = table >> np.uint32(1) ^ np.where(table & np.uint32(1), np.uint32(_POLYNOMIAL), np.uint32(0))
    return table


_TABLE = _by_byte()
_STEPS = tuple(_TABLE.tolist())


def _zero_byte(crcs: Crcs) -> Crcs:
    return _TABLE[crcs & 0xFF] ^ crcs >> 8


_BY_TWO = _zero_byte(_zero_byte(np.arange(1 << 16, dtype=np.uint32)))


def crc32c(data: bytes) -> int:
    if len(data) < 2 * _ROW:  # a loop is faster
        crc = 0xFFFFFFFF
        for byte in data:
            crc = crc >> 8 ^ _STEPS[(crc ^ byte) & 0xFF]
        return crc ^ 0xFFFFFFFF
    rows = -(-len(data) // _ROW)
    padded = np.zeros(rows * _ROW, np.uint8)
    first = len(padded) - len(data)  # zeros before the data change nothing, once the initial value is in them
    padded[first:] = np.frombuffer(data, np.uint8)
    padded[first : first + _BYTES_OF_A_CRC] ^= 0xFF
    crcs = np.zeros(rows, np.uint32)
    for pairs in np.ascontiguousarray(padded.view("<u2").reshape(rows, _ROW // 2).T):
        crcs = _BY_TWO[(crcs ^ pairs) & 0xFFFF] ^ crcs >> 16
    level = 0
    while len(crcs) > 1:
        if len(crcs) % 2:
            crcs = np.concatenate([np.zeros(1, np.uint32), crcs])
        crcs = _moved(_zeros(level), crcs[::2]) ^ crcs[1::2]
        level += 1
    return int(crcs[0]) ^ 0xFFFFFFFF


@cache
def _zeros(level: int) -> Crcs:
    """[4, 256]: for each byte of a CRC, what it becomes behind _ROW << level zero bytes."""
    if level > 0:
        half = _zeros(level - 1)
        return _moved(half, half)
    table = np.arange(256, dtype=np.uint32)[None, :] << np.arange(0, 32, 8, dtype=np.uint32)[:, None]
    for _ in range(_ROW):
        table = _zero_byte(table)
    return table


def _moved(zeros: Crcs, crcs: Crcs) -> Crcs:
    return zeros[0][crcs & 0xFF] ^ zeros[1][crcs >> 8 & 0xFF] ^ zeros[2][crcs >> 16 & 0xFF] ^ zeros[3][crcs >> 24]
