"""The facts of a stage that rules look at, and the rules about learning rates. Pure."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from stagerun.base.errors import Level, Span
from stagerun.base.recipe import DecayFrom, Schedule, Solver, Stage
from stagerun.base.text import apart, count
from stagerun.base.weights import Preprocessing
from stagerun.language.rules.rule import Found, Rule
from stagerun.language.rules.stage import policy_end
from stagerun.plan.described import JUMP, joints, jumps
from stagerun.plan.planned import points_averaged
from stagerun.plan.steps import policy_steps
from stagerun.schedule import learning_rate, own_fields, warm_up_end
from stagerun.schedule.image_size import crop_size
from stagerun.schedule.policies import DECAYS

NOTHING = 1e-3  # a rate below this share of the stage's highest one counts as zero
_SAMPLES = 100
# How far the rate may move between two updates where two stages, or a warm-up and its policy, meet. Multi-step schedules step down by 10, a
# collapse may begin well below its trunk, and the stages of published recipes step up by less than 2.
UP, DOWN = 3.0, 30.0
_FROM_END = "`decay_from: WARMUP_END` starts the decay when the warm-up ends"
_DIGIT = "does it have a digit too many, or too few?"


Published = Callable[[str], Preprocessing | None]  # name of published weights -> how they see images


class StageFacts:
    """A stage, its parent, and values that several rules need."""

    def __init__(self, schedule: Schedule, stage: Stage, published: Published) -> None:
        self.schedule, self.stage, self.published = schedule, stage, published
        self.solver, self.train = stage.solver, stage.data.train
        self.name = f"stage `{stage.name}`"
        self.start = schedule.start_iter(stage)
        self.rate = learning_rate(stage.solver)

    @cached_property
    def parent(self) -> "StageFacts | None":
        name = self.stage.parent
        return StageFacts(self.schedule, self.schedule.stage(name), self.published) if name else None

    @cached_property
    def points(self) -> tuple[int, ...]:
        """Iterations with a snapshot whatever `snapshot` says, the start and the end among them."""
        return 0, *self.schedule.branch_points(self.stage.name), self.solver.max_iter

    @cached_property
    def peak(self) -> float:
        """The highest of a hundred rates, the end of the warm-up and the knots among them."""
        last = self.solver.max_iter - 1
        corners = (warm_up_end(self.solver), *(round(knot.iter) for knot in self.solver.knot))
        iters = (*(last * n // _SAMPLES for n in range(_SAMPLES + 1)), *(iter for iter in corners if 0 <= iter <= last))
        return max(map(self.rate, iters))

    @cached_property
    def weights(self) -> str:
        """The file of weights that the stage starts from, itself or by its parent; ''."""
        return self.solver.start.file if self.solver.start is not None else self.parent.weights if self.parent else ""

    def at_zero(self, length: int) -> bool:
        """Return whether the rate has come down to zero after `length` updates. A decay's last rate belongs to the update before its end:
        look one update further, along the line of the last two."""
        last = self.rate(length - 1)
        following = last if length < 2 else 2 * last - self.rate(length - 2)
        return min(last, following) <= NOTHING * self.peak

    def span(self, *fields: str) -> Span:
        """The place of the first of these Solver fields that is written; else the first written field of transform_param if one of them is in
        it; else the stage's line."""
        inside = "solver.transform_param." if fields[0].startswith("transform_param.") else " "
        written = (o.span for key, o in self.stage.origins.items() if key.startswith(inside) and o.span)
        return self.stage.written(*(f"solver.{field}" for field in fields)) or min(written, default=self.stage.span)


# -- rows


Doubts = Iterator[tuple[str, str, str]]  # fields of Solver, text, hint


def each(
    id: str, find: Callable[[StageFacts], Doubts], why: str, level: Level = Level.WARNING, looks: bool = False
) -> Rule:
    """A rule that looks at one stage at a time. A finding is at the first of its fields that is written."""

    def findings(stages: Sequence[StageFacts]) -> Found:
        for it in stages:
            for fields, text, hint in find(it):
                yield it.span(*fields.split()), text, hint

    return Rule(id, findings, level, why, looks)


