"""Short descriptions of a stage: its update, images, replicas, network, inherited state; and the settings that it doesn't read. Pure."""

from collections.abc import Iterator
from dataclasses import is_dataclass
from functools import cache
from typing import NamedTuple

from stagerun.base.errors import listing
from stagerun.base.recipe import (
    BEST,
    LossType,
    MomentumForm,
    Normalization,
    OnNan,
    PadMode,
    Schedule,
    Solver,
    Stage,
    SyncMethod,
    SyncMomentum,
    SyncRule,
)
from stagerun.base.text import apart, count
from stagerun.base.wings import require_wing
from stagerun.language.tree import retired
from stagerun.language.values import default_text, layout, members, text
from stagerun.schedule import (
    POLICIES,
    SOLVER_TYPES,
    boundaries,
    fields_read,
    learning_rate,
    own_fields,
    parting,
    synchronisations,
    warm_up_end,
)

# -- the update


def loss(solver: Solver) -> str:
    """Return the loss in words; '' for the default."""
    how = solver.loss
    if how is None or how.type is LossType.SOFTMAX:
        return ""
    if how.type is LossType.BINARY:
        mean = "outputs" if how.normalization is Normalization.FULL else "images"
        return f"loss: BINARY, each class separately, mean over {mean}"
    if how.type is LossType.PYTHON:
        return f"loss: `{how.function}`" + (f" with {how.args}" if how.args else "")
    return f"loss: DISTILL, taught by `{how.teacher}`, temperature {how.temperature:g}, weight {how.weight:g}"


def described(solver: Solver) -> str:
    """Return the type and the settings that it reads, except `delta`; then the weight average, if any."""
    read = fields_read(solver)
    parts = [solver.type, *(f"{n} {getattr(solver, n):g}" for n in ("momentum", "momentum2", "rms_decay") if n in read)]
    if "momentum_form" in read and solver.momentum_form is MomentumForm.TORCH:
        parts.append("momentum_form TORCH")
    if "local_gw_ratio" in read:
        name = "local_lr_auto" if solver.local_lr_auto else "local_gw_ratio"
        over = f" over {solver.local_lr_passes} passes" if solver.local_lr_passes > 1 else ""
        parts.append(f"{name} {solver.local_gw_ratio:g}{over}")
    if solver.weight_decay and solver.regularization_type != "L2":
        parts.append(solver.regularization_type)
    if solver.ema_decay is not None:
        every = f" every {solver.ema_interval} iterations" if solver.ema_interval > 1 else ""
        parts.append(f"EMA {solver.ema_decay:g}{every}")
    return ", ".join(parts)


@cache
def _conditional_fields() -> tuple[list[str], list[str]]:
    """Return the fields that only some policies read, and the fields that only some types read."""
    of_types = {name for kind in SOLVER_TYPES.values() for name in kind.reads} - {"adapt", "local_lr_auto"}
    return sorted({name for kind in POLICIES for name in own_fields(kind)}), sorted(of_types)


def unread(stage: Stage) -> list[tuple[str, str]]:
    """Return (field, why) for each field that the stage doesn't read, written or not; `why` ends `FIELD is not read`."""
    solver, read, of_policy = stage.solver, fields_read(stage.solver), own_fields(stage.solver.lr_policy)
    of_policies, of_types = _conditional_fields()
    fields = [(name, f" by lr_policy {solver.lr_policy}") for name in of_policies if name not in of_policy]
    for name in (name for name in of_types if name not in read):
        without = " without local_lr_auto" if (name, solver.type) == ("local_gw_ratio", "SGD") else ""
        fields.append((name, f" by type {solver.type}{without}"))
    everything = "test_interval is not set, and the evaluation after a stage covers every image"
    conditions = (
        ("local_lr_passes" in read, "local_lr_passes", "local_lr_auto is false"),
        (solver.warmup_iter, "warmup_start_lr", "the stage has no warm-up"),
        (solver.warmup_iter, "decay_from", "the stage has no warm-up"),
        (solver.weight_decay, "regularization_type", "weight_decay is 0"),
        (solver.ema_decay is not None, "ema_interval", "ema_decay is not set"),
        (solver.test_interval, "test_iter", everything),
        (solver.on_nan is not OnNan.STOP, "max_nan", "on_nan is STOP"),
    )
    return [*fields, *((name, f": {why}") for is_read, name, why in conditions if not is_read)]


# -- images


def augmentation(solver: Solver) -> str:
    """Return the random changes of the images, in a few words."""
    return ", ".join(_augmentation(solver)) or "none"


