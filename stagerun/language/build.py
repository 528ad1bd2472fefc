"""Checked settings -> the frozen values of recipe, and what each came from. Pure; all settings are in order here."""

import posixpath
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from stagerun.base import recipe, weights
from stagerun.base.code import Sources
from stagerun.base.wings import wing
from stagerun.language import layers, tree, values
from stagerun.language.code import LocalFiles, digest, version
from stagerun.language.consent import NEEDED, Consent
from stagerun.language.layers import pairs
from stagerun.language.nets import Held
from stagerun.language.networks import NET, PLAIN, code_in, network_of
from stagerun.language.tree import SCHEDULE, SOLVER, SOURCE, Block, Entry, is_message
from stagerun.language.values import NONE, RATES
from stagerun.language.view import View
from stagerun.schedule import POLICIES, own_fields

# Messages whose absence means something else than all of their defaults.
OPTIONAL = {"test_transform_param", "data", "train"} | {
    member.path
    for kind in (recipe.Model, recipe.Data, recipe.Solver, recipe.Transform, recipe.Loss)
    for member in values.layout(kind)
    if member.is_message and member.default is None
}
# What `early_stop` hangs on; without it, nothing that is trained does. A message with all that is in it.
TESTED = ("solver.test_interval", "solver.test_iter", "solver.test_transform_param", "data.val.images")
# Fields that say nothing by themselves: they stand in stages.
SKIPPED = {"clear", "solver", "stage", "ensemble"}


# Fields that most don't have: (message, field). Where they are not written there is nothing to say of them.
_NOT_SAID = {("Source", "name"), ("Source", "labels"), ("Solver", "data")}


def _optional(field: FieldDescriptor) -> bool:
    # A schedule has a `model` always, and its `data` a `train`; those of a stage may be absent.
    return field.name in OPTIONAL and field.containing_type.name not in ("Schedule", "Data")


def is_tested(key: str) -> bool:
    """Whether an evaluation depends on the field of that name."""
    return any(f"{key}.".startswith(f"{name}.") for name in TESTED)


def _says_nothing(field: FieldDescriptor) -> bool:
    """Whether the field stands in stages, is resolved into its partner, or was retired and never stood in an identity."""
    gone = tree.retired(field) and tree.quiet(field)
    return gone or field.name in SKIPPED or field.name in dict(pairs(field.containing_type)).values()


@dataclass(frozen=True, slots=True)
class Beside:
    """What is read beside the settings: the Python files of the whole schedule, so that all that is imported of them is imported once; the
    digests of the files with labels; Caffe's nets; all by their names as written."""

    sources: Sources
    labels: Mapping[str, str]
    nets: Mapping[str, Held]

    @property
    def nets_read(self) -> frozenset[str]:
        """The paths of these nets, as in places."""
        return frozenset(held.path for held in self.nets.values())


def model(view: View, given: Beside) -> recipe.Model:
    """The network of a `model { }`, the schedule's or a stage's."""
    norm, path = view.inside("batch_norm_param"), view.text("caffe_net")
    name = path or view.text("name") or ""
    network = NET if path is not None else network_of(name)
    own = path is not None or network.foreign  # each layer says it
    fraction, eps = (None, None) if own else network.batch_norm or PLAIN
    held = given.nets.get(path or "")
    return values.build(
        recipe.Model,
        view,
        name=name,
        net=None if path is None else held.text if held is not None else "",
        input_shape=held.shape if held is not None else (),
        sources=given.sources if network.foreign else None,
        moving_average_fraction=norm.number("moving_average_fraction")
        if norm.has("moving_average_fraction")
        else fraction,
        eps=norm.number("eps") if norm.has("eps") else eps,
    )


def data(view: View, root: str, labels: Mapping[str, str]) -> recipe.Data:
    """`labels`: the digests of the files with labels, by their names as written."""
    train = _source(view.inside("train"), root, labels)
    return values.build(recipe.Data, view, train=train, val=_sources(view, root, labels))