def doubt(id: str, fields: str, text: str, hint: str, when: Callable[[StageFacts], object], why: str) -> Rule:
    """A warning at the first written of `fields` where `when` holds. `text` and `hint` are filled with `{it.solver.FIELD}`."""

    def find(it: StageFacts) -> Doubts:
        if when(it):
            yield fields, text.format(it=it), hint.format(it=it)

    return each(id, find, why)


# -- where the rate moves


def lr_jump(stages: Sequence[StageFacts]) -> Found:
    """The rate jumps far where two stages or a warm-up and its policy meet, or steps up inside a policy.

    A rate that moves with batch_size keeps its value per image and doesn't jump. Into a warm-up it may fall as far as it likes. Another
    type of solver has other rates, and how far a `plateau` falls is unknown.
    """
    yield from lr_joint(stages, far=True)
    for it in stages:
        for step in policy_steps(it.solver):
            if step.after > UP * (1 + 1e-9) * step.before > 0:
                text = f"{_move(step.before, step.after)} at iteration {step.iter} of {it.name}"
                yield it.span(*own_fields(it.solver.lr_policy), "lr_policy"), text, _DIGIT
                break  # one line of the file makes all steps


def lr_joint(stages: Sequence[StageFacts], far: bool = False) -> Found:
    """The rate moves by more than JUMP at a joint, and not far. Equal jumps at one place of a file are one finding."""
    equal: dict[tuple[Span, str, str], list[str]] = {}
    for it in stages:
        for is_far, jump, where in _jumps(it):
            if is_far is far:
                equal.setdefault(jump, []).append(where)
    for (span, move, hint), (first, *others) in equal.items():
        yield span, f"{move} {first}" + (f", and in {count(len(others), 'other')}" if others else ""), hint


def _jumps(it: StageFacts) -> Iterator[tuple[bool, tuple[Span, str, str], str]]:
    """Yield for each joint with a jump: far or not, the jump, where it is. Other rules report a cut decay and a parent at zero."""
    solver, parent = it.solver, it.parent
    for joint in joints(it.schedule, it.stage):
        before, after, batches, comparable = joint.before, joint.after, 1.0, True
        field = "warmup_iter" if joint.iter else "warmup_start_lr" if solver.warmup_iter else "base_lr"
        if joint.iter:
            begins = "begins" if solver.decay_from is DecayFrom.WARMUP_END else "is read at the absolute iteration"
            where = f"at iteration {joint.iter}, where the warm-up of {it.name} to {solver.base_lr:g} ends"
            where += f" and {solver.lr_policy} {begins}"
        elif parent is None or parent.solver.lr_policy == "plateau" or parent.at_zero(it.start):
            continue
        else:
            batches, comparable = solver.batch_size / parent.solver.batch_size, parent.solver.type == solver.type
            where = f"where {it.name} leaves `{it.stage.average or joint.place}`"
        up = after > UP * before * max(1.0, batches)
        down = after * DOWN < before * min(1.0, batches) and (joint.iter > 0 or not solver.warmup_iter)
        far = comparable and (up or down) and before != after
        if far or (jumps(it.schedule, it.stage, joint) and not (joint.iter and _is_cut(solver))):
            hint = "lower `base_lr`, or lead up to it by a warm-up (`warmup_iter`, `warmup_start_lr`)" if up else _DIGIT
            hint = _after_warmup(solver) if joint.iter else hint if far else ""
            yield far, (it.span(field, "base_lr"), _move(before, after), hint), where


def _after_warmup(solver: Solver) -> str:
    """Return the hint for a jump where a warm-up ends."""
    end, near = warm_up_end(solver), JUMP * solver.base_lr
    if abs(learning_rate(solver)(end) - solver.base_lr) <= near:
        return "a longer `warmup_iter`, or a higher `warmup_start_lr`, leads up to `base_lr`"
    joined = learning_rate(replace(solver, decay_from=DecayFrom.WARMUP_END))(end)
    return _FROM_END if abs(joined - solver.base_lr) <= near else _DIGIT


def _move(before: float, after: float) -> str:
    factor = f" (x{after / before:.3g})" if before > 0 and after > 0 else ""
    return f"the learning rate jumps {' -> '.join(apart([before, after]))}{factor}"


def _is_cut(solver: Solver) -> bool:
    """Return whether a decay is read at the stage's iteration, warm-up included. `poly` and `poly_cyc` are meant to, as in Caffe."""
    return solver.lr_policy in DECAYS and not solver.policy_start_iter


