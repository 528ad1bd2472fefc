"""The order of pushes in a stage, as snapshots keep it (`train.progress.ARRIVALS`): by it the stage can be trained again to the same bits."""

from dataclasses import dataclass, field

import torch

from stagerun.engine.codec import decode, encode

# The file's tensors, in its first version's terms. A claim numbers a push of its leg; older versions may apply claims in another order.
_TYPES = {
    "legs": torch.int64,  # [n, 5]: first iteration, last, pushes, 0, 0
    "iterations": torch.int64,  # by claim, as are the replicas
    "replicas": torch.int16,
    "0/pushes": torch.int64,  # by leg
    "0/order": torch.int32,  # the claims of a leg, as they were applied
    "0/staleness": torch.int32,
}


@dataclass(slots=True)
class Record:
    """Of each push of a stage from iteration 0 on, in the order in which they were applied: its iteration, the replica that computed it, and
    how many updates it had not seen. `ends`: the iterations up to which legs went, growing."""

    ends: list[int] = field(default_factory=list)
    iterations: list[int] = field(default_factory=list)
    replicas: list[int] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)

    @property
    def last(self) -> int:
        """The iteration up to which the order is known."""
        return self.ends[-1] if self.ends else 0

    def until(self, end: int) -> "Record":
        """The legs up to iteration `end`."""
        ends = [iter for iter in self.ends if iter <= end]
        pushes = ends[-1] if ends else 0
        return Record(ends, self.iterations[:pushes], self.replicas[:pushes], self.staleness[:pushes])

    def encoded(self) -> bytes:
        bounds = list(zip([0, *self.ends], self.ends, strict=False))
        found: dict[str, list[int]] = {
            "legs": [n for first, last in bounds for n in (first, last, last - first, 0, 0)],
            "iterations": self.iterations,
            "replicas": self.replicas,
            "0/pushes": [last - first for first, last in bounds],
            "0/order": [claim for first, last in bounds for claim in range(last - first)],
            "0/staleness": self.staleness,
        }
        tensors = {name: torch.tensor(numbers, dtype=_TYPES[name]) for name, numbers in found.items()}
        return encode(tensors | {"legs": tensors["legs"].reshape(-1, 5)})


def record_of(data: bytes) -> Record:
    """ValueError if it is none, or one that no run of this version can have written."""
    found = decode(data)
    if "1/order" in found:
        raise ValueError("it is of several servers, and one server holds the model")
    for name, dtype in _TYPES.items():
        shape = (5,) if name == "legs" else ()
        if name not in found or found[name].dtype != dtype or not found[name].dim() or found[name].shape[1:] != shape:
            raise ValueError(f"not a record of pushes: `{name}` is missing, or not what a run writes")
    legs, iterations, replicas, _, order, staleness = (found[name].tolist() for name in _TYPES)
    record = Record(staleness=staleness)
    for first, last, *_ in legs:
        claims = order[first:last]
        sound = first == record.last < last <= min(len(iterations), len(replicas), len(staleness))
        if sound and sorted(claims) == list(range(last - first)):
            record.iterations += [iterations[first + claim] for claim in claims]
            record.replicas += [replicas[first + claim] for claim in claims]
        done, seen = sorted(record.iterations[first:last]), enumerate(staleness[first:last])
        if not sound or done != list(range(first, last)) or not all(0 <= behind <= at for at, behind in seen):
            raise ValueError(f"not a record of pushes: its leg at iteration {first} is not one that a run has")
        record.ends.append(last)
    if {len(iterations), len(replicas), len(order), len(staleness)} != {record.last}:
        raise ValueError("not a record of pushes: it has others than those of its legs")
    return record
