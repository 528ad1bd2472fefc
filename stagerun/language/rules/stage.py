"""Rules about a stage's updates, learning rate, start and evaluation. Pure."""

import itertools
import math

from stagerun.base.errors import listing
from stagerun.base.recipe import DecayFrom, MomentumForm, Solver
from stagerun.base.text import count
from stagerun.language.build import rate_settings
from stagerun.language.layers import divisors, partner
from stagerun.language.lexer import shown
from stagerun.language.rules.rule import (
    Found,
    Message,
    Rule,
    examples,
    excludes,
    missing_fields,
    needs,
    read_by,
    required,
    wrong,
)
from stagerun.language.tree import SOLVER, default
from stagerun.schedule import POLICIES, SOLVER_TYPES, learning_rate, own_fields, policy_fields, slots_of

_FIRST_DEVICE_BATCH = 32  # for a hint: it fits into most devices
# The solvers whose history Caffe writes to a .solverstate.
CAFFES_TYPES = ("SGD", "Nesterov", "AdaGrad", "RMSProp", "AdaDelta", "Adam")


def _required(m: Message) -> Found:
    block = m.view.block
    missing, batch = missing_fields(block, required(SOLVER)), block.entries.get("batch_size")
    if batch and "device_batch_size" in missing:
        fits = max(d for d in range(1, _FIRST_DEVICE_BATCH + 1) if m.batch_size % d == 0)
        hint = f"for example, write `device_batch_size: {fits}`: the images that one worker computes at once"
        yield batch.place, f"`batch_size` {m.batch_size} needs `device_batch_size`", hint
        missing.remove("device_batch_size")
    if missing:
        hint = examples(SOLVER, missing)
        if m.node.solver and "lr_policy" in missing:
            hint += ', or `solver: "OTHER.prototxt"` to share the file of another stage'
        yield block.place, f"stage `{m.stage}` lacks {listing(missing, 'and')}", hint


def _passes(m: Message) -> Found:
    """Find passes of BatchNorm's statistics that would have unequal numbers of device batches."""
    norm, batches = m.network.batch_norm_param, m.batch_size // m.device_batch_size
    passes, apart = norm.moving_average_passes, "sync_param" in m and m.sync_param.method != "ASYNC"
    batches //= m.sync_param.replicas if apart else 1
    if batches % passes and not m.batch_size % m.device_batch_size:
        text = f"`moving_average_passes` {passes} does not divide the {batches} device batches that an iteration of stage `{m.stage}` has"
        hint = "it can be " + listing([str(n) for n in range(1, batches + 1) if batches % n == 0])
        yield norm.place("moving_average_passes"), text, hint


def _policy(m: Message) -> Found:
    needed = [name for name in own_fields(m.lr_policy) if default(SOLVER.fields_by_name[name]) is None]
    if missing := missing_fields(m.view.block, needed):
        span = m.place("lr_policy")
        if span not in m.view.block.layers:
            # Inherited: other stages may have the field.
            span = m.view.block.place
        shapes = {"knot": "knot { epoch: ... factor: ... }"}
        names = [
            f"`{shapes.get(n, f'{n}: ...')}`"
            + (f" or `{other}: ...`" if (other := partner(SOLVER.fields_by_name[n])) else "")
            for n in missing
        ]
        text = f"stage `{m.stage}`: lr_policy `{m.lr_policy}` needs {listing(missing, 'and')}"
        yield span, text, "write " + ", ".join(names)


def _steps(m: Message) -> Found:
    for before, value in zip(m.stepvalue, m.view.block.entries["stepvalue"].values[1:], strict=False):
        if value.value <= before:
            text = f"the step at iteration {value.value} does not come after the one at {before}"
            yield value.span, text, "stepvalues must increase"


def _test_batches(m: Message) -> Found:
    size = m.test_batch_size if "test_batch_size" in m else m.device_batch_size
    for images in [val.images for val in m.data_with("val").val][:1]:
        if m.test_iter * size > images:
            most = images // size
            hint = f"`test_iter` can be {most}; leave it out to evaluate every image" if most else "leave it out"
            text = f"{m.test_iter} passes of {size} images are more than the {images} of `data.val`"
            yield m.place("test_iter"), text, hint


