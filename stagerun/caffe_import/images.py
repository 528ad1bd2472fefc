"""Data layers: where images come from, how many there are and make a batch, and their transforms. Pure."""

import posixpath
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from google.protobuf.message import DecodeError

from stagerun.caffe_import.lines import Line, copied, message
from stagerun.caffe_import.net import of_type, text_of
from stagerun.caffe_import.text import Findings
from stagerun.errors import Span
from stagerun.proto import caffe_pb2
from stagerun.spec.tree import Block, Entry, quoted
from stagerun.spec.view import View

# What reads images, and the message with its settings.
SOURCES = {"Data": "data_param", "ImageData": "image_data_param"}
# What reads something else, or nothing.
OTHERS = ("AnnotatedData", "DummyData", "HDF5Data", "Input", "MemoryData", "Python", "VideoData", "WindowData")
# Fields of a data layer's settings and of its transform that stagerun has no word for.
NOT_CARRIED = {
    "rand_skip": ("stagerun begins with the first image of its own order", ""),
    "force_gray": ("records are read as they are stored", "store them grey, with `channels: 1` in `model`"),
    "resize_param": (
        "it resizes to a fixed size",
        "resize when the LMDB is made: `stagerun data import --resize-height`",
    ),
    "noise_param": ("there is none", ""),
    "distort_param": ("there is none with its formulas", "`stagerun help color_jitter_param` is nearest"),
    "expand_param": ("it belongs to the detection of objects", ""),
    "emit_constraint": ("it belongs to the detection of objects", ""),
    "flow": ("it belongs to optical flow", ""),
}
IDLE = {
    "prefetch": "stagerun reads ahead by itself",
    "force_encoded_color": "grey images among coloured ones always become coloured",
    "force_color": "grey images among coloured ones always become coloured",
}


class MeanFiles:
    """Mean images by the path that a net gives them; those that are not there are left out."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self._files = files

    def fault(self, path: str) -> str:
        """Why there is no mean."""
        return "is no mean image" if path in self._files else "is not there"

    def mean(self, path: str) -> tuple[float, ...] | None:
        """The mean of each channel of a .binaryproto; None if it is not there or no mean image."""
        try:
            blob = caffe_pb2.BlobProto.FromString(self._files[path])
        except (KeyError, DecodeError):
            return None
        values = blob.data or blob.double_data
        channels = blob.shape.dim[-3] if len(blob.shape.dim) > 2 else blob.channels
        if channels not in (1, 3) or not values or len(values) % channels:
            return None
        size = len(values) // channels
        return tuple(sum(values[k * size : (k + 1) * size]) / size for k in range(channels))


@dataclass(frozen=True, slots=True)
class Images:
    """One data layer. `batch`: images of one worker's forward pass. `list_file`: the source is a list of files, no LMDB.
    `channels` is None where the layer doesn't tell."""

    layer: Block
    source: str
    source_place: Span
    batch: int | None
    batch_place: Span
    shuffle: bool
    list_file: bool
    channels: int | None
    transform: tuple[Line, ...]


def images_of(layers: Sequence[Block], phase: str, found: Findings, means: MeanFiles) -> Images | None:
    """The images of a net in one phase; None, and a mistake in training, where no layer reads any."""
    readers = list(of_type(list(layers), *SOURCES))
    for layer in of_type(list(layers), *OTHERS):
        kind = text_of(layer, "type")
        if phase == "TRAIN" and not readers and kind != "Python":
            hint = "make an LMDB of the images (`stagerun data import`) and a Data layer that names it"
            found.mistakes.add(
                layer.place, f"a layer of type `{kind}` does not read images that stagerun can read", hint
            )
        elif kind != "Input":
            found.leave(layer.place, f"layer `{text_of(layer, 'name')}`", f"stagerun has no {kind} layer")
    if not readers:
        return None
    for layer in readers[1:]:
        why = f"a second source of images in {phase}; the first is read"
        found.leave(layer.place, f"layer `{text_of(layer, 'name')}`", why)
    return _images(readers[0], phase, found, means)


