"""Rules about learning rates within a schedule: `lr-jump`, `warmup-start`, `zero-parent`; and about large batches: `lr-batch`,
`decay-on-norm`, `batch-images`. Pure."""

import bisect
import math
from collections.abc import Iterator

from stagerun.base.recipe import ParamKind, Schedule, Solver, Stage
from stagerun.drawing.picture import steps_at_corners
from stagerun.language.networks import NETWORKS
from stagerun.schedule import learning_rate, own_fields, warm_up_end
from stagerun.tools.lint.finding import Finding, place_of

# How far the rate may move from one update to the next where two stages, or a warm-up and its policy, meet. Steps down by 10
# are what multi-step schedules are made of, and a collapse may begin well below its trunk; the stages of published recipes
# step up by less than 2.
UP, DOWN = 3.0, 30.0
# A rate that comes to less than this share of the stage's highest one is zero.
NOTHING = 1e-3
DIGIT = "is there a digit too many, or too few?"
_SAMPLES = 100


def lr_jump(schedule: Schedule) -> Iterator[Finding]:
    """The first update of a stage is the last one of its parent many times over, or a small fraction of it; or so where a warm-up
    ends; or the policy itself steps up many times over. A rate that moves with batch_size stays what it was for an image, and is not a jump; into a warm-up it may fall as far
    as it likes; another type of solver has rates of its own; and how far a `plateau` falls is not known.
    """
    for stage in schedule.stages:
        solver, rate = stage.solver, learning_rate(stage.solver)
        if stage.parent is not None:
            parent = schedule.stage(stage.parent)
            comparable = parent.solver.type == solver.type and parent.solver.lr_policy != "plateau"
            before, after = rate_before(schedule, stage), rate(0)
            if comparable and not ends_at_zero(schedule, stage):
                batches = solver.batch_size / parent.solver.batch_size
                field = "warmup_start_lr" if solver.warmup_iter else "base_lr"
                where = f"where stage `{stage.name}` leaves `{stage.parent}`"
                yield from _jump(stage, before, after, batches, bool(solver.warmup_iter), where, field)
        end = warm_up_end(solver)
        if 0 < end < solver.max_iter:
            where = f"where the warm-up of stage `{stage.name}` ends"
            yield from _jump(stage, rate(end - 1), rate(end), 1.0, False, where, "warmup_iter")
        yield from _steps_up(stage)


def _steps_up(stage: Stage) -> Iterator[Finding]:
    """The first such step: one line of the file makes them all."""
    for step in steps_at_corners(stage.solver):
        if step.factor is not None and step.factor > UP * (1 + 1e-9):
            text = (
                f"the learning rate jumps {step.before:.4g} -> {step.after:.4g} (x{step.factor:.3g}) at iteration {step.iter} of stage "
                f"`{stage.name}`"
            )
            own = own_fields(stage.solver.lr_policy)
            yield Finding("lr-jump", text, place_of(stage, *own, "lr_policy"), DIGIT)
            return


def _jump(
    stage: Stage, before: float, after: float, batches: float, into_warm_up: bool, where: str, field: str
) -> Iterator[Finding]:
    """`batches`: how many times as many images an update has afterwards."""
    up = after > UP * before * max(1.0, batches)
    down = after * DOWN < before * min(1.0, batches) and not into_warm_up
    if not (up or down) or before == after:
        return
    factor = f" (x{after / before:.3g})" if before > 0 else ""
    hint = "a warm-up leads up to it (`warmup_iter`, `warmup_start_lr`)" if up else DIGIT
    text = f"the learning rate jumps {before:.4g} -> {after:.4g}{factor} {where}"
    yield Finding("lr-jump", text, place_of(stage, field, "base_lr"), hint)


def warmup_start(schedule: Schedule) -> Iterator[Finding]:
    """A warm-up that leads down to base_lr, or such a first half of `one_cycle`."""
    for stage in schedule.stages:
        solver = stage.solver
        cycle = solver.lr_policy == "one_cycle"
        for field, read in (("warmup_start_lr", solver.warmup_iter > 0), ("start_lr", cycle)):
            start = getattr(solver, field)
            if read and start > solver.base_lr:
                text = f"the warm-up of stage `{stage.name}` starts above where it leads: {start:.4g} -> {solver.base_lr:.4g}"
                yield Finding("warmup-start", text, place_of(stage, field), "are the two swapped?")


def zero_parent(schedule: Schedule) -> Iterator[Finding]:
    """A stage that trains on from where the rate had come down to zero: what the parent gained by that is lost in the first updates
    at a higher rate, and a branch off before its decay would have cost the decay less.
    """
    for stage in schedule.stages:
        if stage.parent is None or not ends_at_zero(schedule, stage):
            continue
        highest = peak(stage.solver)
        if highest <= NOTHING * peak(schedule.stage(stage.parent).solver):
            continue
        text = f"stage `{stage.name}` goes up to {highest:.4g} from `{stage.parent}`, whose learning rate has come down to zero"
        hint = f'start before its decay, as with `from: "{stage.parent}@ITERATION"`'
        yield Finding("zero-parent", text, place_of(stage, "base_lr"), hint)


def rate_before(schedule: Schedule, stage: Stage) -> float:
    """The rate of the parent's last update before the stage."""
    assert stage.parent is not None
    return learning_rate(schedule.stage(stage.parent).solver)(schedule.start_iter(stage) - 1)


def ends_at_zero(schedule: Schedule, stage: Stage) -> bool:
    """Whether the parent's rate would be zero at its next update, if it went on as in its last two: a decay's last rate is that of one
    update before its end."""
    assert stage.parent is not None
    solver, length = schedule.stage(stage.parent).solver, schedule.start_iter(stage)
    rate = learning_rate(solver)
    last = rate(length - 1)
    next = last if length < 2 else 2 * last - rate(length - 2)
    return min(last, next) <= NOTHING * peak(solver)


def peak(solver: Solver) -> float:
    """The stage's highest rate, as far as a hundred places show, the end of its warm-up and its knots among them."""
    rate, last = learning_rate(solver), solver.max_iter - 1
    places = {last * n // _SAMPLES for n in range(_SAMPLES + 1)} | {warm_up_end(solver), solver.peak_iter or 0}
    places |= {round(knot.iter) for knot in solver.knot}
    return max(rate(place) for place in places if 0 <= place <= last)


# -- batches so large that recipes of small ones don't carry over, or images don't suffice

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