def _augmentation(solver: Solver) -> Iterator[str]:
    transform = solver.transform
    if transform.python:
        yield transform.python
    if transform.pad:
        yield f"pad {transform.pad}{' reflected' if transform.pad_mode is PadMode.REFLECT else ''}"
    if transform.mirror:
        yield "mirror"
    if resize := transform.random_resize:
        most = "" if resize.min_size == resize.max_size else f"-{resize.max_size}"
        yield f"resize {resize.min_size}{most}"
    if area := transform.random_aspect_ratio or transform.random_resized_crop:  # one of them at most
        yield f"area {'-'.join(apart([area.min_area_ratio, area.max_area_ratio], 6))}"
    if transform.crop_size:
        ramp = transform.crop_size_ramp
        yield f"crop {f'{ramp.start_size} -> ' if ramp else ''}{transform.crop_size}"
    if augment := transform.rand_augment:
        yield f"RandAugment {augment.num_ops}x{augment.magnitude}"
    if transform.trivial_augment:
        yield "TrivialAugment"
    numbers = {
        "cutout": transform.cutout_size,
        "mixup": solver.mixup_alpha,
        "cutmix": solver.cutmix_alpha,
        "label smoothing": solver.label_smoothing,
    }
    yield from (f"{name} {value:g}" for name, value in numbers.items() if value)
    if solver.class_weight:
        yield f"class weights {'-'.join(apart([min(solver.class_weight), max(solver.class_weight)], 6))}"


def short(value: object, digits: int) -> str:
    """Return a value of a transform, numbers with `digits` digits."""
    if isinstance(value, tuple):
        return " ".join(short(v, digits) for v in value) or "none"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:.{digits}g}"
    if is_dataclass(value):  # a message; `--why` has its fields
        written = [(name[1:], text(held)) for name, held in members(value, "")]
        changed = [f"{name}: {held}" for name, held in written if not _is_usual(value, name, held)]
        return f"{{ {' '.join(changed)} }}" if changed else "{ }"
    return value if isinstance(value, str) else text(value)


def _is_usual(message: object, name: str, value: str) -> bool:
    """Return whether a field of a message is at its default, or retired."""
    field = next(member.fields[-1] for member in layout(type(message)) if member.path == name)
    return value == default_text(field) or bool(retired(field))


def evaluation(stage: Stage) -> str:
    """Say when a stage is evaluated, and on how many images; '' without validation images."""
    solver, images = stage.solver, sum(val.images for val in stage.data.val)
    if not images:
        return ""
    inside = f"every {count(solver.test_interval, 'iteration')}" if solver.test_interval else ""
    if solver.test_interval and solver.test_iter is not None:
        part = sum(min(val.images, solver.test_iter * solver.test_batch_size) for val in stage.data.val)
        inside += f" on {part}" if part < images else ""
    return f"evaluated {inside + ' and ' if inside else ''}at its end on {count(images, 'image')}"


# -- where the learning rate is not one policy's: where a stage leaves its parent, and where its warm-up ends

# A learning rate jumps at a joint if it is off by more than this share.
JUMP = 0.05


class Joint(NamedTuple):
    """A joint between two learning-rate policies. Rates of `plateau` are before any drop."""

    place: str  # the parent's name at iteration 0, `warm-up` at the end of a warm-up
    iter: int
    before: float  # the rate of the update before `iter`
    after: float


def joints(schedule: Schedule, stage: Stage) -> list[Joint]:
    """Return the stage's joints in the order of its iterations, whether they jump or not."""
    solver = stage.solver
    rate = learning_rate(solver)
    stage_joints = []
    if stage.parent is not None:
        parent = schedule.stage(stage.parent).solver
        stage_joints.append(Joint(stage.parent, 0, learning_rate(parent)(schedule.start_iter(stage) - 1), rate(0)))
    end = warm_up_end(solver)
    if stage.begins < end < solver.max_iter:
        stage_joints.append(Joint("warm-up", end, rate(end - 1), rate(end)))
    return stage_joints


def jumps(schedule: Schedule, stage: Stage, joint: Joint) -> bool:
    """Return whether the rate jumps: a ramp should end at base_lr, whatever its last step; a child should continue at its parent's rate, except
    after a `plateau`, whose drops are unknown, or from `@best`."""
    if not joint.iter and (stage.parent_at == BEST or schedule.stage(joint.place).solver.lr_policy == "plateau"):
        return False
    due = stage.solver.base_lr if joint.iter else joint.before
    return abs(joint.after - due) > JUMP * due


# -- synchronisations of replicas


def replicas(schedule: Schedule, stage: Stage) -> Iterator[str]:
    """Yield `4, LOCAL, by QSR with alpha 0.2 every 4 or more iterations, from iteration 780: 312 synchronisations, ...: 784, 788, ...`; for
    ASYNC the pushes, the boundaries, and the causes of different bits."""
    solver, sync = stage.solver, stage.solver.sync
    if sync is None:
        return
    if solver.asynchronous:
        iters = boundaries(solver, schedule.branch_points(stage.name))
        yield (
            f"replicas: {sync.replicas}, ASYNC: each pushes iterations of {count(solver.batch_size, 'image')}, at most "
            f"{count(sync.max_staleness or 0, 'update')} behind"
        )
        yield f"all earlier iterations are applied, and no later one has started, at {_first(iters)}"
        yield "the bits depend on the order of pushes, which varies: `run --replay OUT` repeats the order of OUT"
        return
    start, met = parting(solver), synchronisations(solver)
    parts = [str(sync.replicas), sync.method.value, f"every {count(sync.period or 0, 'iteration')}"]
    often = count(len(met), "synchronisation")
    if sync.rule is SyncRule.QSR:
        parts[2] = f"by QSR with alpha {sync.alpha:g} every {sync.period} or more iterations"
        often += f", every {(solver.max_iter - start) / max(len(met), 1):.4g} iterations on average"
    parts += ["momentum averaged"] if sync.momentum is SyncMomentum.AVERAGE else []
    if sync.method is SyncMethod.DILOCO and sync.outer is not None:
        parts.append(f"outer {sync.outer.type} at {sync.outer.base_lr:g} with momentum {sync.outer.momentum:g}")
    parts += [f"from iteration {start}"] if start else []
    yield f"replicas: {', '.join(parts)}: {often}: {_first(met)}"