def _images(layer: Block, phase: str, found: Findings, means: MeanFiles) -> Images:
    kind = text_of(layer, "type")
    settings = View(layer).inside(SOURCES[kind])
    moved = View(layer).inside("transform_param")
    for view in (settings, moved):
        _note_fields(view.block, found)
    if not settings.has("source"):
        example = 'source: "/path/to/lmdb"'
        found.mistakes.add(layer.place, f"the layer has no `source` in `{SOURCES[kind]}`", f"write `{example}`")
    batch = settings.whole("batch_size") if settings.has("batch_size") or kind == "ImageData" else None
    if batch is None:
        found.mistakes.add(layer.place, f"the layer has no `batch_size` in `{SOURCES[kind]}`", "write `batch_size: 32`")
    backend = settings.block.entries.get("backend")
    if kind == "Data" and settings.text("backend") == "LEVELDB":
        place = backend.place if backend else layer.place
        said = "LevelDB" if backend else "LevelDB, the default where `backend` is not written,"
        found.leave(place, "backend", f"{said} is not read", "make an LMDB of it: `stagerun data import`")
    source = settings.text("source") or ""
    if kind == "ImageData":
        _note_list(settings, source, found)
    lines, channels = transform(settings, moved, phase, found, means)
    if kind == "ImageData" and not settings.flag("is_color"):
        channels = 1
    return Images(
        layer,
        source,
        settings.place("source"),
        batch,
        settings.place("batch_size"),
        settings.flag("shuffle"),
        kind == "ImageData",
        channels,
        lines,
    )


def _note_fields(block: Block, found: Findings) -> None:
    for name, entry in block.entries.items():
        if name in IDLE:
            found.idle[name] = IDLE[name]
        elif name in NOT_CARRIED and not _nothing(entry):
            found.leave(entry.place, name, *NOT_CARRIED[name])


def _nothing(entry: Entry) -> bool:
    """Whether a field is written with a value that does nothing."""
    return all(v.value in (0, False) for v in entry.values if not isinstance(v.value, Block)) and bool(
        entry.values and not isinstance(entry.values[0].value, Block)
    )


def _note_list(settings: View, source: str, found: Findings) -> None:
    """A list of image files becomes an LMDB first, with the sizes that the layer says."""
    options = ""
    for name, option in (("new_height", "--resize-height"), ("new_width", "--resize-width")):
        if size := settings.whole(name):
            options += f" {option} {size}"
    root = settings.text("root_folder")
    options += f" --root {shlex.quote(root)}" if root else ""
    names = f"{shlex.quote(source)} {shlex.quote(lmdb_of(source))}"
    todo = f"make an LMDB of it: `stagerun data import {names} --format list --no-shuffle{options}`"
    found.leave(settings.place("source"), "source", "a list of files, and stagerun reads LMDBs", todo)


def lmdb_of(source: str) -> str:
    """The name of the LMDB that is to be made of a list of files."""
    return source.removesuffix(".txt") + "_lmdb"


def transform(
    settings: View, moved: View, phase: str, found: Findings, means: MeanFiles
) -> tuple[tuple[Line, ...], int | None]:
    """The inside of transform_param, or of test_transform_param, and the channels that it tells of.

    Files older than TransformationParameter have four of its fields in the layer's own settings.
    """

    def where(name: str) -> View:
        return moved if name in moved.block.entries or name not in settings.block.kind.fields_by_name else settings

    lines: list[Line] = []
    if where("mirror").flag("mirror"):
        if phase == "TEST":
            found.leave(where("mirror").place("mirror"), "mirror", "an evaluation draws nothing at random")
        else:
            lines += copied(where("mirror").block, ["mirror"])
    lines += _crop(where("crop_size"), moved, found)
    mean, channels = _mean(where("mean_file"), moved, found, means)
    lines += mean
    if where("scale").number("scale") != 1:
        lines += copied(where("scale").block, ["scale"])
    for name in ("random_aspect_ratio_param", "random_resize_param"):
        inner = moved.view(name)
        if inner is not None and name == "random_aspect_ratio_param" and phase == "TEST":
            found.leave(inner.block.place, name, "an evaluation draws nothing at random")
        elif inner is not None:
            lines += message(name, _rectangle(inner, found), inner.block.place)
    if moved.flag("force_gray"):
        channels = 1
    return tuple(lines), channels


def _crop(crop: View, moved: View, found: Findings) -> list[Line]:
    if crop.whole("crop_size"):
        return copied(crop.block, ["crop_size"])
    height, width = moved.whole("crop_h"), moved.whole("crop_w")
    if not height and not width:
        return []
    if height == width:
        return [Line(f"crop_size: {height}", moved.place("crop_h"))]
    place = moved.place("crop_h" if "crop_h" in moved.block.entries else "crop_w")
    found.leave(place, "crop_h, crop_w", "stagerun cuts squares", "write `crop_size` into the transform")
    return []


