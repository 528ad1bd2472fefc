"""The nets of a schedule: the settings that their data layers and multipliers say, below all others, and the networks that they are for the
schedule's images. Pure, but for what is looked at through `Files`."""

import posixpath
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from google.protobuf.descriptor import Descriptor

from stagerun.base.errors import Span
from stagerun.base.text import count
from stagerun.caffe.blocks import image_shape, type_of
from stagerun.caffe.data_layers import DATA, channel_means, settings_of
from stagerun.caffe.net import Blob, Net
from stagerun.caffe.reading import text
from stagerun.caffe.resolve import resolve
from stagerun.caffe.text import NetText, read
from stagerun.language import nets, ranges
from stagerun.language.code import Unreadable
from stagerun.language.nets import SAID, First, Held, Images, Shape, entry, named_net, with_block
from stagerun.language.tree import SCHEDULE, SOLVER, SOURCE, Block, Entry, Value, quoted
from stagerun.language.view import Doubtful, View

PARAM: Descriptor = SOLVER.fields_by_name["param"].message_type
CROPS = ("transform_param", "test_transform_param")


class CaffeNets(nets.Nets):
    """The nets of one schedule, each read once. What is wrong with them is a problem in their files, or where they are named."""

    def __init__(self, *given: object) -> None:
        super().__init__(*given)  # type: ignore[arg-type]
        self._texts: dict[str, NetText | None] = {}
        self._nets: dict[tuple[str, Shape], Net | None] = {}

    def text(self, named: Entry) -> NetText | None:
        """The net that a `caffe_net` or `net` names."""
        name = _path(named)
        if name not in self._texts:
            self._texts[name] = None
            path, data = posixpath.normpath(posixpath.join(self.shown, name)), self.files.read(name)
            if isinstance(data, Unreadable):
                hint = "a path starts at the folder of schedule.prototxt, or with `/`"
                self.problems.add(named.place, f"{path}: {data.reason}", hint)
            else:
                self.kept[path] = data if isinstance(data, str) else data.decode(errors="replace")
                self._texts[name] = read(data, path, self.problems)
        return self._texts[name]

    # -- as settings

    def with_sources(self, holder: Block, model: Block | None) -> Block:
        named, data = named_net(model), holder.block("data")
        written = data is not None and ("train" in data.entries or "train" in data.doubtful or data.broken)
        if named is None or written or "data" in holder.doubtful or holder.broken:
            return holder
        if (net := self.text(named)) is None:
            return nets.with_unknown_images(holder)
        kind = holder.kind.fields_by_name["data"].message_type
        entries: dict[str, Entry] = {}
        for phase, name in (("TRAIN", "train"), ("TEST", "val")):
            for block in [one for one in net.readers(phase) if type_of(one) in DATA][:1]:
                if (source := self._source(block, net.path)) is not None:
                    entries[name] = entry(kind, name, source.place, source)
                    if name == "train" and "shuffle" in kind.fields_by_name:
                        shuffle = View(block).inside(DATA[type_of(block)]).flag("shuffle")
                        entries["shuffle"] = entry(kind, "shuffle", source.place, shuffle)
        if "train" not in entries:
            if holder.kind is not SCHEDULE or not _is_deploy(net):
                return holder
            message = f"the schedule has no `data`, and {net.path} has no data layers: it is a deploy net"
            hint = "name its train_val.prototxt, or write `data { train { source: ... } }` and `batch_size`"
            self.problems.add(named.place, message, hint)
            return nets.with_unknown_images(holder)
        base = data or Block(kind, entries["train"].name)
        return with_block(holder, "data", replace(base, entries=entries | dict(base.entries)))

    def _source(self, layer: Block, path: str) -> Block | None:
        """`source` of a data layer as a Source."""
        settings = layer.block(DATA[type_of(layer)])
        named = settings.entries.get("source") if settings is not None else None
        if named is None:
            return None
        said = _path(named)
        if type_of(layer) == "ImageData":
            hint = f"make an LMDB of it, `stagerun data import {said} LMDB --format list`, and write `data {{ train {{ ... }} }}`"
            self.problems.add(named.place, f"{said} is a list of files, and stagerun reads LMDBs", hint)
            return Block(SOURCE, named.place, broken=True)
        value = Value(self.files.find(said, path) or said, quoted(said), named.place)
        return Block(SOURCE, named.place, {"source": Entry(SOURCE.fields_by_name["source"], named.name, (value,))})

    def below(self, merged: Block, said: Block, schedule: Block) -> Block | None:
        own = merged.block("model")
        if (named := named_net(own or schedule.block("model"))) is None:
            return None
        net, data = self.text(named), schedule.block("data")
        train = data.entries.get("train") if data is not None else None
        own_images = own is not None and train is not None and train.name.path in self.kept
        unknown = "data" in schedule.doubtful or (data is not None and "train" in data.doubtful)
        if net is None or (unknown and _is_deploy(net)):
            return Block(SOLVER, named.place, doubtful=SAID | {"data"} if own_images else SAID)
        wanted = SOLVER.fields_by_name.keys() - said.entries.keys() - said.doubtful
        found = settings_of(net, wanted, partial(self._mean, net.path), self.problems)
        block = ranges.sound(Block(SOLVER, net.place, found), self.problems)
        return self.with_sources(block, own) if own_images else block

    def _mean(self, net: str, path: str) -> tuple[str, bytes] | None:
        place = self.files.find(path, net)
        data = self.files.content(place) if place else None
        return (place, data) if data is not None else None

    def check_means(self, settings: Block, channels: int | None, path_of: Callable[[str], str]) -> None:
        for field in CROPS:
            with suppress(Doubtful):
                view = View(settings).inside(field)
                file = view.text("mean_file")
                data = self.files.content(path_of(file)) if file else None
                if data is None:
                    continue
                found, said = channel_means(data), ""
                if found is None:
                    said = f"{file} is not a mean image of Caffe's (.binaryproto)"
                elif channels is not None and len(found) != channels:
                    said = f"{file} has {count(len(found), 'channel')}, and the images have {channels}"
                if said:
                    hint = "make it of these images, with Caffe's compute_image_mean"
                    self.problems.add(view.place("mean_file"), said, hint)

    # -- as networks

    def sized(self, model: Block | None, stages: Sequence[Images], shared: Block | None = None) -> Block | None:
        named = named_net(model)
        if model is None or named is None:
            return model
        net = self.text(named)
        if shared is not None and "channels" in shared.entries and "channels" not in model.entries:
            model = replace(model, entries={**model.entries, "channels": shared.entries["channels"]})
        shape = self._shape(net, named, model, stages) if net is not None else None
        first = self._net(named, shape) if shape is not None else None
        if net is None or shape is None or first is None:
            return nets.unsized(model)
        held = self.held.setdefault(_path(named), Held(net.path, first.text, shape))
        for settings, field in ((stage.settings, field) for stage in stages for field in CROPS):
            for crop in _crops(settings, field):
                place = View(settings).inside(field).place("crop_size")
                self._require_fit(named, held, (crop, crop), place, f"write `crop_size: {held.shape[1]}`")
        classes = model.entries.get("num_classes")
        if classes is not None and classes.values[0].value != first.num_classes:
            message = f"`num_classes` is {classes.values[0].text}, and the net has {first.num_classes} outputs"
            self.problems.add(classes.place, message, "remove it, or change `num_output` of the net's last layer")
        outputs = _outputs_place(net, first.num_classes)
        found = {
            "num_classes": entry(model.kind, "num_classes", outputs, first.num_classes),
            "channels": entry(model.kind, "channels", net.place, shape[0]),
        }
        return replace(model, entries=found | dict(model.entries))

    def with_rules(self, settings: Block, model: Block | None) -> Block:
        named = named_net(model)
        held = self._held(named)
        if held is None or named is None or "param" in settings.doubtful:
            return settings
        read_net, net = self.text(named), self._net(named, held.shape)
        place = read_net.place if read_net is not None else named.place
        own, rules = settings.entries.get("param"), multipliers(net) if net is not None else []
        if not rules:
            return settings
        said = (zip(("name", "lr_mult", "decay_mult"), rule, strict=True) for rule in rules)
        blocks = [Block(PARAM, place, {name: entry(PARAM, name, place, v) for name, v in rule}) for rule in said]
        added = entry(SOLVER, "param", place, *blocks)
        added = replace(own, values=(*own.values, *added.values)) if own is not None else added
        return replace(settings, entries={**settings.entries, "param": added})

    def _shape(self, net: NetText, named: Entry, model: Block, stages: Sequence[Images]) -> Shape | None:
        """The shape of the first stage's images: by its crop, the net's Input, or the first record. None with a problem."""
        given = next(filter(None, map(image_shape, net.readers("TRAIN", "TEST"))), None)
        stage = stages[0] if stages else Images(Block(SOLVER, model.place), None)
        crop = next(iter(_crops(stage.settings, CROPS[0])), None)
        channels = View(model).whole("channels") if "channels" in model.entries else None
        seen = First(given[0], given[1:]) if given is not None else None
        if seen is None and None in (crop, channels) and stage.lmdb is not None:
            seen = self.files.first(stage.lmdb)
        channels = channels or (seen.channels if seen is not None else None)
        size = (crop, crop) if crop is not None else seen.size if seen is not None else None
        for known, what, hint in (
            (channels, "how many channels the images have", "write `channels: 3` beside it, or 1 for grey images"),
            (size, "how large the images are", "write `transform_param { crop_size: ... }`"),
        ):
            if known is None:
                if stage.lmdb is not None and seen is None:
                    hint = f"mend `source` of the images, where there is no LMDB, or {hint}"
                why = "the net has no Input layer, and there is no LMDB with raw images here"
                self.problems.add(named.place, f"{what} isn't known: {why}", hint)
        return (channels, *size) if channels is not None and size is not None else None

    def _net(self, named: Entry, shape: Shape) -> Net | None:
        key = _path(named), shape
        if key not in self._nets:
            net = self.text(named)
            self._nets[key] = resolve(net, shape, self.problems) if net is not None else None
        return self._nets[key]

    def check_teacher(self, own: Block | None, images: Images, teacher: Block | None, who: str, place: Span) -> None:
        named, student = named_net(teacher), self._held(named_net(own))
        held = self._held(named)
        if named is None or held is None or held is student:  # of its own net the stage is told
            return
        sizes = [(crop, crop) for crop in _crops(images.settings, CROPS[0])]
        if not sizes and student is not None:
            sizes = [student.shape[1:]]
        elif not sizes and images.lmdb is not None:
            first = self.files.first(images.lmdb)
            sizes = [first.size] if first is not None and first.size is not None else []
        hint = f"train both with `crop_size: {held.shape[1]}`, or take a teacher that pools whole maps"
        for size in sizes:
            self._require_fit(named, held, size, place, hint, f"{who} doesn't take its images: ")

    def _held(self, named: Entry | None) -> Held | None:
        return self.held.get(_path(named)) if named is not None else None

    def _require_fit(
        self, named: Entry, held: Held, size: tuple[int, int], place: Span, hint: str, who: str = ""
    ) -> None:
        """A mistake where a parameter of a net would have another shape for images of that size."""
        usual, found = self._net(named, held.shape), self._net(named, (held.shape[0], *size))
        if usual is None or found is None:
            return
        theirs = {blob.name: blob.shape for layer in found.layers for blob in layer.blobs}
        for name, shape in ((blob.name, blob.shape) for layer in usual.layers for blob in layer.blobs):
            if (other := theirs.get(name, shape)) != shape:
                sizes = f"{text(shape)} for images of {text(held.shape[1:])}, and {text(other)} for {text(size)}"
                self.problems.add(place, f"{who}layer parameter `{name}` is {sizes}", hint)
                return


