"""What data layers of Caffe's say, as settings of a stage: batches and transforms. Pure."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import isfinite, prod

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError

from stagerun.base.errors import Problems, Span
from stagerun.language.net import ImageReader, upgrade
from stagerun.language.proto import caffe_pb2
from stagerun.language.tree import SOLVER, Block, Entry, Value, quoted
from stagerun.language.view import View

# The absolute path and the bytes of the file that a path of Caffe's names; None if it is not there.
Content = Callable[[str], tuple[str, bytes] | None]


@dataclass(frozen=True, slots=True)
class Means:
    """What is known of mean images. `content` finds one, `channels`: of the images, None where they are not known here.
    `looked`: in which folders, where that has to be said."""

    content: Content
    channels: Callable[[], int | None]
    looked: str = ""

    @property
    def order(self) -> str:
        """In which order the mean of each channel is written."""
        return {1: "one number", 3: "B, G, R"}.get(self.channels() or 0, "a number for each channel")

    @property
    def hint(self) -> str:
        """What to do where one is missing."""
        if not self.looked:
            return f"write its path, or `mean_value` in its place: {self.order}"
        values = {1: "mean_value: ...", 3: "mean_value: [104, 117, 123]"}.get(self.channels() or 0, "mean_value: [...]")
        return (
            f"put the file there (looked in {self.looked}), or give its path; or write "
            f"`transform_param {{ {values} }}` in the schedule: {self.order}"
        )


@dataclass(frozen=True, slots=True)
class Lost:
    """What of a transform stagerun has no word for. `harmless`: where a net is trained as it is, no mistake."""

    place: Span
    field: str
    why: str
    hint: str = ""
    harmless: bool = False


# The layers that read images from disk, and the message with their settings.
DATA = {"Data": "data_param", "ImageData": "image_data_param"}
TRANSFORM: Descriptor = SOLVER.fields_by_name["transform_param"].message_type
# Fields of Caffe's transform_param: those that mean the same here, and those that change nothing here.
_SAME = ("mirror", "crop_size", "scale", "mean_value")
_IDLE = ("force_color", "emit_constraint", "flow")
_DRAWN = ("mirror", "random_aspect_ratio_param")  # an evaluation sees the same images each time, whatever TEST says
_RECTANGLES = ("random_resize_param", "random_aspect_ratio_param")
# Why others are not, and what to do.
_OBJECTS = ("it belongs to the detection of objects", "")
_NOT_HERE = {
    "force_gray": ("records are read as they are stored", "store the images grey, and write `channels: 1` in `model`"),
    "resize_param": (
        "it resizes to a fixed size",
        "resize when the LMDB is made, `stagerun data import --resize-height`, and write `transform_param` in the schedule",
    ),
    "distort_param": (
        "there is none with its formulas",
        "write `transform_param` with `rand_augment_param` in the schedule",
    ),
    "noise_param": ("there is none", ""),
    "expand_param": _OBJECTS,
    "emit_constraint": _OBJECTS,
    "flow": ("it belongs to optical flow", ""),
}
_NOT_DRAWN = "an evaluation draws nothing at random"


def train_settings(
    readers: Sequence[ImageReader], wanted: Collection[str], means: Means, problems: Problems
) -> dict[str, Entry]:
    """The `wanted` ones of those of the data layers of TRAIN."""
    found: dict[str, Entry] = {}
    for reader in readers[:1]:
        if (batch := _batch(reader)) is not None:
            found |= {name: upgrade.renamed(SOLVER, name, batch) for name in ("batch_size", "device_batch_size")}
        if "transform_param" in wanted:
            found |= _transform("transform_param", reader, means, problems)
    return found


def test_settings(
    readers: Sequence[ImageReader], wanted: Collection[str], means: Means, problems: Problems
) -> dict[str, Entry]:
    """The transform of TEST's data layers. Without one of their own, images are taken as they are."""
    found: dict[str, Entry] = {}
    for reader in readers[:1]:
        if (batch := _batch(reader)) is not None:
            found["test_batch_size"] = upgrade.renamed(SOLVER, "test_batch_size", batch)
        if "test_transform_param" in wanted:
            found |= _transform("test_transform_param", reader, means, problems)
        if "test_transform_param" not in found:
            empty = Block(TRANSFORM, reader.place)
            found["test_transform_param"] = upgrade.entry(SOLVER, "test_transform_param", reader.place, empty)
    return found


def _batch(reader: ImageReader) -> Entry | None:
    """`batch_size` of a data layer, or the first axis of DummyData."""
    shapes = upgrade.top_shapes(reader.block) if reader.type == "DummyData" else []
    if shapes and shapes[0]:
        return upgrade.entry(SOLVER, "batch_size", reader.place, shapes[0][0])
    name = DATA.get(reader.type)
    settings = reader.block.block(name) if name is not None else None
    return settings.entries.get("batch_size") if settings is not None else None


def _transform(field: str, reader: ImageReader, means: Means, problems: Problems) -> dict[str, Entry]:
    said = reader.block.block("transform_param")
    if said is None:
        return {}
    block, lost = translated(said, field == "test_transform_param", means)
    for one in lost:
        if not one.harmless:
            hint = one.hint or f"write `{field} {{ ... }}` in the schedule: it counts in place of this one"
            problems.add(one.place, f"`{one.field}` of `transform_param`: {one.why}", hint)
    return {field: upgrade.entry(SOLVER, field, said.place, block)}


