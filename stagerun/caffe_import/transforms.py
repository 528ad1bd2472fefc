"""transform_param of a data layer -> the inside of stagerun's. Pure."""

from google.protobuf.message import DecodeError

from stagerun.caffe_import.left import Findings
from stagerun.caffe_import.lines import Line, copied, message
from stagerun.proto import caffe_pb2
from stagerun.spec.view import View


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
