"""Nets of Caffe's that a schedule names: the settings that their data layers and multipliers say, below all others, and the networks that
they are for the schedule's images. Pure, but for what is looked at through `Files`."""

import posixpath
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache

from google.protobuf.descriptor import Descriptor

from stagerun.base import recipe
from stagerun.base.errors import Problems, RecipeError, Span
from stagerun.base.net import ALL_COUNT, Blob, Ignored, Net, ignored, ignored_by_some
from stagerun.base.text import count
from stagerun.language import net as language
from stagerun.language import ranges
from stagerun.language.code import MISSING, Reader, Unreadable
from stagerun.language.net import NetText, upgrade
from stagerun.language.net_layers import DATA, Means, channel_means, test_settings, train_settings
from stagerun.language.tree import SCHEDULE, SOLVER, SOURCE, Block, Entry, Value, quoted
from stagerun.language.view import Doubtful, View

MODEL: Descriptor = SCHEDULE.fields_by_name["model"].message_type
PARAM: Descriptor = SOLVER.fields_by_name["param"].message_type
# Settings that the data layers of a net may say.
_SAID = frozenset({"batch_size", "device_batch_size", "test_batch_size", "transform_param", "test_transform_param"})
CROPS = ("transform_param", "test_transform_param")
Shape = tuple[int, int, int]  # of an image: channels, height, width


@dataclass(frozen=True, slots=True)
class First:
    """The first record of an LMDB. `size`: (height, width), None where it isn't known without decoding."""

    channels: int | None
    size: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Files:
    """What is looked at on disk. `read`: a net by its path as written. `find`: a path of Caffe's, and that of the net which says it -> the
    place that it means, '' if there is none. `first`: the first record of an LMDB. `content`: the bytes of a file."""

    read: Reader = lambda path: MISSING
    find: Callable[[str, str], str] = lambda path, net: ""
    first: Callable[[str], First | None] = lambda path: None
    content: Callable[[str], bytes | None] = lambda path: None


@dataclass(frozen=True, slots=True)
class Held:
    """A net as the network of a stage: its canonical text, for images of a shape. `path`: of its file, as in places."""

    path: str
    text: str
    shape: Shape
    net: Net


@dataclass(frozen=True, slots=True)
class Images:
    """What is known of a stage's images beside its net: whose settings have the crops, and the LMDB of the training images."""

    settings: Block
    lmdb: str | None