def warmup_cut(it: StageFacts) -> Doubts:
    solver, end = it.solver, warm_up_end(it.solver)
    if _is_cut(solver) and 0 < end < solver.max_iter and it.rate(end) < (1 - JUMP) * solver.base_lr:
        now, due = apart([it.rate(end), solver.base_lr])
        text = f"`{solver.lr_policy}` is at {now} where the warm-up of {it.name} to {due} ends"
        yield "lr_policy", text, _FROM_END


def zero_parent(it: StageFacts) -> Doubts:
    """The first updates at a higher rate lose what the parent gained by decaying; a branch before its decay costs the decay less."""
    parent = it.parent
    if parent is not None and parent.at_zero(it.start) and it.peak > NOTHING * parent.peak:
        text = f"{it.name} goes up to {it.peak:.4g} from `{it.stage.parent}`, whose learning rate has come down to zero"
        hint = f'start before its decay, as with `from: "{it.stage.parent}@ITERATION"`'
        hint += ", or let it end above zero (`end_lr`)" if "end_lr" in own_fields(parent.solver.lr_policy) else ""
        yield "base_lr", text, hint


# -- parts of a policy that a stage doesn't reach

_TURNS = {"multistep": "stepvalue", "step": "stepsize", "piecewise_linear": "knot"}


def never_reached(stages: Sequence[StageFacts]) -> Found:
    """A step or knot that no stage which reads its line gets to: `max_iter` was cut or the batch enlarged, and the steps stayed. One drop by ten
    less leaves the weights at ten times the intended rate; Goyal et al. (arXiv:1706.02677) give the steps in epochs, 30, 60 and 80 of 90. The
    end of a `poly_cyc` is meant to be beyond the stage's."""
    readers: dict[Span, list[StageFacts]] = {}
    for it in stages:
        if (field := _TURNS.get(it.solver.lr_policy)) is not None:
            readers.setdefault(it.span(field), []).append(it)
    for span, (it, *others) in readers.items():
        late = _late(it.solver)
        if unreached := set(late).intersection(*(_late(other.solver) for other in others)):
            turn, end = apart([late[min(unreached)], policy_end(it.solver)], 6)
            text = f"`{_TURNS[it.solver.lr_policy]}` {turn} is never reached: the policy of {it.name} ends at {end}"
            yield span, text, "were `max_iter` or `batch_size` changed without it?"


def _late(solver: Solver) -> dict[int, float]:
    """Return by number the turns of the policy, in its iterations, that the stage doesn't reach. A knot at the end, or within rounding of it,
    ends a line that was followed."""
    turns: Sequence[float] = solver.stepvalue or (solver.stepsize or 0,)
    end = policy_end(solver)
    if solver.lr_policy == "piecewise_linear":
        turns, end = [knot.iter for knot in solver.knot], end + 1
    return {number: at for number, at in enumerate(turns) if at >= end}


def ramp_never_reached(it: StageFacts) -> Doubts:
    size, last = it.solver.transform.crop_size, crop_size(it.solver, it.solver.max_iter - 1)
    if last != size:
        text = f"`crop_size` {size} of {it.name} is never reached: it ends at {last} pixels"
        hint = "was the stage made shorter than its ramp?"
        yield "transform_param.crop_size_ramp_param.end_epoch", text, hint


def lr_part(it: StageFacts) -> Doubts:
    solver, end = it.solver, policy_end(it.solver)
    policy, start, cycle, last = solver.lr_policy, solver.policy_start_iter, solver.lr_iter or 0, solver.max_iter
    rises = f"the learning rate of {it.name} reaches zero at iteration %d and rises again until {last}"
    if warm_up_end(solver) == last:
        yield "warmup_iter", f"{it.name} is warm-up from end to end: {policy} is never used", ""
    elif policy == "poly_cyc" and cycle > end:
        text = (
            f"{it.name} uses {end} of the {cycle} iterations of its poly_cyc; the last {cycle - end} are never reached"
        )
        yield "lr_iter", text, ""
    elif policy == "poly_cyc" and cycle < end:
        yield "lr_iter", rises % (last + cycle - end), ""
    elif start > 1 and policy == "poly" and solver.power:
        yield "policy_start_iter", rises % (last - start), ""
    elif start > 1 and "end_lr" in own_fields(policy):
        stays = f"stays at {it.rate(last - 1):.4g} from iteration {max(last - start, 0)} on"
        yield "policy_start_iter", f"the learning rate of {it.name} {stays}: policy_start_iter {start}", ""


