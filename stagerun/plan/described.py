"""How a stage's weights are updated, its images transformed and its replicas brought together, in a few words, and which of its settings are
read. Pure."""

import enum
from dataclasses import dataclass

from stagerun.base.recipe import (
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
    Transform,
)
from stagerun.base.text import apart, count
from stagerun.language.values import layout
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


def loss(solver: Solver) -> str:
    """'' where it is what it is by default."""
    how = solver.loss
    if how is None or how.type is LossType.SOFTMAX:
        return ""
    if how.type is LossType.BINARY:
        mean = "outputs" if how.normalization is Normalization.FULL else "images"
        return f"loss: BINARY, each class by itself, mean over {mean}"
    if how.type is LossType.PYTHON:
        return f"loss: `{how.function}`" + (f" with {how.args}" if how.args else "")
    return f"loss: DISTILL, taught by `{how.teacher}`, temperature {how.temperature:g}, weight {how.weight:g}"


def described(solver: Solver) -> str:
    """The type and those of its settings that matter, `delta` left out; then the average, if one is kept."""
    read = fields_read(solver)
    parts = [solver.type]
    parts += [f"momentum {solver.momentum:g}"] if "momentum" in read else []
    parts += [f"{n} {getattr(solver, n):g}" for n in ("momentum2", "rms_decay") if n in read]
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


def unread(stage: Stage) -> list[tuple[str, str]]:
    """(field, why) of all that the stage doesn't read, written or not, as the end of `FIELD is not read`."""
    solver = stage.solver
    of_policies = {name for kind in POLICIES for name in own_fields(kind)}
    found = [(n, f" by lr_policy {solver.lr_policy}") for n in sorted(of_policies - {*own_fields(solver.lr_policy)})]
    of_types = {name for kind in SOLVER_TYPES.values() for name in kind.reads} - {"adapt", "local_lr_auto"}
    for name in sorted(of_types - fields_read(solver)):
        without = " without local_lr_auto" if (name, solver.type) == ("local_gw_ratio", "SGD") else ""
        found.append((name, f" by type {solver.type}{without}"))
    if "local_lr_passes" not in fields_read(solver):
        found.append(("local_lr_passes", ": local_lr_auto is false"))
    if not solver.warmup_iter:
        found += [("warmup_start_lr", ": there is no warm-up"), ("decay_from", ": there is no warm-up")]
    if not solver.weight_decay:
        found.append(("regularization_type", ": weight_decay is 0"))
    if solver.ema_decay is None:
        found.append(("ema_interval", ": there is no ema_decay"))
    if not solver.test_interval:
        found.append(("test_iter", ": there is no test_interval, and the evaluation after a stage covers every image"))
    if solver.on_nan is OnNan.STOP:
        found.append(("max_nan", ": on_nan is STOP"))
    return found


# Fields whose changes are shown elsewhere: learning rate and length in the table, the images and what is carried on lines of
# their own.
_SHOWN = (
    "base_lr", "lr_policy", "power", "gamma", "step", "lr_", "warmup", "decay_from", "policy_start", "end_lr", "knot", "plateau",
    "average_loss", "max_", "transform_param", "test_", "carry", "compress_param", "sync_param", "loss", "early_stop",
)  # fmt: skip


def solver_changes(parent: Stage, stage: Stage) -> list[str]:
    """`field old -> new` for each setting of the update that is not the parent's: weight_decay, type, batch_size, ..."""
    found = []
    for field, new in stage.identity.items():
        name = field.removeprefix("solver.")
        old = parent.identity.get(field)
        if field.startswith("solver.") and not name.startswith(_SHOWN) and old not in (None, new):
            found.append(f"{name} {old} -> {new}".replace('"', ""))
    return found


# -- images


def augmentation(solver: Solver) -> str:
    """What is done to the images at random, in a few words."""
    transform, parts = solver.transform, []
    if transform.python:
        parts.append(transform.python)
    if transform.pad:
        parts.append(f"pad {transform.pad}" + (" reflected" if transform.pad_mode is PadMode.REFLECT else ""))
    if transform.mirror:
        parts.append("mirror")
    if transform.random_resize:
        low, high = transform.random_resize.min_size, transform.random_resize.max_size
        parts.append(f"resize {low}" if low == high else f"resize {low}-{high}")
    if transform.random_aspect_ratio:
        r = transform.random_aspect_ratio
        parts.append(f"area {r.min_area_ratio:g}-{r.max_area_ratio:g}")
    if transform.random_resized_crop:
        c = transform.random_resized_crop
        parts.append(f"area {c.min_area_ratio:g}-{c.max_area_ratio:g}")
    if transform.crop_size:
        ramp = transform.crop_size_ramp
        parts.append(f"crop {ramp.start_size} -> {transform.crop_size}" if ramp else f"crop {transform.crop_size}")
    if transform.rand_augment:
        parts.append(f"RandAugment {transform.rand_augment.num_ops}x{transform.rand_augment.magnitude}")
    if transform.trivial_augment:
        parts.append("TrivialAugment")
    if transform.cutout_size:
        parts.append(f"cutout {transform.cutout_size}")
    if solver.mixup_alpha:
        parts.append(f"mixup {solver.mixup_alpha:g}")
    if solver.cutmix_alpha:
        parts.append(f"cutmix {solver.cutmix_alpha:g}")
    if solver.label_smoothing:
        parts.append(f"label smoothing {solver.label_smoothing:g}")
    if solver.class_weight:
        parts.append(f"class weights {min(solver.class_weight):g}-{max(solver.class_weight):g}")
    return ", ".join(parts) or "none"


