"""float32 vectors in fewer bytes, every bit kept.

The exponents of a layer's gradients take few values; signs and mantissas are noise, except the low bytes of what was computed in bf16. So a
vector is split into planes of bytes (exponents; signs and upper mantissas; and so on), and zstd codes those that it makes shorter, with
its match search all but off: what is left is Huffman coding, afresh for each block of a plane.

A coded piece is one byte that says how the rest is written, and the rest: RAW, the values as they are; PLANES, the lengths of the
planes as they are written, and those: each a frame of zstd, or as it is where that is no longer.
"""

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
# Of n values, each [n]: the exponents; the upper 7 mantissa bits and, lowest, the sign; the next 8 mantissa bits; the last 8.
Planes = Sequence[Bytes]
RAW, PLANES = 0, 1
LENGTHS = struct.Struct("<4Q")  # of the planes as they are written

# log2 of the bytes that have a Huffman code of their own. Smaller blocks follow the layers more closely, and take longer.
BLOCK_LOG = 14
# A plane with more bits of entropy per byte, in about so many samples of it, is left as it is: to try zstd takes longer than all the rest.
MOST_ENTROPY = 7.5
SAMPLE = 4096
# Elements that are split or put together at a time: what passes between the steps stays in the processor's cache.
STRIP = 1 << 16


def most_bytes(elements: int) -> int:
    """The longest that a coded piece of so many elements can be."""
    return 1 + 4 * elements


class Codec:
    """For one thread at a time. ImportError if zstandard is missing, which `train.first_look` finds before."""

    def __init__(self) -> None:
        import zstandard

        self.zstd: Any = zstandard
        settings = self.zstd.ZstdCompressionParameters(
            strategy=self.zstd.STRATEGY_FAST,
            window_log=BLOCK_LOG,
            hash_log=6,
            chain_log=6,
            search_log=1,
            min_match=7,
            target_length=0,  # any other number would leave Huffman coding out
            write_content_size=True,
            write_checksum=True,
        )
        self.compressor = self.zstd.ZstdCompressor(compression_params=settings)
        self.decompressor = self.zstd.ZstdDecompressor()
        self.planes: Bytes = np.empty(0, np.uint8)

    def encode(self, values: NDArray[np.float32], out: Bytes) -> int:
        """Writes `values`, contiguous, to the beginning of `out`, which has room for `most_bytes`; returns how many bytes it took."""
        if len(self.planes) < values.nbytes:
            self.planes = np.empty(values.nbytes, np.uint8)
        planes = np.split(self.planes[: values.nbytes], 4)
        _split(values.view(np.uint32), planes)
        written = [self._coded(plane) for plane in planes]
        parts = [np.frombuffer(LENGTHS.pack(*map(len, written)), np.uint8), *written]
        kind = PLANES
        if sum(map(len, parts)) >= values.nbytes:
            kind, parts = RAW, [values.view(np.uint8)]
        out[0], end = kind, 1
        for part in parts:
            out[end : end + len(part)] = part
            end += len(part)
        return end

    def _coded(self, plane: Bytes) -> Bytes:
        """The frame of a plane, or the plane, whichever is shorter."""
        if _entropy(plane[:: len(plane) // SAMPLE | 1]) > MOST_ENTROPY:
            return plane
        frame = np.frombuffer(self.compressor.compress(plane), np.uint8)
        return frame if len(frame) < len(plane) else plane

    def decode(self, piece: Bytes, out: NDArray[np.float32]) -> None:
        """Fills `out`, contiguous. ValueError if `piece` is not the code of so many values."""
        kind, content = int(piece[0]) if len(piece) else None, piece[1:]
        if kind == RAW and len(content) == out.nbytes:
            out.view(np.uint8)[:] = content
        elif kind == PLANES and len(content) >= LENGTHS.size:
            lengths = LENGTHS.unpack(content[: LENGTHS.size].tobytes())
            if sum(lengths) != len(content) - LENGTHS.size:
                raise ValueError(f"planes of {lengths} bytes in a piece of {len(piece)}")
            written = np.split(content[LENGTHS.size :], np.cumsum(lengths[:-1]))
            _join([self._plane(plane, len(out)) for plane in written], out.view(np.uint32))
        else:
            raise ValueError(f"{len(piece)} bytes of kind {kind} for {len(out)} values")

    def _plane(self, written: Bytes, size: int) -> Bytes:
        if len(written) == size:
            return written
        # What the frame says of its size is checked first: the package makes room for as much.
        try:
            said = self.zstd.frame_content_size(written)
            if said == size:
                plane: Bytes = np.frombuffer(self.decompressor.decompress(written, allow_extra_data=False), np.uint8)
                said = len(plane)
        except self.zstd.ZstdError as error:
            raise ValueError(str(error)) from None
        if said != size:
            raise ValueError(f"a plane of {said} bytes where {size} are expected")
        return plane


def _entropy(sample: Bytes) -> float:
    """Bits per byte, at least, in which a code of single bytes writes it."""
    counts = np.bincount(sample)
    shares = counts[counts > 0] / max(1, len(sample))
    return -float(shares @ np.log2(shares))


def _split(values: NDArray[np.uint32], planes: Planes) -> None:
    exponents, upper, middle, last = planes
    one, other = np.empty((2, min(STRIP, len(values))), np.uint32)
    for start in range(0, len(values), STRIP):
        here = slice(start, start + STRIP)
        bits = values[here]
        x, y = one[: len(bits)], other[: len(bits)]
        last[here] = bits  # as every assignment here, without the bits that have no room
        np.right_shift(bits, 8, out=x)
        middle[here] = x
        np.right_shift(bits, 23, out=x)
        exponents[here] = x
        np.right_shift(bits, 15, out=x)
        np.bitwise_and(x, 0xFE, out=x)
        np.right_shift(bits, 31, out=y)
        np.bitwise_or(x, y, out=x)
        upper[here] = x


def _join(planes: Planes, values: NDArray[np.uint32]) -> None:
    exponents, upper, middle, last = planes
    one, other = np.empty((2, min(STRIP, len(values))), np.uint32)
    for start in range(0, len(values), STRIP):
        here = slice(start, start + STRIP)
        bits = values[here]
        x, y = one[: len(bits)], other[: len(bits)]
        x[:] = exponents[here]
        np.left_shift(x, 23, out=bits)
        x[:] = upper[here]
        np.left_shift(x, 31, out=y)
        np.bitwise_or(bits, y, out=bits)
        np.right_shift(x, 1, out=x)
        np.left_shift(x, 16, out=x)
        np.bitwise_or(bits, x, out=bits)
        x[:] = middle[here]
        np.left_shift(x, 8, out=x)
        np.bitwise_or(bits, x, out=bits)
        np.bitwise_or(bits, last[here], out=bits)
