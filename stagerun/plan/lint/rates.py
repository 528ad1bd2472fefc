"""Rules about learning rates within a schedule: `lr-jump`, `warmup-start`, `zero-parent`. Pure."""

from collections.abc import Iterator

from stagerun.plan.lint.finding import Finding, place_of
from stagerun.plan.points import steps_at_corners
from stagerun.recipe import Schedule, Solver, Stage
from stagerun.schedule import learning_rate, own_fields, warm_up_end

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
    ends; or the policy itself steps up many times over. A rate that moves with batch_size stays what it was for an image, and is no jump; into a warm-up it may fall as far
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
