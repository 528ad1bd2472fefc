"""What adding up gradients over a network costs: the usual model of a ring, with backward above it. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

# Of a pass, backward: through a layer it is two products of the size of the one forward.
BACKWARD_SHARE = 2 / 3
# Of backward, how much is left when the first gradients leave: 0.84 in one profile (`run --profile`), of one iteration of `resnet18`.
# Where the last layer alone fills a piece, as in ResNet-50, it is more.
OVERLAP = 0.84


@dataclass(frozen=True, slots=True)
class Link:
    """Of each host to the others. `bandwidth` in bytes per second, each way; `latency` in seconds, of one message."""

    bandwidth: float
    latency: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Seconds of an iteration. `communicating`: all that the link does for it; `exposed`: what of that is left after backward."""

    computing: float
    communicating: float
    exposed: float

    @property
    def total(self) -> float:
        return self.computing + self.exposed


def ring(size: float, workers: int, link: Link) -> float:
    """Seconds of a ring all-reduce of `size` bytes over p workers: 2 (p-1)/p * size / bandwidth + 2 (p-1) * latency. Each worker sends
    2 (p-1) messages, each a p-th of the whole: p-1 until one of them has the sum of each part, p-1 until all have it."""
    steps = 2 * (workers - 1)
    return steps / workers * size / link.bandwidth + steps * link.latency


def step(pieces: Sequence[float], workers: int, link: Link, one_pass: float, passes: int, update: float) -> Step:
    """An iteration of `passes` device batches, `one_pass` seconds of forward and backward each, and an update of `update` seconds, in
    which `pieces` (bytes, in the order in which they leave) are summed, one after the other on the same link.

    They leave while the last pass goes backward, which hides as much as is left of it after the first has left (OVERLAP), but never the
    last piece: that is full when backward is over.
    """
    times = [ring(size, workers, link) for size in pieces] if workers > 1 else [0.0]
    hidden = min(OVERLAP * BACKWARD_SHARE * one_pass, sum(times[:-1]))
    return Step(computing=passes * one_pass + update, communicating=sum(times), exposed=sum(times) - hidden)