class Nets:
    """The nets of one schedule, each read once. What is wrong with them is a problem in their files, or where they are named."""

    def __init__(self, files: Files, shown: str, problems: Problems) -> None:
        self.files, self.shown, self.problems = files, shown, problems
        self.held: dict[str, Held] = {}  # by the path as written
        self._texts: dict[str, NetText | None] = {}
        self._kept: dict[str, str] = {}
        self._nets: dict[tuple[str, Shape], Net | None] = {}
        self._means: dict[bytes, tuple[float, ...] | None] = {}

    @property
    def kept(self) -> tuple[tuple[str, str], ...]:
        """(path, text) of the nets that were read."""
        return tuple(self._kept.items())

    def text(self, named: Entry) -> NetText | None:
        """The net that a `caffe_net` or `net` names."""
        name = str(named.values[0].value)
        if name not in self._texts:
            self._texts[name] = None
            path, data = posixpath.normpath(posixpath.join(self.shown, name)), self.files.read(name)
            if isinstance(data, Unreadable):
                hint = "a path starts at the folder of schedule.prototxt, or with `/`"
                self.problems.add(named.place, f"{path}: {data.reason}", hint)
            else:
                self._kept[path] = data if isinstance(data, str) else data.decode(errors="replace")
                self._texts[name] = language.read(data, path, self.problems)
        return self._texts[name]

    # -- as settings

    def moved(self, schedule: Block, stages: Iterable[Block]) -> Block:
        """The schedule in which `net` of its `solver` is its `model`, else that of the first of its stages which has one; with the sources of
        its net where it has no images of its own. `stages`: their own settings."""
        solver = schedule.block("solver")
        if solver is not None and "net" in solver.entries:
            net = solver.entries["net"]
            if _is_bare(schedule.block("model")):
                schedule = _named_too(schedule, net)
            elif "model" in schedule.entries:
                place, line = net.name, schedule.entries["model"].name.line
                hint = f"keep one of them; `model` stands in line {line}"
                self.problems.add(place, "`net` of the schedule's `solver` is its `model`, which is written, too", hint)
            else:
                schedule = with_block(schedule, "model", _model(net))
            left = {name: entry for name, entry in solver.entries.items() if name != "net"}
            schedule = with_block(schedule, "solver", replace(solver, entries=left))
        if _is_bare(schedule.block("model")):
            nets = [block.entries["net"] for block in stages if "net" in block.entries]
            schedule = _named_too(schedule, nets[0]) if nets else schedule
        elif "model" not in schedule.entries and "model" not in schedule.doubtful:
            models = (of_stage(block, None).block("model") for block in stages)
            first = next((model for model in models if _named(model) is not None), None)
            schedule = with_block(schedule, "model", first) if first is not None else schedule
        return self._with_sources(schedule, schedule.block("model"))

    def _with_sources(self, holder: Block, model: Block | None) -> Block:
        """A Schedule or a stage's settings with the images that its net's data layers read, if it has no `train`."""
        named, data = _named(model), holder.block("data")
        written = data is not None and ("train" in data.entries or "train" in data.doubtful or data.broken)
        if named is None or written or "data" in holder.doubtful or holder.broken:
            return holder
        net = self.text(named)
        if net is None:
            return _with_unknown_images(holder)
        kind = holder.kind.fields_by_name["data"].message_type
        entries: dict[str, Entry] = {}
        for phase, name in (("TRAIN", "train"), ("TEST", "val")):
            found = [r for r in net.readers(phase) if r.type in DATA]
            source = self._source(found[0].block, net.path) if found else None
            if source is not None:
                entries[name] = upgrade.entry(kind, name, source.place, source)
                shuffled = found[0].block.block(DATA[found[0].type])
                if name == "train" and "shuffle" in kind.fields_by_name and shuffled is not None:
                    entries["shuffle"] = upgrade.entry(kind, "shuffle", source.place, View(shuffled).flag("shuffle"))
        if "train" not in entries:
            if holder.kind is not SCHEDULE or not _is_deploy(net):
                return holder
            message = f"the schedule has no `data`, and {net.path} has no data layers: it is a deploy net"
            hint = "name its train_val.prototxt, or write `data { train { source: ... } }` and `batch_size`"
            self.problems.add(named.place, message, hint)
            return _with_unknown_images(holder)
        base = data or Block(kind, entries["train"].name)
        return with_block(holder, "data", replace(base, entries=entries | dict(base.entries)))

    def _source(self, layer: Block, path: str) -> Block | None:
        """`source` of a data layer as a Source."""
        kind = View(layer).text("type") or ""
        settings = layer.block(DATA[kind])
        entry = settings.entries.get("source") if settings is not None else None
        if entry is None:
            return None
        said = str(entry.values[0].value)
        if kind == "ImageData":
            hint = f"make an LMDB of it, `stagerun data import {said} LMDB --format list`, and write `data {{ train {{ ... }} }}`"
            self.problems.add(entry.place, f"{said} is a list of files, and stagerun reads LMDBs", hint)
            return Block(SOURCE, entry.place, broken=True)
        place = self.files.find(said, path) or said
        value = Value(place, quoted(said), entry.place)
        return Block(SOURCE, entry.place, {"source": Entry(SOURCE.fields_by_name["source"], entry.name, (value,))})

    def below(self, merged: Block, said: Block, schedule: Block) -> Block | None:
        """The layer of settings that a stage's net makes, under all others; None without a net. `merged`: what the other layers come to; what
        is `said` there whole is not looked at in the net."""
        own, shared = merged.block("model"), schedule.block("model")
        named = _named(own if own is not None else shared)
        if named is None:
            return None
        net, data = self.text(named), schedule.block("data")
        train = data.entries.get("train") if data is not None else None
        from_net = train is not None and train.name.path in self._kept
        unknown = "data" in schedule.doubtful or (data is not None and "train" in data.doubtful)
        if net is None or (unknown and _is_deploy(net)):
            return Block(
                SOLVER, named.place, doubtful=_SAID | ({"data"} if own is not None and from_net else frozenset())
            )
        unsaid = frozenset(SOLVER.fields_by_name) - said.entries.keys() - said.doubtful
        mean = Means(
            self._mean(net.path),
            lambda: self._channels(merged, own if own is not None else shared, schedule),
            "the folders of the net and of the schedule, and in those above",
        )
        found = train_settings(net.readers("TRAIN"), unsaid, mean, self.problems)
        found |= test_settings(net.readers("TEST"), unsaid, mean, self.problems)
        block = ranges.sound(Block(SOLVER, net.place, found), self.problems)
        return self._with_sources(block, own) if own is not None and from_net else block

    def _mean(self, net: str) -> Callable[[str], tuple[str, bytes] | None]:
        def content(path: str) -> tuple[str, bytes] | None:
            place = self.files.find(path, net)
            data = self.files.content(place) if place else None
            return (place, data) if data is not None else None

        return content

    def check_means(self, settings: Block, channels: int | None, path_of: Callable[[str], str]) -> None:
        """A `mean_file` of a stage that is on this machine is one, and for its images. `channels`: of these."""
        for field in CROPS:
            with suppress(Doubtful):
                view = View(settings).inside(field)
                file = view.text("mean_file")
                data = self.files.content(path_of(file)) if file else None
                if data is None:
                    continue
                if data not in self._means:
                    self._means[data] = channel_means(data)
                found, place = self._means[data], view.place("mean_file")
                hint = "make it of these images, with Caffe's compute_image_mean"
                if found is None:
                    self.problems.add(place, f"{file} is not a mean image of Caffe's (.binaryproto)", hint)
                elif channels is not None and len(found) != channels:
                    said = f"{file} has {count(len(found), 'channel')}, and the images have {channels}"
                    self.problems.add(place, said, hint)

    def _channels(self, settings: Block, model: Block | None, schedule: Block) -> int | None:
        """Those of a stage's images, by what is written or by the first record; None where they are not known."""
        if model is not None and "channels" in model.entries:
            return View(model).whole("channels")
        with suppress(Doubtful):
            holder = settings if "data" in settings.entries else schedule
            source = View(holder).inside("data").inside("train").text("source")
            first = self.files.first(source) if source and posixpath.isabs(source) else None
            return first.channels if first is not None else None
        return None

    # -- as networks

    def sized(self, model: Block | None, stages: Sequence[Images], shared: Block | None = None) -> Block | None:
        """A `model` with the classes and channels that its net has for the images of these stages, which all train it. `shared`: that of the
        schedule, whose channels those of a stage are, too."""
        named = _named(model)
        if model is None or named is None:
            return model
        net = self.text(named)
        if shared is not None and "channels" in shared.entries and "channels" not in model.entries:
            model = replace(model, entries={**model.entries, "channels": shared.entries["channels"]})
        shape = self._shape(net, named, model, stages) if net is not None else None
        first = self._net(named, shape) if shape is not None else None
        if net is None or shape is None or first is None:
            return replace(model, doubtful=model.doubtful | ({"num_classes", "channels"} - model.entries.keys()))
        path = str(named.values[0].value)
        self.held.setdefault(path, Held(net.path, first.text, shape, first))
        for stage in stages:
            self._fit(named, self.held[path], stage.settings)
        classes = model.entries.get("num_classes")
        if classes is not None and classes.values[0].value != first.num_classes:
            message = f"`num_classes` is {classes.values[0].text}, and the net has {first.num_classes} outputs"
            self.problems.add(classes.place, message, "remove it, or change `num_output` of the net's last layer")
        found = {
            "num_classes": upgrade.entry(
                MODEL, "num_classes", _outputs_place(net, first.num_classes), first.num_classes
            ),
            "channels": upgrade.entry(MODEL, "channels", net.place, shape[0]),
        }
        return replace(model, entries=found | dict(model.entries))

    def with_rules(self, settings: Block, model: Block | None) -> Block:
        """A stage's settings with the multipliers of its net as rules, after its own."""
        named = _named(model)
        held = self._held(named)
        if held is None or named is None or "param" in settings.doubtful:
            return settings
        text = self.text(named)
        place = text.place if text is not None else named.place
        own, rules = settings.entries.get("param"), [_rule(*rule, place) for rule in multipliers(held.net)]
        if not rules:
            return settings
        entry = upgrade.entry(SOLVER, "param", place, *rules)
        entry = replace(own, values=(*own.values, *entry.values)) if own is not None else entry
        return replace(settings, entries={**settings.entries, "param": entry})

    def _shape(self, net: NetText | None, named: Entry, model: Block, stages: Sequence[Images]) -> Shape | None:
        """The shape of the first stage's images: by its crop, the net's Input, or the first record. None with a problem."""
        assert net is not None
        given = next((r.shape for phase in ("TRAIN", "TEST") for r in net.readers(phase) if r.shape is not None), None)
        stage = stages[0] if stages else Images(Block(SOLVER, model.place), None)
        crop = next(iter(_crops(stage.settings, CROPS[0])), None)
        channels = View(model).whole("channels") if "channels" in model.entries else None
        first = None
        if given is None and (crop is None or channels is None) and stage.lmdb is not None:
            first = self.files.first(stage.lmdb)
        size = (crop, crop) if crop is not None else given[1:] if given is not None else first.size if first else None
        channels = channels or (given[0] if given is not None else first.channels if first else None)
        for known, what, hint in (
            (channels, "how many channels the images have", "write `channels: 3` beside it, or 1 for grey images"),
            (size, "how large the images are", "write `transform_param { crop_size: ... }`"),
        ):
            if known is None:
                if stage.lmdb is not None and first is None and given is None:
                    hint = f"mend `source` of the images, where there is no LMDB, or {hint}"
                why = "the net has no Input layer, and there is no LMDB with raw images here"
                self.problems.add(named.place, f"{what} isn't known: {why}", hint)
        return (channels, *size) if channels is not None and size is not None else None

    def _net(self, named: Entry, shape: Shape) -> Net | None:
        key = str(named.values[0].value), shape
        if key not in self._nets:
            text = self.text(named)
            self._nets[key] = language.resolve(text, shape, self.problems) if text is not None else None
        return self._nets[key]

    def _fit(self, named: Entry, held: Held, settings: Block) -> None:
        """The crops of a stage leave the parameters their shapes."""
        for field in CROPS:
            for crop in _crops(settings, field):
                other = self._other(named, held, (crop, crop))
                if other:
                    place = View(settings).inside(field).place("crop_size")
                    self.problems.add(place, other, f"write `crop_size: {held.shape[1]}`")

    def check_teacher(self, own: Block | None, images: Images, teacher: Block | None, who: str, place: Span) -> None:
        """The images of a stage leave the parameters of its teacher's net their shapes. `own`, `teacher`: the networks of both."""
        named, student = _named(teacher), self._held(_named(own))
        held = self._held(named)
        if named is None or held is None or held is student:  # of its own net the stage is told
            return
        sizes = [(crop, crop) for crop in _crops(images.settings, CROPS[0])]
        if not sizes and student is not None:
            sizes = [student.shape[1:]]
        elif not sizes and images.lmdb is not None:
            first = self.files.first(images.lmdb)
            sizes = [first.size] if first is not None and first.size is not None else []
        for size in sizes:
            other = self._other(named, held, size)
            if other:
                hint = f"train both with `crop_size: {held.shape[1]}`, or take a teacher that pools whole maps"
                self.problems.add(place, f"{who} doesn't take its images: {other}", hint)

    def _held(self, named: Entry | None) -> Held | None:
        return self.held.get(str(named.values[0].value)) if named is not None else None

    def _other(self, named: Entry, held: Held, size: tuple[int, int]) -> str:
        """Which parameter of a net would have another shape for images of that size, in words; '' where none has, or it can't be told."""
        found = self._net(named, (held.shape[0], *size))
        if found is None or (other := _other(held.net, found)) is None:
            return ""
        one, two = other
        return f"layer parameter `{one.name}` is {_by(one.shape)} for images of {_by(held.shape[1:])}, and {_by(two.shape)} for {_by(size)}"


