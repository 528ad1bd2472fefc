"""The rules: about lengths and fields; and all of them by id, as a table and as text. Pure."""

import itertools
from collections.abc import Iterator

from stagerun.base.errors import Level, Span
from stagerun.base.recipe import OnNan, ParamKind, Schedule, Solver, Stage
from stagerun.base.text import MOST_LISTED, columns, listed
from stagerun.language.networks import known_of
from stagerun.plan.described import unread
from stagerun.schedule import SOLVER_TYPES, fields_read
from stagerun.tools.lint.finding import ID, Found, Rule, each, place_of
from stagerun.tools.lint.gradients import compress_alone, compress_more, no_memory
from stagerun.tools.lint.images import channel_order, far_mean, odd_range, other_numbers, other_sizes
from stagerun.tools.lint.rates import (
    LARGE,
    lr_batch,
    lr_end,
    lr_joint,
    lr_jump,
    lr_part,
    never_reached,
    warmup_cut,
    warmup_start,
    zero_parent,
)
from stagerun.tools.lint.replicas import one_replica, period_beyond, staleness_waits

# Images that may be lost: six epochs of ImageNet, or more than two hours of a GPU that does a thousand in a second.
UNSAVED = 8_000_000


def unsaved_work(schedule: Schedule, stage: Stage) -> Iterator[Found]:
    """A kill may cost more than UNSAVED images, since no snapshot is due for so long; or a stage's own file asks for an interval that
    is longer than the stage, so that none is ever due in it. One at the end of a stage is always taken.
    """
    solver, images = stage.solver, stage.data.train.images
    span = place_of(stage, "snapshot", "max_iter")
    points = (0, *schedule.branch_points(stage.name), solver.max_iter)  # snapshots are taken there, too
    longest = max(b - a for a, b in itertools.pairwise(points))
    lost = min(solver.snapshot or longest, longest) * solver.batch_size
    if lost > UNSAVED:
        text = f"a kill in stage `{stage.name}` may cost {lost:,} images, {lost / images:.3g} epochs: " + (
            f"snapshots are {solver.snapshot} iterations apart" if solver.snapshot else "no snapshot is taken inside it"
        )
        hint = f"`snapshot: {max(1, UNSAVED // 4 // solver.batch_size)}` costs {UNSAVED // 4:,} at most"
        yield text, span, hint
    elif solver.snapshot > solver.max_iter and stage.origins["solver.snapshot"].layer != "schedule":
        text = f"`snapshot` {solver.snapshot} is never due: stage `{stage.name}` has {solver.max_iter} iterations"
        yield text, span, "there is always one at the end of a stage"


def no_test(schedule: Schedule) -> Iterator[Found]:
    """Nothing is ever evaluated."""
    if schedule.stages and not schedule.validation_sets:
        path = schedule.files[0][0] if schedule.files else ""
        span = schedule.stages[0].written("data.train.source") or Span(path, 1, 1)
        hint = "write `val { source: ... images: ... }` in `data`"
        yield "there is no `data.val`: nothing says how good the network is", span, hint


def no_snapshot(schedule: Schedule) -> Iterator[Found]:
    """Stages that a kill throws back to their start, and `on_nan: ROLLBACK`, too."""
    found = [s for s in schedule.stages if s.enabled and not s.solver.snapshot and not schedule.branch_points(s.name)]
    if found:
        back = "; so does `on_nan: ROLLBACK`" if any(s.solver.on_nan is OnNan.ROLLBACK for s in found) else ""
        names = listed([s.name for s in found], MOST_LISTED)
        text = f"no snapshot inside {names}: a kill there costs the stage from its start (`snapshot`){back}"
        yield text, place_of(found[0], "max_iter"), ""


