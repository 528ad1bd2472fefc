"""Rules about learning rates, and about batches so large that rates of small ones don't carry over. Pure."""

import math
from collections.abc import Iterator, Sequence

from stagerun.base.errors import Level, Span
from stagerun.base.recipe import DecayFrom, Solver
from stagerun.base.text import apart, count
from stagerun.drawing.picture import steps_at_corners
from stagerun.language.rules.rule import Found, Rule
from stagerun.language.rules.stage import policy_end
from stagerun.plan.described import JUMP, joints, jumps
from stagerun.plan.planned import points_averaged
from stagerun.schedule import own_fields, warm_up_end
from stagerun.schedule.averages import DECAYS
from stagerun.schedule.image_size import crop_size
from stagerun.tools.lint.looked import NOTHING, Looked, note, warning

# How far the rate may move from one update to the next where two stages, or a warm-up and its policy, meet. Steps down by 10
# are what multi-step schedules are made of, and a collapse may begin well below its trunk; the stages of published recipes
# step up by less than 2.
UP, DOWN = 3.0, 30.0
DIGIT = "is there a digit too many, or too few?"


def lr_jump(stages: Sequence[Looked]) -> Found:
    """The first update of a stage is the last one of its parent many times over, or a small fraction of it; or so where a warm-up ends; or
    the policy itself steps up many times over. A rate that moves with batch_size stays what it was for an image, and is not a jump; into a
    warm-up it may fall as far as it likes; another type of solver has rates of its own; and how far a `plateau` falls is not known.
    """
    yield from lr_joint(stages, far=True)
    for it in stages:
        for step in steps_at_corners(it.solver):
            if step.factor is not None and step.factor > UP * (1 + 1e-9):
                text = f"{_move(step.before, step.after)} at iteration {step.iter} of {it.name}"
                yield it.place(*own_fields(it.solver.lr_policy), "lr_policy"), text, DIGIT
                break  # one line of the file makes them all


def lr_joint(stages: Sequence[Looked], far: bool = False) -> Found:
    """The rate moves by more than JUMP in the same places, and not so far. After a warm-up `poly` is read at the absolute iteration, as in
    Caffe, and has come down some way by then. Equal jumps at one place of a file are one finding."""
    equal: dict[tuple[Span, str, str], list[str]] = {}
    for is_far, jump, where in (found for it in stages for found in _jumps(it)):
        if is_far is far:
            equal.setdefault(jump, []).append(where)
    for (span, move, hint), (first, *others) in equal.items():
        yield span, f"{move} {first}" + (f", and in {count(len(others), 'other')}" if others else ""), hint


def _jumps(it: Looked) -> Iterator[tuple[bool, tuple[Span, str, str], str]]:
    """Each joint at which the rate is off: whether that is far, the jump, where. Other rules tell of a decay that is cut, and of a parent at zero."""
    solver, parent = it.solver, it.parent
    for joint in joints(it.schedule, it.stage):
        before, after, batches, comparable = joint.before, joint.after, 1.0, True
        if joint.iter:
            begins = "begins" if solver.decay_from is DecayFrom.WARMUP_END else "is read at the absolute iteration"
            where = f"at iteration {joint.iter}, where the warm-up of {it.name} to {solver.base_lr:g} ends"
            where += f" and {solver.lr_policy} {begins}"
            field = "warmup_iter"
        else:
            assert parent is not None
            if parent.solver.lr_policy == "plateau" or parent.at_zero(it.start):
                continue
            batches, comparable = solver.batch_size / parent.solver.batch_size, parent.solver.type == solver.type
            where = f"where {it.name} leaves `{it.stage.average or joint.place}`"
            field = "warmup_start_lr" if solver.warmup_iter else "base_lr"
        up = after > UP * before * max(1.0, batches)
        down = after * DOWN < before * min(1.0, batches) and (joint.iter > 0 or not solver.warmup_iter)
        far = comparable and (up or down) and before != after
        if far or (jumps(it.schedule, it.stage, joint) and not (joint.iter and _is_cut(solver))):
            hint = "lower `base_lr`, or lead up to it by a warm-up (`warmup_iter`, `warmup_start_lr`)" if up else DIGIT
            yield far, (it.place(field, "base_lr"), _move(before, after), hint if far else ""), where


def _move(before: float, after: float) -> str:
    factor = f" (x{after / before:.3g})" if before > 0 and after > 0 else ""
    return f"the learning rate jumps {' -> '.join(apart([before, after]))}{factor}"


def warmup_start(it: Looked) -> Found:
    """A warm-up that leads down to base_lr."""
    start, end = it.solver.warmup_start_lr, it.solver.base_lr
    if it.solver.warmup_iter and start > end:
        text = f"the warm-up of {it.name} starts above where it leads: {' -> '.join(apart([start, end]))}"
        yield it.place("warmup_start_lr"), text, "are the two swapped?"


