"""Settings of a stage from a net's data layers: batches and transforms. Pure."""

from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from math import isfinite
from typing import NamedTuple

from google.protobuf.descriptor import Descriptor

from stagerun.base.errors import Problems, Span
from stagerun.caffe.reading import type_of
from stagerun.caffe.text import NetText
from stagerun.language.nets import entry, renamed, with_block
from stagerun.language.tree import SOLVER, Block, Entry, Value, View, quoted

# Returns the absolute path and the bytes of the file that a path of Caffe's names; both are empty if it is missing.
Content = Callable[[str], tuple[str, bytes]]


NO_MEAN = "write its path, or `mean_value` instead: a number for each channel (B, G, R)"


class Lost(NamedTuple):
    """Part of a transform that stagerun can't express. `harmless`: not a mistake when the net is trained unchanged."""

    place: Span
    field: str
    why: str
    hint: str = ""
    harmless: bool = False


# The layers that read images from disk, and the message with their settings.
DATA = {"Data": "data_param", "ImageData": "image_data_param"}
TRANSFORM: Descriptor = SOLVER.fields_by_name["transform_param"].message_type
# Fields of Caffe's transform_param with the same meaning here, and fields without effect here.
_SAME = ("mirror", "crop_size", "scale", "mean_value")
_IDLE = ("force_color", "emit_constraint", "flow")
_DRAWN = ("mirror", "random_aspect_ratio_param")  # an evaluation sees the same images each time, even if TEST has these
_RECTANGLES = {"random_resize_param", "random_aspect_ratio_param"}
# Fields that aren't supported: why, and what to do.
_NOT_HERE = {
    "force_gray": ("records are read as they are stored", "store the images grey, and write `channels: 1` in `model`"),
    "resize_param": (
        "it resizes to a fixed size",
        "resize when the LMDB is made, `stagerun data import --resize-height`, and write `transform_param` in the schedule",
    ),
    "distort_param": (
        "stagerun has no such formulas",
        "write `transform_param` with `rand_augment_param` in the schedule",
    ),
    "expand_param": ("it belongs to the detection of objects", ""),
}
_SETTINGS = (
    ("TRAIN", ("batch_size", "device_batch_size"), "transform_param"),
    ("TEST", ("test_batch_size",), "test_transform_param"),
)
_NOT_DRAWN = "an evaluation draws nothing at random"


def settings_of(net: NetText, wanted: Collection[str], content: Content, problems: Problems) -> dict[str, Entry]:
    """Return the data layers' batch sizes, and their `wanted` transforms. A TEST layer without one changes no image."""
    settings: dict[str, Entry] = {}
    for phase, batches, field in _SETTINGS:
        for block in net.readers(phase)[:1]:
            reads = block.block(DATA.get(type_of(block), ""))
            if reads is not None and "batch_size" in reads.entries:
                settings |= {name: renamed(SOLVER, name, reads.entries["batch_size"]) for name in batches}
            caffes = block.block("transform_param") if field in wanted else None
            if caffes is not None:
                transform, lost = translated(caffes, phase == "TEST", content)
                for one in lost:
                    if not one.harmless:
                        hint = one.hint or f"write `{field} {{ ... }}` in the schedule: it overrides this one"
                        problems.add(one.place, f"`{one.field}` of `transform_param`: {one.why}", hint)
                settings[field] = entry(SOLVER, field, caffes.place, transform)
            elif phase == "TEST":
                settings[field] = entry(SOLVER, field, block.place, Block(TRANSFORM, block.place))
    return settings


def translated(caffes: Block, test: bool, content: Content) -> tuple[Block, list[Lost]]:
    """Translate Caffe's `transform_param` to stagerun's; return also what is lost. `test`: for an evaluation."""
    entries: dict[str, Entry] = {}
    lost: list[Lost] = []
    for name, old in caffes.entries.items():
        idle = (0, 1) if name == "scale" else (0, False)
        if name in _IDLE or all(not isinstance(value.value, Block) and value.value in idle for value in old.values):
            continue
        if test and name in _DRAWN:
            lost.append(Lost(old.place, name, _NOT_DRAWN, harmless=True))
        elif name in _SAME:
            entries[name] = renamed(TRANSFORM, name, old)
        elif name in _RECTANGLES:
            (inner,) = caffes.blocks(name)
            rectangle = _rectangle(inner, TRANSFORM.fields_by_name[name].message_type, lost)
            entries[name] = entry(TRANSFORM, name, old.name, rectangle)
        elif name == "mean_file":
            entries |= _mean(old, caffes, content, lost)
        elif name not in ("crop_h", "crop_w"):
            lost.append(Lost(old.place, name, *_NOT_HERE.get(name, ("stagerun has no such transform", ""))))
        elif not any(one.field in ("crop_h", "crop_w") for one in lost):
            height, width = View(caffes).whole("crop_h") or 0, View(caffes).whole("crop_w") or 0
            if height == width:
                entries["crop_size"] = entry(TRANSFORM, "crop_size", old.place, height)
            else:
                why = f"images are cut to {height} x {width}, and stagerun cuts squares"
                lost.append(Lost(old.place, name, why, "write `crop_size`"))
    return Block(TRANSFORM, caffes.place, entries), lost


def _rectangle(inner: Block, kind: Descriptor, lost: list[Lost]) -> Block:
    """Translate random_resize_param or random_aspect_ratio_param, with one interpolation at most."""
    entries = {name: renamed(kind, name, old) for name, old in inner.entries.items() if name != "resize_param"}
    made, resize = Block(kind, inner.place, entries), View(inner).inside("resize_param").block
    old = resize.entries.get("interp_mode")  # the sizes come from the message around it
    if old is None:
        return made
    if len({value.value for value in old.values}) > 1:
        why = "Caffe draws one of several for each image, and stagerun has one"
        lost.append(Lost(old.place, "interp_mode", why, f"keep that: {old.values[0].value}, say"))
    target = kind.fields_by_name["resize_param"].message_type
    one = replace(renamed(target, "interp_mode", old), values=old.values[:1])
    return with_block(made, "resize_param", Block(target, inner.entries["resize_param"].place, {"interp_mode": one}))


def _mean(old: Entry, caffes: Block, content: Content, lost: list[Lost]) -> dict[str, Entry]:
    """Translate a mean image; for resized images, whose pixels don't match it, to the mean of each channel."""
    file = str(old.values[0].value)
    path, data = content(file)
    if (means := channel_means(data)) is None:
        fault = "is not a mean image" if path else "is missing"
        lost.append(Lost(old.place, "mean_file", f"{file} {fault}", NO_MEAN))
        return {}
    if not caffes.entries.keys() & _RECTANGLES:
        value = Value(path, quoted(file), old.place)
        return {"mean_file": Entry(TRANSFORM.fields_by_name["mean_file"], old.name, (value,))}
    why = "the pixels of resized images don't match a mean image: one number per channel is subtracted"
    lost.append(Lost(old.place, "mean_file", why, "each is the mean of the file's image", harmless=True))
    return {"mean_value": entry(TRANSFORM, "mean_value", old.place, *means)}


@lru_cache(maxsize=4)
def channel_means(data: bytes) -> tuple[float, ...] | None:
    """Return the mean of each channel of a .binaryproto; None if it is not a mean image."""
    from stagerun.caffe.binary import read_mean  # numpy, which few schedules need

    with suppress(ValueError):
        means = tuple(sum(channel.ravel().tolist()) / channel.size for channel in read_mean(data))
        if len(means) in (1, 3) and all(map(isfinite, means)):
            return means
    return None