@lru_cache(maxsize=16)
def of_model(model: recipe.Model) -> Net:
    """The net that a network is. ValueError if it can't be one: a snapshot need not be ours."""
    assert model.net is not None
    channels, height, width = model.input_shape
    try:
        return language.net_of(model.net, (channels, height, width))
    except RecipeError as error:
        raise ValueError("; ".join(problem.message for problem in error.problems[:3])) from error


def ignored_in(stage: recipe.Stage) -> Ignored:
    """The labels that count for nothing in a stage."""
    return ignored(of_model(stage.model), stage.solver.loss is not None) if _ignores(stage.model) else ALL_COUNT


def ignored_by_some_in(stage: recipe.Stage) -> frozenset[int]:
    """Labels that layers of a stage's net ignore, which may count elsewhere."""
    return ignored_by_some(of_model(stage.model)) if _ignores(stage.model) else frozenset()


def _ignores(model: recipe.Model) -> bool:
    return model.net is not None and "ignore_label" in model.net  # to read a large net takes a while


def _other(one: Net, two: Net) -> tuple[Blob, Blob] | None:
    """The first parameter that has another shape."""
    theirs = {(layer.name, blob.name): blob for layer in (*two.train.layers, *two.test.layers) for blob in layer.blobs}
    for layer in (*one.train.layers, *one.test.layers):
        for blob in layer.blobs:
            other = theirs.get((layer.name, blob.name), blob)  # one that is shared may have another shape in each layer
            if other.shape != blob.shape:
                return blob, other
    return None


