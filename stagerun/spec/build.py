"""Checked settings -> the frozen values of recipe, and what each came from. Pure; all settings are in order here."""

import posixpath
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from stagerun import recipe
from stagerun.errors import Span
from stagerun.spec import knots, layers, tree
from stagerun.spec.build_rate import curve, rate_settings
from stagerun.spec.build_transform import evaluation_transform, number, transform, whole
from stagerun.spec.layers import PAIRS
from stagerun.spec.networks import NETWORKS, PLAIN
from stagerun.spec.tree import Block, Entry, is_message
from stagerun.spec.view import View

# Messages whose absence means something else than all of their defaults.
OPTIONAL = {
    "val",
    "random_aspect_ratio_param",
    "random_resize_param",
    "random_resized_crop_param",
    "color_jitter_param",
    "rand_augment_param",
    "crop_size_ramp_param",
    "test_transform_param",
    "fc_weight_filler",
    "fc_bias_filler",
    "momentum_policy",
    "weight_decay_policy",
}
# Fields that say nothing by themselves: they are resolved into others, or stand in stages.
SKIPPED = {"clear", "solver", "stage", "ensemble"} | {other for _, other in PAIRS}
NONE = "none"


def model(view: View) -> recipe.Model:
    name, norm = _text(view, "name"), view.inside("batch_norm_param")
    fraction, eps = NETWORKS[name].batch_norm or PLAIN
    return recipe.Model(
        name=name,
        num_classes=whole(view, "num_classes"),
        channels=whole(view, "channels"),
        moving_average_fraction=number(norm, "moving_average_fraction")
        if norm.has("moving_average_fraction")
        else fraction,
        eps=number(norm, "eps") if norm.has("eps") else eps,
        zero_gamma=recipe.ZeroGamma(view.text("zero_gamma")),
        fc_weight_filler=_filler(view.view("fc_weight_filler")),
        fc_bias_filler=_filler(view.view("fc_bias_filler")),
        blur_pool=view.flag("blur_pool"),
        spare_classes=view.flag("spare_classes"),
    )


def _filler(view: View | None) -> recipe.Filler | None:
    if view is None:
        return None
    return recipe.Filler(
        type=_text(view, "type"),
        value=number(view, "value"),
        min=number(view, "min"),
        max=number(view, "max"),
        mean=number(view, "mean"),
        std=number(view, "std"),
        variance_norm=recipe.VarianceNorm(view.text("variance_norm")),
    )


def data(view: View, root: str) -> recipe.Data:
    val = view.view("val")
    return recipe.Data(
        train=_source(view.inside("train"), root),
        val=_source(val, root) if val else None,
        scratch=view.text("scratch"),
        shuffle=view.flag("shuffle"),
        loader_threads=view.whole("loader_threads"),
        cache=recipe.Cache(view.text("cache")),
        on_bad_record=recipe.OnBadRecord(view.text("on_bad_record")),
        scratch_reserve=number(view, "scratch_reserve"),
        scratch_copy=recipe.ScratchCopy(view.text("scratch_copy")),
        scratch_from=recipe.ScratchFrom(view.text("scratch_from")),
    )


def _source(view: View, root: str) -> recipe.Source:
    source = _text(view, "source")
    return recipe.Source(source=source, path=path_of(root, source), images=whole(view, "images"))


def path_of(root: str, source: str) -> str:
    """The folder that `source` means in a schedule whose folder is `root`."""
    return posixpath.normpath(posixpath.join(root, source))


