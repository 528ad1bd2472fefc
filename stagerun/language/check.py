"""Errors of meaning: settings that are each in range and don't fit together. Pure.

A check is a function of a View; it adds to the problems, at the value that is wrong, and is left out where a value that
it needs could not be read, so that one mistake is reported once.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from google.protobuf.descriptor import Descriptor

from stagerun import schedule
from stagerun.base.errors import Problems, listing
from stagerun.base.recipe import MomentumForm
from stagerun.base.wings import wing
from stagerun.language import layers, tree
from stagerun.language.check_images import check_compiled, check_drawn, check_training, check_transform
from stagerun.language.check_loss import check_early_stop, check_loss
from stagerun.language.check_rates import check_knots, check_learning_rate
from stagerun.language.check_weights import check_solverstate, check_weights
from stagerun.language.layers import higher
from stagerun.language.proto import stagerun_pb2
from stagerun.language.tree import Block
from stagerun.language.view import Doubtful, View


def check_local_rate(stage: str, view: View, problems: Problems) -> None:
    """Caffe has layer-wise rates in its SGD only."""
    kind = view.text("type")
    if kind != "SGD" and view.flag("local_lr_auto"):
        message = f"`local_lr_auto` goes with type `SGD`, not with `{kind}`"
        problems.add(higher(view, "local_lr_auto", "type"), message, "write `local_lr_auto: false`")


def check_regularisation(stage: str, view: View, problems: Problems) -> None:
    """Some types were published with the L2 term alone."""
    kind = view.text("type")
    if kind is not None and schedule.SOLVER_TYPES[kind].l2_alone and view.text("regularization_type") == "L1":
        message = f"type `{kind}` has no form with `regularization_type` `L1`"
        problems.add(higher(view, "regularization_type", "type"), message, 'write `regularization_type: "L2"`')


def check_carry(stage: str, view: View, parent: str, before: View, problems: Problems) -> None:
    """Momentum can carry over only where what is remembered means the same."""
    with contextlib.suppress(Doubtful):
        if view.inside("carry").text("momentum") != "KEEP":
            return
        (kind, form), (old_kind, old_form) = _type(view), _type(before)
        if schedule.slots_of(kind, form) == schedule.slots_of(old_kind, old_form):
            return
        if schedule.slots_of(kind, form) == schedule.slots_of(old_kind, form):
            what = f"`momentum_form` is {old_form.value} and not {form.value}"
            hint = "the same `momentum_form`"
        else:
            fitting = [t for t in schedule.SOLVER_TYPES if schedule.slots_of(t, form) == schedule.slots_of(kind, form)]
            what = f"type `{old_kind}` remembers something else than `{kind}`"
            hint = f"give both type {listing(fitting)}"
        place = view.view("carry") or view
        message = f"stage `{stage}` keeps the momentum of `{parent}`, whose {what}"
        problems.add(place.place("momentum"), message, f"write `carry {{ momentum: ZERO }}`, or {hint}")


def check_from_average(stage: str, view: View, average: str, problems: Problems) -> None:
    """An average of snapshots has weights alone."""
    with contextlib.suppress(Doubtful):
        if view.inside("carry").text("momentum") == "KEEP":
            message = f"stage `{stage}` keeps the momentum of ensemble `{average}`, which has weights alone"
            problems.add((view.view("carry") or view).place("momentum"), message, "write `carry { momentum: ZERO }`")
        if view.has("solverstate"):
            text = f"`solverstate` in stage `{stage}`, which starts from ensemble `{average}`"
            problems.add(view.place("solverstate"), text, 'write `from: ""`: all that it begins with is in the file')


def _type(view: View) -> tuple[str, MomentumForm]:
    kind = view.text("type")
    assert kind is not None
    return kind, MomentumForm(view.text("momentum_form"))


__all__ = ["Shared", "check_carry", "check_data", "check_from_average", "check_required", "check_stage"]


@dataclass(frozen=True, slots=True)
class Shared:
    """What a stage's settings are checked against. None: not written; `doubtful` names what could not be read."""

    channels: int | None
    has_val: bool | None
    val_images: int | None
    on_device: bool = False  # `cache: DEVICE`
    train_images: int | None = None


def check_required(block: Block, problems: Problems) -> None:
    """Missing fields of a message and of the messages in it, Solvers left out: those inherit."""
    names = required(block.kind)
    if block.kind.name == "Model" and "caffe_net" in (*block.entries, *block.doubtful):
        names = []  # the net says it
    missing = [] if block.kind is tree.SOLVER else _missing(block, names)
    if missing:
        problems.add(block.place, f"{block.kind.name} lacks {_all(missing)}", _examples(block.kind, missing))
    for name in block.entries:
        for inner in block.blocks(name):
            check_required(inner, problems)


def required(kind: Descriptor) -> list[str]:
    return [field.name for field in kind.fields if field.GetOptions().HasExtension(stagerun_pb2.required)]