def unread_field(schedule: Schedule) -> Iterator[Found]:
    """One for each line that sets such a field, whichever stages inherit it; a line that one of them reads is none. What
    `--set` says stands in no file.
    """
    unread_by = {s.name: {f"solver.{field}": why for field, why in unread(s)} for s in schedule.stages}
    read = {o.span for s in schedule.stages for key, o in s.origins.items() if key not in unread_by[s.name]}
    for stage in schedule.stages:
        for key, why in unread_by[stage.name].items():
            origin = stage.origins.get(key)
            if origin is None or origin.span is None or origin.span in read or origin.layer == "--set":
                continue
            written = origin.text.lstrip("[").partition(": ")[0]  # its partner in epochs, perhaps
            name = written if written.endswith("_epoch") else key.removeprefix("solver.")
            text = f"`{name}` is not read in stage `{stage.name}`{why if why.startswith(':') else f',{why}'}"
            yield text, origin.span, "take it out, or is another policy or type meant?"
        for rule in stage.solver.param:
            text = ""
            if "adapt" not in fields_read(stage.solver):
                text = "" if rule.adapt else f"`adapt` of param `{rule.name}` is not read by type {stage.solver.type}"
            elif stage.solver.local_lr_auto and rule.adapt and rule.lr_mult not in (0, 1):
                text = f"`lr_mult` {rule.lr_mult:g} of param `{rule.name}` is replaced by local_lr_auto"
            if text:
                yield f"{text} in stage `{stage.name}`", place_of(stage, "param"), "take it out"


# A larger share of the stage's first weights in the average that `ema_decay` keeps is worth a look.
MOST_OF_FIRST = 0.1


def doubtful_value(schedule: Schedule, stage: Stage) -> Iterator[Found]:
    """A value that makes little of its solver type, or of the average of the weights."""
    solver, kind, name = stage.solver, SOLVER_TYPES[stage.solver.type], f"stage `{stage.name}`"
    if kind.momentum_is and not solver.momentum and stage.written("solver.momentum") is None:  # `momentum: 0` was meant
        meaning, usual = kind.momentum_is
        text = f"{name}: momentum is 0, and {meaning} of type {solver.type}: {usual} is usual"
        yield text, place_of(stage, "type"), "`momentum: 0.9` is Adam's beta1, say"
    if kind.divides and solver.delta == 0:
        text = f"{name}: delta is 0: a weight without a gradient divides 0 by 0"
        yield text, place_of(stage, "delta", "type"), "is it meant?"
    if solver.ema_decay is None:
        return
    averaged = solver.max_iter // solver.ema_interval
    first = solver.ema_decay**averaged
    if first == 1:
        text = f"{name}: ema_interval {solver.ema_interval} is never reached: the stage ends at {solver.max_iter}"
        yield text, place_of(stage, "ema_interval", "type"), "is it meant?"
    elif first > MOST_OF_FIRST:
        text = f"{name}: {100 * first:.3g} % of the average at its end ({solver.ema_decay:g}^{averaged}) are the weights that it starts with"
        yield text, place_of(stage, "ema_decay", "type"), "take a smaller decay, or leave the average out"


def decay_on_norm(schedule: Schedule, stage: Stage) -> Iterator[Found]:
    """Weight decay on the scales and shifts of BatchNorm, with batches of LARGE images or more, or with LARS or LAMB: all large-batch
    recipes since Goyal et al. (arXiv:1706.02677) leave it out, and a layer-wise rate is meant for maps alone. With small batches it does
    little either way, and is not looked at. A `param` rule that exempts some of them by name is taken for meant.
    """
    if known_of(stage.model).batch_norm is None:
        return
    solver = stage.solver
    large = solver.batch_size >= LARGE or solver.type in ("LARS", "LAMB") or solver.local_lr_auto
    if large and solver.weight_decay > 0 and _decays_norm(solver):
        text = f"weight_decay {solver.weight_decay:g} of stage `{stage.name}` is on the scales and shifts of BatchNorm, too"
        yield text, place_of(stage, "weight_decay"), "write `param { kind: NORM decay_mult: 0 }`"


def batch_images(schedule: Schedule, stage: Stage) -> Iterator[Found]:
    """An update of more images than there are: some are in it twice."""
    images = stage.data.train.images
    if stage.solver.batch_size > images:
        text = f"an update of stage `{stage.name}` takes {stage.solver.batch_size} images, and there are {images}"
        hint = "a smaller `batch_size`, or is `images` of `data.train` wrong?"
        yield text, place_of(stage, "batch_size"), hint


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


