"""One snapshot as a file for other programs, and what must be known to use it: `stagerun export`."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import stagerun
from stagerun.base.code import Sources
from stagerun.base.errors import UsageError
from stagerun.base.recipe import Model, PadMode, Precision, Transform
from stagerun.base.text import count, listed
from stagerun.base.wings import require_wing
from stagerun.engine.device import dtype_of
from stagerun.engine.state import restore
from stagerun.language.networks import TIMM, TORCHVISION, code_in, from_outside, known_of, network_of
from stagerun.models.catalog import ARGUMENTS
from stagerun.models.foreign import arguments_for, timms_arguments
from stagerun.system.code import function_of
from stagerun.tools.weights.formats import (
    Deployed,
    Format,
    Pixels,
    for_rgb,
    pixels_of,
    to_onnx,
    to_safetensors,
    to_torch,
)
from stagerun.tools.weights.stored import Stored, load_network, saved_weights

_MENDED = "import stagerun.models.torchvision  # only where `import torchvision` fails: beside a CPU build of torch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """`file`: its name. `side` of the images that an ONNX graph takes, in pixels; default: the evaluation's crop_size."""

    format: Format
    file: str
    ema: bool = False
    rgb: bool = False
    side: int | None = None


def export(stored: Stored, wanted: Wanted) -> tuple[bytes, list[str]]:
    """The file, and what its user must know, a line each. UsageError, ResumeRefused."""
    model, transform = stored.stage.model, stored.stage.solver.test_transform
    if wanted.rgb and model.channels != 3:
        raise UsageError(
            f"--rgb, but the network takes images of {count(model.channels, 'channel')}", "leave --rgb out"
        )
    side = _side(stored, wanted) if wanted.format is Format.ONNX else None
    if side is not None and transform.mean_file is not None:
        text = "--onnx: the graph normalises with a mean for each channel, and this network has a `mean_file`"
        raise UsageError(text, "export with --safetensors, and take the mean image off before")
    network = load_network(stored, torch.device("cpu"), wanted.ema)
    weights = saved_weights(stored, wanted.ema)
    pixels = pixels_of(transform, model.channels, wanted.rgb)
    if pixels.turned:
        weights = for_rgb(weights, network)
        restore(dict(network.state_dict()), weights)
    facts = facts_of(stored, wanted, side)
    lines = [f"{name}: {facts[name]}" for name in ("input", "before", "output") if facts[name]] + _mean_line(transform)
    if side is not None:
        return to_onnx(Deployed(network, pixels), model.channels, side, facts), lines
    data = to_torch(weights) if wanted.format is Format.TORCH else to_safetensors(weights, facts)
    return data, [*lines, in_torchvision(model), "to load it:", *(f"  {line}" for line in loading(model, wanted))]


def for_caffe(
    stored: Stored, paths: Sequence[Path], ema: bool, rgb: bool, double: bool
) -> tuple[list[bytes], list[str]]:
    """The .caffemodel, with a second path the .solverstate, and what their user must know. UsageError, ResumeRefused."""
    model = stored.stage.model
    network = load_network(stored, torch.device("cpu"), ema)
    weights = saved_weights(stored, ema)
    pixels = pixels_of(stored.stage.solver.test_transform, model.channels, rgb)
    if pixels.turned:
        weights = for_rgb(weights, network)
    files = [require_wing("caffe.export.caffemodel")(model, weights, double, goes_on=len(paths) > 1)]
    if len(paths) > 1:
        state = require_wing("caffe.export.solverstate")
        files.append(state(stored.stage, stored.files, stored.ref.iter, str(paths[0]), double))
    lines = [f"input: {pixels.order}: (0..255 - {_list(pixels.means)}) * {_list(pixels.factors)}"]
    lines += _mean_line(stored.stage.solver.test_transform)
    if stored.stage.solver.precision is Precision.FP64 and not double:
        lines.append("32 bits of each number; --double writes 64")
    return files, lines


