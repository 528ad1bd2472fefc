"""What data layers of Caffe's say, as settings of a stage: batches and transforms. Pure."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError

from stagerun.base.errors import Problems
from stagerun.language.net import ImageReader
from stagerun.language.net.upgrade import top_shapes
from stagerun.language.proto import caffe_pb2
from stagerun.language.tree import SOLVER, Block, Entry, Value, quoted
from stagerun.language.view import View

# The absolute path and the bytes of the file that a path of Caffe's names; None if it is not there.
Content = Callable[[str], tuple[str, bytes] | None]


@dataclass(frozen=True, slots=True)
class Means:
    """What is known of mean images. `content` finds one; `channels`: of the images, None where they are not known here."""

    content: Content
    channels: Callable[[], int | None]

    @property
    def hint(self) -> str:
        """What to do where one is missing."""
        known = self.channels() or 0
        values = {1: "mean_value: ...", 3: "mean_value: [104, 117, 123]"}.get(known, "mean_value: [...]")
        said = {1: "one number", 3: "B, G, R"}.get(known, "a number for each channel")
        where = "looked in the folders of the net and of the schedule, and in those above"
        return (
            f"put the file there ({where}), or give its path; or write "
            f"`transform_param {{ {values} }}` in the schedule: {said}"
        )


# The layers that read images from disk, and the message with their settings.
DATA = {"Data": "data_param", "ImageData": "image_data_param"}
TRANSFORM: Descriptor = SOLVER.fields_by_name["transform_param"].message_type
# Fields of Caffe's transform_param: those that mean the same here, and those that change nothing here.
_SAME = ("mirror", "crop_size", "scale", "mean_value")
_IDLE = ("force_color", "emit_constraint", "flow")
_DRAWN = ("mirror", "random_aspect_ratio_param")  # an evaluation sees the same images each time, whatever TEST says
_RECTANGLES = ("random_resize_param", "random_aspect_ratio_param")
_HINTS = {
    "force_gray": "store the images grey, and write `channels: 1` in `model`",
    "resize_param": "resize when the LMDB is made, `stagerun data import --resize-height`, and write `transform_param` here",
    "distort_param": "write `transform_param` with `color_jitter_param` in the schedule",
}


def train_settings(
    readers: Sequence[ImageReader], passes: int, wanted: Collection[str], means: Means, problems: Problems
) -> dict[str, Entry]:
    """The `wanted` ones of those of the data layers of TRAIN. `passes`: iter_size."""
    found: dict[str, Entry] = {}
    for reader in readers[:1]:
        if (batch := _batch(reader)) is not None:
            size = batch.values[0].value
            assert isinstance(size, int)
            whole = Value(size * passes, str(size * passes), batch.values[0].span)
            found["batch_size"] = Entry(SOLVER.fields_by_name["batch_size"], batch.name, (whole,))
            found["device_batch_size"] = Entry(SOLVER.fields_by_name["device_batch_size"], batch.name, batch.values)
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
            found["test_batch_size"] = Entry(SOLVER.fields_by_name["test_batch_size"], batch.name, batch.values)
        if "test_transform_param" in wanted:
            found |= _transform("test_transform_param", reader, means, problems)
        if "test_transform_param" not in found:
            inner = Value(Block(TRANSFORM, reader.place), "", reader.place)
            found["test_transform_param"] = Entry(SOLVER.fields_by_name["test_transform_param"], reader.place, (inner,))
    return found


def _batch(reader: ImageReader) -> Entry | None:
    """`batch_size` of a data layer, or the first axis of DummyData."""
    shapes = top_shapes(reader.block) if reader.type == "DummyData" else []
    if shapes and shapes[0]:
        value = Value(shapes[0][0], str(shapes[0][0]), reader.place)
        return Entry(SOLVER.fields_by_name["batch_size"], reader.place, (value,))
    name = DATA.get(reader.type)
    settings = reader.block.block(name) if name is not None else None
    return settings.entries.get("batch_size") if settings is not None else None


def _transform(field: str, reader: ImageReader, means: Means, problems: Problems) -> dict[str, Entry]:
    said = reader.block.block("transform_param")
    if said is None:
        return {}
    entries: dict[str, Entry] = {}
    for name, entry in said.entries.items():
        if field == "test_transform_param" and name in _DRAWN:
            continue
        if name in _SAME and not says_nothing(entry):
            entries[name] = Entry(TRANSFORM.fields_by_name[name], entry.name, entry.values)
        elif name in _RECTANGLES:
            inner = said.block(name)
            assert inner is not None
            block = _rectangle(inner, TRANSFORM.fields_by_name[name].message_type, problems)
            entries[name] = Entry(TRANSFORM.fields_by_name[name], entry.name, (Value(block, "", entry.name),))
        elif name == "mean_file":
            entries |= _mean(entry, said, means, problems)
        elif name in ("crop_h", "crop_w"):
            entries |= _square(said, problems)
        elif name not in (*_SAME, *_IDLE) and not says_nothing(entry):
            hint = _HINTS.get(name, f"write `{field} {{ ... }}` in the schedule: it counts in place of this one")
            problems.add(entry.name, f"`{name}` of `transform_param`: stagerun has no such transform", hint)
    block = Block(TRANSFORM, said.place, entries)
    return {field: Entry(SOLVER.fields_by_name[field], said.place, (Value(block, "", said.place),))}


def says_nothing(entry: Entry) -> bool:
    """Whether a field is written with a value that does nothing."""
    return all(not isinstance(value.value, Block) and value.value in (0, False) for value in entry.values)


def _square(said: Block, problems: Problems) -> dict[str, Entry]:
    view, place = View(said), next(said.entries[n].place for n in ("crop_h", "crop_w") if n in said.entries)
    height, width = view.whole("crop_h") or 0, view.whole("crop_w") or 0
    if height != width:
        problems.add(place, f"images are cut to {height} x {width}, and stagerun cuts squares", "write `crop_size`")
    if not height or height != width:
        return {}
    return {"crop_size": Entry(TRANSFORM.fields_by_name["crop_size"], place, (Value(height, str(height), place),))}


def _rectangle(inner: Block, kind: Descriptor, problems: Problems) -> Block:
    """random_resize_param or random_aspect_ratio_param, with the one interpolation that it may have."""
    entries = {
        name: Entry(kind.fields_by_name[name], entry.name, entry.values)
        for name, entry in inner.entries.items()
        if name != "resize_param"
    }
    resize = inner.block("resize_param")
    modes = resize.entries.get("interp_mode") if resize is not None else None
    if modes is not None and resize is not None:
        if len({value.value for value in modes.values}) > 1:
            problems.add(modes.place, "several `interp_mode`, of which Caffe draws one", "stagerun has one: keep that")
        target = kind.fields_by_name["resize_param"].message_type
        one = Entry(target.fields_by_name["interp_mode"], modes.name, modes.values[:1])
        block = Block(target, resize.place, {"interp_mode": one})
        entries["resize_param"] = Entry(
            kind.fields_by_name["resize_param"], resize.place, (Value(block, "", resize.place),)
        )
    return Block(kind, inner.place, entries)


def _mean(entry: Entry, said: Block, means: Means, problems: Problems) -> dict[str, Entry]:
    """The mean image; of images that are resized, whose pixels have no place in it, the mean of each of its channels."""
    file = str(entry.values[0].value)
    there = means.content(file)
    found = channel_means(there[1]) if there is not None else None
    if there is None or found is None:
        fault = "is not there" if there is None else "is not a mean image"
        problems.add(entry.place, f"{file} {fault}", means.hint)
        return {}
    if not any(name in said.entries for name in _RECTANGLES):
        path = Value(there[0], quoted(file), entry.place)
        return {"mean_file": Entry(TRANSFORM.fields_by_name["mean_file"], entry.name, (path,))}
    values = tuple(Value(mean, f"{mean!r}", entry.place) for mean in found)
    return {"mean_value": Entry(TRANSFORM.fields_by_name["mean_value"], entry.name, values)}


def channel_means(data: bytes) -> tuple[float, ...] | None:
    """The mean of each channel of a .binaryproto; None if it is not a mean image."""
    try:
        blob = caffe_pb2.BlobProto.FromString(data)
    except DecodeError:
        return None
    values: Iterable[float] = blob.data or blob.double_data
    channels = blob.shape.dim[-3] if len(blob.shape.dim) > 2 else blob.channels
    count = len(blob.data or blob.double_data)
    if channels not in (1, 3) or not count or count % channels:
        return None
    size, numbers = count // channels, list(values)
    return tuple(sum(numbers[k * size : (k + 1) * size]) / size for k in range(channels))