def _first(iters: list[int] | tuple[int, ...]) -> str:
    return ", ".join([*map(str, iters[:5]), *(["..."] if len(iters) > 5 else [])])


# -- changes from the parent stage

# Fields whose changes are shown elsewhere: learning rate and length in the table, images and inherited state on other lines.
_SHOWN = (
    "base_lr", "lr_policy", "power", "gamma", "step", "lr_", "warmup", "decay_from", "policy_start", "end_lr", "knot", "plateau",
    "average_loss", "max_", "transform_param", "test_", "carry", "compress_param", "sync_param", "loss", "early_stop",
)  # fmt: skip


def carried_changes(schedule: Schedule, stage: Stage) -> Iterator[str]:
    """Yield the start from replicas that haven't synchronised, and changes of update and images, `field old -> new`."""
    assert stage.parent is not None
    parent, at = schedule.stage(stage.parent), schedule.start_iter(stage)
    old, met = parent.solver, synchronisations(parent.solver) if parent.solver.sync is not None else []
    if old.sync is not None and not old.asynchronous and at > (start := parting(old)) and at not in met:
        since = count(at - max((iter for iter in met if iter < at), default=start), "iteration")
        yield f"starts from the average of {old.sync.replicas} replicas, {since} after their last synchronisation"
    changes = []
    for field, new in stage.identity.items():
        name = field.removeprefix("solver.")
        if parent.identity.get(field, new) != new and field.startswith("solver.") and not name.startswith(_SHOWN):
            changes.append(f"{name} {parent.identity[field]} -> {new}".replace('"', ""))
    if changes:
        yield f"update: {', '.join(changes)}"
    pairs = zip(members(old.transform, ""), members(stage.solver.transform, ""), strict=True)
    moved = list[tuple[str, ...]]()
    for (key, before), (_, now) in pairs:
        if is_dataclass(before) != is_dataclass(now):
            moved.append((key[1:], "on" if before else "off", "on" if now else "off"))
        elif before != now:
            moved.append((key[1:], *apart((before, now), 6, short)))
    if moved:
        yield f"augmentation: {', '.join(f'{name} {before} -> {now}' for name, before, now in moved)}"


# -- the network; its shapes are unknown here


def network_change(schedule: Schedule, stage: Stage) -> str:
    """Return the change from the parent's network; '' if it is the same."""
    if stage.parent is None or schedule.stage(stage.parent).model == stage.model:
        return ""
    before, now, where = schedule.stage(stage.parent).model, stage.model, f"stage `{stage.name}`"
    text = f"{where} has other settings of `{now.name}` than `{stage.parent}`"
    if before.name != now.name:
        text = f"{where} trains `{now.name}`, and `{stage.parent}` trains `{before.name}`"
        if before.num_classes != now.num_classes:
            text += f", {now.num_classes} classes instead of {before.num_classes}"
    elif before.num_classes != now.num_classes:
        text = f"{where} has {now.num_classes} classes, and `{stage.parent}` has {before.num_classes}: its head starts from random weights"
    return f"{text}; tensors with the same name and shape are kept"


def network_lines(schedule: Schedule, stage: Stage) -> Iterator[str]:
    """Yield `plan`'s lines about a stage's network and weights."""
    model, solver = stage.model, stage.solver
    if change := network_change(schedule, stage):
        yield f"network: {change.removeprefix(f'stage `{stage.name}` ')}"
    elif solver.model is not None:
        yield f"network: {model.name}, {model.num_classes} classes"
    if model.net is not None and (stage.parent is None or model != schedule.stage(stage.parent).model):
        size = require_wing("caffe.table.size_text")(model)
        yield f"net: {size}"
    if solver.solverstate is not None:
        at = f"at iteration {stage.begins} " if stage.begins else ""
        yield f"begins: {at}from {solver.solverstate}; `--weights` shows its tensors"
    elif (weights := solver.weights) is not None:
        parts = [weights.file, *(f"without `{pattern}`" for pattern in weights.drop)]
        parts += [] if weights.strict else ["as far as they fit"]
        yield f"weights: {', '.join(parts)}; `--weights` shows which tensors"
    if solver.freeze:
        yield f"frozen: {listing(solver.freeze, 'and')}"