def _mean_line(transform: Transform) -> list[str]:
    return [f"mean: that of each pixel in {transform.mean_file}, first of all"] * (transform.mean_file is not None)


def _side(stored: Stored, wanted: Wanted) -> int:
    model, transform = stored.stage.model, stored.stage.solver.test_transform
    side = wanted.side or transform.crop_size
    if side is None:
        text = "an ONNX graph has images of one size, and the evaluation's transform has no crop_size to take it from"
        raise UsageError(text, "give --size N, the side of the images in pixels")
    if not known_of(model).fits(side, side):
        raise UsageError(
            f"`{model.name}` takes images of {known_of(model).sizes}, not {side} x {side}", "give another --size"
        )
    return side


def facts_of(stored: Stored, wanted: Wanted, side: int | None) -> dict[str, str]:
    """What goes into the file's metadata, as text. `side` for ONNX."""
    model, transform = stored.stage.model, stored.stage.solver.test_transform
    if side is not None and transform.crop_size is not None:
        transform = replace(transform, crop_size=side, rectangular=False)
    pixels = pixels_of(transform, model.channels, wanted.rgb)
    # The graph computes in 32 bits, whatever the network was trained in.
    dtype = "float32" if side is not None else str(dtype_of(stored.stage.solver.precision)).removeprefix("torch.")
    return {
        "stagerun": stagerun.__version__,
        "schedule": stored.schedule.name,
        "stage": stored.ref.stage,
        "iter": str(stored.ref.iter),
        "snapshot": stored.ref.name,
        "snapshot_id": stored.ref.id,
        "weights": "averaged" if wanted.ema else "trained",
        "precision": stored.stage.solver.precision.value,
        "model": model.name,
        "num_classes": str(model.num_classes),
        "channels": str(model.channels),
        "channel_order": pixels.order,
        "mean_value": ", ".join(f"{v!r}" for v in pixels.means),
        "scale": repr(transform.scale),
        "std_value": ", ".join(f"{v!r}" for v in pixels.stds),
        "crop_size": "" if transform.crop_size is None else str(transform.crop_size),
        "batch_norm_eps": "" if known_of(model).batch_norm is None or model.eps is None else repr(model.eps),
        "blur_pool": "true" if model.blur_pool else "false",
        "input": _input(model, pixels, dtype) if side is None else _bytes(model, pixels.order, side),
        "before": _before(transform),
        "output": f"logits {dtype} [N, {model.num_classes}]",
        **({"net": model.net} if model.net is not None else {}),
    }


def _bytes(model: Model, order: str, side: int) -> str:
    """What an ONNX graph takes."""
    return f"uint8 [N, {side}, {side}, {model.channels}], {order}, 0..255; the normalisation is in the graph"


def _input(model: Model, pixels: Pixels, dtype: str) -> str:
    mean = _list(pixels.means)
    # Normalize takes values of 0..1: (v/255 - mean/255) / (std/(255 scale)) = (v - mean) * scale / std.
    shown = [_list(v / 255 for v in pixels.means), _list(1 / (255 * f) for f in pixels.factors)]
    divided = f" / {_list(pixels.stds)}" if any(std != 1.0 for std in pixels.stds) else ""
    return (
        f"{dtype} [N, {model.channels}, H, W], {pixels.order}: (0..255 - {mean}) * {pixels.scale:.9g}{divided}, which torchvision "
        f"writes as Normalize(mean={shown[0]}, std={shown[1]}) of 0..1"
    )


def _list(values: Iterable[float]) -> str:
    return f"[{', '.join(f'{v:.9g}' for v in values)}]"