def _missing(block: Block, names: Iterable[str]) -> list[str]:
    """Those of the names that are not written; what could not be read is."""

    def missing(name: str) -> bool:
        # In a stage's `solver_param` durations are as they are written.
        other = layers.partner(block.kind.fields_by_name[name])
        entry = block.entries.get(name) or block.entries.get(other)
        return not entry.values if entry else not (block.broken or name in block.doubtful)

    return [name for name in names if missing(name)]


def _examples(kind: Descriptor, names: Iterable[str]) -> str:
    fields = [kind.fields_by_name[name] for name in names]
    return "write " + ", ".join(f"`{field.GetOptions().Extensions[stagerun_pb2.required]}`" for field in fields)


def check_data(schedule: View, problems: Problems) -> None:
    """Reports settings for copies that are never made."""
    data = schedule.inside("data")
    with contextlib.suppress(Doubtful):
        if data.has("scratch_reserve") and not data.has("scratch"):
            message = "`scratch_reserve` without `scratch`: nothing is copied"
            problems.add(data.place("scratch_reserve"), message, 'write `scratch: "/tmp"`, say, or remove it')


def check_sources(holder: View, problems: Problems) -> None:
    """Names of the validation sets of a Schedule or a Solver: of several each has one, of its own."""
    data = holder.view("data")
    if data is None:
        return
    with contextlib.suppress(Doubtful):
        train = data.view("train")
        if train is not None and train.has("name"):
            problems.add(train.place("name"), "`name` is for one of several validation sets", "remove it")
    vals, seen = list(data.views("val")), dict[str, int]()
    for val in vals:
        with contextlib.suppress(Doubtful):
            name = val.text("name")
            if name is None and len(vals) > 1:
                problems.add(
                    val.block.place, f"one of {len(vals)} validation sets has no `name`", 'write `name: "v2"`, say'
                )
            elif name is not None and name in seen:
                problems.add(
                    val.place("name"),
                    f"two validation sets are named `{name}`",
                    f"the other one stands in line {seen[name]}",
                )
            if name is not None:
                seen.setdefault(name, val.place("name").line)


def check_stage(name: str, view: View, shared: Shared, problems: Problems) -> None:
    """Everything about the settings of one stage, durations already in iterations."""
    for check in STAGE_CHECKS:
        try:
            check(name, view, problems)
        except Doubtful:
            continue
    with contextlib.suppress(Doubtful):
        check_learning_rate(name, view, shared.train_images, problems)
    with contextlib.suppress(Doubtful):
        _evaluation(view, shared, problems)
    with contextlib.suppress(Doubtful):
        check_compiled(view, problems)
    for field in ("transform_param", "test_transform_param"):
        try:
            transform = view.view(field)
        except Doubtful:
            continue
        if transform:
            check_transform(transform, shared.channels, problems)
            if field == "test_transform_param":
                check_drawn(transform, problems)
            else:
                check_training(transform, shared.on_device, problems)


_FIRST_DEVICE_BATCH = 32  # that a hint offers: it fits into most devices


def _required_settings(stage: str, view: View, problems: Problems) -> None:
    missing = _missing(view.block, required(tree.SOLVER))
    batch = view.block.entries.get("batch_size")
    if batch and (size := view.whole("batch_size")) and "device_batch_size" in missing:
        fits = max(d for d in range(1, _FIRST_DEVICE_BATCH + 1) if size % d == 0)
        hint = f"write `device_batch_size: {fits}`, say: what one worker computes at once"
        problems.add(batch.place, f"`batch_size` {size} needs `device_batch_size` beside it", hint)
        missing.remove("device_batch_size")
    if missing:
        hint = _examples(tree.SOLVER, missing)
        problems.add(view.block.place, f"stage `{stage}` lacks {_all(missing)}", hint)


def _batch(stage: str, view: View, problems: Problems) -> None:
    batch, device = view.whole("batch_size"), view.whole("device_batch_size")
    if batch is None or device is None or batch % device == 0:
        return
    place = layers.higher(view, "device_batch_size", "batch_size")
    message = f"`device_batch_size` {device} does not divide `batch_size` {batch}"
    problems.add(place, message, layers.divisors(batch, device))


def check_passes(stage: str, view: View, norm: View, problems: Problems) -> None:
    """Each pass of BatchNorm's statistics has as many device batches as any other. `norm`: `batch_norm_param` of the stage's model."""
    passes, batch, device = (
        norm.whole("moving_average_passes"),
        view.whole("batch_size"),
        view.whole("device_batch_size"),
    )
    if not passes or not batch or not device or batch % device:
        return
    met = view.view("sync_param")
    apart = (met.whole("replicas") if met is not None else None) or 1
    batches = batch // device // apart if met is None or met.text("method") != "ASYNC" else batch // device
    if batches % passes:
        message = f"`moving_average_passes` {passes} does not divide the {batches} device batches that an iteration of stage `{stage}` has"
        hint = "it can be " + listing([str(n) for n in range(1, batches + 1) if batches % n == 0], "or")
        problems.add(norm.place("moving_average_passes"), message, hint)