def _path(named: Entry) -> str:
    return str(named.values[0].value)


def multipliers(net: Net) -> list[tuple[str, float, float]]:
    """(name, lr_mult, decay_mult) of the parameters whose multipliers aren't 1: one rule for all of an ending where they are alike."""
    blobs = {blob.name: blob for layer in net.train.layers for blob in layer.blobs}
    by_end: dict[str, list[Blob]] = {}
    for name, blob in blobs.items():
        by_end.setdefault(name.rpartition(".")[2], []).append(blob)
    found: list[tuple[str, float, float]] = []
    for end, own in by_end.items():
        alike = len({(blob.lr_mult, blob.decay_mult) for blob in own}) == 1
        rules = [(f"*.{_literal(end)}", own[0])] if alike else [(_literal(blob.name), blob) for blob in own]
        found += [(rule, b.lr_mult, b.decay_mult) for rule, b in rules if (b.lr_mult, b.decay_mult) != (1.0, 1.0)]
    return found


def _literal(name: str) -> str:
    """A pattern that fits the name alone."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


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
    return all(type_of(reader) == "Input" for reader in net.readers("TRAIN", "TEST"))


def _crops(settings: Block, field: str) -> list[int]:
    """The sizes that a transform cuts images to: that at its end first."""
    found: list[int | None] = []
    with suppress(Doubtful):
        transform = View(settings).inside(field)
        found.append(transform.whole("crop_size"))
        found.append(transform.inside("crop_size_ramp_param").whole("start_size"))
    return [size for size in found if size]
