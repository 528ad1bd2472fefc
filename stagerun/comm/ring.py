"""What gloo's ring all-reduce computes: where it cuts a vector, and in which order it adds. With these, another way of sending has its bits.

Piece r ends at rank r. It starts at rank r-1, goes down the ring, and each rank adds what it has: ((x[r-1] + x[r-2]) + ...) + x[r], by rank.
The rules are in gloo/allreduce.cc, function `ring`; tests/process/test_comm_gloo.py compares with what the installed torch does.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

# The most bytes that gloo sends at a time, unless it is asked for another number; torch doesn't ask.
SEGMENT_BYTES = 1 << 20


def ring_pieces(elements: int, element_size: int, size: int) -> list[int]:
    """Elements of each rank's piece of a vector; those of the last ranks may be smaller, or empty."""
    segments = _up(max(-(-elements * element_size // SEGMENT_BYTES), 2 * size), size)
    width = segments // size * _up(-(-elements * element_size // segments), element_size) // element_size
    return [min(elements, (rank + 1) * width) - min(elements, rank * width) for rank in range(size)]


def ring_sum(rank: int, parts: Sequence[NDArray[np.float32]], out: NDArray[np.float32]) -> None:
    """Puts the sum of `parts`, which are those that the ranks have of piece `rank`, into `out`, which may be one of them."""
    order = [parts[(rank - step) % len(parts)] for step in range(1, len(parts) + 1)]
    sum = order[0]
    for step, part in enumerate(order[1:], 2):
        sum = np.add(part, sum, out=out if step == len(order) else None)


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