def _kept_momentum(m: Message) -> Found:
    """Find momentum that can't be kept because the parent's solver stores something else."""
    before = m.parent
    form, old_form = MomentumForm(m.momentum_form), MomentumForm(before.momentum_form)
    slots, what = slots_of(m.type, form), ""
    if slots != slots_of(before.type, form):
        what = f"type `{before.type}` stores something other than `{m.type}`"
        hint = f"give both type {listing([t for t in SOLVER_TYPES if slots_of(t, form) == slots])}"
    elif slots != slots_of(before.type, old_form):
        what, hint = f"`momentum_form` is {old_form.value} and not {form.value}", "the same `momentum_form`"
    if what and m.carry.momentum == "KEEP" and m.node.average is None:
        text = f"stage `{m.stage}` keeps the momentum of {m.starts_from}, whose {what}"
        yield m.place("carry.momentum"), text, f"write `carry {{ momentum: ZERO }}`, or {hint}"


def _renamed(m: Message) -> str:
    return f"`{shown(getattr(m, 'from'))}` and `{shown(m.to)}` have different numbers of `*`"


# -- the learning rate at every iteration; knots


def _learning_rate(m: Message) -> Found:
    """Find a rate that is below zero, infinite or not a number."""
    needed = (*policy_fields(m.lr_policy), "base_lr", "max_iter", "batch_size")
    if not all(getattr(m, name) != [] for name in needed if name != "epoch_iter"):
        return
    try:
        settings = rate_settings(m.view, m.data_with("train").train.images)
    except OverflowError:
        hint = f"stage `{m.stage}`: it is multiplied by batch_size / base_lr_batch"
        yield m.place("base_lr_batch"), "the learning rate for `batch_size` images is too large for a double", hint
        return
    # Fields that the rate does not depend on get made-up values.
    solver = Solver(**settings, device_batch_size=1, random_seed=0, test_batch_size=1)
    policy, iters = POLICIES[m.lr_policy], [knot.iter for knot in solver.knot]
    if iters != sorted(iters) or (policy.factor and (solver.gamma or 0) < 0):
        return  # reported elsewhere
    for drops in sorted({0, len(solver.plateau_winsize)}):
        what, iteration = _impossible(solver, drops)
        if what:
            field = next((name for name in (policy.suspect, "base_lr") if name in m.view.block.entries), "lr_policy")
            when = f"after {drops} drops" if drops else f"at iteration {iteration}"
            yield m.place(field), f"the learning rate {what} {when}", _hint(m.stage, solver)
            return


def _impossible(solver: Solver, drops: int) -> tuple[str, int]:
    """Return the fault of the rate, as the end of `the learning rate ...`, and its first iteration; ('', 0) if it is possible."""
    rate = None
    for iteration in _turning_points(solver):
        try:
            rate = rate or learning_rate(solver, drops)
            now = rate(iteration)
        except (ValueError, ZeroDivisionError):
            return "is not a number", iteration
        except OverflowError:
            now = math.inf
        if math.isinf(now):
            return "is too large for a double", iteration
        if not now >= 0:
            return f"is {now:.6g}", iteration
    return "", 0


def _policy_start(solver: Solver) -> int:
    """Return the iteration, counted from the warm-up on, at which the policy's count begins."""
    return solver.warmup_iter if solver.decay_from is DecayFrom.WARMUP_END else 0


def policy_end(solver: Solver) -> int:
    """Return the first iteration in the policy's count that the stage doesn't reach."""
    return solver.policy_start_iter + solver.max_iter - _policy_start(solver)


def _turning_points(solver: Solver) -> list[int]:
    """Return iterations that include an impossible rate if any iteration has one: ends, joints, and changes of sign or direction."""
    first, start = solver.policy_start_iter, _policy_start(solver)
    last = first + solver.max_iter - 1
    of_policy = [0, *(knot.iter for knot in solver.knot), solver.lr_iter or 0, solver.max_iter - start]
    if solver.lr_policy == "inv" and solver.gamma and solver.gamma < 0:
        of_policy.append(min(-1 / solver.gamma, last))
    turns = (first, solver.warmup_iter, last, *(start + at for at in of_policy))
    near = {math.floor(at) + step for at in turns for step in range(-1, 3)}
    return sorted(i - first for i in near if first <= i <= last)