def stage_data(view: View, shared: recipe.Data, root: str, labels: Mapping[str, str]) -> recipe.Data:
    """What `data` of a stage's settings makes of the schedule's."""
    own = view.view("data")
    if own is None:
        return shared
    train = own.view("train")
    return replace(
        shared,
        train=_source(train, root, labels) if train is not None else shared.train,
        val=_sources(own, root, labels) if own.has("val") else shared.val,
    )


def _sources(view: View, root: str, labels: Mapping[str, str]) -> tuple[recipe.Source, ...]:
    return tuple(_source(one, root, labels) for one in view.views("val"))


def _source(view: View, root: str, labels: Mapping[str, str]) -> recipe.Source:
    path, file = path_of(root, view.text("source") or ""), view.text("labels")
    return values.build(
        recipe.Source,
        view,
        path=path,
        labels_path=path_of(root, file) if file and file != recipe.FLOAT_DATA else None,
        labels_digest=labels.get(file) if file else None,
    )


def path_of(root: str, source: str) -> str:
    """The folder that `source` means in a schedule whose folder is `root`."""
    return posixpath.normpath(posixpath.join(root, source))


def solver(view: View, seed: int, images: int, root: str, given: Beside) -> recipe.Solver:
    """A stage's settings, durations in iterations; `seed` is Schedule.seed, `images` is how many an epoch has."""
    own_seed, compressed = view.whole("random_seed"), view.view("compress_param")
    own_model, started = view.view("model"), view.view("weights")
    transform = view.view("transform_param")
    return values.build(
        recipe.Solver,
        view,
        **_for_the_batch(view, images),
        transform=_with_mean(values.build(recipe.Transform, transform) if transform else recipe.Transform(), root),
        test_transform=_with_mean(evaluation_transform(view), root),
        random_seed=seed if own_seed is None else own_seed,
        compress=wing("wire.rules.compression")(compressed) if compressed is not None else None,
        model=model(own_model, given) if own_model is not None else None,
        weights=_weights(started, root) if started is not None else None,
        solverstate_path=path_of(root, state) if (state := view.text("solverstate")) else "",
        loss=_loss(loss, given) if (loss := view.view("loss")) is not None else None,
        sync=_sync(met) if (met := view.view("sync_param")) is not None else None,
    )


def _with_mean(transform: recipe.Transform, root: str) -> recipe.Transform:
    return replace(transform, mean_path=path_of(root, transform.mean_file)) if transform.mean_file else transform


def _weights(view: View, root: str) -> recipe.Weights:
    found = weights.place_of(view.text("file") or "")
    path = path_of(root, found.path) if found.path else ""
    return values.build(recipe.Weights, view, path=path, state=False)


def earliest_end(view: View) -> int | None:
    """The iteration that a stage with `early_stop` comes to in any case (`recipe.Solver.earliest_end`); None of another stage."""
    early, length, every = view.view("early_stop"), view.whole("max_iter"), view.whole("test_interval")
    patience = early.whole("patience_iter") if early is not None else None
    return recipe.earliest_end(length, every, patience) if length and every and patience else None


def _loss(view: View, given: Beside) -> recipe.Loss:
    return values.build(
        recipe.Loss,
        view,
        sources=given.sources if code_in(view.text("function") or "") is not None else None,
    )


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


@dataclass(frozen=True, slots=True)
class Fact:
    """One resolved value: `solver.base_lr`, its canonical text, where it came from."""

    key: str
    text: str
    identity: bool
    origin: recipe.Origin