def solver(view: View, seed: int, images: int) -> recipe.Solver:
    """A stage's settings, durations in iterations; `seed` is Schedule.seed, `images` is how many an epoch has."""
    carry = view.inside("carry")
    made = transform(view.inside("transform_param"))
    test = view.view("test_transform_param")
    random_seed, test_batch = view.whole("random_seed"), view.whole("test_batch_size")
    return recipe.Solver(
        **rate_settings(view, images),
        device_batch_size=whole(view, "device_batch_size"),
        momentum_policy=curve(view, "momentum_policy"),
        weight_decay_policy=curve(view, "weight_decay_policy"),
        type=_text(view, "type"),
        momentum=number(view, "momentum"),
        momentum2=number(view, "momentum2"),
        rms_decay=number(view, "rms_decay"),
        delta=number(view, "delta"),
        regularization_type=_text(view, "regularization_type"),
        local_lr_auto=view.flag("local_lr_auto"),
        local_gw_ratio=number(view, "local_gw_ratio"),
        ema_decay=view.number("ema_decay"),
        ema_interval=whole(view, "ema_interval"),
        momentum_form=recipe.MomentumForm(view.text("momentum_form")),
        weight_decay=number(view, "weight_decay"),
        clip_gradients=view.number("clip_gradients"),
        param=tuple(_param(v) for v in view.views("param")),
        carry_momentum=carry.text("momentum") == "KEEP",
        carry_data=carry.text("data") == "CONTINUE",
        transform=made,
        test_transform=transform(test) if test else evaluation_transform(made),
        mixup_alpha=number(view, "mixup_alpha"),
        cutmix_alpha=number(view, "cutmix_alpha"),
        label_smoothing=number(view, "label_smoothing"),
        random_seed=seed if random_seed is None else random_seed,
        precision=recipe.Precision(view.text("precision")),
        channels_last=view.flag("channels_last"),
        compile=view.flag("compile"),
        on_nan=recipe.OnNan(view.text("on_nan")),
        max_nan=whole(view, "max_nan"),
        display=whole(view, "display"),
        test_interval=whole(view, "test_interval"),
        test_iter=view.whole("test_iter"),
        test_batch_size=whole(view, "device_batch_size") if test_batch is None else test_batch,
        snapshot=whole(view, "snapshot"),
    )


def _param(view: View) -> recipe.ParamRule:
    return recipe.ParamRule(
        name=_text(view, "name"),
        kind=recipe.ParamKind(view.text("kind")),
        lr_mult=number(view, "lr_mult"),
        decay_mult=number(view, "decay_mult"),
        adapt=view.flag("adapt"),
    )


def _text(view: View, name: str) -> str:
    value = view.text(name)
    assert value is not None, name
    return value


@dataclass(frozen=True, slots=True)
class Fact:
    """One resolved value: `solver.base_lr`, its canonical text, where it came from."""

    key: str
    text: str
    identity: bool
    origin: recipe.Origin


def facts(block: Block, prefix: str, derived: Mapping[str, str], schedule: str) -> Iterator[Fact]:
    """Every field below a block, written or not, in the order of the .proto. `derived` has the canonical text of
    defaults that come from other fields, by key; `schedule` is the path of schedule.prototxt.
    """
    yield from _facts(block.kind, block, prefix, True, derived, schedule)


def _facts(
    kind: Descriptor, block: Block | None, prefix: str, identity: bool, derived: Mapping[str, str], schedule: str
) -> Iterator[Fact]:
    for field in kind.fields:
        if field.name in SKIPPED:
            continue
        key = prefix + field.name
        counts = identity and tree.identity(field)
        entry = block.entries.get(field.name) if block else None
        if is_message(field) and not field.is_repeated and (entry or field.name not in OPTIONAL):
            inner = block.block(field.name) if block else None
            yield from _facts(field.message_type, inner, key + ".", counts, derived, schedule)
        elif entry:
            span: Span = entry.place
            layer = layers.layer_of(span, schedule)
            origin = recipe.Origin(_written(entry), layer, None if layer == layers.LMDB else span)
            yield Fact(key, _canonical(entry), counts, origin)
        else:
            text = derived.get(key) or default_text(field)
            yield Fact(key, text, counts, recipe.Origin(text, "default"))


def default_text(field: FieldDescriptor) -> str:
    """The default that the .proto states, as a Fact has it."""
    value = tree.default(field)
    return ("[]" if field.is_repeated else NONE) if value is None else tree.canonical(value, field)


def _written(entry: Entry) -> str:
    texts = [_block_as_written(v.value) if isinstance(v.value, Block) else v.text for v in entry.values]
    return f"[{', '.join(texts)}]" if entry.field.is_repeated else texts[0]


def _block_as_written(block: Block) -> str:
    """On one line; a knot's `iter` that was written as `epoch` has that in its text."""
    found = []
    for name, entry in block.entries.items():
        text = _written(entry)
        found.append(text if text.startswith(f"{knots.EPOCH}: ") else f"{name}: {text}")
    return "{ " + " ".join(found) + " }"


def _canonical(entry: Entry) -> str:
    texts = [
        _message(v.value) if isinstance(v.value, Block) else tree.canonical(v.value, entry.field) for v in entry.values
    ]
    return f"[{', '.join(texts)}]" if entry.field.is_repeated else texts[0]


def _message(block: Block) -> str:
    """A message of scalars on one line, defaults spelt out; a field that is not written and has none is left out."""
    entries = ((f, block.entries.get(f.name)) for f in block.kind.fields)
    texts = ((f.name, _canonical(e) if e else default_text(f)) for f, e in entries)
    return "{ " + " ".join(f"{name}: {text}" for name, text in texts if text != NONE) + " }"
