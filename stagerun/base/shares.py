"""How often each class comes in an epoch that has its classes in shares (`sampling`). Pure, and without numpy."""

from collections.abc import Sequence
from fractions import Fraction

from stagerun.base.recipe import Sampling, Solver


def shares(weights: Sequence[Fraction], images: int) -> list[int]:
    """How many of `images` each class has by its weight, which is 0 or more, one of them more: within one of the exact share.

    By largest remainders (Hamilton's method), of equal ones the first. In whole numbers, so that all machines have the same.

    >>> shares([Fraction(1), Fraction(1), Fraction(1), Fraction(0)], 100)
    [34, 33, 33, 0]
    """
    total = sum(weights)
    exact = [images * weight / total for weight in weights]
    found = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda c: found[c] - exact[c])
    for c in by_remainder[: images - sum(found)]:
        found[c] += 1
    return found


def weights_of(solver: Solver, sizes: Sequence[int]) -> list[Fraction]:
    """How often each class comes, in proportion; `sizes`: the images of each."""
    if solver.sampling is Sampling.BALANCED:
        return [Fraction(1 if size else 0) for size in sizes]
    return [Fraction(size) for size in sizes]


def told(solver: Solver, sizes: Sequence[int], images: int) -> str:
    """What `sampling` does to an epoch of so many images, for `plan`; `sizes` is () where they are not known."""
    name = solver.sampling.value
    weights = weights_of(solver, sizes) if sizes else []
    if not any(weights):
        return name
    drawn = {c: n for c, n in enumerate(shares(weights, images)) if n}
    seen = sum(min(n, sizes[c]) for c, n in drawn.items())
    ends = dict.fromkeys(end(drawn, key=lambda c: (sizes[c], c)) for end in (min, max))  # the rarest and the commonest
    times = ", of ".join(f"class {c} ({sizes[c]}) {drawn[c] / sizes[c]:.3g} times" for c in ends)
    return f"{name}: an epoch has {seen} of {images} images; each of {times}"
