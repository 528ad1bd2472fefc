"""The layers of a pass as steps from numbered maps to numbered maps: what an in-place layer writes has a number of its own. Layers whose tops
nothing needs are left out, and those that one call of torch's computes are joined."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from stagerun.base import net
from stagerun.base.net import Layer, Pass

IMAGES = 0


@dataclass(frozen=True, slots=True)
class Step:
    """`scale`: the Scale that follows a BatchNorm, computed with it. `over`: the bottom is overwritten, since no other layer needs it.
    `ends`: maps that no later step takes."""

    layer: Layer
    takes: tuple[int, ...]
    makes: tuple[int, ...]
    scale: Layer | None = None
    over: bool = False
    ends: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Steps:
    """`logits`, and `losses`: the maps that a pass is for, of each loss that is trained its logits."""

    steps: tuple[Step, ...]
    logits: int
    losses: tuple[int, ...]


def steps_of(one: Pass, training: bool, alone: bool = False) -> Steps:
    """`alone`: the logits only, without the branches of other losses."""
    found, logits, losses = _numbered(one, training)
    losses = losses if training and not alone else ()
    wanted = {logits, *losses}
    kept = _needed(found, wanted)
    return Steps(_with_ends(_over(_joined(kept, wanted), wanted), wanted), logits, losses)


def _numbered(one: Pass, training: bool) -> tuple[list[Step], int, tuple[int, ...]]:
    """All steps; the logits; and those of each loss that counts."""
    current, steps = {one.images: IMAGES}, list[Step]()
    last, logits, losses = IMAGES, None, list[int]()
    softened: dict[int, int] = {}  # what each Softmax makes, and what it takes
    for layer in one.layers:
        settings = layer.settings
        if isinstance(settings, net.Images | net.Accuracy | net.Silence | net.SoftmaxWithLoss | net.Softmax):
            # What is judged is the map as it is now: a later layer may overwrite it.
            if layer.bottoms and layer.bottoms[0] == one.logits:
                logits = current[one.logits]
            if isinstance(settings, net.SoftmaxWithLoss) and settings.loss_weight:
                losses.append(current[layer.bottoms[0]])
        if isinstance(settings, net.Images | net.Accuracy | net.Silence):
            continue
        bottoms = layer.bottoms[:1] if isinstance(settings, net.SoftmaxWithLoss) else layer.bottoms
        takes = tuple(current[name] for name in bottoms)
        if isinstance(settings, net.Split) or (isinstance(settings, net.Dropout) and not training):
            current.update(dict.fromkeys(layer.tops, takes[0]))
            continue
        makes = tuple(range(last + 1, last + 1 + len(layer.tops)))
        last += len(layer.tops)
        steps.append(Step(layer, takes, makes))
        if isinstance(settings, net.Softmax):
            softened[makes[0]] = takes[0]
        current.update(zip(layer.tops, makes, strict=True))
    logits = current[one.logits] if logits is None else logits
    while logits in softened:  # computed in place, under the logits' name
        logits = softened[logits]
    return steps, logits, tuple(losses)


def _needed(steps: Sequence[Step], wanted: set[int]) -> list[Step]:
    needed, kept = set(wanted), list[Step]()
    for step in reversed(steps):
        if needed.intersection(step.makes):
            needed.update(step.takes)
            kept.append(step)
    return kept[::-1]


def _uses(steps: Sequence[Step], wanted: set[int]) -> Counter[int]:
    return Counter([*wanted, *(number for step in steps for number in step.takes)])


def _joined(steps: list[Step], wanted: set[int]) -> list[Step]:
    """A BatchNorm without weights of its own, and the Scale that alone takes its top, are one step."""
    uses, by_bottom = _uses(steps, wanted), {step.takes[0]: step for step in steps}
    joined, gone = list[Step](), set[int]()
    for step in steps:
        if step.makes[0] in gone:
            continue
        after = by_bottom.get(step.makes[0])
        if _is_norm(step) and after is not None and uses[step.makes[0]] == 1 and _scales_channels(after):
            gone.add(after.makes[0])
            step = replace(step, makes=after.makes, scale=after.layer)
        joined.append(step)
    return joined


def _is_norm(step: Step) -> bool:
    return isinstance(step.layer.settings, net.BatchNorm) and not step.layer.blobs


def _scales_channels(step: Step) -> bool:
    settings, blobs = step.layer.settings, step.layer.blobs
    own = isinstance(settings, net.Scale) and len(step.takes) == 1
    return own and settings.axis == 1 and len(blobs[0].shape) == 1  # type: ignore[union-attr]


# What needs its own top for its gradient no more than that of the ReLU after it does.
_FORGETS = net.Convolution | net.InnerProduct | net.Pooling | net.BatchNorm | net.Scale | net.Bias


def _over(steps: list[Step], wanted: set[int]) -> list[Step]:
    uses, by_top = _uses(steps, wanted), {number: step for step in steps for number in step.makes}

    def free(step: Step) -> bool:
        settings, before = step.layer.settings, by_top.get(step.takes[0])
        plain = isinstance(settings, net.ReLU) and not settings.negative_slope and uses[step.takes[0]] == 1
        return plain and before is not None and (_adds(before) or isinstance(before.layer.settings, _FORGETS))

    return [replace(step, over=True) if free(step) else step for step in steps]


def _adds(step: Step) -> bool:
    settings = step.layer.settings
    return isinstance(settings, net.Eltwise) and settings.operation is net.Operation.SUM and len(step.takes) > 1


def _with_ends(steps: list[Step], wanted: set[int]) -> tuple[Step, ...]:
    seen, found = set(wanted), list[Step]()
    for step in reversed(steps):
        found.append(replace(step, ends=tuple(set(step.takes) - seen)))
        seen.update(step.takes)
    return tuple(found[::-1])
