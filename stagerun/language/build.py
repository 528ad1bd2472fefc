"""Builds the frozen values of recipe from checked settings, with the origin of each. Pure; the settings have no mistakes."""

import posixpath
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from stagerun.base import recipe, weights
from stagerun.base.code import Code, Sources
from stagerun.base.wings import wing
from stagerun.language import layers, tree, values
from stagerun.language.code import LocalFiles, digest, version
from stagerun.language.consent import NEEDED, Consent
from stagerun.language.layers import pairs
from stagerun.language.nets import Held
from stagerun.language.networks import NET, PLAIN, code_in, network_of
from stagerun.language.tree import SCHEDULE, SOLVER, SOURCE, Block, Entry, View, is_message
from stagerun.language.values import NONE, RATES, default_text
from stagerun.schedule import POLICIES, own_fields

# Messages that exist without being written; for other messages, absence differs from all defaults.
ALWAYS = {"batch_norm_param", "carry", "transform_param", "resize_param", "outer"}
# Fields that training depends on only with `early_stop` or `@best`; a message includes its fields.
TESTED = ("solver.test_interval", "solver.test_iter", "solver.test_transform_param", "data.val.images")
# Fields that are not facts: the stages have their contents.
SKIPPED = {"clear", "solver", "stage", "ensemble"}
# Rare fields (message, field) that are only facts if written.
_IF_WRITTEN = {("Source", "name"), ("Source", "labels"), ("Solver", "data")}


@cache
def _optional(field: FieldDescriptor) -> bool:
    # A schedule always has a `model`, and its `data` a `train`; a stage may lack both.
    return field.name not in ALWAYS and field.containing_type.name not in ("Schedule", "Data")


def is_tested(key: str) -> bool:
    """Return whether an evaluation depends on the field of that name."""
    return any(f"{key}.".startswith(f"{name}.") for name in TESTED)


@cache
def _is_structural(field: FieldDescriptor) -> bool:
    """Return whether the field is in stages, resolves to its partner, or was retired and never in an identity."""
    gone = tree.retired(field) and tree.quiet(field)
    return gone or field.name in SKIPPED or field.name in pairs(field.containing_type)


@dataclass(frozen=True, slots=True)
class Fact:
    """A resolved value: `solver.base_lr`, its canonical text, its origin."""

    key: str
    text: str
    identity: bool
    origin: recipe.Origin


@dataclass(frozen=True, slots=True)
class Context:
    """Facts besides the settings: the absolute path of the schedule's folder, and the `path` of schedule.prototxt as in spans; the Python
    files of the whole schedule, so that each is imported once; the digests of the files with labels, and Caffe's nets, by their names as
    written."""

    root: str
    path: str
    sources: Sources
    labels: Mapping[str, str]
    nets: Mapping[str, Held]


def model(view: View, context: Context) -> recipe.Model:
    """Build the network of a `model { }`, the schedule's or a stage's."""
    norm, path = view.inside("batch_norm_param"), view.text("caffe_net")
    name = path or view.text("name") or ""
    network, held = NET if path is not None else network_of(name), context.nets.get(path or "")
    # In a Caffe net, and in a network from outside, each layer has its values.
    published = (None, None) if path is not None or network.foreign else network.batch_norm or PLAIN
    fraction, eps = norm.number("moving_average_fraction"), norm.number("eps")
    return values.build(
        recipe.Model,
        view,
        name=name,
        net=None if path is None else held.text if held is not None else "",
        input_shape=held.shape if held is not None else (),
        sources=context.sources if network.foreign else None,
        moving_average_fraction=published[0] if fraction is None else fraction,
        eps=published[1] if eps is None else eps,
    )


def data(view: View, context: Context) -> recipe.Data:
    """Build the `data { }` of the schedule, as a stage has it."""
    val = tuple(_source(one, context) for one in view.views("val"))
    return values.build(recipe.Data, view, train=_source(view.inside("train"), context), val=val)


def _source(view: View, context: Context) -> recipe.Source:
    file = view.text("labels") or ""
    return values.build(
        recipe.Source,
        view,
        path=path_of(context.root, view.text("source") or ""),
        labels_path=path_of(context.root, file) if file and file != recipe.FLOAT_DATA else None,
        labels_digest=context.labels.get(file),
    )


def path_of(root: str, source: str) -> str:
    """Return the folder that `source` means in a schedule whose folder is `root`."""
    return posixpath.normpath(posixpath.join(root, source))


def solver(view: View, seed: int, images: int, context: Context) -> recipe.Solver:
    """Build a stage's settings, durations in iterations. `seed`: Schedule.seed; `images`: the number in an epoch."""
    root, stage_seed, compressed = context.root, view.whole("random_seed"), view.view("compress_param")
    stage_model, started, loss = view.view("model"), view.view("weights"), view.view("loss")
    runs = loss is not None and code_in(loss.text("function") or "") is not None
    return values.build(
        recipe.Solver,
        view,
        **_for_the_batch(view, images),
        transform=_with_mean(values.build(recipe.Transform, view.inside("transform_param")), root),
        test_transform=_with_mean(evaluation_transform(view), root),
        random_seed=seed if stage_seed is None else stage_seed,
        compress=wing("wire.rules.compression")(compressed) if compressed is not None else None,
        model=model(stage_model, context) if stage_model is not None else None,
        weights=_weights(started, root) if started is not None else None,
        solverstate_path=path_of(root, state) if (state := view.text("solverstate")) else "",
        loss=values.build(recipe.Loss, loss, sources=context.sources if runs else None) if loss is not None else None,
        sync=_sync(met) if (met := view.view("sync_param")) is not None else None,
    )