def lr_end(stages: Sequence[StageFacts]) -> Found:
    enabled = [it.stage for it in stages if it.stage.enabled]
    started_from = {stage.parent for stage in enabled}
    started_from |= {name for stage in enabled for name, _ in points_averaged(stages[0].schedule, stage)}
    for it in stages:
        last = it.solver.max_iter
        if it.stage.name not in started_from and it.solver.lr_policy != "plateau" and not it.at_zero(last):
            yield it.span("lr_policy"), f"{it.name} ends at a learning rate of {it.rate(last - 1):.4g}, above zero", ""


# -- batches so large that recipes of small ones don't carry over

LARGE = 1024
# Linear scaling, 0.1 for 256 images with a momentum of 0.9 (Goyal et al., arXiv:1706.02677; tensorflow/tpu: models/official/resnet).
# Published runs are between a half of it (batch 24,576, with 4.8) and two and a half (NVIDIA's and MosaicML's 2.048 for 2,048).
LINEAR = 0.1 / 256
SGD_BAND = 4.0
# Batch size and peak learning rate of LARS with which ResNet-50 reached 75.9 % in the fewest epochs (mlcommons/logging:
# mlperf_logging/rcp_checker/training_4.0.0/rcps_resnet.json). Other runs' rates are up to 2 times higher or lower.
LARS = {1632: 7.4, 3264: 10.5, 4096: 10.0, 8192: 17.0, 13056: 12.8, 32768: 21.2, 49152: 19.4, 65536: 24.7}
LARS_BAND = 2.5


def lr_batch(it: StageFacts) -> Doubts:
    """SGD and Nesterov with a momentum near 0.9, and LARS: other types, and smaller batches, have no such rule. A stage with a parent may
    have any lower rate."""
    solver, batch = it.solver, it.solver.batch_size
    sgd = solver.type in ("SGD", "Nesterov") and not solver.local_lr_auto and 0.8 <= solver.momentum <= 0.95
    if solver.type == "LARS" and batch >= min(LARS):
        usual, band = LARS[min(LARS, key=lambda size: abs(math.log(batch / size)))], LARS_BAND
    elif sgd and batch >= LARGE:
        usual, band = LINEAR * batch, SGD_BAND
    else:
        return
    if it.peak > usual * band or (it.peak < usual / band and it.stage.parent is None):
        text = (
            f"the learning rate of {it.name} goes up to {it.peak:.4g} with {batch} images per update: "
            f"{it.peak / usual:.2g} times what published runs of type {solver.type} had"
        )
        hint = f"about {usual:.2g}; `base_lr_batch` scales a rate that was written for another batch"
        yield "base_lr", text, hint


_JUMP = "the learning rate jumps, where two stages, or a warm-up and its policy, meet, or up inside a stage"
_REACHED = "a step or a knot of the learning rate, or the end of a ramp of crop_size, is beyond the stage's end"
RULES = (
    Rule("lr-jump", lr_jump, Level.WARNING, _JUMP, once=False),
    Rule("lr-joint", lr_joint, Level.NOTE, "the learning rate moves a little at such a place", once=False),
    doubt(
        "warmup-start", "warmup_start_lr",
        "the warm-up of {it.name} starts above where it leads: {it.solver.warmup_start_lr:g} -> {it.solver.base_lr:g}",
        "are the two swapped?", lambda it: it.solver.warmup_iter and it.solver.warmup_start_lr > it.solver.base_lr,
        "a warm-up starts above base_lr",
    ),
    each("warmup-cut", warmup_cut, "a decay that has come down before the warm-up ends"),
    each("zero-parent", zero_parent, "a stage goes up again from a parent whose rate has come down to zero"),
    Rule("never-reached", never_reached, Level.WARNING, _REACHED),
    each("never-reached", ramp_never_reached, _REACHED),
    each("lr-part", lr_part, "a stage that reads a part of its policy, or continues beyond the policy's end", Level.NOTE),
    Rule("lr-end", lr_end, Level.NOTE, "a learning rate above zero at the end of a stage that no other starts from"),
    each("lr-batch", lr_batch, "a large batch whose learning rate is far from that in published runs"),
)  # fmt: skip