def _before(transform: Transform) -> str:
    """What an evaluation does to an image first; nothing if it takes it as it is."""
    steps = []
    if transform.pad:
        what = "the mirrored image" if transform.pad_mode is PadMode.REFLECT else "zeros"
        steps.append(f"{transform.pad} pixels of {what} on each side")
    if (resize := transform.random_resize) is not None:
        steps.append(f"shorter side resized to {resize.min_size} ({resize.interp_mode.value})")
    if transform.rectangular:
        steps.append(f"a rectangle of about its own shape cut from the centre, shorter side {transform.crop_size}")
    elif transform.crop_size is not None:
        steps.append(f"{transform.crop_size} x {transform.crop_size} cut from the centre")
    return ", ".join(steps)


def loading(model: Model, wanted: Wanted) -> list[str]:
    """The lines of Python that make the network of the file."""
    if model.net is not None:
        made = f"net = build(net_of(text, {model.input_shape}))"
        lines = [*_text_of_net(model, wanted), "from stagerun.caffe.network import build", made]
    elif model.name in TORCHVISION and in_torchvision(model).startswith("the weights"):
        network = in_torchvision(model).removeprefix("the weights are those of ")
        lines = [_MENDED, "import torchvision", f"net = {network}"]
    elif from_outside(model):
        lines = _foreign(model)
    else:
        arguments = [
            f"{name}={getattr(model, name)!r}" for name in ("name", "num_classes", "channels", "eps", "blur_pool")
        ]
        lines = [
            "from stagerun.models import build",
            "from stagerun.base.recipe import Model",
            f"net = build(Model({', '.join(arguments)}))",
        ]
    if wanted.format is Format.TORCH:
        lines += ["import torch", f"net.load_state_dict(torch.load({wanted.file!r}, weights_only=True))"]
    else:
        lines += ["from safetensors.torch import load_file", f"net.load_state_dict(load_file({wanted.file!r}))"]
    return [*lines, "net.eval()"]


def _text_of_net(model: Model, wanted: Wanted) -> list[str]:
    """The net as it was trained: from the metadata; a .pth has none, and the prototxt may be another one by now."""
    lines = ["from stagerun.caffe.resolve import net_of"]
    if wanted.format is Format.TORCH:
        return ["from pathlib import Path", *lines, f"text = Path({model.name!r}).read_text()  # as it was then"]
    read = f"text = safe_open({wanted.file!r}, 'pt').metadata()['net']"
    return ["from safetensors import safe_open", *lines, read]


def _foreign(model: Model) -> list[str]:
    code = code_in(model.name)
    assert code is not None
    if model.name.startswith(TIMM):
        words, given = [repr(model.name.removeprefix(TIMM))], timms_arguments(model)
    else:
        words, given = [], arguments_for(function_of(code, model.sources or Sources()), model)
    words += [f"{name}={value!r}" for name, value in given.items()]
    mended = [_MENDED] if model.name.startswith(TIMM) else []  # timm imports torchvision
    return [*mended, f"from {code.module} import {code.function}", f"net = {code.function}({', '.join(words)})"]


def in_torchvision(model: Model) -> str:
    """Which network of torchvision takes the weights, or why none does."""
    if model.net is not None:
        return f"the weights are those of `{model.name}`: --caffemodel writes them for Caffe"
    if from_outside(model):
        return f"the weights are those of the network that `{model.name}` makes"
    if model.name not in TORCHVISION:
        return f"torchvision has no network for these weights: `{model.name}` is stagerun's"
    published = network_of(model.name).batch_norm
    other = []
    if model.channels != 3:
        other.append(f"{count(model.channels, 'channel')} in place of 3")
    if model.blur_pool:
        other.append("blur_pool")
    if published is not None and model.eps != published[1]:
        other.append(f"a BatchNorm eps of {model.eps:g} in place of {published[1]:g}")
    if other:
        return f"torchvision's `{model.name}` is another network: this one has {listed(other)}"
    more = "".join(f", {name}={value}" for name, value in ARGUMENTS.get(model.name, {}).items())
    call = f"torchvision.models.get_model({model.name!r}, num_classes={model.num_classes}{more})"
    return f"the weights are those of {call}"
