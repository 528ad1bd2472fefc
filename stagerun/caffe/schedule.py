"""The nets of a schedule: settings from their data layers and multipliers, which all other settings override, and their networks for the
schedule's images. Pure, except for reading through `Files`."""

import posixpath
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from google.protobuf.descriptor import Descriptor

from stagerun.base.errors import Span
from stagerun.base.text import count
from stagerun.caffe.data_layers import DATA, channel_means, settings_of
from stagerun.caffe.reading import Blob, Net, image_shape, text, type_of
from stagerun.caffe.resolve import resolve
from stagerun.caffe.text import NetText, read
from stagerun.language import nets, ranges
from stagerun.language.code import Unreadable
from stagerun.language.nets import SAID, First, Held, Images, Shape, entry, named_net, with_block
from stagerun.language.tree import SCHEDULE, SOLVER, SOURCE, Block, Doubtful, Entry, Value, View, quoted

PARAM: Descriptor = SOLVER.fields_by_name["param"].message_type
CROPS = ("transform_param", "test_transform_param")


class CaffeNets(nets.Nets):
    """The nets of one schedule, each read once. Their mistakes are reported in their files, or where they are named."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self._texts: dict[str, NetText | None] = {}
        self._nets: dict[tuple[str, Shape], Net | None] = {}

    def text(self, named: Entry) -> NetText | None:
        """Return the net that a `caffe_net` or `net` names."""
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
        """Return the `source` of a data layer as a Source."""
        named = View(layer).inside(DATA[type_of(layer)]).block.entries.get("source")
        if named is None:
            return None
        written = _path(named)
        if type_of(layer) == "ImageData":
            hint = f"make an LMDB of it, `stagerun data import {written} LMDB --format list`, and write `data {{ train {{ ... }} }}`"
            self.problems.add(named.place, f"{written} is a list of files, and stagerun reads LMDBs", hint)
            return Block(SOURCE, named.place, broken=True)
        value = Value(self.files.find(written, path) or written, quoted(written), named.place)
        return Block(SOURCE, named.place, {"source": Entry(SOURCE.fields_by_name["source"], named.name, (value,))})

    def below(self, merged: Block, written: Block, schedule: Block) -> Block | None:
        model = merged.block("model")
        if (named := named_net(model or schedule.block("model"))) is None:
            return None
        net, data = self.text(named), schedule.block("data")
        train = data.entries.get("train") if data is not None else None
        from_net = model is not None and train is not None and train.name.path in self.kept
        unknown = "data" in schedule.doubtful or (data is not None and "train" in data.doubtful)
        if net is None or (unknown and _is_deploy(net)):
            return Block(SOLVER, named.place, doubtful=SAID | {"data"} if from_net else SAID)
        wanted = SOLVER.fields_by_name.keys() - written.entries.keys() - written.doubtful
        settings = settings_of(net, wanted, partial(self._mean, net.path), self.problems)
        block = ranges.sound(Block(SOLVER, net.place, settings), self.problems)
        return self.with_sources(block, model) if from_net else block

    def _mean(self, net: str, path: str) -> tuple[str, bytes]:
        absolute = self.files.find(path, net)
        data = self.files.content(absolute) if absolute else None
        return (absolute, data) if data is not None else ("", b"")

    def check_means(self, settings: Block, channels: int | None, path_of: Callable[[str], str]) -> None:
        for field in CROPS:
            with suppress(Doubtful):
                view = View(settings).inside(field)
                file = view.text("mean_file")
                data = self.files.content(path_of(file)) if file else None
                if data is None:
                    continue
                means, message = channel_means(data), ""
                if means is None:
                    message = f"{file} is not a mean image of Caffe's (.binaryproto)"
                elif channels is not None and len(means) != channels:
                    message = f"{file} has {count(len(means), 'channel')}, and the images have {channels}"
                if message:
                    hint = "make it of these images, with Caffe's compute_image_mean"
                    self.problems.add(view.place("mean_file"), message, hint)

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
                span = View(settings).inside(field).place("crop_size")
                self._require_fit(named, held, (crop, crop), span, f"write `crop_size: {held.shape[1]}`")
        classes = model.entries.get("num_classes")
        if classes is not None and classes.values[0].value != first.num_classes:
            message = f"`num_classes` is {classes.values[0].text}, and the net has {first.num_classes} outputs"
            self.problems.add(classes.place, message, "remove it, or change `num_output` of the net's last layer")
        outputs = _outputs_place(net, first.num_classes)
        from_net = {
            "num_classes": entry(model.kind, "num_classes", outputs, first.num_classes),
            "channels": entry(model.kind, "channels", net.place, shape[0]),
        }
        return replace(model, entries=from_net | dict(model.entries))

    def with_rules(self, settings: Block, model: Block | None) -> Block:
        named = named_net(model)
        held = self._held(named)
        if held is None or named is None or "param" in settings.doubtful:
            return settings
        net, span = self._net(named, held.shape), Span(held.path, 1, 1)
        rules, written = multipliers(net) if net is not None else [], settings.entries.get("param")
        if not rules:
            return settings
        fields = ("name", "lr_mult", "decay_mult")
        rows = ({name: entry(PARAM, name, span, getattr(rule, name)) for name in fields} for rule in rules)
        added = entry(SOLVER, "param", span, *(Block(PARAM, span, row) for row in rows))
        added = replace(written, values=(*written.values, *added.values)) if written is not None else added
        return replace(settings, entries={**settings.entries, "param": added})

    def _shape(self, net: NetText, named: Entry, model: Block, stages: Sequence[Images]) -> Shape | None:
        """Return the shape of the first stage's images, from its crop, the net's Input, or the first record; None after a mistake."""
        written = next(filter(None, map(image_shape, net.readers("TRAIN", "TEST"))), None)
        stage = stages[0] if stages else Images(Block(SOLVER, model.place), None)
        crop = next(iter(_crops(stage.settings, CROPS[0])), None)
        channels = View(model).whole("channels") if "channels" in model.entries else None
        seen = First(written[0], written[1:]) if written is not None else None
        if seen is None and None in (crop, channels) and stage.lmdb is not None:
            seen = self.files.first(stage.lmdb)
        channels = channels or (seen.channels if seen is not None else None)
        size = (crop, crop) if crop is not None else seen.size if seen is not None else None
        for value, what, hint in (
            (channels, "the number of channels", "write `channels: 3` next to it, or 1 for grey images"),
            (size, "the size of the images", "write `transform_param { crop_size: ... }`"),
        ):
            if value is None:
                if stage.lmdb is not None and seen is None:
                    hint = f"correct `source` of the images, which is not an LMDB, or {hint}"
                why = "the net has no Input layer, and the images are not an LMDB of raw images"
                self.problems.add(named.place, f"{what} is unknown: {why}", hint)
        return (channels, *size) if channels is not None and size is not None else None

    def _net(self, named: Entry, shape: Shape) -> Net | None:
        key = _path(named), shape
        if key not in self._nets:
            net = self.text(named)
            self._nets[key] = resolve(net, shape, self.problems) if net is not None else None
        return self._nets[key]

    def check_teacher(self, model: Block | None, images: Images, teacher: Block | None, who: str, span: Span) -> None:
        named, student = named_net(teacher), self._held(named_net(model))
        held = self._held(named)
        if named is None or held is None or held is student:  # the stage's net is checked elsewhere
            return
        sizes: list[tuple[int, int] | None] = [(crop, crop) for crop in _crops(images.settings, CROPS[0])]
        if not sizes and student is not None:
            sizes = [student.shape[1:]]
        elif not sizes and images.lmdb is not None and (first := self.files.first(images.lmdb)) is not None:
            sizes = [first.size]
        hint = f"train both with `crop_size: {held.shape[1]}`, or take a teacher that pools whole maps"
        for size in filter(None, sizes):
            self._require_fit(named, held, size, span, hint, f"{who} doesn't take its images: ")

    def _held(self, named: Entry | None) -> Held | None:
        return self.held.get(_path(named)) if named is not None else None

    def _require_fit(
        self, named: Entry, held: Held, size: tuple[int, int], span: Span, hint: str, who: str = ""
    ) -> None:
        """Add a mistake if a parameter of a net would have another shape for images of that size."""
        usual, resized = self._net(named, held.shape), self._net(named, (held.shape[0], *size))
        if usual is None or resized is None:
            return
        theirs = {blob.name: blob.shape for layer in resized.layers for blob in layer.blobs}
        for name, shape in ((blob.name, blob.shape) for layer in usual.layers for blob in layer.blobs):
            if (other := theirs.get(name, shape)) != shape:
                sizes = f"{text(shape)} for images of {text(held.shape[1:])}, and {text(other)} for {text(size)}"
                self.problems.add(span, f"{who}layer parameter `{name}` is {sizes}", hint)
                return


def _path(named: Entry) -> str:
    return str(named.values[0].value)


def multipliers(net: Net) -> list[Blob]:
    """Return the parameters whose multipliers aren't 1, with patterns as names: one for an ending with equal multipliers."""
    by_end: dict[str, dict[str, Blob]] = {}
    for blob in (blob for layer in net.train.layers for blob in layer.blobs):
        by_end.setdefault(blob.name.rpartition(".")[2], {})[blob.name] = blob
    rules: list[Blob] = []
    for end, group in by_end.items():
        blobs = [blob._replace(name=_literal(name)) for name, blob in group.items()]
        if len({(blob.lr_mult, blob.decay_mult) for blob in blobs}) == 1:
            blobs = [blobs[0]._replace(name=f"*.{_literal(end)}")]
        rules += [blob for blob in blobs if (blob.lr_mult, blob.decay_mult) != (1.0, 1.0)]
    return rules


def _literal(name: str) -> str:
    """Return a pattern that matches only the name."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def _outputs_place(net: NetText, classes: int) -> Span:
    """Return the span of the last layer's `num_output` that equals the number of classes."""
    for layer in reversed(net.layers):
        for message in ("inner_product_param", "convolution_param"):
            outputs = View(layer).inside(message).block.entries.get("num_output")
            if outputs is not None and outputs.values[0].value == classes:
                return outputs.place
    return net.place


def _is_deploy(net: NetText) -> bool:
    """Return whether a net only has shapes for its images, or nothing."""
    return all(type_of(reader) == "Input" for reader in net.readers("TRAIN", "TEST"))


def _crops(settings: Block, field: str) -> list[int]:
    """Return the crop sizes of a transform, the final one first."""
    sizes: list[int | None] = []
    with suppress(Doubtful):
        transform = View(settings).inside(field)
        sizes.append(transform.whole("crop_size"))
        sizes.append(transform.inside("crop_size_ramp_param").whole("start_size"))
    return [size for size in sizes if size]