def translated(said: Block, test: bool, means: Means) -> tuple[Block, list[Lost]]:
    """A `transform_param` of Caffe's as stagerun's, and what of it is lost. `test`: for an evaluation."""
    entries: dict[str, Entry] = {}
    lost: list[Lost] = []
    for name, entry in said.entries.items():
        if name in _IDLE or says_nothing(entry):
            continue
        if test and name in _DRAWN:
            lost.append(Lost(entry.place, name, _NOT_DRAWN, harmless=True))
        elif name in _SAME:
            entries[name] = upgrade.renamed(TRANSFORM, name, entry)
        elif name in _RECTANGLES:
            inner = said.block(name)
            assert inner is not None
            block = _rectangle(inner, TRANSFORM.fields_by_name[name].message_type, lost)
            entries[name] = upgrade.entry(TRANSFORM, name, entry.name, block)
        elif name == "mean_file":
            entries |= _mean(entry, said, means, lost)
        elif name in ("crop_h", "crop_w"):
            if not any(one.field in ("crop_h", "crop_w") for one in lost):
                entries |= _square(said, entry, lost)
        else:
            why, hint = _NOT_HERE.get(name, ("stagerun has no such transform", ""))
            lost.append(Lost(entry.place, name, why, hint))
    return Block(TRANSFORM, said.place, entries), lost


def says_nothing(entry: Entry) -> bool:
    """Whether a field is written with a value that does nothing."""
    idle = (0, 1) if entry.field.name == "scale" else (0, False)
    return all(not isinstance(value.value, Block) and value.value in idle for value in entry.values)


def _square(said: Block, entry: Entry, lost: list[Lost]) -> dict[str, Entry]:
    height, width = View(said).whole("crop_h") or 0, View(said).whole("crop_w") or 0
    if height != width:
        why = f"images are cut to {height} x {width}, and stagerun cuts squares"
        lost.append(Lost(entry.place, entry.field.name, why, "write `crop_size`"))
        return {}
    return {"crop_size": upgrade.entry(TRANSFORM, "crop_size", entry.place, height)}


def _rectangle(inner: Block, kind: Descriptor, lost: list[Lost]) -> Block:
    """random_resize_param or random_aspect_ratio_param, with the one interpolation that it may have."""
    entries = {
        name: upgrade.renamed(kind, name, entry) for name, entry in inner.entries.items() if name != "resize_param"
    }
    resize = inner.block("resize_param")
    for name, entry in resize.entries.items() if resize is not None else ():
        if name != "interp_mode":
            why = "the size comes from the message around it"
            lost.append(Lost(entry.place, f"resize_param.{name}", why, harmless=True))
            continue
        if len({value.value for value in entry.values}) > 1:
            why = "Caffe draws one of several for each image, and stagerun has one"
            lost.append(Lost(entry.place, name, why, f"keep that: {entry.values[0].value}, say"))
        target = kind.fields_by_name["resize_param"].message_type
        one = Entry(target.fields_by_name[name], entry.name, entry.values[:1])
        place = inner.entries["resize_param"].place
        entries["resize_param"] = upgrade.entry(kind, "resize_param", place, Block(target, place, {name: one}))
    return Block(kind, inner.place, entries)


def _mean(entry: Entry, said: Block, means: Means, lost: list[Lost]) -> dict[str, Entry]:
    """The mean image; of images that are resized, whose pixels have no place in it, the mean of each of its channels."""
    file = str(entry.values[0].value)
    there = means.content(file)
    found = channel_means(there[1]) if there is not None else None
    if there is None or found is None:
        fault = "is not there" if there is None else "is not a mean image"
        lost.append(Lost(entry.place, "mean_file", f"{file} {fault}", means.hint))
        return {}
    if not any(name in said.entries for name in _RECTANGLES):
        path = Value(there[0], quoted(file), entry.place)
        return {"mean_file": Entry(TRANSFORM.fields_by_name["mean_file"], entry.name, (path,))}
    why = "resized images have no mean at their pixels' places: one number per channel is taken off"
    lost.append(Lost(entry.place, "mean_file", why, "each is the mean of the file's image", harmless=True))
    return {"mean_value": upgrade.entry(TRANSFORM, "mean_value", entry.place, *found)}


def channel_means(data: bytes) -> tuple[float, ...] | None:
    """The mean of each channel of a .binaryproto; None if it is not a mean image."""
    try:
        blob = caffe_pb2.BlobProto.FromString(data)
    except DecodeError:
        return None
    dims = list(blob.shape.dim) or [blob.num, blob.channels, blob.height, blob.width]
    numbers = list(blob.data or blob.double_data)
    channels = dims[-3] if len(dims) > 2 else 0
    if channels not in (1, 3) or not numbers or prod(dims) != len(numbers) or not all(map(isfinite, numbers)):
        return None
    if len(dims) > 4 or prod(dims[:-3]) != 1:
        return None
    size = len(numbers) // channels
    return tuple(sum(numbers[k * size : (k + 1) * size]) / size for k in range(channels))
