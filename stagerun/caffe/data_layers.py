"""What data layers of Caffe's say, as settings of a stage: batches and transforms. Pure."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite, prod

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError

from stagerun.base.errors import Problems, Span
from stagerun.caffe.blocks import type_of
from stagerun.caffe.text import NetText
from stagerun.language.nets import entry, renamed
from stagerun.language.proto import caffe_pb2
from stagerun.language.tree import SOLVER, Block, Entry, Value, quoted
from stagerun.language.view import View

# The absolute path and the bytes of the file that a path of Caffe's names; None if it is not there.
Content = Callable[[str], tuple[str, bytes] | None]


NO_MEAN = "write its path, or `mean_value` in its place: a number for each channel (B, G, R)"


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
_RECTANGLES = {"random_resize_param", "random_aspect_ratio_param"}
# Why others are not, and what to do.
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
    "expand_param": ("it belongs to the detection of objects", ""),
}
_SETTINGS = (
    ("TRAIN", ("batch_size", "device_batch_size"), "transform_param"),
    ("TEST", ("test_batch_size",), "test_transform_param"),
)
_NOT_DRAWN = "an evaluation draws nothing at random"


def settings_of(net: NetText, wanted: Collection[str], content: Content, problems: Problems) -> dict[str, Entry]:
    """The batches that the data layers say, and those of their transforms that are `wanted`. Images of a layer of TEST without a transform are
    taken as they are."""
    found: dict[str, Entry] = {}
    for phase, batches, field in _SETTINGS:
        for block in net.readers(phase)[:1]:
            reads = block.block(DATA.get(type_of(block), ""))
            if reads is not None and "batch_size" in reads.entries:
                found |= {name: renamed(SOLVER, name, reads.entries["batch_size"]) for name in batches}
            said = block.block("transform_param") if field in wanted else None
            if said is not None:
                transform, lost = translated(said, phase == "TEST", content)
                for one in lost:
                    if not one.harmless:
                        hint = one.hint or f"write `{field} {{ ... }}` in the schedule: it counts in place of this one"
                        problems.add(one.place, f"`{one.field}` of `transform_param`: {one.why}", hint)
                found[field] = entry(SOLVER, field, said.place, transform)
            elif phase == "TEST":
                found[field] = entry(SOLVER, field, block.place, Block(TRANSFORM, block.place))
    return found


def translated(said: Block, test: bool, content: Content) -> tuple[Block, list[Lost]]:
    """A `transform_param` of Caffe's as stagerun's, and what of it is lost. `test`: for an evaluation."""
    entries: dict[str, Entry] = {}
    lost: list[Lost] = []
    for name, old in said.entries.items():
        if name in _IDLE or says_nothing(old):
            continue
        if test and name in _DRAWN:
            lost.append(Lost(old.place, name, _NOT_DRAWN, harmless=True))
        elif name in _SAME:
            entries[name] = renamed(TRANSFORM, name, old)
        elif name in _RECTANGLES:
            (inner,) = said.blocks(name)
            rectangle = _rectangle(inner, TRANSFORM.fields_by_name[name].message_type, lost)
            entries[name] = entry(TRANSFORM, name, old.name, rectangle)
        elif name == "mean_file":
            entries |= _mean(old, said, content, lost)
        elif name not in ("crop_h", "crop_w"):
            lost.append(Lost(old.place, name, *_NOT_HERE.get(name, ("stagerun has no such transform", ""))))
        elif not any(one.field in ("crop_h", "crop_w") for one in lost):
            height, width = View(said).whole("crop_h") or 0, View(said).whole("crop_w") or 0
            if height == width:
                entries["crop_size"] = entry(TRANSFORM, "crop_size", old.place, height)
            else:
                why = f"images are cut to {height} x {width}, and stagerun cuts squares"
                lost.append(Lost(old.place, name, why, "write `crop_size`"))
    return Block(TRANSFORM, said.place, entries), lost


def says_nothing(entry: Entry) -> bool:
    """Whether a field is written with a value that does nothing."""
    idle = (0, 1) if entry.field.name == "scale" else (0, False)
    return all(not isinstance(value.value, Block) and value.value in idle for value in entry.values)


def _rectangle(inner: Block, kind: Descriptor, lost: list[Lost]) -> Block:
    """random_resize_param or random_aspect_ratio_param, with the one interpolation that it may have."""
    entries = {name: renamed(kind, name, old) for name, old in inner.entries.items() if name != "resize_param"}
    resize, target = inner.block("resize_param"), kind.fields_by_name["resize_param"].message_type
    old = resize.entries.get("interp_mode") if resize is not None else None  # the sizes come from the message around it
    if old is not None:
        if len({value.value for value in old.values}) > 1:
            why = "Caffe draws one of several for each image, and stagerun has one"
            lost.append(Lost(old.place, "interp_mode", why, f"keep that: {old.values[0].value}, say"))
        one = Entry(target.fields_by_name["interp_mode"], old.name, old.values[:1])
        place = inner.entries["resize_param"].place
        entries["resize_param"] = entry(kind, "resize_param", place, Block(target, place, {"interp_mode": one}))
    return Block(kind, inner.place, entries)


def _mean(old: Entry, said: Block, content: Content, lost: list[Lost]) -> dict[str, Entry]:
    """The mean image; of images that are resized, whose pixels have no place in it, the mean of each of its channels."""
    file = str(old.values[0].value)
    there = content(file)
    found = channel_means(there[1]) if there is not None else None
    if there is None or found is None:
        fault = "is not there" if there is None else "is not a mean image"
        lost.append(Lost(old.place, "mean_file", f"{file} {fault}", NO_MEAN))
        return {}
    if not said.entries.keys() & _RECTANGLES:
        path = Value(there[0], quoted(file), old.place)
        return {"mean_file": Entry(TRANSFORM.fields_by_name["mean_file"], old.name, (path,))}
    why = "resized images have no mean at their pixels' places: one number per channel is taken off"
    lost.append(Lost(old.place, "mean_file", why, "each is the mean of the file's image", harmless=True))
    return {"mean_value": entry(TRANSFORM, "mean_value", old.place, *found)}


@lru_cache(maxsize=4)
def channel_means(data: bytes) -> tuple[float, ...] | None:
    """The mean of each channel of a .binaryproto; None if it is not a mean image."""
    try:
        blob = caffe_pb2.BlobProto.FromString(data)
    except DecodeError:
        return None
    dims = list(blob.shape.dim) or [blob.num, blob.channels, blob.height, blob.width]
    numbers = list(blob.data or blob.double_data)
    channels = dims[-3] if len(dims) > 2 else 0
    is_image = channels in (1, 3) and 0 < prod(dims) == len(numbers) and len(dims) <= 4 and prod(dims[:-3]) == 1
    if not is_image or not all(map(isfinite, numbers)):
        return None
    size = len(numbers) // channels
    return tuple(sum(numbers[k * size : (k + 1) * size]) / size for k in range(channels))