def multipliers(net: Net) -> list[tuple[str, float, float]]:
    """(name, lr_mult, decay_mult) of the parameters whose multipliers aren't 1: one rule for all of an ending where they are alike."""
    blobs = {blob.name: blob for layer in net.train.layers for blob in layer.blobs}
    found: list[tuple[str, float, float]] = []
    for end in dict.fromkeys(name.rpartition(".")[2] for name in blobs):
        own = [blob for name, blob in blobs.items() if name.rpartition(".")[2] == end]
        alike = {(blob.lr_mult, blob.decay_mult) for blob in own}
        rules = [(f"*.{_literal(end)}", own[0])] if len(alike) == 1 else [(_literal(blob.name), blob) for blob in own]
        found += [(rule, b.lr_mult, b.decay_mult) for rule, b in rules if (b.lr_mult, b.decay_mult) != (1.0, 1.0)]
    return found


def _literal(name: str) -> str:
    """A pattern that fits the name alone."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def _rule(name: str, lr: float, decay: float, place: Span) -> Block:
    values = {"name": name, "lr_mult": lr, "decay_mult": decay}
    return Block(PARAM, place, {field: upgrade.entry(PARAM, field, place, value) for field, value in values.items()})


def _outputs_place(net: NetText, classes: int) -> Span:
    """`num_output` of the last layer that has as many outputs as there are classes."""
    for layer in reversed(net.layers):
        for message in ("inner_product_param", "convolution_param"):
            inner = layer.block(message)
            found = inner.entries.get("num_output") if inner is not None else None
            if found is not None and found.values[0].value == classes:
                return found.place
    return net.place


def _is_deploy(net: NetText) -> bool:
    """Whether a net says shapes alone of its images, or nothing."""
    return all(reader.type == "Input" for phase in ("TRAIN", "TEST") for reader in net.readers(phase))


def _with_unknown_images(holder: Block) -> Block:
    """A Schedule or a stage's settings whose images a net would say, which can't be read."""
    data = holder.block("data")
    if data is None:
        return replace(holder, doubtful=holder.doubtful | {"data"})
    return with_block(holder, "data", replace(data, doubtful=data.doubtful | ({"train", "val"} - data.entries.keys())))


def _named(model: Block | None) -> Entry | None:
    """The entry of a `model` that names its net."""
    return model.entries.get("caffe_net") if model is not None else None


def of_stage(settings: Block, shared: Block | None) -> Block:
    """A stage's settings with `net` as its `model`, unless that is the `shared` one of the schedule."""
    net = settings.entries.get("net")
    if net is None:
        return settings
    settings = replace(settings, entries={name: entry for name, entry in settings.entries.items() if name != "net"})
    said = _named(shared)
    same = said is not None and said.values[0].value == net.values[0].value
    if shared is not None and said is not None and same and (len(shared.entries) == 1 or said.name == net.name):
        return settings  # it is alone there, or `model` says more of this very `net`
    return with_block(settings, "model", _model(net))


