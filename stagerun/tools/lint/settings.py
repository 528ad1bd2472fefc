"""Rules about lengths, snapshots, and fields that are not read or make little of others. Pure."""

import itertools
from collections.abc import Sequence

from stagerun.base.errors import Level, Span
from stagerun.base.recipe import CLEARED, OnNan, Origin, ParamKind, Solver
from stagerun.base.text import MOST_LISTED, listed
from stagerun.language.networks import known_of
from stagerun.language.rules.rule import Found, Rule
from stagerun.plan.described import unread
from stagerun.schedule import SOLVER_TYPES, fields_read
from stagerun.tools.lint.looked import Looked, note, warning
from stagerun.tools.lint.rates import LARGE

# Images that may be lost: six epochs of ImageNet, or more than two hours of a GPU that does a thousand in a second.
UNSAVED = 8_000_000


def unsaved_work(it: Looked) -> Found:
    """A kill may cost more than UNSAVED images, since no snapshot is due for so long; or a stage's own file asks for an interval that
    is longer than the stage, so that none is ever due in it. One at the end of a stage is always taken.
    """
    solver, images = it.solver, it.train.images
    span, longest = it.place("snapshot", "max_iter"), max(b - a for a, b in itertools.pairwise(it.points))
    lost = min(solver.snapshot or longest, longest) * solver.batch_size
    if lost > UNSAVED:
        why = (
            f"snapshots are {solver.snapshot} iterations apart" if solver.snapshot else "no snapshot is taken inside it"
        )
        text = f"a kill in {it.name} may cost {lost:,} images, {lost / images:.3g} epochs: {why}"
        hint = f"`snapshot: {max(1, UNSAVED // 4 // solver.batch_size)}` costs {UNSAVED // 4:,} at most"
        yield span, text, hint
    elif solver.snapshot > solver.max_iter and it.stage.origins["solver.snapshot"].layer != "schedule":
        text = f"`snapshot` {solver.snapshot} is never due: {it.name} has {solver.max_iter} iterations"
        yield span, text, "there is always one at the end of a stage"


def no_test(stages: Sequence[Looked]) -> Found:
    """Nothing is ever evaluated."""
    schedule = stages[0].schedule
    if not schedule.validation_sets:
        span = stages[0].stage.written("data.train.source") or stages[0].stage.span
        hint = "write `val { source: ... images: ... }` in `data`"
        yield span, "there is no `data.val`: nothing says how good the network is", hint


def no_snapshot(stages: Sequence[Looked]) -> Found:
    """Stages that a kill throws back to their start, and `on_nan: ROLLBACK`, too."""
    found = [it for it in stages if it.stage.enabled and not it.solver.snapshot and len(it.points) == 2]
    if found:
        back = "; so does `on_nan: ROLLBACK`" if any(it.solver.on_nan is OnNan.ROLLBACK for it in found) else ""
        names = listed([it.stage.name for it in found], MOST_LISTED)
        text = f"no snapshot inside {names}: a kill there costs the stage from its start (`snapshot`){back}"
        yield found[0].place("max_iter"), text, ""


def unread_field(stages: Sequence[Looked]) -> Found:
    """One for each line that sets such a field, whichever stages inherit it; a line that one of them reads is none. What
    `--set` says stands in no file.
    """
    unread_by = {it.name: {f"solver.{field}": why for field, why in unread(it.stage)} for it in stages}
    lines: dict[Span, list[tuple[Looked, str, Origin]]] = {}
    for it in stages:
        for key, origin in it.stage.origins.items():
            if origin.span is not None and origin.layer != "--set":
                lines.setdefault(origin.span, []).append((it, key, origin))
    for span, found in lines.items():
        if all(key in unread_by[it.name] for it, key, _ in found):
            it, key, origin = found[0]
            why, twin = unread_by[it.name][key], origin.text.lstrip("[").partition(": ")[0]  # in epochs, perhaps
            name = twin if twin.endswith("_epoch") else key.removeprefix("solver.")
            text = f"`{name}` is not read in {it.name}{why if why.startswith(':') else f',{why}'}"
            yield span, text, "take it out, or is another policy or type meant?"


def idle_clear(it: Looked) -> Found:
    """A path in `clear` that leads to nothing inherited."""
    for key, origin in it.stage.origins.items():
        if key.startswith(CLEARED) and origin.span:
            yield origin.span, f"`clear: {origin.text}` takes nothing away: nothing like that is inherited", ""


def same_stage(stages: Sequence[Looked]) -> Found:
    """A stage that trains to the same bits as one before it. Sets and files are no part of an identity, and are compared by themselves."""
    seen: dict[str, str] = {}
    for it in stages:
        stage, solver = it.stage, it.solver
        if not stage.enabled:
            continue
        files = stage.data.train.path, solver.start, solver.transform, solver.loss
        first = seen.setdefault(f"{stage.parent, stage.average, it.start, stage.identity, files}", it.name)
        if first != it.name:
            hint = "is a value missing there? `random_seed` draws other images and weights"
            yield stage.span, f"{it.name} trains exactly what {first} trains", hint


