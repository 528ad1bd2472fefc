"""Which worker computes whose gradient again (`audit_param`), and how the proofs of a stage are chained. Pure."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

_T = TypeVar("_T")
# A right rank is off by what the wrong one's gradients have added in some updates, a wrong one by that and its own, which may nearly cancel:
# the one that is named is so by a wide margin.
FURTHER = 30.0


def is_due(iter: int, every: int) -> bool:
    """Whether the update after `iter` updates is audited.

    >>> [i for i in range(7) if is_due(i, 3)]
    [2, 5]
    """
    return every > 0 and (iter + 1) % every == 0


def auditor(rank: int, number: int, workers: int) -> int:
    """The rank that computes a gradient of `rank` again in the audit of that number. In workers - 1 audits in turn each rank has all others.

    >>> [[auditor(rank, n, 3) for rank in range(3)] for n in range(2)]
    [[1, 2, 0], [2, 0, 1]]
    """
    return rank if workers == 1 else (rank + 1 + number % (workers - 1)) % workers


def audited(rank: int, number: int, workers: int) -> int:
    """The rank of which `rank` is the `auditor`."""
    return rank if workers == 1 else (rank - 1 - number % (workers - 1)) % workers


def judge(rank: int, number: int, workers: int) -> int:
    """A third rank, which decides between `rank` and its auditor; of two workers the auditor, of one the worker itself.

    >>> [judge(rank, 0, 3) for rank in range(3)]
    [2, 0, 1]
    """
    return auditor(rank, number + 1, workers)


def audited_worker(run: range, number: int, workers: int) -> int:
    """Which logical worker of the audited rank's `run`: all of them in turn, each by all auditors.

    >>> [audited_worker(range(4, 6), n, 3) for n in range(5)]
    [4, 4, 5, 5, 4]
    """
    return run[number // max(1, workers - 1) % len(run)]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Which of two that don't agree erred, 0 or 1, none if it can't be said; and which of these erred once more."""

    wrong: tuple[int, ...] = ()
    again: tuple[int, ...] = ()


def verdict(first: Sequence[_T], again: Sequence[_T], same: Callable[[_T, _T], bool] = lambda a, b: a == b) -> Verdict:
    """`first`: what the audited rank and its auditor computed; `again`: what these, and a third if there is one, computed afterwards. What most
    of the latter agree on is right.

    >>> verdict("xy", "xyy"), verdict("xy", "yy")
    (Verdict(wrong=(0,), again=(0,)), Verdict(wrong=(0,), again=()))
    >>> verdict("xy", "xy")
    Verdict(wrong=(), again=())
    """
    votes = [sum(same(found, other) for other in again) for found in again]
    best = max(range(len(again)), key=votes.__getitem__)
    if 2 * votes[best] <= len(again):
        return Verdict()
    wrong = tuple(number for number, found in enumerate(first) if not same(found, again[best]))
    return Verdict(wrong, tuple(number for number in wrong if not same(again[number], again[best])))


def furthest(distances: Sequence[Sequence[float]]) -> tuple[int, ...]:
    """Of ranks that held other bits of some tensors, those that were further from the right ones than another in one of them, by FURTHER. `distances`:
    by rank, then by tensor.

    >>> furthest([[0.0, 1e-9], [0.5, 1e-9]]), furthest([[0.5, 0.1], [0.5, 0.2]])
    ((1,), ())
    """
    least = [min(its) for its in zip(*distances, strict=True)]
    return tuple(
        rank
        for rank, its in enumerate(distances)
        if any(distance > FURTHER * low or distance != distance for distance, low in zip(its, least, strict=True))
    )


def chained(before: str, iter: int, state: str) -> str:
    """The next link of a chain of proofs: BLAKE2b of the link before ('' at its start), the iteration and the state's digest, in hex."""
    return hashlib.blake2b(f"{before} {iter} {state}".encode(), digest_size=16).hexdigest()


def broken_link(before: str, proofs: Sequence[tuple[int, str, str]]) -> int | None:
    """The iteration of the first of (iteration, state, chain), in order, that does not follow from what is before it."""
    for iter, state, chain in proofs:
        if chained(before, iter, state) != chain:
            return iter
        before = chain
    return None
