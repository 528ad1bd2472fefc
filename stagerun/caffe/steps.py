"""The layers of a pass as steps from numbered maps to numbered maps: what an in-place layer writes has a number of its own. Layers whose tops
nothing needs are left out, and those that one call of torch's computes are joined."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from stagerun.caffe import layers, map_layers
from stagerun.caffe.layers import SoftmaxWithLoss
from stagerun.caffe.net import Layer, Net, Pass

IMAGES = 0  # the number of the map that comes in


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
    return Steps(_with_ends(_over(_joined(_needed(found, wanted), wanted), wanted), wanted), logits, losses)


def losses_of(net: Net) -> tuple[SoftmaxWithLoss, ...]:
    """The losses that training sums up, in the order of the logits of `Network`. Empty where the mean cross entropy of the logits is all
    there is."""
    found, planned = layers.trained_losses(net.train), steps_of(net.train, training=True)
    means = [SoftmaxWithLoss(normalization=word) for word in ("VALID", "FULL", "BATCH_SIZE")]
    plain = planned.losses in ((), (planned.logits,)) and all(loss in means for loss in found)
    return () if plain else found


def _numbered(one: Pass, training: bool) -> tuple[list[Step], int, tuple[int, ...]]:
    """All steps; the logits; and those of each loss that counts."""
    current, steps = {one.images: IMAGES}, list[Step]()
    last, logits, losses = IMAGES, None, list[int]()
    softened: dict[int, int] = {}  # what each Softmax makes, and what it takes
    for layer in one.layers:
        settings, bottoms = layer.settings, layer.bottoms
        unneeded = isinstance(settings, layers.Images | layers.Accuracy | map_layers.Silence)
        if unneeded or isinstance(settings, SoftmaxWithLoss | layers.Softmax):
            # What is judged is the map as it is now: a later layer may overwrite it.
            if bottoms[:1] == (one.logits,):
                logits = current[one.logits]
            if isinstance(settings, SoftmaxWithLoss):
                bottoms = bottoms[:1]
                losses += [current[bottoms[0]]] if settings.loss_weight else []
        if unneeded:
            continue
        takes = tuple(current[name] for name in bottoms)
        if isinstance(settings, map_layers.Split) or (isinstance(settings, layers.Dropout) and not training):
            current.update(dict.fromkeys(layer.tops, takes[0]))
            continue
        makes = tuple(range(last + 1, last + 1 + len(layer.tops)))
        last += len(layer.tops)
        steps.append(Step(layer, takes, makes))
        if isinstance(settings, layers.Softmax):
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
        is_norm = isinstance(step.layer.settings, layers.BatchNorm) and not step.layer.blobs
        if is_norm and after is not None and uses[step.makes[0]] == 1 and _scales_channels(after):
            gone.add(after.makes[0])
            step = replace(step, makes=after.makes, scale=after.layer)
        joined.append(step)
    return joined


def _scales_channels(step: Step) -> bool:
    settings = step.layer.settings
    own = isinstance(settings, layers.Scale) and settings.axis == 1 and len(step.takes) == 1
    return own and len(step.layer.blobs[0].shape) == 1


# What needs its own top for its gradient no more than that of the ReLU after it does.
_FORGETS = (
    map_layers.Convolution | map_layers.Pooling | layers.InnerProduct | layers.BatchNorm | layers.Bias
)  # and Scale, which is a Bias


def _over(steps: list[Step], wanted: set[int]) -> list[Step]:
    uses, by_top = _uses(steps, wanted), {number: step for step in steps for number in step.makes}

    def free(step: Step) -> bool:
        settings, before = step.layer.settings, by_top.get(step.takes[0])
        plain = isinstance(settings, layers.ReLU) and not settings.negative_slope and uses[step.takes[0]] == 1
        if not plain or before is None:
            return False
        made_by = before.layer.settings
        adds = isinstance(made_by, map_layers.Eltwise) and made_by.operation == "SUM"
        return isinstance(made_by, _FORGETS) or (adds and len(before.takes) > 1)

    return [replace(step, over=True) if free(step) else step for step in steps]


def _with_ends(steps: list[Step], wanted: set[int]) -> tuple[Step, ...]:
    seen, found = set(wanted), list[Step]()
    for step in reversed(steps):
        found.append(replace(step, ends=tuple(set(step.takes) - seen)))
        seen.update(step.takes)
    return tuple(found[::-1])
