"""Rules about learning rates, and about batches so large that rates of small ones don't carry over. Pure."""

import bisect
import math
from collections.abc import Iterator

from stagerun.base.errors import Span
from stagerun.base.recipe import DecayFrom, Schedule, Solver, Stage
from stagerun.base.text import apart
from stagerun.drawing.picture import steps_at_corners
from stagerun.plan.counting import points_averaged
from stagerun.plan.described import JUMP, joints, jumps
from stagerun.schedule import learning_rate, own_fields, warm_up_end
from stagerun.schedule.averages import DECAYS
from stagerun.schedule.image_size import crop_size
from stagerun.tools.lint.finding import Found, place_of

# How far the rate may move from one update to the next where two stages, or a warm-up and its policy, meet. Steps down by 10
# are what multi-step schedules are made of, and a collapse may begin well below its trunk; the stages of published recipes
# step up by less than 2.
UP, DOWN = 3.0, 30.0
# A rate that comes to less than this share of the stage's highest one is zero.
NOTHING = 1e-3
DIGIT = "is there a digit too many, or too few?"
_SAMPLES = 100


def lr_jump(schedule: Schedule, stage: Stage) -> Iterator[Found]:
    """The first update of a stage is the last one of its parent many times over, or a small fraction of it; or so where a warm-up ends; or
    the policy itself steps up many times over. A rate that moves with batch_size stays what it was for an image, and is not a jump; into a
    warm-up it may fall as far as it likes; another type of solver has rates of its own; and how far a `plateau` falls is not known.
    """
    yield from (found for far, found in _jumps(schedule, stage) if far)
    for step in steps_at_corners(stage.solver):
        if step.factor is not None and step.factor > UP * (1 + 1e-9):
            text = f"{_move(step.before, step.after)} at iteration {step.iter} of stage `{stage.name}`"
            yield text, place_of(stage, *own_fields(stage.solver.lr_policy), "lr_policy"), DIGIT
            return  # one line of the file makes them all


def lr_joint(schedule: Schedule, stage: Stage) -> Iterator[Found]:
    """The rate moves by more than JUMP in the same places, and not so far. After a warm-up `poly` is read at the absolute iteration, as in
    Caffe, and has come down some way by then."""
    yield from (found for far, found in _jumps(schedule, stage) if not far)


def _jumps(schedule: Schedule, stage: Stage) -> Iterator[tuple[bool, Found]]:
    """Each joint at which the rate is off, and whether that is far. Other rules tell of a decay that is cut, and of a parent at zero."""
    solver = stage.solver
    for joint in joints(schedule, stage):
        before, after, batches, comparable = joint.before, joint.after, 1.0, True
        if joint.iter:
            begins = "begins" if solver.decay_from is DecayFrom.WARMUP_END else "is read at the absolute iteration"
            where = f"at iteration {joint.iter}, where the warm-up of stage `{stage.name}` to {solver.base_lr:g} ends"
            where += f" and {solver.lr_policy} {begins}"
            field = "warmup_iter"
        else:
            parent = schedule.stage(joint.place).solver
            if parent.lr_policy == "plateau" or _at_zero(parent, schedule.start_iter(stage)):
                continue
            batches, comparable = solver.batch_size / parent.batch_size, parent.type == solver.type
            where = f"where stage `{stage.name}` leaves `{stage.average or joint.place}`"
            field = "warmup_start_lr" if solver.warmup_iter else "base_lr"
        up = after > UP * before * max(1.0, batches)
        down = after * DOWN < before * min(1.0, batches) and (joint.iter > 0 or not solver.warmup_iter)
        if comparable and (up or down) and before != after:
            hint = "a warm-up leads up to it (`warmup_iter`, `warmup_start_lr`)" if up else DIGIT
            yield True, (f"{_move(before, after)} {where}", place_of(stage, field, "base_lr"), hint)
        elif jumps(schedule, stage, joint) and not (joint.iter and _is_cut(solver)):
            yield False, (f"{_move(before, after)} {where}", place_of(stage, field, "base_lr"), "")


def _move(before: float, after: float) -> str:
    factor = f" (x{after / before:.3g})" if before > 0 and after > 0 else ""
    return f"the learning rate jumps {' -> '.join(apart([before, after]))}{factor}"


