"""A batch as the engine gets it, and the memory that it lies in."""

import math
import weakref
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Batch:
    """`images` is uint8[n, height, width, channels], contiguous, in the order B, G, R; labels and positions are int64[n].

    `lighting` is float32[n, 3], to be added to B, G, R; `cutout` int32[n, 4], the top, left, height and width of what becomes 0 for
    the network. None where the transform has no such thing. The memory of `images` is used again when no one refers to the array,
    to a part of it or to a tensor made of it: whoever holds one of these may do so as long as they like.
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    positions: NDArray[np.int64]
    lighting: NDArray[np.float32] | None = None
    cutout: NDArray[np.int32] | None = None


class Buffers:
    """Arrays over memory that is used again: fresh pages for each batch would cost 20 to 30 us per image of 224 x 224.

    When is memory free? A new array is made over it each time it is lent. All that refers to the pixels refers to that array: a
    part of it (numpy lets a view of a view refer to the array that is first in line, and that is this one, as the memory
    itself is no array), a memoryview, a tensor of `torch.from_numpy`, and what shares memory with these. So when the array is
    collected, and not before, no one can see the memory any more, and its callback puts it back. Counting references
    instead would have to know how many are the loader's own.
    """

    def __init__(self, most: int) -> None:
        """At most `most` pieces of memory are kept for later; any number may be lent."""
        self._free: deque[bytearray] = deque(maxlen=most)

    def array(self, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        """uint8[shape], contiguous, with anything in it. From any thread."""
        memory = self._take(math.prod(shape))
        array: NDArray[np.uint8] = np.ndarray(shape, np.uint8, buffer=memory)
        # May run in any thread, at any time: appending to a deque takes no lock that this thread could hold.
        weakref.finalize(array, self._free.append, memory).atexit = False
        return array

    def _take(self, size: int) -> bytearray:
        while True:
            try:
                memory = self._free.popleft()
            except IndexError:
                return bytearray(size)
            if len(memory) == size:  # others are of batches of another size, which the stream may have left behind
                return memory
