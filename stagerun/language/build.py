"""Checked settings -> the frozen values of recipe, and what each came from. Pure; all settings are in order here."""

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
from stagerun.language.tree import SCHEDULE, SOLVER, SOURCE, Block, Entry, is_message
from stagerun.language.values import NONE, RATES, default_text
from stagerun.language.view import View
from stagerun.schedule import POLICIES, own_fields

# Messages that are there without being written; the absence of another means something else than all of its defaults.
ALWAYS = {"batch_norm_param", "carry", "transform_param", "resize_param", "outer"}
# What `early_stop` hangs on; without it, nothing that is trained does. A message with all that is in it.
TESTED = ("solver.test_interval", "solver.test_iter", "solver.test_transform_param", "data.val.images")
# Fields that say nothing by themselves: they stand in stages.
SKIPPED = {"clear", "solver", "stage", "ensemble"}
# Fields that most don't have: (message, field). Where they are not written there is nothing to say of them.
_NOT_SAID = {("Source", "name"), ("Source", "labels"), ("Solver", "data")}


@cache
def _optional(field: FieldDescriptor) -> bool:
    # A schedule has a `model` always, and its `data` a `train`; those of a stage may be absent.
    return field.name not in ALWAYS and field.containing_type.name not in ("Schedule", "Data")


def is_tested(key: str) -> bool:
    """Whether an evaluation depends on the field of that name."""
    return any(f"{key}.".startswith(f"{name}.") for name in TESTED)


@cache
def _says_nothing(field: FieldDescriptor) -> bool:
    """Whether the field stands in stages, is resolved into its partner, or was retired and never stood in an identity."""
    gone = tree.retired(field) and tree.quiet(field)
    return gone or field.name in SKIPPED or field.name in pairs(field.containing_type)


@dataclass(frozen=True, slots=True)
class Fact:
    """One resolved value: `solver.base_lr`, its canonical text, where it came from."""

    key: str
    text: str
    identity: bool
    origin: recipe.Origin


@dataclass(frozen=True, slots=True)
class Beside:
    """What is known beside the settings: the absolute path of the schedule's folder, and the `path` of schedule.prototxt as in places; the
    Python files of the whole schedule, so that all that is imported of them is imported once; the digests of the files with labels, and
    Caffe's nets, by their names as written."""

    root: str
    path: str
    sources: Sources
    labels: Mapping[str, str]
    nets: Mapping[str, Held]


def model(view: View, given: Beside) -> recipe.Model:
    """The network of a `model { }`, the schedule's or a stage's."""
    norm, path = view.inside("batch_norm_param"), view.text("caffe_net")
    name = path or view.text("name") or ""
    network, held = NET if path is not None else network_of(name), given.nets.get(path or "")
    # Of a net of Caffe's, and of a network from outside, each layer says it.
    published = (None, None) if path is not None or network.foreign else network.batch_norm or PLAIN
    fraction, eps = norm.number("moving_average_fraction"), norm.number("eps")
    return values.build(
        recipe.Model,
        view,
        name=name,
        net=None if path is None else held.text if held is not None else "",
        input_shape=held.shape if held is not None else (),
        sources=given.sources if network.foreign else None,
        moving_average_fraction=published[0] if fraction is None else fraction,
        eps=published[1] if eps is None else eps,
    )


def data(view: View, given: Beside) -> recipe.Data:
    """The `data { }` of the schedule, as a stage has it."""
    val = tuple(_source(one, given) for one in view.views("val"))
    return values.build(recipe.Data, view, train=_source(view.inside("train"), given), val=val)


def _source(view: View, given: Beside) -> recipe.Source:
    file = view.text("labels") or ""
    return values.build(
        recipe.Source,
        view,
        path=path_of(given.root, view.text("source") or ""),
        labels_path=path_of(given.root, file) if file and file != recipe.FLOAT_DATA else None,
        labels_digest=given.labels.get(file),
    )


def path_of(root: str, source: str) -> str:
    """The folder that `source` means in a schedule whose folder is `root`."""
    return posixpath.normpath(posixpath.join(root, source))


def solver(view: View, seed: int, images: int, given: Beside) -> recipe.Solver:
    """A stage's settings, durations in iterations; `seed` is Schedule.seed, `images` is how many an epoch has."""
    root, own_seed, compressed = given.root, view.whole("random_seed"), view.view("compress_param")
    own_model, started, loss = view.view("model"), view.view("weights"), view.view("loss")
    runs = loss is not None and code_in(loss.text("function") or "") is not None
    return values.build(
        recipe.Solver,
        view,
        **_for_the_batch(view, images),
        transform=_with_mean(values.build(recipe.Transform, view.inside("transform_param")), root),
        test_transform=_with_mean(evaluation_transform(view), root),
        random_seed=seed if own_seed is None else own_seed,
        compress=wing("wire.rules.compression")(compressed) if compressed is not None else None,
        model=model(own_model, given) if own_model is not None else None,
        weights=_weights(started, root) if started is not None else None,
        solverstate_path=path_of(root, state) if (state := view.text("solverstate")) else "",
        loss=values.build(recipe.Loss, loss, sources=given.sources if runs else None) if loss is not None else None,
        sync=_sync(met) if (met := view.view("sync_param")) is not None else None,
    )