def warmup_start(schedule: Schedule, stage: Stage) -> Iterator[Found]:
    """A warm-up that leads down to base_lr."""
    start, end = stage.solver.warmup_start_lr, stage.solver.base_lr
    if stage.solver.warmup_iter and start > end:
        text = f"the warm-up of stage `{stage.name}` starts above where it leads: {' -> '.join(apart([start, end]))}"
        yield text, place_of(stage, "warmup_start_lr"), "are the two swapped?"


def warmup_cut(schedule: Schedule, stage: Stage) -> Iterator[Found]:
    """A decay that is read at the iteration of the stage, so that after a warm-up it has come some way down already. `poly` and `poly_cyc`
    are meant to, as in Caffe."""
    solver, end = stage.solver, warm_up_end(stage.solver)
    if _is_cut(solver) and 0 < end < solver.max_iter:
        rate = learning_rate(solver)(end)
        if rate < (1 - JUMP) * solver.base_lr:
            now, due = apart([rate, solver.base_lr])
            text = f"`{solver.lr_policy}` is at {now} where the warm-up of stage `{stage.name}` to {due} ends"
            yield text, place_of(stage, "lr_policy"), "`decay_from: WARMUP_END` starts it there"


def _is_cut(solver: Solver) -> bool:
    return solver.lr_policy in DECAYS and not solver.policy_start_iter


def zero_parent(schedule: Schedule, stage: Stage) -> Iterator[Found]:
    """A stage that trains on from where the rate had come down to zero: what the parent gained by that is lost in the first updates
    at a higher rate, and a branch off before its decay would have cost the decay less.
    """
    if stage.parent is None:
        return
    parent, highest = schedule.stage(stage.parent).solver, peak(stage.solver)
    if _at_zero(parent, schedule.start_iter(stage)) and highest > NOTHING * peak(parent):
        text = f"stage `{stage.name}` goes up to {highest:.4g} from `{stage.parent}`, whose learning rate has come down to zero"
        yield text, place_of(stage, "base_lr"), f'start before its decay, as with `from: "{stage.parent}@ITERATION"`'


def never_reached(schedule: Schedule) -> Iterator[Found]:
    """A step of the rate, or a knot, that no stage which reads its line gets to: `max_iter` was cut or the batch enlarged, and the
    steps stayed where they were. One drop by ten less leaves the weights at ten times the rate that was meant; Goyal et al.
    (arXiv:1706.02677) give the places in epochs, 30, 60 and 80 of 90. The end of a `poly_cyc` is meant to lie beyond the stage's.
    """
    readers: dict[Span, list[tuple[Stage, str, list[float]]]] = {}
    for stage in schedule.stages:
        if turns := _turns(stage.solver):
            readers.setdefault(place_of(stage, turns[0]), []).append((stage, *turns))
    for span, found in readers.items():
        # A knot at the end, or within rounding of it, is the last of a line that was followed.
        late = [
            {n for n, at in enumerate(places) if at >= policy_end(stage) + (field == "knot")}
            for stage, field, places in found
        ]
        if common := set.intersection(*late):
            stage, field, places = found[0]
            place, end = apart([places[min(common)], policy_end(stage)], 6)
            text = f"`{field}` {place} is never reached: the policy of stage `{stage.name}` ends at {end}"
            yield text, span, "were `max_iter` or `batch_size` changed without it?"
    for stage in schedule.stages:
        size, last = stage.solver.transform.crop_size, crop_size(stage.solver, stage.solver.max_iter - 1)
        if last != size:
            text = f"`crop_size` {size} of stage `{stage.name}` is never reached: it ends at {last} pixels"
            span = place_of(stage, "transform_param.crop_size_ramp_param.end_epoch")
            yield text, span, "was the stage made shorter than its ramp?"


def _turns(solver: Solver) -> tuple[str, list[float]] | None:
    """The field that says where the policy changes its course, and at which of its own iterations."""
    if solver.lr_policy == "multistep":
        return "stepvalue", list(solver.stepvalue)
    if solver.lr_policy == "step" and solver.stepsize is not None:
        return "stepsize", [solver.stepsize]
    if solver.lr_policy == "piecewise_linear":
        return "knot", [knot.iter for knot in solver.knot]
    return None


