"""Data layers: where images come from, how many make a batch, and what is done to them. Pure."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from stagerun.caffe_import.left import Findings
from stagerun.caffe_import.lines import Line
from stagerun.caffe_import.nets import of_type, text_of
from stagerun.caffe_import.transforms import MeanFiles, transform
from stagerun.errors import Span
from stagerun.spec.tree import Block, Entry
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