def _with_mean(transform: recipe.Transform, root: str) -> recipe.Transform:
    return replace(transform, mean_path=path_of(root, transform.mean_file)) if transform.mean_file else transform


def _weights(view: View, root: str) -> recipe.Weights:
    path = weights.place_of(view.text("file") or "").path
    return values.build(recipe.Weights, view, path=path_of(root, path) if path else "", state=False)


def earliest_end(view: View) -> int | None:
    """Return the iteration that a stage with `early_stop` always reaches (`recipe.Solver.earliest_end`); None for other stages."""
    length, every = view.known("max_iter"), view.known("test_interval")
    patience = view.known("early_stop", "patience_iter")
    return recipe.earliest_end(length, every, patience) if length and every and patience else None


def _sync(view: View) -> recipe.Sync:
    """Build `sync_param`, with the outer update that `DILOCO` always has."""
    outer = None
    if view.text("method") == recipe.SyncMethod.DILOCO.value:
        outer = values.build(recipe.Outer, view.inside("outer"))
    return values.build(recipe.Sync, view, outer=outer)


# The fields of Solver that a learning rate depends on, besides the ones from `_for_the_batch`.
RATE_FIELDS = {
    *("lr_policy", "max_iter", "warmup_iter", "decay_from", "policy_start_iter"),
    *(name for policy in POLICIES for name in own_fields(policy) if name not in RATES),
}


def rate_settings(view: View, images: int | None) -> dict[str, Any]:
    """Return the fields that a learning rate depends on. `images`: of an epoch. OverflowError if `base_lr_batch` makes a rate too large for
    a double."""
    return {**values.settings(recipe.Solver, view, RATE_FIELDS), **_for_the_batch(view, images)}


def _for_the_batch(view: View, images: int | None) -> dict[str, Any]:
    written = values.settings(recipe.Solver, view, ("batch_size", *RATES))
    batch, base = written["batch_size"], view.whole("base_lr_batch")
    rates = {name: scaled(written[name], batch, base) for name in RATES}
    return {"batch_size": batch, "epoch_iter": None if images is None else images / batch, **rates}


def scaled(rate: float, batch: int, base: int | None) -> float:
    """Scale a learning rate for `base` images to `batch` images: linear scaling (Goyal et al., arXiv:1706.02677) of the decimal number as
    written, rounded once.

    >>> scaled(0.256, 2048, 256), 0.1 * 3 / 1, scaled(0.1, 3, 1)
    (2.048, 0.30000000000000004, 0.3)
    """
    return rate if base is None else float(Fraction(repr(rate)) * batch / base)


def evaluation_transform(view: View) -> recipe.Transform:
    """Build the transform of an evaluation; by default the training's without random parts and with the final crop_size."""
    written = view.view("test_transform_param")
    if written is not None:
        return values.build(recipe.Transform, written)
    names = ("scale", "crop_size", "mean_value", "channel_order", "std_value", "mean_file")
    return recipe.Transform(**values.settings(recipe.Transform, view.inside("transform_param"), names))


def facts(
    kind: Descriptor,
    block: Block | None,
    prefix: str,
    derived: Mapping[str, str],
    schedule: str,
    stored: Iterable[str] = (),
) -> Iterator[Fact]:
    """Yield every field below a message, written or not, in the order of the .proto. `derived`: the canonical text of values whose
    default comes from other fields, by key; `schedule`: the path of schedule.prototxt. The messages of the keys in `stored` exist, too.
    """

    def below(kind: Descriptor, block: Block | None, prefix: str, identity: bool) -> Iterator[Fact]:
        for field in kind.fields:
            key, entry = prefix + field.name, block.entries.get(field.name) if block else None
            inner = list(block.blocks(field.name)) if block and entry and is_message(field) else []
            counts = identity and tree.identity(field)
            if _is_structural(field) or (entry is None and (kind.name, field.name) in _IF_WRITTEN):
                continue
            if field.message_type is SOURCE and inner:  # the first has the name of the list, as in `values.members`
                yield from below(SOURCE, inner[0], f"{key}.", counts)
                for source in inner[1:]:
                    yield from below(SOURCE, source, f"{key}.{View(source).text('name')}.", counts)
            elif (
                is_message(field)
                and not field.is_repeated
                and (entry or not _optional(field) or any(name.startswith(f"{key}.") for name in stored))
            ):
                yield from below(field.message_type, inner[0] if inner else None, f"{key}.", counts)
            else:
                default = default_text(field)
                text = _canonical(entry) if entry else derived.get(key, NONE) if default == NONE else default
                omitted = tree.quiet(field) and text == default
                origin = _origin(entry, schedule) if entry else recipe.Origin(text, "default")
                yield Fact(key, text, counts and not omitted, origin)

    return below(kind, block, prefix, True)