NOTE = Level.NOTE
RULES: dict[str, Rule] = {
    "lr-jump": Rule(
        each(lr_jump),
        "the learning rate jumps, where two stages, or a warm-up and its policy, meet, or up inside a stage",
    ),
    "lr-joint": Rule(each(lr_joint), "the learning rate moves a little there", NOTE),
    "warmup-start": Rule(each(warmup_start), "a warm-up starts above base_lr"),
    "warmup-cut": Rule(each(warmup_cut), "a decay that has come down before the warm-up ends"),
    "zero-parent": Rule(each(zero_parent), "a stage goes up again from a parent whose rate has come down to zero"),
    "never-reached": Rule(
        never_reached,
        "a step or a knot of the learning rate, or the end of a ramp of crop_size, lies beyond the stage's end",
    ),
    "lr-part": Rule(each(lr_part), "a stage that reads a part of its policy, or goes on beyond the policy's end", NOTE),
    "lr-end": Rule(each(lr_end), "a learning rate above zero at the end of a stage that no other goes on from", NOTE),
    "lr-batch": Rule(each(lr_batch), "a large batch whose learning rate is far from those of published runs"),
    "decay-on-norm": Rule(each(decay_on_norm), "a large batch with weight decay on BatchNorm"),
    "batch-images": Rule(each(batch_images), "an update of more images than there are"),
    "unsaved-work": Rule(each(unsaved_work), "a kill costs much, since snapshots are far apart"),
    "no-snapshot": Rule(no_snapshot, "stages without a snapshot before their end", NOTE),
    "unread-field": Rule(unread_field, "a field that the policy, or the type, of no stage that has it reads"),
    "doubtful-value": Rule(
        each(doubtful_value), "a value that makes little of the solver type, or of an average of the weights"
    ),
    "other-numbers": Rule(
        each(other_numbers), "a network that is given other numbers than in its evaluation, or in its parent"
    ),
    "odd-range": Rule(each(odd_range), "images that nothing normalises, or mean_value for pixels of 0 to 1"),
    "channel-order": Rule(
        each(channel_order), "weights or a mean of R, G, B where channels are B, G, R, or the other way round"
    ),
    "far-mean": Rule(far_mean, "a mean_value far from the mean of the images", looks=True),
    "other-sizes": Rule(
        each(other_sizes), "images that are resized in training alone, or in an evaluation alone", looks=True
    ),
    "compress-alone": Rule(each(compress_alone), "gradients are compressed that one worker alone can't send"),
    "compress-more": Rule(each(compress_more), "compressed gradients that take more bytes than dense ones"),
    "no-memory": Rule(
        each(no_memory), "a compression that loses the same part of each gradient, since it has no memory"
    ),
    "one-replica": Rule(each(one_replica), "a network whose replicas meet, and which has one"),
    "period-beyond": Rule(
        each(period_beyond), "replicas that meet at the stage's end alone, since their period is longer"
    ),
    "staleness-waits": Rule(
        each(staleness_waits), "a bound on staleness that keeps replicas of `ASYNC` waiting for each other"
    ),
    "no-test": Rule(no_test, "there are no images to evaluate with"),
    # `unsilenced` finds these, when it knows what the other rules have found.
    ID: Rule(lambda schedule: (), "a comment for lint that does nothing; can't be silenced"),
}


def rules_text() -> str:
    """The ids, what each is for, and how a comment silences one."""
    rows = [(f"  {id}", rule.level.value, rule.purpose) for id, rule in RULES.items()]
    return "\n".join(
        [
            "lint: what is legal in a schedule and looks wrong, or is good to know (`stagerun check DIR`)",
            "",
            *columns(rows),
            "",
            "A comment silences one where it is meant: in its line, in the line above, or at the head of a file for all of that file.",
            "",
            "  # lint: ignore lr-jump, zero-parent: what the published run did",
        ]
    )