def _with_mean(transform: recipe.Transform, root: str) -> recipe.Transform:
    return replace(transform, mean_path=path_of(root, transform.mean_file)) if transform.mean_file else transform


def _weights(view: View, root: str) -> recipe.Weights:
    path = weights.place_of(view.text("file") or "").path
    return values.build(recipe.Weights, view, path=path_of(root, path) if path else "", state=False)


def earliest_end(view: View) -> int | None:
    """The iteration that a stage with `early_stop` comes to in any case (`recipe.Solver.earliest_end`); None of another stage."""
    length, every, patience = (
        view.known("max_iter"),
        view.known("test_interval"),
        view.known("early_stop", "patience_iter"),
    )
    return recipe.earliest_end(length, every, patience) if length and every and patience else None


def _sync(view: View) -> recipe.Sync:
    """With the outer update that `DILOCO` has though none is written."""
    outer = None
    if view.text("method") == recipe.SyncMethod.DILOCO.value:
        outer = values.build(recipe.Outer, view.inside("outer"))
    return values.build(recipe.Sync, view, outer=outer)


# The fields of Solver that a learning rate depends on, besides those of `_for_the_batch`.
RATE_FIELDS = {
    *("lr_policy", "max_iter", "warmup_iter", "decay_from", "policy_start_iter"),
    *(name for policy in POLICIES for name in own_fields(policy) if name not in RATES),
}


def rate_settings(view: View, images: int | None) -> dict[str, Any]:
    """Those fields, by name. `images`: of an epoch. OverflowError where `base_lr_batch` makes a rate too large for a double."""
    return {**values.settings(recipe.Solver, view, RATE_FIELDS), **_for_the_batch(view, images)}


def _for_the_batch(view: View, images: int | None) -> dict[str, Any]:
    found = values.settings(recipe.Solver, view, ("batch_size", *RATES))
    batch, base = found["batch_size"], view.whole("base_lr_batch")
    rates = {name: scaled(found[name], batch, base) for name in RATES}
    return {"batch_size": batch, "epoch_iter": None if images is None else images / batch, **rates}


def scaled(rate: float, batch: int, base: int | None) -> float:
    """A learning rate for `base` images as one for `batch`: linear scaling (Goyal et al., arXiv:1706.02677), on the decimal
    number as written, rounded once.

    >>> scaled(0.256, 2048, 256), 0.1 * 3 / 1, scaled(0.1, 3, 1)
    (2.048, 0.30000000000000004, 0.3)
    """
    return rate if base is None else float(Fraction(repr(rate)) * batch / base)


def evaluation_transform(view: View) -> recipe.Transform:
    """The transform of an evaluation. Without one of its own it has the training's, with nothing drawn at random and
    crop_size from the start."""
    own = view.view("test_transform_param")
    if own is not None:
        return values.build(recipe.Transform, own)
    names = ("scale", "crop_size", "mean_value", "channel_order", "std_value", "mean_file")
    return recipe.Transform(**values.settings(recipe.Transform, view.inside("transform_param"), names))


def facts(
    kind: Descriptor,
    block: Block | None,
    prefix: str,
    derived: Mapping[str, str],
    schedule: str,
    said: Iterable[str] = (),
) -> Iterator[Fact]:
    """Every field below a message, written or not, in the order of the .proto. `derived` has the canonical text of
    values whose default comes from other fields, by key; `schedule` is the path of schedule.prototxt. Keys in `said`
    tell which messages are there besides those of the block.
    """

    def below(kind: Descriptor, block: Block | None, prefix: str, identity: bool) -> Iterator[Fact]:
        for field in kind.fields:
            key, entry = prefix + field.name, block.entries.get(field.name) if block else None
            inner = list(block.blocks(field.name)) if block and entry and is_message(field) else []
            counts = identity and tree.identity(field)
            if _says_nothing(field) or (entry is None and (kind.name, field.name) in _NOT_SAID):
                continue
            if (
                field.message_type is SOURCE and inner
            ):  # the first under the name of all, as the names of `values.members`
                yield from below(SOURCE, inner[0], f"{key}.", counts)
                for source in inner[1:]:
                    yield from below(SOURCE, source, f"{key}.{View(source).text('name')}.", counts)
            elif (
                is_message(field)
                and not field.is_repeated
                and (entry or not _optional(field) or any(name.startswith(f"{key}.") for name in said))
            ):
                yield from below(field.message_type, inner[0] if inner else None, f"{key}.", counts)
            else:
                default = default_text(field)
                text = _canonical(entry) if entry else derived.get(key, NONE) if default == NONE else default
                unsaid = tree.quiet(field) and text == default
                origin = _origin(entry, schedule) if entry else recipe.Origin(text, "default")
                yield Fact(key, text, counts and not unsaid, origin)

    return below(kind, block, prefix, True)


