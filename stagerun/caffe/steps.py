"""The layers of a pass as steps from numbered maps to numbered maps; an in-place layer's output gets a new number. Layers whose tops nothing
needs are left out, and layers that one call of torch's computes are joined."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from stagerun.caffe import layers, map_layers
from stagerun.caffe.layers import SoftmaxWithLoss
from stagerun.caffe.reading import Layer, Net, Pass

IMAGES = 0  # the number of the map that comes in


class Step(NamedTuple):
    """The call of a layer. `scale`: the Scale after a BatchNorm, computed with it. `over`: the bottom is overwritten, since no other layer needs it.
    `ends`: maps that no later step takes."""

    layer: Layer
    takes: tuple[int, ...]
    makes: tuple[int, ...]
    scale: Layer | None = None
    over: bool = False
    ends: tuple[int, ...] = ()


class Steps(NamedTuple):
    """The steps of a pass. `logits` and `losses`: the maps to compute; each trained loss has its logits in `losses`."""

    steps: tuple[Step, ...]
    logits: int
    losses: tuple[int, ...]


def steps_of(one: Pass, training: bool, alone: bool = False) -> Steps:
    """Return the steps of a pass. `alone`: only the logits, without the branches of other losses."""
    steps, logits, losses = _numbered(one, training)
    losses = losses if training and not alone else ()
    wanted = {logits, *losses}
    return Steps(_with_ends(_over(_joined(_needed(steps, wanted), wanted), wanted), wanted), logits, losses)


def losses_of(net: Net) -> tuple[SoftmaxWithLoss, ...]:
    """Return the losses that training sums, in the order of the logits of `Network`; () for the plain mean cross entropy of the logits."""
    losses, planned = layers.trained_losses(net.train), steps_of(net.train, training=True)
    means = [SoftmaxWithLoss(normalization=word) for word in ("VALID", "FULL", "BATCH_SIZE")]
    plain = planned.losses in ((), (planned.logits,)) and all(loss in means for loss in losses)
    return () if plain else losses


def _numbered(one: Pass, training: bool) -> tuple[list[Step], int, tuple[int, ...]]:
    """Return all steps, the number of the logits, and the numbers of the logits of each loss that counts."""
    current, steps = {one.images: IMAGES}, list[Step]()
    last, logits, losses = IMAGES, None, list[int]()
    softened: dict[int, int] = {}  # bottom of each Softmax by its top
    for layer in one.layers:
        settings, bottoms = layer.settings, layer.bottoms
        unneeded = isinstance(settings, layers.Images | layers.Accuracy | map_layers.Silence)
        if unneeded or isinstance(settings, SoftmaxWithLoss | layers.Softmax):
            # The loss judges the current map: a later layer may overwrite it.
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
    """Join a BatchNorm without weights to the Scale that alone takes its top."""
    uses, by_bottom = _uses(steps, wanted), {step.takes[0]: step for step in steps}
    joined, gone = list[Step](), set[int]()
    for step in steps:
        if step.makes[0] in gone:
            continue
        after = by_bottom.get(step.makes[0])
        is_norm = isinstance(step.layer.settings, layers.BatchNorm) and not step.layer.blobs
        if is_norm and after is not None and uses[step.makes[0]] == 1 and _scales_channels(after):
            gone.add(after.makes[0])
            step = step._replace(makes=after.makes, scale=after.layer)
        joined.append(step)
    return joined


def _scales_channels(step: Step) -> bool:
    settings = step.layer.settings
    learned = isinstance(settings, layers.Scale) and settings.axis == 1 and len(step.takes) == 1
    return learned and len(step.layer.blobs[0].shape) == 1


# Layers whose gradient doesn't need their top, so that a ReLU may overwrite it.
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

    return [step._replace(over=True) if free(step) else step for step in steps]


def _with_ends(steps: list[Step], wanted: set[int]) -> tuple[Step, ...]:
    seen, ended = set(wanted), list[Step]()
    for step in reversed(steps):
        ended.append(step._replace(ends=tuple(set(step.takes) - seen)))
        seen.update(step.takes)
    return tuple(ended[::-1])
