"""Rules about batches so large that recipes of small ones don't carry over, or images don't suffice: `lr-batch`, `decay-on-norm`,
`batch-images`. Pure."""

import bisect
import math
from collections.abc import Iterator

from stagerun.plan.lint.finding import Finding, place_of
from stagerun.plan.lint.rates import peak
from stagerun.recipe import ParamKind, Schedule, Solver
from stagerun.spec.networks import NETWORKS

LARGE = 1024
# Linear scaling, 0.1 for 256 images with a momentum of 0.9 (Goyal et al., arXiv:1706.02677; tensorflow/tpu:
# models/official/resnet). Published runs lie between a half of it (batch 24,576, with 4.8) and two and a half (NVIDIA's and
# MosaicML's 2.048 for 2,048).
LINEAR = 0.1 / 256
SGD_BAND = 4.0
# Batch size and peak learning rate of LARS with which ResNet-50 reached 75.9 % in the fewest epochs (mlcommons/logging:
# mlperf_logging/rcp_checker/training_4.0.0/rcps_resnet.json). Others' rates are up to 2 times higher or lower.
LARS = (
    (1632, 7.4),
    (3264, 10.5),
    (4096, 10.0),
    (8192, 17.0),
    (13056, 12.8),
    (32768, 21.2),
    (49152, 19.4),
    (65536, 24.7),
)
LARS_BAND = 2.5


def lr_batch(schedule: Schedule) -> Iterator[Finding]:
    """A stage with batches of LARGE images or more whose highest rate is several times off what published runs
    had at that batch: SGD and Nesterov with a momentum near 0.9, and LARS. A stage that trains on from another may have any rate below
    that; other types, and smaller batches, have no such rule.
    """
    for stage in schedule.stages:
        solver = stage.solver
        usual, band = _usual(solver)
        if usual is None:
            continue
        highest, least = peak(solver), usual / band if stage.parent is None else 0.0
        if least <= highest <= usual * band:
            continue
        factor = highest / usual
        text = (
            f"the learning rate of stage `{stage.name}` goes up to {highest:.4g} with {solver.batch_size} images per update: "
            f"{factor:.2g} times what published runs of type {solver.type} had"
        )
        hint = f"about {usual:.2g}; `base_lr_batch` scales a rate that was written for another batch"
        yield Finding("lr-batch", text, place_of(stage, "base_lr"), hint)


def _usual(solver: Solver) -> tuple[float | None, float]:
    """The usual rate at this batch, None where nothing is known, and the factor that it may be off by."""
    if solver.batch_size < LARGE:
        return None, 1.0
    if solver.type in ("SGD", "Nesterov") and not solver.local_lr_auto and 0.8 <= solver.momentum <= 0.95:
        return LINEAR * solver.batch_size, SGD_BAND
    if solver.type == "LARS" and solver.batch_size >= LARS[0][0]:
        return _interpolated(solver.batch_size), LARS_BAND
    return None, 1.0


def _interpolated(batch: int) -> float:
    """The rate of LARS on a line between its neighbours in the table, in logarithms; beyond its end that of the last row."""
    at = bisect.bisect_right([size for size, _ in LARS], batch)
    if at == len(LARS):
        return LARS[-1][1]
    (low, before), (high, after) = LARS[at - 1], LARS[at]
    share = math.log(batch / low) / math.log(high / low)
    return before * (after / before) ** share


def decay_on_norm(schedule: Schedule) -> Iterator[Finding]:
    """Weight decay on the scales and shifts of BatchNorm, with batches of LARGE images or more, or with LARS or LAMB: all large-batch
    recipes since Goyal et al. (arXiv:1706.02677) leave it out, and a layer-wise rate is meant for maps alone. With small batches it does
    little either way, and is not looked at. A `param` rule that exempts some of them by name is taken for meant.
    """
    if NETWORKS[schedule.model.name].batch_norm is None:
        return
    for stage in schedule.stages:
        solver = stage.solver
        large = solver.batch_size >= LARGE or solver.type in ("LARS", "LAMB") or solver.local_lr_auto
        if large and solver.weight_decay > 0 and _decays_norm(solver):
            text = f"weight_decay {solver.weight_decay:g} of stage `{stage.name}` is on the scales and shifts of BatchNorm, too"
            yield Finding(
                "decay-on-norm", text, place_of(stage, "weight_decay"), "write `param { kind: NORM decay_mult: 0 }`"
            )


def batch_images(schedule: Schedule) -> Iterator[Finding]:
    """An update of more images than there are: some are in it twice."""
    images = schedule.data.train.images
    for stage in schedule.stages:
        if stage.solver.batch_size > images:
            text = f"an update of stage `{stage.name}` takes {stage.solver.batch_size} images, and there are {images}"
            hint = "a smaller `batch_size`, or is `images` of `data.train` wrong?"
            yield Finding("batch-images", text, place_of(stage, "batch_size"), hint)


def _decays_norm(solver: Solver) -> bool:
    """The first rule that fits counts, as in training."""
    for rule in solver.param:
        if rule.kind in (ParamKind.ANY, ParamKind.NORM):
            if rule.decay_mult == 0:
                return False
            if rule.name == "*":
                return True
    return True