def _origin(entry: Entry, schedule: str) -> recipe.Origin:
    layer = layers.layer_of(entry.place, schedule)
    return recipe.Origin(_written(entry), layer, None if layer == layers.LMDB else entry.place)


@cache
def _names_code(field: FieldDescriptor) -> bool:
    return NEEDED.get(f"{field.containing_type.name}.{field.name}") is Consent.CODE


def code_entries(settings: Block, schedule: Block) -> Iterator[tuple[Block, Entry, Code]]:
    """Yield (message, entry, function) of each Python function in the settings of a stage, and in a `model` that it shares."""
    shared = schedule.block("model") if "model" not in settings.entries else None
    for holder in (shared, settings):
        for inner, entry in holder.walk() if holder is not None else ():
            if _names_code(entry.field) and (code := code_in(str(entry.values[0].value))):
                yield inner, entry, code


def code_facts(settings: Block, schedule: Block, local: LocalFiles, path: str) -> Iterator[Fact]:
    """Yield the digest of each Python file that a stage needs, `code.mynet.py`, and the version of each package, `code.timm`."""
    by_name: dict[str, Fact] = {}
    for _, entry, code in code_entries(settings, schedule):
        texts = {code.top: version(code.top)} if not code.file else {}
        for file, text in local.sources(local.closure(code.file)).files if code.file else ():
            texts[file] = digest([(file, text)])
        for name, text in texts.items():
            by_name.setdefault(name, Fact(recipe.CODE + name, text, True, _origin(entry, path)))
    yield from by_name.values()


def _written(entry: Entry) -> str:
    texts = [_block_as_written(v.value) if isinstance(v.value, Block) else v.text for v in entry.values]
    return f"[{', '.join(texts)}]" if entry.field.is_repeated else texts[0]


def _block_as_written(block: Block) -> str:
    """Return a block on one line; a knot written in epochs keeps `epoch`."""
    texts = []
    for name, entry in block.entries.items():
        text = _written(entry)
        texts.append(text if text.startswith(f"{layers.EPOCH}: ") else f"{name}: {text}")
    return "{ " + " ".join(texts) + " }"


def _canonical(entry: Entry) -> str:
    texts = [
        _message(v.value) if isinstance(v.value, Block) else tree.canonical(v.value, entry.field) for v in entry.values
    ]
    return f"[{', '.join(texts)}]" if entry.field.is_repeated else texts[0]


def _message(block: Block) -> str:
    """Return a message of scalars on one line with its defaults, without fields that have neither value nor default."""
    entries = ((f, block.entries.get(f.name)) for f in block.kind.fields)
    texts = ((f.name, _canonical(e) if e else default_text(f)) for f, e in entries)
    return "{ " + " ".join(f"{name}: {text}" for name, text in texts if text != NONE) + " }"


# -- identities of snapshots from another version of stagerun, in the terms of this one


def completed(identity: Mapping[str, str]) -> dict[str, str]:
    """Return the identity (`recipe.Stage.identity`) with newer fields at their defaults, and without fields that no
    longer count: an upgrade is not a difference. Unknown names stay. A default that follows from other fields is stated
    as `none`: fields of that kind are as old as snapshots."""
    policy = identity.get("solver.lr_policy", "").strip('"')
    follows = "solver.early_stop.metric" in identity or recipe.FOLLOWED in identity

    def counts(key: str) -> bool:
        return values.identity(key, policy) or (follows and is_tested(key))

    both = *facts(SCHEDULE, None, "", {}, "", identity), *facts(SOLVER, None, "solver.", {}, "", identity)
    defaults = {fact.key: fact.text for fact in both if counts(fact.key) and not values.omitted_default(fact.key)}
    return defaults | {key: value for key, value in identity.items() if counts(key) or values.field_of(key) is None}


_SAME_RULE = "lr_mult: 1.0 decay_mult: 1.0 adapt: true }"  # the end of an entry of `param` without effect
_LOSS = "solver.loss.type"


def meant(identity: Mapping[str, str]) -> Mapping[str, str]:
    """Return the identity with one text for equivalent settings that train to the same bits: equal values for each channel, entries of
    `param` without effect, the default loss."""
    normal = dict(identity)
    for key in ("mean_value", "std_value"):
        text = identity.get(f"solver.transform_param.{key}", "")
        if len(channels := set(text.strip("[]").split(", "))) == 1:
            normal[f"solver.transform_param.{key}"] = f"[{channels.pop()}]"
    rules = identity.get("solver.param", "[]").removeprefix("[").removesuffix("]")
    if rules and all(rule.endswith(_SAME_RULE) for rule in rules.replace("}, {", "}\n{").split("\n")):
        normal["solver.param"] = "[]"
    loss = {key for key in identity if key.startswith("solver.loss.")}
    if identity.get(_LOSS) == "SOFTMAX" and all(values.at_default(key, identity[key]) for key in loss - {_LOSS}):
        normal = {key: text for key, text in normal.items() if key not in loss}
    return normal
