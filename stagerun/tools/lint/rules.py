"""The rules: about lengths and fields, learning rates, large batches; and all of them by id, as a table and as text. Pure."""

import bisect
import itertools
import math
from collections.abc import Iterator

from stagerun.base.errors import Span
from stagerun.base.recipe import ParamKind, Schedule, Solver, Stage
from stagerun.base.text import columns
from stagerun.drawing.picture import steps_at_corners
from stagerun.language.networks import known_of
from stagerun.plan.described import doubtful_values, unread_fields, unread_rules
from stagerun.plan.hazards import JUMP, policy_end
from stagerun.schedule import learning_rate, own_fields, warm_up_end
from stagerun.schedule.averages import DECAYS
from stagerun.schedule.image_size import crop_size
from stagerun.tools.lint.finding import ID, Finding, Rule, place_of
from stagerun.tools.lint.gradients import compress_alone, compress_more, no_memory
from stagerun.tools.lint.images import channel_order, far_mean, odd_range, other_numbers, other_sizes
from stagerun.tools.lint.replicas import one_replica, period_beyond, staleness_waits

# Images that may be lost: six epochs of ImageNet, or more than two hours of a GPU that does a thousand in a second.
UNSAVED = 8_000_000


def unsaved_work(schedule: Schedule) -> Iterator[Finding]:
    """A kill may cost more than UNSAVED images, since no snapshot is due for so long; or a stage's own file asks for an interval that
    is longer than the stage, so that none is ever due in it. One at the end of a stage is always taken.
    """
    for stage in schedule.stages:
        solver, images = stage.solver, stage.data.train.images
        span = place_of(stage, "snapshot", "max_iter")
        points = (0, *schedule.branch_points(stage.name), solver.max_iter)  # snapshots are taken there, too
        longest = max(b - a for a, b in itertools.pairwise(points))
        lost = min(solver.snapshot or longest, longest) * solver.batch_size
        if lost > UNSAVED:
            text = f"a kill in stage `{stage.name}` may cost {lost:,} images, {lost / images:.3g} epochs: " + (
                f"snapshots are {solver.snapshot} iterations apart"
                if solver.snapshot
                else "no snapshot is taken inside it"
            )
            hint = f"`snapshot: {max(1, UNSAVED // 4 // solver.batch_size)}` costs {UNSAVED // 4:,} at most"
            yield Finding("unsaved-work", text, span, hint)
        elif solver.snapshot > solver.max_iter and stage.origins["solver.snapshot"].layer != "schedule":
            text = f"`snapshot` {solver.snapshot} is never due: stage `{stage.name}` has {solver.max_iter} iterations"
            yield Finding("unsaved-work", text, span, "there is always one at the end of a stage")


def no_test(schedule: Schedule) -> Iterator[Finding]:
    """Nothing is ever evaluated."""
    if schedule.stages and not schedule.validation_sets:
        path = schedule.files[0][0] if schedule.files else ""
        span = schedule.stages[0].written("data.train.source") or Span(path, 1, 1)
        hint = "write `val { source: ... images: ... }` in `data`"
        yield Finding("no-test", "there is no `data.val`: nothing says how good the network is", span, hint)


def unread_field(schedule: Schedule) -> Iterator[Finding]:
    """One for each line that sets such a field, whichever stages inherit it; a line that one of them reads is none. What
    `--set` says stands in no file.
    """
    unread = {stage.name: unread_fields(stage) for stage in schedule.stages}
    read: set[Span] = set()
    for stage in schedule.stages:
        read |= _written(stage, but_for=[u.field for u in unread[stage.name]])
    for stage in schedule.stages:
        for field in unread[stage.name]:
            if field.origin.layer == "--set" or field.span in read:
                continue
            why = field.why if field.why.startswith(":") else f",{field.why}"
            text = f"`{field.name}` is not read in stage `{stage.name}`{why}"
            yield Finding("unread-field", text, field.span, "take it out, or is another policy or type meant?")
        for text in unread_rules(stage):
            yield Finding("unread-field", f"{text} in stage `{stage.name}`", place_of(stage, "param"), "take it out")