def warmup_cut(it: Looked) -> Found:
    """A decay that is read at the iteration of the stage, so that after a warm-up it has come some way down already. `poly` and `poly_cyc`
    are meant to, as in Caffe."""
    solver, end = it.solver, warm_up_end(it.solver)
    if _is_cut(solver) and 0 < end < solver.max_iter:
        rate = it.rate(end)
        if rate < (1 - JUMP) * solver.base_lr:
            now, due = apart([rate, solver.base_lr])
            text = f"`{solver.lr_policy}` is at {now} where the warm-up of {it.name} to {due} ends"
            yield it.place("lr_policy"), text, "`decay_from: WARMUP_END` starts it there"


def _is_cut(solver: Solver) -> bool:
    return solver.lr_policy in DECAYS and not solver.policy_start_iter


def zero_parent(it: Looked) -> Found:
    """A stage that trains on from where the rate had come down to zero: what the parent gained by that is lost in the first updates
    at a higher rate, and a branch off before its decay would have cost the decay less.
    """
    above, parent = it.parent, it.stage.parent
    if above is not None and above.at_zero(it.start) and it.peak > NOTHING * above.peak:
        text = f"{it.name} goes up to {it.peak:.4g} from `{parent}`, whose learning rate has come down to zero"
        hint = f'start before its decay, as with `from: "{parent}@ITERATION"`'
        hint += ", or let it end above zero (`end_lr`)" if "end_lr" in own_fields(above.solver.lr_policy) else ""
        yield it.place("base_lr"), text, hint


def never_reached(stages: Sequence[Looked]) -> Found:
    """A step of the rate, or a knot, that no stage which reads its line gets to: `max_iter` was cut or the batch enlarged, and the
    steps stayed where they were. One drop by ten less leaves the weights at ten times the rate that was meant; Goyal et al.
    (arXiv:1706.02677) give the places in epochs, 30, 60 and 80 of 90. The end of a `poly_cyc` is meant to lie beyond the stage's.
    """
    readers: dict[Span, list[Looked]] = {}
    for it in stages:
        if (field := _TURNS.get(it.solver.lr_policy)) is not None:
            readers.setdefault(it.place(field), []).append(it)
    for span, found in readers.items():
        it, places = found[0], _places(found[0].solver)
        if late := set.intersection(*map(_late, found)):
            place, end = apart([places[min(late)], policy_end(it.solver)], 6)
            text = f"`{_TURNS[it.solver.lr_policy]}` {place} is never reached: the policy of {it.name} ends at {end}"
            yield span, text, "were `max_iter` or `batch_size` changed without it?"


# The field that says where a policy changes its course.
_TURNS = {"multistep": "stepvalue", "step": "stepsize", "piecewise_linear": "knot"}


def _places(solver: Solver) -> Sequence[float]:
    """Where, in the policy's own iterations."""
    if solver.lr_policy == "piecewise_linear":
        return [knot.iter for knot in solver.knot]
    return solver.stepvalue or [solver.stepsize or 0]


def _late(it: Looked) -> set[int]:
    """Which of the places the stage doesn't get to. A knot at the end, or within rounding of it, is the last of a line that was followed."""
    end = policy_end(it.solver) + (1 if it.solver.lr_policy == "piecewise_linear" else 0)
    return {n for n, at in enumerate(_places(it.solver)) if at >= end}


def ramp_never_reached(it: Looked) -> Found:
    """The same of the size of images."""
    size, last = it.solver.transform.crop_size, crop_size(it.solver, it.solver.max_iter - 1)
    if last != size:
        text = f"`crop_size` {size} of {it.name} is never reached: it ends at {last} pixels"
        yield (
            it.place("transform_param.crop_size_ramp_param.end_epoch"),
            text,
            "was the stage made shorter than its ramp?",
        )


def lr_part(it: Looked) -> Found:
    """A stage that reads a part of its policy, or goes on beyond the policy's end."""
    solver, end = it.solver, policy_end(it.solver)
    policy, start, cycle = solver.lr_policy, solver.policy_start_iter, solver.lr_iter or 0
    zero = None
    if warm_up_end(solver) == solver.max_iter:
        yield it.place("warmup_iter"), f"{it.name} is warm-up from end to end: {policy} is never used", ""
    elif policy == "poly_cyc" and cycle > end:
        text = (
            f"{it.name} uses {end} of the {cycle} iterations of its poly_cyc; the last {cycle - end} are never reached"
        )
        yield it.place("lr_iter"), text, ""
    elif policy == "poly_cyc" and cycle < end:
        field, zero = "lr_iter", solver.max_iter + cycle - end
    elif start > 1 and policy == "poly" and solver.power:
        field, zero = "policy_start_iter", solver.max_iter - start
    elif start > 1 and "end_lr" in own_fields(policy):
        text = f"the learning rate of {it.name} stays at {it.rate(solver.max_iter - 1):.4g} from iteration "
        text += f"{max(solver.max_iter - start, 0)} on: policy_start_iter {start}"
        yield it.place("policy_start_iter"), text, ""
    if zero is not None:
        text = (
            f"the learning rate of {it.name} reaches zero at iteration {zero} and rises again until {solver.max_iter}"
        )
        yield it.place(field), text, ""


