"""`stagerun plan --net`: a net prototxt's layers, with shapes, parameters and multiply-adds."""

import re
from collections.abc import Sequence
from dataclasses import fields

from stagerun.base.errors import DataError, Problems, RecipeError, UsageError
from stagerun.base.recipe import Model
from stagerun.base.text import columns, count
from stagerun.caffe.reading import Net, Settings, costs, image_shape, text
from stagerun.caffe.resolve import of_model, resolve
from stagerun.caffe.text import NetText, read
from stagerun.language.parse import LARGEST
from stagerun.language.tree import View

COUNTED = (
    "A multiply and its add count once. Counted are convolutions and linear layers without their biases, for one image."
)
Image = tuple[int, int, int]


def net_text(file: str, size: str | None) -> str:
    """Return the layers of a net, as in TEST, with the shape of their tops, parameters and multiply-adds. DataError, RecipeError, UsageError."""
    sizes = _parse_size(size)
    try:
        with open(file, "rb") as stream:
            data = stream.read(LARGEST + 1)
    except OSError as error:
        raise DataError(f"{file} can't be read: {error.strerror}", "give a net prototxt") from error
    problems = Problems()
    net = read(data, file, problems)
    resolved = resolve(net, _shape(net, sizes), problems) if net is not None else None
    if problems:
        raise RecipeError(problems.all())
    if resolved is None:
        hint = "give it: `--size 224`; for grey images `--size 1x28x28`"
        raise UsageError(f"{file} doesn't say the size of its images", hint)
    return table(resolved)


def _shape(net: NetText, sizes: list[int]) -> Image | None:
    """Return the image shape of --size; the missing parts come from the first data layer, the channels else are 3."""
    written = None
    for reader in net.readers("TEST", "TRAIN")[:1]:
        crop = View(reader).inside("transform_param").whole("crop_size")
        written = image_shape(reader) or ((3, crop, crop) if crop else None)
    if not sizes:
        return written
    *channels, height, width = sizes if len(sizes) > 1 else sizes * 2
    return (channels or written or (3,))[0], height, width


def _parse_size(written: str | None) -> list[int]:
    """`1x24x40` -> [1, 24, 40]."""
    if written is not None and not re.fullmatch(r"[1-9]\d{0,5}(x[1-9]\d{0,5}){0,2}", written):
        hint = "write `224`, or height and width: `224x320`; for grey images `1x28x28`"
        raise UsageError(f"--size {written}: it is not a size", hint)
    return [int(number) for number in written.split("x")] if written else []


def table(net: Net) -> str:
    """Return the whole output."""
    rows = [("layer", "type", "settings", "bottoms", "shape", "parameters", "multiply-adds")]
    layers, *numbers = zip(*costs(net.test), strict=True)
    for layer, *figures in zip(layers, *numbers, strict=True):
        sizes = ", ".join(dict.fromkeys(dims(shape) for shape in layer.shapes if shape))
        parameters, adds = (f"{number:,}" if number else "" for number in figures)
        rows.append(
            (layer.name, layer.type, _changed(layer.settings), ", ".join(layer.bottoms), sizes, parameters, adds)
        )
    parameters, adds = (f"{sum(column):,}" for column in numbers)
    rows.append(("total", "", "", "", "", parameters, adds))
    width = max(len(row[5]) for row in rows), max(len(row[6]) for row in rows)
    aligned = [(*row[:5], row[5].rjust(width[0]), row[6].rjust(width[1])) for row in rows]
    classes = f"{net.num_classes} class{'' if net.num_classes == 1 else 'es'}"
    title = f"{net.name or 'net'}: images of {dims(net.shape)}, {classes}"
    return "\n".join([title, "", *columns(aligned), "", COUNTED])


def _changed(settings: Settings) -> str:
    """Return the settings that differ from their defaults: `kernel 11x11, stride 4, group 2`."""
    words = []
    for field in fields(settings):  # type: ignore[arg-type]
        value = getattr(settings, field.name)
        if value != field.default:
            shown = dims(value) if isinstance(value, tuple) else value
            words.append(f"{field.name} {shown:g}" if isinstance(shown, float) else f"{field.name} {shown}")
    return ", ".join(words)


def dims(shape: Sequence[object]) -> str:
    return "x".join(map(str, shape))


def size_text(model: Model) -> str:
    """Return a net's size: `lenet.prototxt, 431080 parameters, 2.29 million multiply-adds for an image of 1 x 28 x 28`."""
    _, *numbers = zip(*costs(of_model(model).train), strict=True)
    parameters, adds = map(sum, numbers)
    many = f"{adds / 1e9:.3g} billion" if adds >= 1e9 else f"{adds / 1e6:.3g} million"
    return f"{model.name}, {count(parameters, 'parameter')}, {many} multiply-adds for an image of {text(model.input_shape)}"