def _hint(stage: str, solver: Solver) -> str:
    reached = policy_end(solver)
    if solver.lr_policy == "poly_cyc" and solver.lr_iter and solver.lr_iter < reached:
        if reached == solver.max_iter:
            return f"stage `{stage}` has {solver.max_iter} iterations; lr_iter must not be below that"
        return f"stage `{stage}` reads it up to iteration {reached - 1}; lr_iter must not be below that"
    if solver.lr_policy == "poly" and solver.policy_start_iter > 1:
        return f"stage `{stage}` reads lr_policy `poly` beyond its end, max_iter; `linear` stays at end_lr after it"
    return f"stage `{stage}`, lr_policy `{solver.lr_policy}`"


def _knots(m: Message) -> Found:
    """Find knots that are out of order, or more than two at one iteration."""
    for before, knot in itertools.pairwise(m.knot):
        if knot.iter < before.iter:
            text = f"the knot at `{knot.view.written('iter')}` does not come after the one at `{before.view.written('iter')}`"
            yield knot.place("iter"), text, "knots must be in order"
    for first, third in zip(m.knot, m.knot[2:], strict=False):
        if first.iter == third.iter:
            text = f"three knots at `{third.view.written('iter')}`"
            yield third.place("iter"), text, "two make a jump, and the one between them has no effect"


