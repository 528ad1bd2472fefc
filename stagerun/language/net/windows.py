"""Layers that move a window over height and width: convolutions and pooling."""

from dataclasses import dataclass

from stagerun.base import net
from stagerun.language.net.blobs import outputs_of, weights_of
from stagerun.language.net.given import Dims, Given, Made, Size, text
from stagerun.language.view import View

DIVIDES = "groups share channels and outputs evenly"


@dataclass(frozen=True, slots=True)
class Window:
    kernel: net.Pair
    stride: net.Pair
    pad: net.Pair
    dilation: net.Pair = (1, 1)

    @property
    def extent(self) -> net.Pair:
        """The size of the kernel with its holes."""
        (h, w), (dh, dw) = self.kernel, self.dilation
        return dh * (h - 1) + 1, dw * (w - 1) + 1


def convolution(given: Given) -> Made | None:
    return _convolution(given, transposed=False)


def deconvolution(given: Given) -> Made | None:
    return _convolution(given, transposed=True)


def _convolution(given: Given, transposed: bool) -> Made | None:
    view = given.inside("convolution_param")
    outputs, group, window = outputs_of(given, view), view.whole("group") or 0, _window(given, view)
    dims = given.rank(3, "a convolution takes channels, height and width")
    if view.whole("axis") != 1:
        given.wrong(view, "axis", "`axis` other than 1: a convolution here is one over height and width", "take it out")
    if view.flag("relu"):
        given.wrong(view, "relu", "a merged ReLU is not built", 'take it out, and write a layer of `type: "ReLU"`')
    if outputs is None or window is None or not _grouped(given, view, dims, outputs, group):
        return None
    channels = dims[0] if dims is not None else None
    sizes = tuple(
        _convolved(n, i, window, transposed) for i, n in enumerate(dims[1:] if dims is not None else (None, None))
    )
    if dims is not None and not _fitting(given, view, dims, sizes, window.extent):
        return None
    inputs, per_group = (
        (channels, outputs // group) if transposed else (outputs, None if channels is None else channels // group)
    )
    settings = net.Convolution(
        kernel=window.kernel,
        stride=window.stride,
        pad=window.pad,
        dilation=window.dilation,
        group=group,
        transposed=transposed,
    )
    return Made(settings, ((outputs, *sizes),), weights_of(given, view, (inputs, per_group, *window.kernel), outputs))


def _convolved(size: Size, side: int, window: Window, transposed: bool) -> Size:
    if size is None:
        return None
    stride, pad, extent = window.stride[side], window.pad[side], window.extent[side]
    return stride * (size - 1) + extent - 2 * pad if transposed else (size + 2 * pad - extent) // stride + 1


def _grouped(given: Given, view: View, dims: Dims | None, outputs: int, group: int) -> bool:
    if group < 1:
        given.wrong(view, "group", "`group` must be at least 1", "take it out: 1 is the default")
        return False
    fine = True
    if dims is not None and dims[0] is not None and dims[0] % group:
        given.wrong(
            view, "group", f"bottom {given.bottom()} has {dims[0]} channels, group {group} does not divide it", DIVIDES
        )
        fine = False
    if outputs % group:
        given.wrong(view, "group", f"`num_output: {outputs}`, and group {group} does not divide it", DIVIDES)
        fine = False
    return fine


def pooling(given: Given) -> Made | None:
    view, dims = given.inside("pooling_param"), given.rank(3, "a pooling takes channels, height and width")
    whole, method = view.flag("global_pooling"), view.text("pool") or ""
    if method == "STOCHASTIC":
        given.wrong(view, "pool", "`STOCHASTIC` is not built", "MAX and AVE are")
        return None
    settings = {"method": net.Method(method), "ceil": view.text("round_mode") == "CEIL"}
    if whole:
        if any(view.has(name) for name in ("kernel_size", "kernel_h", "kernel_w")):
            message = "`global_pooling` takes the whole map, and a kernel is given"
            given.wrong(view, "global_pooling", message, "take one of them out")
            return None
        channels = dims[0] if dims is not None else None
        return Made(net.Pooling(kernel=None, **settings), ((channels, 1, 1),))  # type: ignore[arg-type]
    window = _window(given, view)
    if window is None:
        return None
    if any(p >= k for p, k in zip(window.pad, window.kernel, strict=True)):
        message = f"a pad of {text(window.pad)} is not smaller than the kernel, {text(window.kernel)}"
        given.wrong(view, "pad", message, "a window would see no value of the map")
        return None
    channels, *sides = dims if dims is not None else (None, None, None)
    made = net.Pooling(kernel=window.kernel, stride=window.stride, pad=window.pad, **settings)  # type: ignore[arg-type]
    sizes = tuple(None if n is None else net.windows(made, side, n) for side, n in enumerate(sides))
    if dims is not None and not _fitting(given, view, dims, sizes, window.kernel):
        return None
    if any(
        n and out and (out - 1) * s >= n + p
        for n, out, s, p in zip(sides, sizes, window.stride, window.pad, strict=True)
    ):
        message = f"the last window begins beyond bottom {given.bottom()}, {text(tuple(sides))}"
        given.wrong(view, "stride", message, "take a `stride` no larger than the kernel, or `round_mode: FLOOR`")
        return None
    return Made(made, ((channels, *sizes),))


def _window(given: Given, view: View) -> Window | None:
    kernel = _pair(given, view, "kernel_size", "kernel", None)
    stride, pad = _pair(given, view, "stride", "stride", 1), _pair(given, view, "pad", "pad", 0)
    holes = "dilation" in view.block.kind.fields_by_name
    dilation = _pair(given, view, "dilation", "dilation", 1) if holes else (1, 1)
    if kernel is None or stride is None or pad is None or dilation is None:
        return None
    for name, pair in (("kernel_size", kernel), ("stride", stride), ("dilation", dilation)):
        if 0 in pair:
            given.wrong(view, name, f"`{name}` must be at least 1", f"write `{name}: 1`")
            return None
    return Window(kernel, stride, pad, dilation)


def _pair(given: Given, view: View, name: str, short: str, default: int | None) -> net.Pair | None:
    """(height, width) of a setting that is one number, two, or `short`_h and `short`_w."""
    sides = [view.whole(f"{short}_{side}") for side in "hw"] if f"{short}_h" in view.block.kind.fields_by_name else []
    given_sides = [side for side in "hw" if sides and view.has(f"{short}_{side}")]
    several = view.block.kind.fields_by_name[name].is_repeated
    values = [int(n) for n in view.numbers(name)] if several else [view.whole(name) or 0] if view.has(name) else []
    if given_sides and values:
        given.wrong(view, name, f"both `{name}` and `{short}_{given_sides[0]}` are given", "take one of them out")
        return None
    if given_sides:
        if len(given_sides) == 1 and default is None:
            message = f"`{short}_h` and `{short}_w` are given together or not at all"
            given.wrong(view, f"{short}_{given_sides[0]}", message, "give the other one, too")
            return None
        fallback = default or 0
        height, width = (s if s is not None else fallback for s in sides)
        return height, width
    if len(values) > 2:
        given.wrong(view, name, f"`{name}` has {len(values)} values, and a map has two axes", "give one or two")
        return None
    if values:
        return values[0], values[-1]
    if default is None:
        given.wrong(view, name, f"`{name}` is missing", f"write `{name}: 3`")
        return None
    return default, default


def _fitting(given: Given, view: View, dims: Dims, sizes: tuple[Size, ...], extent: net.Pair) -> bool:
    if all(n is None or n > 0 for n in sizes):
        return True
    message = f"a kernel of {text(extent)} is larger than bottom {given.bottom()}, {text(dims[1:])}, with its pad"
    hint = "are the images too small, or does a layer before it shrink them too much?"
    given.wrong(view, "kernel_size", message, hint)
    return False