def facts(
    kind: Descriptor, block: Block | None, prefix: str, derived: Mapping[str, str], schedule: str, identity: bool = True
) -> Iterator[Fact]:
    """Every field below a message, written or not, in the order of the .proto. `derived` has the canonical text of
    defaults that come from other fields, by key; `schedule` is the path of schedule.prototxt.
    """
    for field in kind.fields:
        if _says_nothing(field):
            continue
        key = prefix + field.name
        counts = identity and tree.identity(field)
        entry = block.entries.get(field.name) if block else None
        if entry is None and (kind.name, field.name) in _NOT_SAID:
            continue
        if field.message_type is SOURCE and field.is_repeated:
            yield from _facts_of_sources(field, block, key, derived, schedule)
        elif is_message(field) and not field.is_repeated and (entry or not _optional(field)):
            inner = block.block(field.name) if block else None
            yield from facts(field.message_type, inner, key + ".", derived, schedule, counts)
        elif entry:
            layer = layers.layer_of(entry.place, schedule)
            origin = recipe.Origin(_written(entry), layer, None if layer == layers.LMDB else entry.place)
            text = _canonical(entry)
            yield Fact(key, text, counts and not _unsaid(field, text), origin)
        else:
            text = derived.get(key) or default_text(field)
            yield Fact(key, text, counts and not _unsaid(field, text), recipe.Origin(text, "default"))


def _facts_of_sources(
    field: FieldDescriptor, block: Block | None, key: str, derived: Mapping[str, str], schedule: str
) -> Iterator[Fact]:
    """The first under the name of all, as the names of `values.members`."""
    found = list(block.blocks(field.name)) if block is not None else []
    for number, source in enumerate(found):
        own = View(source).text("name")
        yield from facts(SOURCE, source, f"{key}.{own}." if number else f"{key}.", derived, schedule, False)
    if not found:
        yield Fact(key, NONE, False, recipe.Origin(NONE, "default"))


def code_entries(block: Block | None) -> Iterator[tuple[Block, Entry]]:
    """The entries of a message, and of those in it, that name a function of Python; each with the message that it stands in."""
    for inner, entry in block.walk() if block is not None else ():
        key = f"{inner.kind.name}.{entry.field.name}"
        if NEEDED.get(key) is Consent.CODE and code_in(str(entry.values[0].value)) is not None:
            yield inner, entry


def code_facts(entries: Iterable[Entry], local: LocalFiles, schedule: str) -> Iterator[Fact]:
    """The digest of each Python file that these entries need, `code.mynet.py`, and the version of each package, `code.timm`."""
    found: dict[str, Fact] = {}
    for entry in entries:
        code = code_in(str(entry.values[0].value))
        assert code is not None
        origin = recipe.Origin(entry.values[0].text, layers.layer_of(entry.place, schedule), entry.place)
        if code.file:
            for path, text in local.sources(local.closure(code.file)).files:
                found.setdefault(path, Fact(recipe.CODE + path, digest([(path, text)]), True, origin))
        else:
            found.setdefault(code.top, Fact(recipe.CODE + code.top, version(code.top), True, origin))
    yield from found.values()


def _unsaid(field: FieldDescriptor, text: str) -> bool:
    """Whether an identity leaves the field out, because it has its default."""
    return tree.quiet(field) and text == default_text(field)


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
    found = {
        key: value
        for key, value in identity.items()
        if values.identity(key, policy) or not values.known(key) or (_stops_early(identity) and is_tested(key))
    }
    defaults = {key: text for key, text in _defaults(SCHEDULE, "", identity) if values.is_read(key, policy)}
    return found | {key: text for key, text in defaults.items() if key not in identity}


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


def _stops_early(identity: Mapping[str, str]) -> bool:
    return "solver.early_stop.metric" in identity


def _defaults(kind: Descriptor, prefix: str, said: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(key, text) of each field below a message that training depends on; of a message that may be absent its fields where one
    of them is said, `none` for itself else. A quiet field that isn't said has its default, unsaid."""
    for field in kind.fields:
        key = prefix + field.name
        if kind is SCHEDULE and field.name == "solver":
            yield from _defaults(SOLVER, "solver.", said)
        elif _says_nothing(field) or not (tree.identity(field) or (_stops_early(said) and is_tested(key))):
            continue
        elif not is_message(field) or field.is_repeated:
            if not tree.quiet(field):
                yield key, values.CONSTANT.get(field.name) or default_text(field)
        elif not _optional(field) or any(name.startswith(f"{key}.") for name in said):
            yield from _defaults(field.message_type, f"{key}.", said)
        elif not tree.quiet(field):
            yield key, NONE
