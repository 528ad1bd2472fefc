"""Data layers: where images come from, how many there are and make a batch, and their transforms. Pure."""

import posixpath
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

from stagerun.base.errors import Span
from stagerun.language.net_layers import DATA, Means, channel_means, says_nothing, translated
from stagerun.language.tree import Block, quoted
from stagerun.language.view import View
from stagerun.tools.caffe.disk import CaffeFolder
from stagerun.tools.caffe.text import Findings, Line, message, of_type, text_of, written

# What reads something else, or nothing.
OTHERS = ("AnnotatedData", "DummyData", "HDF5Data", "Input", "MemoryData", "Python", "VideoData", "WindowData")
# Fields of a data layer's settings, which say what stagerun does anyway.
IDLE = {
    "prefetch": "stagerun reads ahead by itself",
    "force_encoded_color": "grey images among coloured ones always become coloured",
}
# The order in which a transform is written.
ORDER = ("mirror", "crop_size", "mean_value", "mean_file", "scale", "random_aspect_ratio_param", "random_resize_param")
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


def images_of(layers: Sequence[Block], phase: str, found: Findings, folder: CaffeFolder) -> Images | None:
    """The images of a net in one phase; None, and a mistake in training, if no layer reads any."""
    readers = list(of_type(layers, *DATA))
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
    return _images(readers[0], phase, found, folder) if readers else None


def _images(layer: Block, phase: str, found: Findings, folder: CaffeFolder) -> Images:
    kind = text_of(layer, "type")
    settings, moved = View(layer).inside(DATA[kind]), View(layer).inside("transform_param")
    is_list = kind == "ImageData"
    found.idle |= {name: why for name, why in IDLE.items() if name in settings.block.entries}
    skip = settings.block.entries.get("rand_skip")
    if skip is not None and not says_nothing(skip):
        found.leave(skip.place, "rand_skip", "stagerun begins with the first image of its own order")
    if not settings.has("source"):
        example = 'source: "/path/to/lmdb"'
        found.mistakes.add(layer.place, f"the layer has no `source` in `{DATA[kind]}`", f"write `{example}`")
    batch = settings.whole("batch_size") if settings.has("batch_size") or is_list else None
    if batch is None:
        found.mistakes.add(layer.place, f"the layer has no `batch_size` in `{DATA[kind]}`", "write `batch_size: 32`")
    backend = settings.block.entries.get("backend")
    if not is_list and settings.text("backend") == "LEVELDB":
        place = backend.place if backend else layer.place
        said = "LevelDB" if backend else "LevelDB, the default where `backend` is not written,"
        found.leave(place, "backend", f"{said} is not read", "make an LMDB of it: `stagerun data import`")
    source = settings.text("source") or ""
    if is_list:
        _note_list(settings, source, found)
    grey = moved.flag("force_gray") or (is_list and not settings.flag("is_color"))

    def channels() -> int | None:
        """How many channels the records have; None where that is not known."""
        there = None if grey or is_list else folder.images(source, False)
        return 1 if grey else 3 if is_list else there[2] if there else None

    means = Means(folder.mean_file, channels)
    return Images(
        layer=layer,
        source=source,
        source_place=settings.place("source"),
        batch=batch,
        batch_place=settings.place("batch_size"),
        shuffle=settings.flag("shuffle"),
        list_file=is_list,
        channels=1 if grey else _said_channels(moved, folder),
        transform=_transform(layer, phase, found, means),
    )


def _said_channels(moved: View, folder: CaffeFolder) -> int | None:
    """How many the means of a transform are for."""
    if moved.numbers("mean_value"):
        return 3 if len(moved.numbers("mean_value")) == 3 else None
    there = folder.mean_file(moved.text("mean_file") or "")
    return len(channel_means(there[1]) or ()) or None if there is not None else None


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


def _transform(layer: Block, phase: str, found: Findings, means: Means) -> tuple[Line, ...]:
    """The inside of transform_param, or of test_transform_param."""
    said = layer.block("transform_param")
    if said is None:
        return ()
    block, lost = translated(said, phase == "TEST", means)
    for one in lost:
        found.leave(one.place, one.field, one.why, one.hint)
    lines = _lines(block, means)
    missing = next((one for one in lost if one.field == "mean_file" and not one.harmless), None)
    if missing is not None:
        order = "" if "each" in means.order else f" {means.order}"
        lines.append(Line("mean_value: ?", missing.place, f"the mean of each channel?{order}", asks=True))
    return tuple(lines)


def _lines(block: Block, means: Means) -> list[Line]:
    """What a translated message says."""
    lines: list[Line] = []
    for name in sorted(block.entries, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER)):
        entry, inner = block.entries[name], block.block(name)
        if name == "resize_param" and inner is not None:
            lines.append(Line(f"{name} {{ {' '.join(line.text for line in _lines(inner, means))} }}", entry.place))
        elif inner is not None:
            lines += message(name, _lines(inner, means), inner.place)
        elif name == "mean_value":
            text = entry.values[0].text if len(entry.values) == 1 else written(entry)
            lines.append(Line(f"{name}: {text}", entry.place, means.order if len(entry.values) == 3 else ""))
        elif name == "mean_file":
            lines.append(Line(f"{name}: {quoted(str(entry.values[0].value))}", entry.place))
        elif name != "max_size" or View(block).whole(name) != View(block).whole("min_size"):
            lines.append(Line(f"{name}: {written(entry)}", entry.place))
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
    asked = Line('source: "?"', span, "which LMDB?", asks=True)
    return (
        Line(f"source: {quoted(count.place)}", span) if count.place else asked,
        Line(f"images: {count.number}", None, why, asks=not count.number),
    )