def policy_end(stage: Stage) -> int:
    """The first of the policy's own iterations that the stage doesn't read."""
    solver = stage.solver
    warm_up = solver.warmup_iter if solver.decay_from is DecayFrom.WARMUP_END else 0
    return solver.max_iter + solver.policy_start_iter - warm_up


def lr_part(schedule: Schedule, stage: Stage) -> Iterator[Found]:
    """A stage that reads a part of its policy, or goes on beyond the policy's end."""
    solver, end = stage.solver, policy_end(stage)
    policy, start = solver.lr_policy, solver.policy_start_iter
    if warm_up_end(solver) == solver.max_iter:
        text = f"stage `{stage.name}` is warm-up from end to end: {policy} is never used"
        yield text, place_of(stage, "warmup_iter"), ""
    elif policy == "poly_cyc" and solver.lr_iter is not None and solver.lr_iter > end:
        text = f"stage `{stage.name}` uses {end} of the {solver.lr_iter} iterations of its poly_cyc"
        yield f"{text}; the last {solver.lr_iter - end} are never reached", place_of(stage, "lr_iter"), ""
    elif policy == "poly_cyc" and solver.lr_iter is not None and solver.lr_iter < end:
        yield _rises(stage, solver.max_iter + solver.lr_iter - end), place_of(stage, "lr_iter"), ""
    elif start > 1 and policy == "poly" and solver.power:
        yield _rises(stage, solver.max_iter - start), place_of(stage, "policy_start_iter"), ""
    elif start > 1 and "end_lr" in own_fields(policy):
        text = f"the learning rate of stage `{stage.name}` stays at {learning_rate(solver)(solver.max_iter - 1):.4g} from iteration "
        text += f"{max(solver.max_iter - start, 0)} on: policy_start_iter {start}"
        yield text, place_of(stage, "policy_start_iter"), ""


def _rises(stage: Stage, zero: int) -> str:
    text = f"the learning rate of stage `{stage.name}` reaches zero at iteration {zero}"
    return f"{text} and rises again until {stage.solver.max_iter}"


def lr_end(schedule: Schedule, stage: Stage) -> Iterator[Found]:
    """A rate above zero at the end of a stage that no other one goes on from."""
    solver = stage.solver
    if solver.lr_policy == "plateau" or _at_zero(solver, solver.max_iter):
        return
    children = (s for s in schedule.stages if s.enabled)
    if not any(s.parent == stage.name or stage.name in dict(points_averaged(schedule, s)) for s in children):
        last = learning_rate(solver)(solver.max_iter - 1)
        yield (
            f"stage `{stage.name}` ends at a learning rate of {last:.4g}, above zero",
            place_of(stage, "lr_policy"),
            "",
        )


def _at_zero(solver: Solver, length: int) -> bool:
    """Whether the rate would be zero at the next update after so many, if it went on as in its last two: a decay's last rate is that of one
    update before its end."""
    rate = learning_rate(solver)
    last = rate(length - 1)
    next = last if length < 2 else 2 * last - rate(length - 2)
    return min(last, next) <= NOTHING * peak(solver)


def peak(solver: Solver) -> float:
    """The stage's highest rate, as far as a hundred places show, the end of its warm-up and its knots among them."""
    rate, last = learning_rate(solver), solver.max_iter - 1
    places = {last * n // _SAMPLES for n in range(_SAMPLES + 1)} | {warm_up_end(solver)}
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


def lr_batch(schedule: Schedule, stage: Stage) -> Iterator[Found]:
    """A stage with batches of LARGE images or more whose highest rate is several times off what published runs
    had at that batch: SGD and Nesterov with a momentum near 0.9, and LARS. A stage that trains on from another may have any rate below
    that; other types, and smaller batches, have no such rule.
    """
    solver = stage.solver
    usual, band = _usual(solver)
    if usual is None:
        return
    highest, least = peak(solver), usual / band if stage.parent is None else 0.0
    if not least <= highest <= usual * band:
        text = (
            f"the learning rate of stage `{stage.name}` goes up to {highest:.4g} with {solver.batch_size} images per update: "
            f"{highest / usual:.2g} times what published runs of type {solver.type} had"
        )
        hint = f"about {usual:.2g}; `base_lr_batch` scales a rate that was written for another batch"
        yield text, place_of(stage, "base_lr"), hint


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