def lr_end(stages: Sequence[Looked]) -> Found:
    """A rate above zero at the end of a stage that no other one goes on from."""
    enabled = [it.stage for it in stages if it.stage.enabled]
    averaged = {name for stage in enabled for name, _ in points_averaged(stages[0].schedule, stage)}
    started_from = averaged | {stage.parent for stage in enabled}
    for it in stages:
        last = it.solver.max_iter
        if it.stage.name not in started_from and it.solver.lr_policy != "plateau" and not it.at_zero(last):
            yield it.place("lr_policy"), f"{it.name} ends at a learning rate of {it.rate(last - 1):.4g}, above zero", ""


# -- batches so large that recipes of small ones don't carry over, or images don't suffice

LARGE = 1024
# Linear scaling, 0.1 for 256 images with a momentum of 0.9 (Goyal et al., arXiv:1706.02677; tensorflow/tpu:
# models/official/resnet). Published runs lie between a half of it (batch 24,576, with 4.8) and two and a half (NVIDIA's and
# MosaicML's 2.048 for 2,048).
LINEAR = 0.1 / 256
SGD_BAND = 4.0
# Batch size and peak learning rate of LARS with which ResNet-50 reached 75.9 % in the fewest epochs (mlcommons/logging:
# mlperf_logging/rcp_checker/training_4.0.0/rcps_resnet.json). Others' rates are up to 2 times higher or lower.
LARS = {1632: 7.4, 3264: 10.5, 4096: 10.0, 8192: 17.0, 13056: 12.8, 32768: 21.2, 49152: 19.4, 65536: 24.7}
LARS_BAND = 2.5


def lr_batch(it: Looked) -> Found:
    """A stage with batches of LARGE images or more whose highest rate is several times off what published runs
    had at that batch: SGD and Nesterov with a momentum near 0.9, and LARS. A stage that trains on from another may have any rate below
    that; other types, and smaller batches, have no such rule.
    """
    solver = it.solver
    usual, band = _usual(solver)
    if usual is None:
        return
    least = usual / band if it.stage.parent is None else 0.0
    if not least <= it.peak <= usual * band:
        text = (
            f"the learning rate of {it.name} goes up to {it.peak:.4g} with {solver.batch_size} images per update: "
            f"{it.peak / usual:.2g} times what published runs of type {solver.type} had"
        )
        hint = f"about {usual:.2g}; `base_lr_batch` scales a rate that was written for another batch"
        yield it.place("base_lr"), text, hint


def _usual(solver: Solver) -> tuple[float | None, float]:
    """The usual rate at this batch, None where nothing is known, and the factor that it may be off by."""
    batch = solver.batch_size
    if (
        batch >= LARGE
        and solver.type in ("SGD", "Nesterov")
        and not solver.local_lr_auto
        and 0.8 <= solver.momentum <= 0.95
    ):
        return LINEAR * batch, SGD_BAND
    if batch >= min(LARS) and solver.type == "LARS":
        return LARS[min(LARS, key=lambda size: abs(math.log(batch / size)))], LARS_BAND
    return None, 1.0


_REACHED = "a step or a knot of the learning rate, or the end of a ramp of crop_size, lies beyond the stage's end"
RULES = (
    Rule(
        "lr-jump",
        lr_jump,
        Level.WARNING,
        "the learning rate jumps, where two stages, or a warm-up and its policy, meet, or up inside a stage",
        once=False,
    ),
    Rule("lr-joint", lr_joint, Level.NOTE, "the learning rate moves a little there", once=False),
    warning("warmup-start", warmup_start, "a warm-up starts above base_lr"),
    warning("warmup-cut", warmup_cut, "a decay that has come down before the warm-up ends"),
    warning("zero-parent", zero_parent, "a stage goes up again from a parent whose rate has come down to zero"),
    Rule("never-reached", never_reached, Level.WARNING, _REACHED),
    warning("never-reached", ramp_never_reached, _REACHED),
    note("lr-part", lr_part, "a stage that reads a part of its policy, or goes on beyond the policy's end"),
    Rule("lr-end", lr_end, Level.NOTE, "a learning rate above zero at the end of a stage that no other goes on from"),
    warning("lr-batch", lr_batch, "a large batch whose learning rate is far from those of published runs"),
)