def doubtful_value(schedule: Schedule) -> Iterator[Finding]:
    """A value that makes little of its solver type, or of the average of the weights."""
    hints = {
        "momentum": "`momentum: 0.9` is Adam's beta1, say",
        "ema_decay": "take a smaller decay, or leave the average out",
    }
    for stage in schedule.stages:
        for text, field in doubtful_values(stage):
            if field != "momentum" or stage.written("solver.momentum") is None:  # `momentum: 0` was meant
                place = place_of(stage, field, "type")
                yield Finding(
                    "doubtful-value", f"stage `{stage.name}`: {text}", place, hints.get(field, "is it meant?")
                )


def warm_up_cut(schedule: Schedule) -> Iterator[Finding]:
    """A decay that is read at the iteration of the stage, so that after a warm-up it has come some way down already. `poly` and `poly_cyc`
    are meant to, as in Caffe."""
    for stage in schedule.stages:
        solver, end = stage.solver, warm_up_end(stage.solver)
        if solver.lr_policy not in DECAYS or solver.policy_start_iter or not 0 < end < solver.max_iter:
            continue
        rate = learning_rate(solver)(end)
        if rate < (1 - JUMP) * solver.base_lr:
            text = f"`{solver.lr_policy}` is at {rate:.4g} where the warm-up of stage `{stage.name}` to {solver.base_lr:g} ends"
            yield Finding("warmup-cut", text, place_of(stage, "lr_policy"), "`decay_from: WARMUP_END` starts it there")


def _written(stage: Stage, but_for: list[str]) -> set[Span]:
    """Where the fields of Solver stand that the stage has, leaving some out."""
    left_out = {f"solver.{field}" for field in but_for}
    return {o.span for key, o in stage.origins.items() if o.span is not None and key not in left_out}


# -- learning rates within a schedule

# How far the rate may move from one update to the next where two stages, or a warm-up and its policy, meet. Steps down by 10
# are what multi-step schedules are made of, and a collapse may begin well below its trunk; the stages of published recipes
# step up by less than 2.
UP, DOWN = 3.0, 30.0
# A rate that comes to less than this share of the stage's highest one is zero.
NOTHING = 1e-3
DIGIT = "is there a digit too many, or too few?"
_SAMPLES = 100