_MIXED = "images are mixed within a device batch: make it larger, or leave the mixing out"
_ITSELF = "it mixes each image with itself"
_VAL = "write `val { source: ... images: ... }` in `data`, or leave it out"
_SEEN = "a .solverstate lacks its history"
_ALONE = "take only the weights with `weights`"
_IN_FILE = 'write `from: ""`: the file has its whole start'
RULES = (
    Rule("Solver", _required),
    wrong(
        "Solver.device_batch_size", "`device_batch_size` {device_batch_size} does not divide `batch_size` {batch_size}",
        lambda m: divisors(m.batch_size, m.device_batch_size), lambda m: m.batch_size % m.device_batch_size,
        "batch_size",
    ),
    Rule("Solver.batch_size", _passes),
    excludes("Solver.mixup_alpha", "device_batch_size: 1", _ITSELF, _MIXED),
    excludes("Solver.cutmix_alpha", "device_batch_size: 1", _ITSELF, _MIXED),
    wrong(
        "Solver.class_weight", "`class_weight` weighs cross entropy, and loss `{loss.type}` ignores it",
        "remove it, or `loss`",
        lambda m: m.loss.type != "SOFTMAX",
    ),
    wrong(
        "Solver.class_weight", "`class_weight` is 0 for every class: nothing is learned", "give some class more than 0",
        lambda m: not any(m.class_weight),
    ),
    wrong(
        "Solver.class_weight",
        lambda m: f"{count(len(m.class_weight), 'value')} of `class_weight`, and `num_classes` is {m.network.num_classes}",
        "give {network.num_classes}, one for each class in the order of their numbers",
        lambda m: len(m.class_weight) != m.network.num_classes,
    ),
    wrong(
        "Solver.sampling", "`sampling: {sampling}` draws a random order, and `shuffle` is false",
        "remove `shuffle: false` from `data`, or `sampling` here",
        lambda m: m.sampling != "UNIFORM" and not m.schedule.data.shuffle,
    ),
    wrong(
        "Solver.local_lr_auto", "`local_lr_auto` goes with type `SGD`, not with `{type}`",
        "write `local_lr_auto: false`",
        lambda m: m.type != "SGD", "type",  # Caffe has layer-wise rates in its SGD only
    ),
    wrong(
        "Solver.regularization_type: L1", "type `{type}` has no form with `regularization_type` `L1`",
        'write `regularization_type: "L2"`',
        lambda m: SOLVER_TYPES[m.type].l2_alone, "type",
    ),
    wrong(
        "Solver.warmup_iter", "the warm-up of {warmup_iter} iterations is longer than the stage, which has {max_iter}",
        lambda m: f"stage `{m.stage}`: {m.view.origin('max_iter')}; {m.view.origin('warmup_iter')}",
        lambda m: m.warmup_iter - m.policy_start_iter > m.max_iter, "max_iter",
    ),
    Rule("Solver.lr_policy", _policy),
    wrong(
        "Solver.gamma", "`gamma` of lr_policy `{lr_policy}` must be at least 0, not {gamma}", "",
        lambda m: m.gamma < 0 and POLICIES[m.lr_policy].factor,
    ),
    Rule("Solver.stepvalue", _steps),
    Rule("Solver.lr_policy", _learning_rate),
    Rule("Solver.knot", _knots),
    wrong(
        "Solver.knot", "lr_policy `piecewise_linear` needs at least two knots",
        "write another, or lr_policy `fixed`",
        lambda m: len(m.knot) == 1,
    ),
    *read_by("LossParameter", "type", {
        "normalization": "BINARY", "teacher": "DISTILL", "temperature": "DISTILL", "weight": "DISTILL",
        "function": "PYTHON", "args": "PYTHON",
    }),
    needs("LossParameter.type: DISTILL", "teacher", "", 'write `teacher: "STAGE"`'),
    needs("LossParameter.type: PYTHON", "function", "", 'write `function: "loss.py:build"`'),
    needs(
        "Solver.early_stop", "test_interval", "nothing is tested inside stage `{stage}`",
        "for example, write `test_epoch: 1`",
    ),
    excludes(
        "Solver.early_stop", "sync_param.method: ASYNC", "iterations after the last one have been computed already",
        "remove one of them from stage `{stage}`, or write `method: LOCAL`",
    ),
    wrong(
        "Solver.early_stop", "`early_stop` without `data.val`: nothing to test",
        "write `val { source: ... }` in `data`",
        lambda m: "val" not in m.data_with("val"),
    ),
    wrong(
        "Solver.test_interval",
        lambda m: f"`{m.view.written('test_interval')}` without `data.val`: nothing to evaluate", _VAL,
        lambda m: "val" not in m.data_with("val"),
    ),
    Rule("Solver.test_iter", _test_batches),
    wrong(
        "Rename.to", _renamed,
        'each `*` of `to` takes the text of one in `from`: `rename { from: "module.*" to: "*" }`',
        lambda m: m.to.count("*") != getattr(m, "from").count("*"),
    ),
    excludes(
        "Solver.solverstate", "weights", "a .solverstate names its weights",
        "remove one of them; `weights` begins at iteration 0, without momentum",
    ),
    excludes("Solver.solverstate", "sync_param", _SEEN),
    excludes("Solver.solverstate", "early_stop", _SEEN),
    excludes("Solver.solverstate", 'lr_policy: "plateau"', "the file lacks the losses it needs", _ALONE),
    wrong(
        "Solver.solverstate", "`solverstate` with type `{type}`, which Caffe lacks", f"write {listing(CAFFES_TYPES)}",
        lambda m: m.type not in CAFFES_TYPES,
    ),
    wrong(
        "Solver.solverstate",
        "`solverstate` with `momentum_form: TORCH`: Caffe stores steps, and this form gradients",
        "write `momentum_form: CAFFE`, or " + _ALONE,
        lambda m: m.type in ("SGD", "Nesterov") and m.momentum_form == "TORCH",
    ),
    wrong(
        "Solver.solverstate", "`solverstate` in stage `{stage}`, which starts from {starts_from}", _IN_FILE,
        lambda m: m.parent,
    ),
    wrong(
        "Solver.carry.momentum: KEEP", "stage `{stage}` keeps the momentum of {starts_from}, which only has weights",
        "write `carry { momentum: ZERO }`", lambda m: m.parent and m.node.average is not None,
    ),
    Rule("Solver.carry", _kept_momentum),
    needs("Data.scratch_reserve", "scratch", "nothing is copied", 'write `scratch: "/tmp"`, or remove it'),
)  # fmt: skip