def augmentation_changes(before: Transform, now: Transform) -> list[str]:
    """`field old -> new` for each part of the transform that differs."""
    pairs = ((m.name, getattr(before, m.attribute), getattr(now, m.attribute)) for m in layout(Transform))
    return [f"{name} {' -> '.join(apart((old, new), 6, short))}" for name, old, new in pairs if old != new]


def crop_size_ramp(solver: Solver) -> str:
    """How large the images of the stage are while that changes; '' where it doesn't."""
    ramp = solver.transform.crop_size_ramp
    if ramp is None:
        return ""
    start, end = (f"{at:g}" for at in (ramp.start_epoch, ramp.end_epoch))
    return f"images {ramp.start_size} -> {solver.transform.crop_size} pixels, epochs {start} to {end} of the stage"


def short(value: object, digits: int) -> str:
    if value is None:
        return "none"
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, enum.Enum):
        return str(value.value)
    if isinstance(value, tuple):
        return " ".join(f"{v:.{digits}g}" for v in value) or "none"
    if isinstance(value, int | float):
        return f"{value:.{digits}g}"
    fields = getattr(value, "__dataclass_fields__", {})
    inner = " ".join(f"{name}: {getattr(getattr(value, name), 'value', getattr(value, name))}" for name in fields)
    return "{ " + inner + " }"


# -- where the learning rate is not one policy's: where a stage leaves its parent, and where its warm-up ends

# A learning rate that is off by more than this share, where one would expect it to go on, jumps.
JUMP = 0.05


@dataclass(frozen=True, slots=True)
class Joint:
    """Where the learning rate is not one policy's: `before` is the rate of the update before `iter`, `after` that of the
    one at `iter`. `place` is the parent's name at iteration 0, and `warm-up` where a warm-up ends. Rates of `plateau` are those
    before any drop."""

    place: str
    iter: int
    before: float
    after: float


def joints(schedule: Schedule, stage: Stage) -> list[Joint]:
    """The stage's joints, in the order of its iterations; jumps or not."""
    solver = stage.solver
    rate = learning_rate(solver)
    found = []
    if stage.parent is not None:
        parent = schedule.stage(stage.parent).solver
        found.append(Joint(stage.parent, 0, learning_rate(parent)(schedule.start_iter(stage) - 1), rate(0)))
    end = warm_up_end(solver)
    if stage.begins < end < solver.max_iter:
        found.append(Joint("warm-up", end, rate(end - 1), rate(end)))
    return found


def jumps(schedule: Schedule, stage: Stage, joint: Joint) -> bool:
    """Whether the rate is off: a ramp ends at base_lr, whatever its last step is; a child goes on with its parent's rate, and how far that
    of a `plateau` has come down is unknown."""
    if not joint.iter and schedule.stage(joint.place).solver.lr_policy == "plateau":
        return False
    due = stage.solver.base_lr if joint.iter else joint.before
    return abs(joint.after - due) > JUMP * due


# -- when replicas meet

# So many of a stage's synchronisations are named.
NAMED = 5


def replicas(solver: Solver) -> str:
    """`4, LOCAL, by QSR with alpha 0.2 every 4 or more iterations, from iteration 780: 312 synchronisations, every 26.3 iterations on
    average: 784, 788, ...`; the average is that of QSR alone"""
    sync = solver.sync
    assert sync is not None and sync.period is not None
    every = f"every {count(sync.period, 'iteration')}"
    if sync.rule is SyncRule.QSR:
        every = f"by QSR with alpha {sync.alpha:g} every {sync.period} or more iterations"
    parts = [str(sync.replicas), sync.method.value, every]
    parts += ["momentum averaged"] if sync.momentum is SyncMomentum.AVERAGE else []
    if sync.method is SyncMethod.DILOCO and sync.outer is not None:
        parts.append(f"outer {sync.outer.type} at {sync.outer.base_lr:g} with momentum {sync.outer.momentum:g}")
    start, found = parting(solver), synchronisations(solver)
    parts += [f"from iteration {start}"] if start else []
    mean = (solver.max_iter - start) / max(len(found), 1)
    named = ", ".join(map(str, found[:NAMED])) + (", ..." if len(found) > NAMED else "")
    mostly = f", every {mean:.4g} iterations on average" if sync.rule is SyncRule.QSR else ""
    often = f"{count(len(found), 'synchronisation')}{mostly}: {named}"
    return f"{', '.join(parts)}: {often}"


def pushes(schedule: Schedule, stage: Stage) -> list[str]:
    """The same of a stage with `ASYNC`, a line each: who pushes what; the boundaries; what the bits hang on."""
    solver, sync = stage.solver, stage.solver.sync
    assert sync is not None
    found = boundaries(solver, schedule.branch_points(stage.name))
    named = ", ".join(map(str, found[:NAMED])) + (", ..." if len(found) > NAMED else "")
    return [
        f"replicas: {sync.replicas}, ASYNC: each pushes iterations of {count(solver.batch_size, 'image')}, at most "
        f"{count(sync.max_staleness or 0, 'update')} behind",
        f"all iterations before are applied, and none after has started, at {named}",
        "the order of pushes isn't known beforehand, and bits hang on it: `run --replay OUT` trains in that of OUT again",
    ]


def starts_between(schedule: Schedule, stage: Stage) -> str:
    """What a stage starts from whose parent's replicas haven't met there; '' for any other."""
    if stage.parent is None:
        return ""
    solver, at = schedule.stage(stage.parent).solver, schedule.start_iter(stage)
    if solver.sync is None or solver.asynchronous or at <= parting(solver) or at in synchronisations(solver):
        return ""
    met = max((i for i in synchronisations(solver) if i < at), default=parting(solver))
    return f"starts from the average of {solver.sync.replicas} replicas, {count(at - met, 'iteration')} after they last met"