def lr_jump(schedule: Schedule) -> Iterator[Finding]:
    """The first update of a stage is the last one of its parent many times over, or a small fraction of it; or so where a warm-up ends; or
    the policy itself steps up many times over. A rate that moves with batch_size stays what it was for an image, and is not a jump; into a
    warm-up it may fall as far as it likes; another type of solver has rates of its own; and how far a `plateau` falls is not known.
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
    """A warm-up that leads down to base_lr."""
    for stage in schedule.stages:
        solver = stage.solver
        start = solver.warmup_start_lr
        if solver.warmup_iter and start > solver.base_lr:
            text = (
                f"the warm-up of stage `{stage.name}` starts above where it leads: {start:.4g} -> {solver.base_lr:.4g}"
            )
            yield Finding("warmup-start", text, place_of(stage, "warmup_start_lr"), "are the two swapped?")


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


def never_reached(schedule: Schedule) -> Iterator[Finding]:
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
        ends = [policy_end(stage) + (field == "knot") for stage, field, _ in found]
        late = [
            {n for n, at in enumerate(places) if at >= end} for end, (_, _, places) in zip(ends, found, strict=True)
        ]
        if common := set.intersection(*late):
            stage, field, places = found[0]
            text = f"`{field}` {places[min(common)]:g} is never reached: the policy of stage `{stage.name}` ends at {policy_end(stage)}"
            yield Finding("never-reached", text, span, "were `max_iter` or `batch_size` changed without it?")
    for stage in schedule.stages:
        transform, last = stage.solver.transform, crop_size(stage.solver, stage.solver.max_iter - 1)
        if last != transform.crop_size:
            text = (
                f"`crop_size` {transform.crop_size} of stage `{stage.name}` is never reached: it ends at {last} pixels"
            )
            span = place_of(stage, "transform_param.crop_size_ramp_param.end_epoch")
            yield Finding("never-reached", text, span, "was the stage made shorter than its ramp?")


def _turns(solver: Solver) -> tuple[str, list[float]] | None:
    """The field that says where the policy changes its course, and at which of its own iterations."""
    if solver.lr_policy == "multistep":
        return "stepvalue", list(solver.stepvalue)
    if solver.lr_policy == "step" and solver.stepsize is not None:
        return "stepsize", [solver.stepsize]
    if solver.lr_policy == "piecewise_linear":
        return "knot", [knot.iter for knot in solver.knot]
    return None


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
    for stage in schedule.stages:
        if known_of(stage.model).batch_norm is None:
            continue
        solver = stage.solver
        large = solver.batch_size >= LARGE or solver.type in ("LARS", "LAMB") or solver.local_lr_auto
        if large and solver.weight_decay > 0 and _decays_norm(solver):
            text = f"weight_decay {solver.weight_decay:g} of stage `{stage.name}` is on the scales and shifts of BatchNorm, too"
            yield Finding(
                "decay-on-norm", text, place_of(stage, "weight_decay"), "write `param { kind: NORM decay_mult: 0 }`"
            )


def batch_images(schedule: Schedule) -> Iterator[Finding]:
    """An update of more images than there are: some are in it twice."""
    for stage in schedule.stages:
        images = stage.data.train.images
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


# -- every rule


def _of_comments(schedule: Schedule) -> Iterator[Finding]:
    """`unsilenced` finds these, when it knows what the other rules have found."""
    yield from ()


RULES: dict[str, Rule] = {
    "lr-jump": Rule(
        lr_jump,
        "the learning rate jumps, where two stages, or a warm-up and its policy, meet, or up inside a stage",
    ),
    "warmup-start": Rule(warmup_start, "a warm-up starts above base_lr"),
    "warmup-cut": Rule(warm_up_cut, "a decay that has come down before the warm-up ends"),
    "zero-parent": Rule(zero_parent, "a stage goes up again from a parent whose rate has come down to zero"),
    "never-reached": Rule(
        never_reached,
        "a step or a knot of the learning rate, or the end of a ramp of crop_size, lies beyond the stage's end",
    ),
    "lr-batch": Rule(lr_batch, "a large batch whose learning rate is far from those of published runs"),
    "decay-on-norm": Rule(decay_on_norm, "a large batch with weight decay on BatchNorm"),
    "batch-images": Rule(batch_images, "an update of more images than there are"),
    "unsaved-work": Rule(unsaved_work, "a kill costs much, since snapshots are far apart"),
    "unread-field": Rule(unread_field, "a field that the policy, or the type, of no stage that has it reads"),
    "doubtful-value": Rule(
        doubtful_value, "a value that makes little of the solver type, or of an average of the weights"
    ),
    "other-numbers": Rule(
        other_numbers, "a network that is given other numbers than in its evaluation, or in its parent"
    ),
    "odd-range": Rule(odd_range, "images that nothing normalises, or mean_value for pixels of 0 to 1"),
    "channel-order": Rule(
        channel_order, "weights or a mean of R, G, B where channels are B, G, R, or the other way round"
    ),
    "far-mean": Rule(far_mean, "a mean_value far from the mean of the images", looks=True),
    "other-sizes": Rule(
        other_sizes, "images that are resized in training alone, or in an evaluation alone", looks=True
    ),
    "compress-alone": Rule(compress_alone, "gradients are compressed that one worker alone can't send"),
    "compress-more": Rule(compress_more, "compressed gradients that take more bytes than dense ones"),
    "no-memory": Rule(no_memory, "a compression that loses the same part of each gradient, since it has no memory"),
    "one-replica": Rule(one_replica, "a network whose replicas meet, and which has one"),
    "period-beyond": Rule(period_beyond, "replicas that meet at the stage's end alone, since their period is longer"),
    "staleness-waits": Rule(
        staleness_waits, "a bound on staleness that keeps replicas of `ASYNC` waiting for each other"
    ),
    "no-test": Rule(no_test, "there are no images to evaluate with"),
    ID: Rule(_of_comments, "a comment for lint that does nothing; can't be silenced"),
}


def rules_text() -> str:
    """The ids, what each is for, and how a comment silences one."""
    rows = [(f"  {id}", rule.purpose) for id, rule in RULES.items()]
    return "\n".join(
        [
            "lint: what is legal in a schedule and looks wrong (`stagerun check DIR`)",
            "",
            *columns(rows),
            "",
            "A comment silences one where it is meant: in its line, in the line above, or at the head of a file for all of that file.",
            "",
            "  # lint: ignore lr-jump, zero-parent: what the published run did",
        ]
    )
