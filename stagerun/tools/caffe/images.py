"""Data layers: where images come from, how many there are and make a batch, and their transforms. Pure."""

import posixpath
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

from stagerun.base.errors import Span
from stagerun.language.net.upgrade import top_shapes
from stagerun.language.net_layers import DATA, Content, channel_means, says_nothing
from stagerun.language.tree import Block, quoted
from stagerun.language.view import View
from stagerun.tools.caffe.disk import CaffeFolder
from stagerun.tools.caffe.lines import Line, copied, message
from stagerun.tools.caffe.net import of_type, text_of
from stagerun.tools.caffe.text import Findings

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
ILSVRC12 = {"train": 1281167, "val": 50000}


@dataclass(frozen=True, slots=True)
class Images:
    """One data layer. `batch`: images of one worker's forward pass. `list_file`: the source is a list of files, not an LMDB.
    `channels` is None where the layer doesn't say."""

    layer: Block
    source: str
    source_place: Span
    batch: int | None
    batch_place: Span
    shuffle: bool
    list_file: bool
    channels: int | None
    transform: tuple[Line, ...]


def images_of(layers: Sequence[Block], phase: str, found: Findings, mean_file: Content) -> Images | None:
    """The images of a net in one phase; None, and a mistake in training, if no layer reads any."""
    readers = list(of_type(layers, *DATA))
    made_up = [] if readers else list(of_type(layers, "DummyData"))
    if made_up and (shapes := top_shapes(made_up[0])):
        return _made_up(made_up[0], shapes[0])
    for layer in of_type(layers, *OTHERS):
        kind = text_of(layer, "type")
        if phase == "TRAIN" and not readers and kind != "Python":
            hint = "make an LMDB of the images (`stagerun data import`) and a Data layer that names it"
            found.mistakes.add(
                layer.place, f"a layer of type `{kind}` does not read images that stagerun can read", hint
            )
        elif kind != "Input":
            found.leave(layer.place, f"layer `{text_of(layer, 'name')}`", f"stagerun has no {kind} layer")
    for layer in readers[1:]:
        why = f"a second source of images in {phase}; the first is read"
        found.leave(layer.place, f"layer `{text_of(layer, 'name')}`", why)
    return _images(readers[0], phase, found, mean_file) if readers else None


def _made_up(layer: Block, shape: Sequence[int]) -> Images:
    """A DummyData layer, in a net for timing: where the images are is asked."""
    channels = shape[1] if len(shape) == 4 else None
    place = layer.place
    crop = (Line(f"crop_size: {shape[2]}", place),) if len(shape) == 4 and shape[2] == shape[3] else ()
    return Images(layer, "", place, shape[0], place, True, False, channels, crop)


def _images(layer: Block, phase: str, found: Findings, mean_file: Content) -> Images:
    kind = text_of(layer, "type")
    settings = View(layer).inside(DATA[kind])
    moved = View(layer).inside("transform_param")
    for view in (settings, moved):
        _note_fields(view.block, found)
    if not settings.has("source"):
        example = 'source: "/path/to/lmdb"'
        found.mistakes.add(layer.place, f"the layer has no `source` in `{DATA[kind]}`", f"write `{example}`")
    batch = settings.whole("batch_size") if settings.has("batch_size") or kind == "ImageData" else None
    if batch is None:
        found.mistakes.add(layer.place, f"the layer has no `batch_size` in `{DATA[kind]}`", "write `batch_size: 32`")
    backend = settings.block.entries.get("backend")
    if kind == "Data" and settings.text("backend") == "LEVELDB":
        place = backend.place if backend else layer.place
        said = "LevelDB" if backend else "LevelDB, the default where `backend` is not written,"
        found.leave(place, "backend", f"{said} is not read", "make an LMDB of it: `stagerun data import`")
    source = settings.text("source") or ""
    if kind == "ImageData":
        _note_list(settings, source, found)
    lines, channels = transform(settings, moved, phase, found, mean_file)
    return Images(
        layer=layer,
        source=source,
        source_place=settings.place("source"),
        batch=batch,
        batch_place=settings.place("batch_size"),
        shuffle=settings.flag("shuffle"),
        list_file=kind == "ImageData",
        channels=1 if kind == "ImageData" and not settings.flag("is_color") else channels,
        transform=lines,
    )


def _note_fields(block: Block, found: Findings) -> None:
    for name, entry in block.entries.items():
        if name in IDLE:
            found.idle[name] = IDLE[name]
        elif name in NOT_CARRIED and not says_nothing(entry):
            found.leave(entry.place, name, *NOT_CARRIED[name])


def _note_list(settings: View, source: str, found: Findings) -> None:
    """A list of image files becomes an LMDB first, with the sizes that the layer says."""
    options = ""
    for name, option in (("new_height", "--resize-height"), ("new_width", "--resize-width")):
        if size := settings.whole(name):
            options += f" {option} {size}"
    root = settings.text("root_folder")
    options += f" --root {shlex.quote(root)}" if root else ""
    names = f"{shlex.quote(source)} {shlex.quote(_lmdb_of(source))}"
    todo = f"make an LMDB of it: `stagerun data import {names} --format list --no-shuffle{options}`"
    found.leave(settings.place("source"), "source", "a list of files, and stagerun reads LMDBs", todo)


def _lmdb_of(source: str) -> str:
    """The name of the LMDB to be made of a list of files."""
    return source.removesuffix(".txt") + "_lmdb"


