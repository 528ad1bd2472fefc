"""`stagerun plan --net`: a net prototxt's layers, with shapes, parameters and multiply-adds."""

import re
from collections.abc import Sequence

from stagerun.base import net
from stagerun.base.errors import DataError, Problems, RecipeError, UsageError
from stagerun.base.text import columns
from stagerun.language.net import NetText, read, resolve
from stagerun.language.net.cost import Cost, costs
from stagerun.language.parse import LARGEST

COUNTED = (
    "A multiply and its add count once. Counted are convolutions and linear layers without their biases, for one image."
)
Image = tuple[int, int, int]


def net_text(file: str, size: str | None) -> str:
    """Return the layers of a net, as in TEST, with the shape of their tops, parameters and multiply-adds. DataError, RecipeError, UsageError."""
    channels, shape = _size(size)
    found = _read(file, shape, channels)
    return table(found, list(costs(found.test)))


def _read(file: str, size: tuple[int, int] | None, channels: int | None) -> net.Net:
    """The net for images of that size. UsageError where the size is known from nowhere; DataError, RecipeError."""
    try:
        with open(file, "rb") as stream:
            data = stream.read(LARGEST + 1)
    except OSError as error:
        raise DataError(f"{file} can't be read: {error.strerror}", "give a net prototxt") from error
    problems = Problems()
    text = read(data, file, problems)
    found = resolve(text, _shape(text, size, channels), problems) if text is not None else None
    if problems:
        raise RecipeError(problems.all())
    if found is None:
        raise UsageError(
            f"{file} doesn't say the size of its images", "give it: `--size 224`, of grey ones `--size 1x28x28`"
        )
    return found


def _shape(text: NetText, size: tuple[int, int] | None, channels: int | None) -> Image | None:
    """That of the options; what they leave out is that of the first data layer."""
    reader = next((r for phase in ("TEST", "TRAIN") for r in text.readers(phase)), None)
    own = reader.shape if reader is not None else None
    crop = reader.crop_size if reader is not None else 0
    if size is None and own is not None:
        size = own[1], own[2]
    if size is None and crop:
        size = crop, crop
    if size is None:
        return None
    return channels or (own[0] if own is not None else 3), *size


def _size(written: str | None) -> tuple[int | None, tuple[int, int] | None]:
    """Return channels, and height and width."""
    if written is None:
        return None, None
    match = re.fullmatch(r"(?:([1-9]\d{0,3})x(?=\d+x))?([1-9]\d{0,5})(?:x([1-9]\d{0,5}))?", written)
    if match is None:
        raise UsageError(
            f"--size {written}: it is not a size",
            "write `224`, or height and width: `224x320`; of grey images `1x28x28`",
        )
    return int(match[1]) if match[1] else None, (int(match[2]), int(match[3] or match[2]))


def table(found: net.Net, cost: Sequence[Cost]) -> str:
    """The whole output."""
    rows = [("layer", "type", "settings", "bottoms", "shape", "parameters", "multiply-adds")]
    for one in cost:
        layer = one.layer
        shapes = [dims(s) for top, s in zip(layer.tops, layer.shapes, strict=True) if s] if layer.tops else []
        sizes, adds = ", ".join(dict.fromkeys(shapes)), one.multiply_adds
        number, added = f"{one.parameters:,}" * (one.parameters > 0), f"{adds:,}" * (adds > 0)
        rows.append((layer.name, layer.type, said(layer), ", ".join(layer.bottoms), sizes, number, added))
    parameters, adds = sum(one.parameters for one in cost), sum(one.multiply_adds for one in cost)
    rows.append(("total", "", "", "", "", f"{parameters:,}", f"{adds:,}"))
    width = max(len(row[5]) for row in rows), max(len(row[6]) for row in rows)
    aligned = [(*row[:5], row[5].rjust(width[0]), row[6].rjust(width[1])) for row in rows]
    classes = f"{found.num_classes} class{'es' * (found.num_classes != 1)}"
    title = f"{found.name or 'net'}: images of {dims(found.shape)}, {classes}"
    return "\n".join([title, "", *columns(aligned), "", COUNTED])


def dims(shape: net.Shape) -> str:
    return "x".join(map(str, shape))


def said(layer: net.Layer) -> str:
    """What tells it from others of its type: `11x11 / 4, group 2`."""
    match layer.settings:
        case net.Convolution(kernel=kernel, stride=stride, pad=pad, dilation=dilation, group=group):
            words = [_window(kernel, stride, pad)]
            words += [f"dilation {_pair(dilation)}"] * (dilation != (1, 1)) + [f"group {group}"] * (group != 1)
            return ", ".join(words)
        case net.Pooling(method=method, kernel=None):
            return f"{method.value} of all"
        case net.Pooling(method=method, kernel=kernel, stride=stride, pad=pad) if kernel is not None:
            return f"{method.value} {_window(kernel, stride, pad)}"
        case net.LRN(local_size=size, within=within):
            return f"{size}x{size} within" if within else f"over {size} channels"
        case net.Dropout(ratio=ratio):
            return f"{ratio:g}"
        case net.Eltwise(operation=operation):
            return operation.value
        case net.SoftmaxWithLoss(loss_weight=weight):
            return f"weight {weight:g}"
        case net.Accuracy(top_k=top_k):
            return f"top {top_k}"
    return ""


def _pair(pair: net.Pair) -> str:
    return f"{pair[0]}" if pair[0] == pair[1] else f"{pair[0]}x{pair[1]}"


def _window(kernel: net.Pair, stride: net.Pair, pad: net.Pair) -> str:
    return (
        f"{kernel[0]}x{kernel[1]}"
        + f" / {_pair(stride)}" * (stride != (1, 1))
        + f", pad {_pair(pad)}" * (pad != (0, 0))
    )
