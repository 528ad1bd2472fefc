"""The ways to send a stage's gradients that AUTO weighs: how long each would take, which to try, and which to take. Pure."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stagerun.base.recipe import Method
from stagerun.plan.link import Coding, Senders, Speeds, cheapest, compressed_step, dense_step, lossless_step

DENSE = Method.NONE.value
MIXED = "a mixture by layer"

# Dense gradients stay unless another way takes so much less: what a few steps show is not surer.
CLEARLY = 0.97
# What is predicted to take so many times as long as the best is not tried. Of dense gradients it must be more: they are what a wrong
# prediction for the others is found out by.
WORSE, MUCH_WORSE = 1.5, 3.0
# Steps of each way that count; fewer, but _LEAST, after _ENOUGH seconds, and one after _LONG.
STEPS = 9
_LEAST, _ENOUGH, _LONG = 3, 30.0, 120.0


@dataclass(frozen=True, slots=True)
class Way:
    """`choice` as of `base.compression`; `predicted`: seconds of an iteration."""

    name: str
    choice: Mapping[str, str]
    predicted: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """`computing`: seconds of an iteration that sends nothing, `one_pass` those of a device batch in it. `dense`: bytes of the chunks
    of dense gradients."""

    who: Senders
    speeds: Speeds
    computing: float
    one_pass: float
    dense: Sequence[float]


def ways(chunks: Sequence[Mapping[str, Mapping[str, Coding]]], job: Job, mixed: bool) -> list[Way]:
    """The fastest first. `chunks`: by tensor, in the order in which they are sent, what each method costs; a tensor that has one method by a
    rule has that alone. `mixed`: each tensor may have a method of its own."""
    free = {name: codings for chunk in chunks for name, codings in chunk.items() if len(codings) > 1}
    fixed = any(len(codings) == 1 and DENSE not in codings for chunk in chunks for codings in chunk.values())
    choices = {method: {"*": method} for method in dict.fromkeys(m for codings in free.values() for m in codings)}
    if mixed:
        best = {name: cheapest(codings, job.who, job.speeds) for name, codings in free.items()}
        if len(set(best.values())) > 1:
            choices[MIXED] = {"*": DENSE} | {name: method for name, method in best.items() if method != DENSE}

    def predicted(choice: Mapping[str, str]) -> float:
        if choice == {"*": DENSE} and not fixed:
            return dense_step(job.dense, job.who.workers, job.speeds, job.computing, job.one_pass)
        found = [
            [c.get(choice.get(name, choice["*"])) or next(iter(c.values())) for name, c in chunk.items()]
            for chunk in chunks
        ]
        return compressed_step(found, job.who, job.speeds, job.computing, job.one_pass)

    return sorted((Way(name, choice, predicted(choice)) for name, choice in choices.items()), key=lambda w: w.predicted)


def with_lossless(found: Sequence[Way], job: Job, share: float, seconds: float) -> list[Way]:
    """And dense gradients in a `share` of the bytes; `seconds` to code and to decode one."""
    name = Method.LOSSLESS.value
    predicted = lossless_step(job.dense, share, seconds, job.who.workers, job.speeds, job.computing, job.one_pass)
    return sorted([*found, Way(name, {"*": name}, predicted)], key=lambda way: way.predicted)


def worth_trying(found: Sequence[Way], most: int) -> list[Way]:
    """Dense gradients first, unless they are much worse, and `most` others at most. `found`: the fastest first."""
    best = found[0].predicted
    dense = [way for way in found if way.name == DENSE and way.predicted <= MUCH_WORSE * best]
    others = [way for way in found if way.name != DENSE and way.predicted <= WORSE * best]
    return [*dense, *others[:most]]


def still_tried(taken: Mapping[str, Sequence[float]], live: Sequence[str], first: bool) -> list[str]:
    """Without those that are slower than the best by far; after the `first` step, which makes room for things, by more."""
    middle = {name: statistics.median(taken[name]) for name in live}
    limit = (MUCH_WORSE if first else WORSE) * min(middle.values())
    return [name for name in live if middle[name] <= limit]


def enough(steps: int, elapsed: float, left: int) -> bool:
    """Whether to try no more, with so many `steps` of each that count, and as many ways `left`."""
    return left == 1 or steps >= STEPS or (elapsed > _ENOUGH and steps >= _LEAST) or (elapsed > _LONG and steps >= 1)


def decided(taken: Mapping[str, Sequence[float]]) -> tuple[str, str]:
    """The way to take, and why in words. `taken`: seconds of the steps of each way, in turn, so that those of one turn make pairs."""
    middle = {name: statistics.median(times) for name, times in taken.items()}
    best = min(middle, key=lambda name: middle[name])
    if best == DENSE or DENSE not in taken:
        return best, "the fastest of those that were tried"
    ratios = sorted(a / b for a, b in zip(taken[best], taken[DENSE], strict=False))
    ratio, high = statistics.median(ratios), ratios[(3 * len(ratios)) // 4]
    if ratio > CLEARLY or high >= 1:
        return DENSE, f"nothing is clearly faster: {best} takes {ratio:.2f} times as long"
    return best, f"it takes {ratio:.2f} times as long as dense"