def unread_in_param(it: Looked) -> Found:
    """The same in `param`."""
    for rule in it.solver.param:
        text = ""
        if "adapt" not in fields_read(it.solver):
            text = "" if rule.adapt else f"`adapt` of param `{rule.name}` is not read by type {it.solver.type}"
        elif it.solver.local_lr_auto and rule.adapt and rule.lr_mult not in (0, 1):
            text = f"`lr_mult` {rule.lr_mult:g} of param `{rule.name}` is replaced by local_lr_auto"
        if text:
            yield it.place("param"), f"{text} in {it.name}", "take it out"


# A larger share of the stage's first weights in the average that `ema_decay` keeps is worth a look.
MOST_OF_FIRST = 0.1


def doubtful_value(it: Looked) -> Found:
    """A value that makes little of its solver type, or of the average of the weights."""
    solver, kind, name = it.solver, SOLVER_TYPES[it.solver.type], it.name
    meant = it.stage.written("solver.momentum") is not None  # `momentum: 0`
    if kind.momentum_is and not solver.momentum and not meant:
        meaning, usual = kind.momentum_is
        text = f"{name}: momentum is 0, and {meaning} of type {solver.type}: {usual} is usual"
        yield it.place("type"), text, "`momentum: 0.9` is Adam's beta1, say"
    if kind.divides and solver.delta == 0:
        text = f"{name}: delta is 0: a weight without a gradient divides 0 by 0"
        yield it.place("delta", "type"), text, "is it meant?"
    if solver.ema_decay is None:
        return
    averaged = solver.max_iter // solver.ema_interval
    first = solver.ema_decay**averaged
    if first == 1:
        text = f"{name}: ema_interval {solver.ema_interval} is never reached: the stage ends at {solver.max_iter}"
        yield it.place("ema_interval", "type"), text, "is it meant?"
    elif first > MOST_OF_FIRST:
        text = f"{name}: {100 * first:.3g} % of the average at its end ({solver.ema_decay:g}^{averaged}) are the weights that it starts with"
        yield it.place("ema_decay", "type"), text, "take a smaller decay, or leave the average out"


def decay_on_norm(it: Looked) -> Found:
    """Weight decay on the scales and shifts of BatchNorm, with batches of LARGE images or more, or with LARS or LAMB: all large-batch
    recipes since Goyal et al. (arXiv:1706.02677) leave it out, and a layer-wise rate is meant for maps alone. With small batches it does
    little either way, and is not looked at. A `param` rule that exempts some of them by name is taken for meant.
    """
    if known_of(it.stage.model).batch_norm is None:
        return
    solver = it.solver
    large = solver.batch_size >= LARGE or solver.type in ("LARS", "LAMB") or solver.local_lr_auto
    if large and solver.weight_decay > 0 and _decays_norm(solver):
        text = f"weight_decay {solver.weight_decay:g} of {it.name} is on the scales and shifts of BatchNorm, too"
        yield it.place("weight_decay"), text, "write `param { kind: NORM decay_mult: 0 }`"


def batch_images(it: Looked) -> Found:
    """An update of more images than there are: some are in it twice."""
    images = it.train.images
    if it.solver.batch_size > images:
        text = f"an update of {it.name} takes {it.solver.batch_size} images, and there are {images}"
        hint = "a smaller `batch_size`, or is `images` of `data.train` wrong?"
        yield it.place("batch_size"), text, hint


def _decays_norm(solver: Solver) -> bool:
    """The first rule that fits counts, as in training."""
    for rule in solver.param:
        if rule.kind in (ParamKind.ANY, ParamKind.NORM):
            if rule.decay_mult == 0:
                return False
            if rule.name == "*":
                return True
    return True


_UNREAD = "a field that the policy, or the type, of no stage that has it reads"
RULES = (
    warning("decay-on-norm", decay_on_norm, "a large batch with weight decay on BatchNorm"),
    warning("batch-images", batch_images, "an update of more images than there are"),
    warning("unsaved-work", unsaved_work, "a kill costs much, since snapshots are far apart"),
    Rule("no-snapshot", no_snapshot, Level.NOTE, "stages without a snapshot before their end"),
    Rule("unread-field", unread_field, Level.WARNING, _UNREAD),
    warning("unread-field", unread_in_param, _UNREAD),
    note("idle-clear", idle_clear, "a path in `clear` that takes nothing away"),
    Rule("same-stage", same_stage, Level.WARNING, "a stage that trains exactly what another one trains"),
    warning(
        "doubtful-value",
        doubtful_value,
        "a value that makes little of the solver type, or of an average of the weights",
    ),
    Rule("no-test", no_test, Level.WARNING, "there are no images to evaluate with"),
)