def _mixtures(stage: str, view: View, problems: Problems) -> None:
    for name in ("mixup_alpha", "cutmix_alpha"):
        if view.number(name) and view.whole("device_batch_size") == 1:
            message = f"`{name}` with `device_batch_size` 1 mixes each image with itself"
            hint = "images are mixed within a device batch: make it larger, or leave the mixing out"
            problems.add(layers.higher(view, name, "device_batch_size"), message, hint)


def _warm_up(stage: str, view: View, problems: Problems) -> None:
    warm_up, length, start = (view.whole(name) for name in ("warmup_iter", "max_iter", "policy_start_iter"))
    if warm_up and length and warm_up - (start or 0) > length:
        place = layers.higher(view, "warmup_iter", "max_iter")
        message = f"the warm-up of {warm_up} iterations is longer than the stage, which has {length}"
        problems.add(place, message, f"stage `{stage}`: {view.origin('max_iter')}; {view.origin('warmup_iter')}")


def _policy(stage: str, view: View, problems: Problems) -> None:
    policy = view.text("lr_policy")
    if policy is None:
        return
    needed = [n for n in schedule.own_fields(policy) if tree.default(tree.SOLVER.fields_by_name[n]) is None]
    if missing := _missing(view.block, needed):
        place = view.place("lr_policy")
        if place not in view.block.own:
            # Inherited, by stages that may have the field.
            place = view.block.place
        names = [f"`{_shape(n)}`" + (f" or `{layers.PARTNER[n]}: ...`" if n in layers.PARTNER else "") for n in missing]
        message = f"stage `{stage}`: lr_policy `{policy}` needs {_all(missing)}"
        problems.add(place, message, "write " + ", ".join(names))


def _shape(name: str) -> str:
    return "knot { epoch: ... factor: ... }" if name == "knot" else f"{name}: ..."


def _gamma(stage: str, view: View, problems: Problems) -> None:
    policy, gamma = view.text("lr_policy"), view.number("gamma")
    if policy is not None and schedule.POLICIES[policy].factor and gamma is not None and gamma < 0:
        problems.add(view.place("gamma"), f"`gamma` of lr_policy `{policy}` must be at least 0, not {gamma}")


def _steps(stage: str, view: View, problems: Problems) -> None:
    if not view.has("stepvalue"):
        return
    values = view.block.entries["stepvalue"].values
    for earlier, later in itertools.pairwise(values):
        assert isinstance(earlier.value, int) and isinstance(later.value, int)
        if later.value <= earlier.value:
            message = f"the step at iteration {later.value} does not come after the one at {earlier.value}"
            problems.add(later.span, message, "stepvalues grow")


def _knots(stage: str, view: View, problems: Problems) -> None:
    check_knots(view, "lr_policy", problems)


def _evaluation(view: View, shared: Shared, problems: Problems) -> None:
    if shared.has_val is False and view.has("early_stop"):
        text, hint = "`early_stop` without `data.val`: nothing to test", "write `val { source: ... }` in `data`"
        problems.add(view.place("early_stop"), text, hint)
    if shared.has_val is False and view.whole("test_interval"):
        hint = "write `val { source: ... images: ... }` in `data`, or leave it out"
        problems.add(
            view.place("test_interval"),
            f"`{view.written('test_interval')}` without `data.val`: nothing to evaluate",
            hint,
        )
    batches = view.whole("test_iter")
    size = view.whole("test_batch_size") or view.whole("device_batch_size")
    if batches and size and shared.val_images and batches * size > shared.val_images:
        message = f"{batches} passes of {size} images are more than the {shared.val_images} of `data.val`"
        most = shared.val_images // size
        hint = f"`test_iter` can be {most}; leave it out to evaluate every image" if most else "leave it out"
        problems.add(view.place("test_iter"), message, hint)


def _of_a_wing(field: str, check: str, stage: str, view: View, problems: Problems) -> None:
    """The rules of a field that a wing serves."""
    message, known = view.view(field), wing(check)
    if message is not None and known is not None:
        known(stage, view, problems)
    elif message is not None:
        folder = check.partition(".")[0]
        text = f"stage `{stage}` has `{field}`, and this installation lacks stagerun/{folder}, which carries it out"
        problems.add(view.place(field), text, "remove it, or install all of stagerun")


STAGE_CHECKS: tuple[Callable[[str, View, Problems], None], ...] = (
    _required_settings,
    _batch,
    _mixtures,
    _warm_up,
    _policy,
    _gamma,
    _steps,
    _knots,
    check_local_rate,
    check_regularisation,
    partial(_of_a_wing, "compress_param", "wire.rules.check_compression"),
    partial(_of_a_wing, "sync_param", "wire.rules.check_sync"),
    check_weights,
    check_solverstate,
    check_loss,
    check_early_stop,
)


def _all(names: Iterable[str]) -> str:
    return listing(list(names), "and")