def _origin(entry: Entry, schedule: str) -> recipe.Origin:
    layer = layers.layer_of(entry.place, schedule)
    return recipe.Origin(_written(entry), layer, None if layer == layers.LMDB else entry.place)


@cache
def _names_code(field: FieldDescriptor) -> bool:
    return NEEDED.get(f"{field.containing_type.name}.{field.name}") is Consent.CODE


def code_entries(settings: Block, schedule: Block) -> Iterator[tuple[Block, Entry, Code]]:
    """What in the settings of a stage, and in a `model` that it shares, names a function of Python: message, entry, function."""
    shared = schedule.block("model") if "model" not in settings.entries else None
    for holder in (shared, settings):
        for inner, entry in holder.walk() if holder is not None else ():
            if _names_code(entry.field) and (code := code_in(str(entry.values[0].value))):
                yield inner, entry, code


def code_facts(settings: Block, schedule: Block, local: LocalFiles, path: str) -> Iterator[Fact]:
    """The digest of each Python file that a stage needs, `code.mynet.py`, and the version of each package, `code.timm`."""
    found: dict[str, Fact] = {}
    for _, entry, code in code_entries(settings, schedule):
        texts = {code.top: version(code.top)} if not code.file else {}
        for file, text in local.sources(local.closure(code.file)).files if code.file else ():
            texts[file] = digest([(file, text)])
        for name, text in texts.items():
            found.setdefault(name, Fact(recipe.CODE + name, text, True, _origin(entry, path)))
    yield from found.values()


def _written(entry: Entry) -> str:
    texts = [_block_as_written(v.value) if isinstance(v.value, Block) else v.text for v in entry.values]
    return f"[{', '.join(texts)}]" if entry.field.is_repeated else texts[0]


def _block_as_written(block: Block) -> str:
    """On one line; a knot's `iter` that was written as `epoch` has that in its text."""
    found = []
    for name, entry in block.entries.items():
        text = _written(entry)
        found.append(text if text.startswith(f"{layers.EPOCH}: ") else f"{name}: {text}")
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


# -- identities of snapshots that another version of stagerun made, in the words of this one


def completed(identity: Mapping[str, str]) -> dict[str, str]:
    """The identity (`recipe.Stage.identity`) with the fields that it lacks at their defaults, and without those that count no
    more: the version that wrote it did not know the ones, and an upgrade is not a difference.

    A name that this version doesn't know stays. A default that follows from other fields is stated as `none`: fields of that
    kind are as old as snapshots are.
    """
    policy = identity.get("solver.lr_policy", "").strip('"')
    stops_early = "solver.early_stop.metric" in identity

    def counts(key: str) -> bool:
        return values.identity(key, policy) or (stops_early and is_tested(key))

    both = *facts(SCHEDULE, None, "", {}, "", identity), *facts(SOLVER, None, "solver.", {}, "", identity)
    defaults = {fact.key: fact.text for fact in both if counts(fact.key) and not values.unsaid(fact.key)}
    return defaults | {key: value for key, value in identity.items() if counts(key) or not values.known(key)}


_SAME_RULE = "lr_mult: 1.0 decay_mult: 1.0 adapt: true }"  # the end of an entry of `param` that changes nothing
_LOSS = "solver.loss.type"


def meant(identity: Mapping[str, str]) -> Mapping[str, str]:
    """The identity with one text for what is written in several ways and trains to the same bits: a value for each channel where all
    are equal, entries of `param` of which none changes anything, the loss that there is by default."""
    found = dict(identity)
    for key in ("mean_value", "std_value"):
        text = identity.get(f"solver.transform_param.{key}", "")
        if len(channels := set(text.strip("[]").split(", "))) == 1:
            found[f"solver.transform_param.{key}"] = f"[{channels.pop()}]"
    rules = identity.get("solver.param", "[]").removeprefix("[").removesuffix("]")
    if rules and all(rule.endswith(_SAME_RULE) for rule in rules.replace("}, {", "}\n{").split("\n")):
        found["solver.param"] = "[]"
    loss = {key for key in identity if key.startswith("solver.loss.")}
    if identity.get(_LOSS) == "SOFTMAX" and all(values.at_default(key, identity[key]) for key in loss - {_LOSS}):
        found = {key: text for key, text in found.items() if key not in loss}
    return found