def _model(net: Entry) -> Block:
    """What `net: "..."` says, as a `model`."""
    return Block(MODEL, net.place, {"caffe_net": upgrade.renamed(MODEL, "caffe_net", net)})


def _is_bare(model: Block | None) -> bool:
    """Whether a `model` names no network, which `net` does then."""
    names = {"name", "caffe_net"}
    return model is not None and not model.broken and not names & {*model.entries, *model.doubtful}


def _named_too(schedule: Block, net: Entry) -> Block:
    """The schedule whose `model` has the net, beside what it says."""
    model = schedule.block("model")
    assert model is not None
    return with_block(schedule, "model", replace(model, entries={**_model(net).entries, **model.entries}))


def with_block(holder: Block, name: str, block: Block) -> Block:
    """A message with another in one of its fields."""
    before = holder.entries.get(name)
    place = before.name if before is not None else block.place
    return replace(holder, entries={**holder.entries, name: upgrade.entry(holder.kind, name, place, block)})


def _crops(settings: Block, field: str) -> list[int]:
    """The sizes that a transform cuts images to: that at its end first."""
    found: list[int | None] = []
    with suppress(Doubtful):
        transform = View(settings).view(field)
        if transform is not None:
            found.append(transform.whole("crop_size"))
            ramp = transform.view("crop_size_ramp_param")
            found.append(ramp.whole("start_size") if ramp is not None else None)
    return [size for size in found if size]


def _by(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))