def _mean(where: View, moved: View, found: Findings, means: MeanFiles) -> tuple[list[Line], int | None]:
    values = moved.numbers("mean_value")
    if values:
        place = moved.place("mean_value")
        comment = "B, G, R" if len(values) == 3 else ""
        texts = [v.text for v in moved.block.entries["mean_value"].values]
        line = texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]"
        return [Line(f"mean_value: {line}", place, comment)], 3 if len(values) == 3 else None
    if not where.has("mean_file"):
        return [], None
    file, place = where.text("mean_file") or "", where.place("mean_file")
    mean = means.mean(file)
    if mean is None:
        why = f"stagerun takes off one number per channel, and {file} {means.fault(file)}"
        found.leave(place, "mean_file", why, "write them as `mean_value`: B, G, R")
        return [Line("mean_value: ?", place, "the mean of each channel? B, G, R", asks=True)], None
    found.leave(place, "mean_file", "stagerun takes off one number per channel", "each is the mean of the file's image")
    text = ", ".join(f"{value:.6g}" for value in mean)
    return [Line(f"mean_value: [{text}]", place, "B, G, R" if len(mean) == 3 else "")], len(mean)


def _rectangle(view: View, found: Findings) -> list[Line]:
    """The inside of random_aspect_ratio_param or random_resize_param."""
    names = [f.name for f in view.block.kind.fields if f.name != "resize_param"]
    lines = copied(view.block, names)
    if view.block.kind.name == "RandomResizeParameter" and view.whole("min_size") == view.whole("max_size"):
        lines = copied(view.block, ["min_size"])
    resize = view.view("resize_param")
    if resize is None:
        return lines
    modes = resize.block.entries["interp_mode"].values if "interp_mode" in resize.block.entries else ()
    for name, entry in resize.block.entries.items():
        if name != "interp_mode":
            found.leave(entry.place, f"resize_param.{name}", "the size comes from the message around it")
    if len(modes) > 1:
        place = resize.place("interp_mode")
        found.leave(place, "interp_mode", f"Caffe draws one for each image; {modes[0].value} is taken for all")
    if modes:
        lines.append(Line(f"resize_param {{ interp_mode: {modes[0].value} }}", modes[0].span))
    return lines


ILSVRC12 = {"train": 1281167, "val": 50000}
ASKED = "how many records has it?"


class Counting(Protocol):
    """What is to be known of images on disk."""

    def images(self, path: str, is_list: bool) -> "tuple[str, int, int | None] | None":
        """Where an LMDB, or a list of files, is; number and channels (0, None: not known) of its images. None if it isn't
        there."""
        ...


@dataclass(frozen=True, slots=True)
class Count:
    """`number` is 0 where nothing tells it; `why` says where it comes from. `place` is where the LMDB is, or will be."""

    place: str
    number: int
    why: str = ""
    channels: int | None = None


def count_images(images: Images, given: int | None, disk: Counting, found: Findings) -> Count:
    """How many images there are: as given, as counted, or as everybody knows of ILSVRC 2012 by the name of its LMDB."""
    there = disk.images(images.source, images.list_file)
    place, counted, channels = there or (images.source, 0, None)
    if images.list_file:
        place = lmdb_of(images.source)
    elif there is None and not posixpath.isabs(images.source):
        why = "a path from Caffe's folder, and it isn't there; here paths begin at the schedule's folder"
        found.leave(images.source_place, "source", why, "write the LMDB's path")
    return _counted(
        images.source, Count(place, counted, "", channels), given, "the list" if images.list_file else "the LMDB"
    )


def count_told(option: str, source: str, given: int | None, disk: Counting, found: Findings) -> Count:
    """The same of an LMDB whose absolute path an option gives."""
    there = disk.images(source, False)
    place, counted, channels = there or (source, 0, None)
    if there is None:
        found.leave(Span(option, 0, 0), source, "there is no LMDB of that name on this machine")
    return _counted(source, Count(place, counted, "", channels), given, "the LMDB")


def _counted(source: str, there: Count, given: int | None, what: str) -> Count:
    """`there` with its number: `given`, else its own, else that of the part of ILSVRC 2012 that the name ends with."""
    if given is not None:
        return replace(there, number=given)
    if there.number:
        return replace(there, why=f"counted in {what}")
    name = source.lower()
    part = max(ILSVRC12, key=name.rfind)
    if "ilsvrc12" in name and part in name:
        return replace(there, number=ILSVRC12[part], why="of ILSVRC 2012, by its name")
    return there


def source_lines(count: Count, span: Span | None) -> tuple[Line, ...]:
    """The inside of `train` or `val`."""
    return (
        Line(f"source: {quoted(count.place)}", span),
        Line(f"images: {count.number}", None, count.why if count.number else ASKED, asks=not count.number),
    )