# -- transform_param


def transform(
    settings: View, moved: View, phase: str, found: Findings, mean_file: Content
) -> tuple[tuple[Line, ...], int | None]:
    """The inside of transform_param, or of test_transform_param, and the channels that it implies.

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
    mean, channels = _mean(where("mean_file"), moved, found, mean_file)
    lines += mean
    if where("scale").number("scale") != 1:
        lines += copied(where("scale").block, ["scale"])
    for name in ("random_aspect_ratio_param", "random_resize_param"):
        inner = moved.view(name)
        if inner is not None and name == "random_aspect_ratio_param" and phase == "TEST":
            found.leave(inner.block.place, name, "an evaluation draws nothing at random")
        elif inner is not None:
            lines += message(name, _rectangle(inner, found), inner.block.place)
    return tuple(lines), 1 if moved.flag("force_gray") else channels


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


def _mean(where: View, moved: View, found: Findings, mean_file: Content) -> tuple[list[Line], int | None]:
    if moved.numbers("mean_value"):
        entry = moved.block.entries["mean_value"]
        three = len(entry.values) == 3
        texts = [v.text for v in entry.values]
        line = texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]"
        return [Line(f"mean_value: {line}", entry.place, "B, G, R" if three else "")], 3 if three else None
    if not where.has("mean_file"):
        return [], None
    file, place = where.text("mean_file") or "", where.place("mean_file")
    there = mean_file(file)
    mean = channel_means(there[1]) if there is not None else None
    if there is None or mean is None:
        fault = "is not there" if there is None else "is not a mean image"
        found.leave(place, "mean_file", f"{file} {fault}", "write its path, or `mean_value` in its place: B, G, R")
        return [Line("mean_value: ?", place, "the mean of each channel? B, G, R", asks=True)], None
    if not any(name in moved.block.entries for name in ("random_resize_param", "random_aspect_ratio_param")):
        return [Line(f"mean_file: {quoted(there[0])}", place)], len(mean)
    why = "resized images have no mean at their pixels' places: one number per channel is taken off"
    found.leave(place, "mean_file", why, "each is the mean of the file's image")
    text = ", ".join(f"{value:.6g}" for value in mean)
    return [Line(f"mean_value: [{text}]", place, "B, G, R" if len(mean) == 3 else "")], len(mean)


def _rectangle(view: View, found: Findings) -> list[Line]:
    """The inside of random_aspect_ratio_param or random_resize_param."""
    names = [f.name for f in view.block.kind.fields if f.name != "resize_param"]
    if view.block.kind.name == "RandomResizeParameter" and view.whole("min_size") == view.whole("max_size"):
        names = ["min_size"]
    lines = copied(view.block, names)
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


# -- how many images there are, and where


@dataclass(frozen=True, slots=True)
class Count:
    """`place`: where the LMDB is, or will be. `number` is 0 if nothing says it; `why`: where it comes from."""

    place: str
    number: int
    why: str = ""
    channels: int | None = None
    there: bool = False  # on this machine


def count_images(images: Images, given: int | None, folder: CaffeFolder, found: Findings) -> Count:
    """As given, as counted, or as is well known of ILSVRC 2012 by the name of its LMDB."""
    if not images.source:
        return Count("", given or 0)
    there = folder.images(images.source, images.list_file)
    if there is None and not images.list_file and not posixpath.isabs(images.source):
        why = "the LMDB is not there, as seen from Caffe's folder"
        found.leave(images.source_place, "source", why, "mend `source`: its path starts at the schedule's folder")
    place, number, channels = there or (images.source, 0, None)
    made = folder.images(_lmdb_of(images.source), False) if images.list_file else None
    if made is not None:
        return _counted(images.source, Count(made[0], made[1], "counted in the LMDB", made[2], True), given)
    if images.list_file:
        return _counted(images.source, Count(_lmdb_of(images.source), number, "counted in the list", channels), given)
    return _counted(images.source, Count(place, number, "counted in the LMDB", channels, there is not None), given)


def count_lmdb(option: str, source: str, given: int | None, folder: CaffeFolder, found: Findings) -> Count:
    """The same for an LMDB whose absolute path an option gives."""
    there = folder.images(source, False)
    if there is None:
        found.leave(Span(option, 0, 0), source, "there is no LMDB of that name on this machine")
    place, number, channels = there or (source, 0, None)
    return _counted(source, Count(place, number, "counted in the LMDB", channels), given)


def _counted(source: str, there: Count, given: int | None) -> Count:
    """`there` with its number: `given`, else its own, else that of the part of ILSVRC 2012 that the name ends with."""
    if given is not None:
        return replace(there, number=given, why="")
    if there.number:
        return there
    name = source.lower()
    part = max(ILSVRC12, key=name.rfind)
    if "ilsvrc12" in name and part in name:
        return replace(there, number=ILSVRC12[part], why="of ILSVRC 2012, by its name")
    return there


def source_lines(count: Count, span: Span | None) -> tuple[Line, ...]:
    """The inside of `train` or `val`."""
    why = count.why if count.number else "how many records has it?"
    asked = Line('source: "?"', span, "which LMDB? the net makes its images up", asks=True)
    return (
        Line(f"source: {quoted(count.place)}", span) if count.place else asked,
        Line(f"images: {count.number}", None, why, asks=not count.number),
    )
