"""When an iteration is broken off: a stop was asked for, and the iteration could not be finished in the time that is left."""

from collections import deque

# In the place of the 1 by which a rank asks to stop after this iteration. More than ranks can be; sums of it are exact in float64.
BROKEN_OFF = float(1 << 30)

_RECENT = 5
# An iteration may take a tenth longer than the ones before.
_MARGIN = 1.1


class Pace:
    """How long iterations take on this rank, from the last ones of this process life."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=_RECENT)

    def add(self, seconds: float) -> None:
        self._recent.append(seconds)

    @property
    def usual(self) -> float | None:
        """The longest of the last ones; None before the first is done."""
        return max(self._recent, default=None)


def hopeless(left: float | None, done: int, of: int, spent: float, usual: float | None) -> bool:
    """Whether to break off an iteration of which `done` of `of` device batches are computed in `spent` seconds.

    `left`: seconds in which it would have to be finished; None: no one asks for a stop, or it has all the time it needs. `usual`:
    what an iteration takes; None: not known yet, and then nothing was trained yet in this process life that could be lost, nor
    before the first device batch.

    >>> hopeless(33.0, 1, 4, 10.0, 40.0), hopeless(35.0, 1, 4, 10.0, 40.0), hopeless(None, 1, 4, 10.0, 40.0)
    (True, False, False)
    """
    if left is None:
        return False
    if done == 0 or usual is None:
        return True
    return _MARGIN * max(usual, spent / done * of) - spent > left
