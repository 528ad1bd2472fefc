"""Layers that move a window over height and width, join maps, split them or reshape them."""

from itertools import pairwise
from math import prod

from stagerun.caffe.reading import MANY, MOST_AXES, Layer, Made, Reading, Settings, Shape, alike, text

Pair = tuple[int, int]  # (height, width)


# -- windows


class Convolution(Settings, param="convolution_param", types=("Convolution", "Deconvolution")):
    """Convolution, or Deconvolution if `transposed`. Blobs: the weight, and optionally the bias."""

    kernel: Pair
    stride: Pair = (1, 1)
    pad: Pair = (0, 0)
    dilation: Pair = (1, 1)
    group: int = 1
    transposed: bool = False

    @classmethod
    def read(cls, layer: Reading) -> Made | None:
        view, outputs, group = layer.view, layer.outputs(), layer.view.whole("group") or 0
        window = _window(layer)
        dims = layer.image("a convolution takes channels, height and width")
        if view.whole("axis") != 1:
            layer.wrong("axis", "`axis` other than 1: convolutions run over height and width", "take it out")
        if view.flag("relu"):
            layer.wrong("relu", "a merged ReLU is not built", 'take it out, and write a layer of `type: "ReLU"`')
        if dims is None or window is None or not _fits_groups(layer, dims[0], outputs, group):
            return None
        channels, *sides = dims
        made = cls(**window, group=group, transposed=layer.type == "Deconvolution")
        sizes = tuple(map(made.size, sides, made.stride, made.pad, made.extent))
        if not _has_window(layer, dims, sizes, made.extent):
            return None
        weight = (channels, outputs // group) if made.transposed else (outputs, channels // group)
        return Made(made, ((outputs, *sizes),), layer.weights((*weight, *made.kernel), (outputs,)))

    @property
    def extent(self) -> Pair:
        """Return the size of the kernel with its holes."""
        (h, w), (dh, dw) = self.kernel, self.dilation
        return dh * (h - 1) + 1, dw * (w - 1) + 1

    def size(self, size: int, stride: int, pad: int, extent: int) -> int:
        """Return the top's height or width."""
        if not size:
            return 0
        return stride * (size - 1) + extent - 2 * pad if self.transposed else (size + 2 * pad - extent) // stride + 1

    def multiply_adds(self, layer: Layer, bottom: Shape) -> int:
        """Count each weight once per position of the top, or of the bottom for a transposed convolution."""
        positions = bottom if self.transposed else layer.shapes[0]
        return prod(layer.blobs[0].shape) * prod(positions[1:])


class Pooling(Settings, param="pooling_param"):
    """Pooling. `method`: MAX or AVE. `kernel` is None for the whole map (`global_pooling`). `ceil`: Caffe's rounding; FLOOR is BVLC's
    later `round_mode`."""

    method: str
    kernel: Pair | None
    stride: Pair = (1, 1)
    pad: Pair = (0, 0)
    ceil: bool = True

    @classmethod
    def read(cls, layer: Reading) -> Made | None:
        view, dims = layer.view, layer.image("a pooling takes channels, height and width")
        if dims is None:
            return None
        channels, *sides = dims
        method, ceil = view.text("pool") or "", view.text("round_mode") == "CEIL"
        if method == "STOCHASTIC":
            layer.wrong("pool", "`STOCHASTIC` is not built", "MAX and AVE are")
            return None
        if view.flag("global_pooling"):
            if any(view.has(name) for name in ("kernel_size", "kernel_h", "kernel_w")):
                message = "`global_pooling` takes the whole map, and a kernel is set"
                layer.wrong("global_pooling", message, "take one of them out")
                return None
            return Made(cls(method=method, kernel=None, ceil=ceil), ((channels, 1, 1),))
        if (window := _window(layer)) is None:
            return None
        made, kernel = cls(**window, method=method, ceil=ceil), window["kernel"]
        if any(p > k // 2 for p, k in zip(made.pad, kernel, strict=True)):
            message = f"a pad of {text(made.pad)} is more than half the kernel, {text(kernel)}"
            layer.wrong("pad", message, "torch pools with half a window of padding at most")
            return None
        sizes = tuple(made.windows(side, n) if n else 0 for side, n in enumerate(sides))
        if not _has_window(layer, dims, sizes, kernel):
            return None
        windows = zip(sides, sizes, made.stride, made.pad, strict=True)
        if any(n and out and (out - 1) * stride >= n + pad for n, out, stride, pad in windows):
            message = f"the last window begins beyond bottom {layer.bottom()}, {text(tuple(sides))}"
            layer.wrong("stride", message, "take a `stride` no larger than the kernel, or `round_mode: FLOOR`")
            return None
        return Made(made, ((channels, *sizes),))

    def windows(self, side: int, size: int) -> int:
        """Return the number of windows along the height (side 0) or the width (1) of a map. With a pad on any side, the last window begins
        in the map, or in the pad before it.

        >>> Pooling(method="MAX", kernel=(1, 1), stride=(2, 2)).windows(0, 4)
        3
        >>> Pooling(method="MAX", kernel=(2, 2), stride=(2, 2), pad=(0, 1)).windows(0, 5)
        3
        """
        assert self.kernel is not None
        kernel, stride, pad = self.kernel[side], self.stride[side], self.pad[side]
        room = size + 2 * pad - kernel
        count = (-(-room // stride) if self.ceil else room // stride) + 1
        return count - (any(self.pad) and (count - 1) * stride >= size + pad)


# The field with one number or two for each part of a window, and its default. A kernel has none.
_WINDOW = {"kernel": ("kernel_size", 0), "stride": ("stride", 1), "pad": ("pad", 0), "dilation": ("dilation", 1)}


def _window(layer: Reading) -> dict[str, Pair] | None:
    """Return kernel, stride, pad and, if the message has it, dilation; None after a mistake."""
    fields = layer.view.block.kind.fields_by_name
    named = {part: _pair(layer, part, *row) for part, row in _WINDOW.items() if row[0] in fields}
    window = {part: pair for part, pair in named.items() if pair is not None}
    if len(window) < len(named):
        return None
    for part, pair in window.items():
        if part != "pad" and 0 in pair:
            field = _WINDOW[part][0]
            layer.wrong(field, f"`{field}` must be at least 1", f"write `{field}: 1`")
            return None
    return window


def _pair(layer: Reading, part: str, name: str, default: int) -> Pair | None:
    """Read a setting that is one number, two, or `part`_h and `part`_w; None after a mistake."""
    view = layer.view
    sides = [f"{part}_{side}" for side in "hw" if view.has(f"{part}_{side}")]
    values = [int(n) for n in view.numbers(name)]
    if sides and values:
        layer.wrong(name, f"both `{name}` and `{sides[0]}` are set", "take one of them out")
    elif len(sides) == 1 and part == "kernel":
        layer.wrong(sides[0], "`kernel_h` and `kernel_w` must be set together", "give the other one, too")
    elif sides:
        high, wide = (view.whole(f"{part}_{side}") for side in "hw")
        return default if high is None else high, default if wide is None else wide
    elif len(values) > 2:
        layer.wrong(name, f"`{name}` has {len(values)} values, and a map has two axes", "give one or two")
    elif values:
        return values[0], values[-1]
    elif part == "kernel":
        layer.wrong(name, f"`{name}` is missing", f"write `{name}: 3`")
    else:
        return default, default
    return None


def _fits_groups(layer: Reading, channels: int, outputs: int, group: int) -> bool:
    if group < 1:
        layer.wrong("group", "`group` must be at least 1", "take it out: 1 is the default")
        return False
    hint = "groups share channels and outputs evenly"
    if channels % group:
        message = f"bottom {layer.bottom()} has {channels} channels, group {group} does not divide it"
        layer.wrong("group", message, hint)
    if outputs % group:
        layer.wrong("group", f"`num_output: {outputs}`, and group {group} does not divide it", hint)
    return not (outputs % group or channels % group)


def _has_window(layer: Reading, dims: Shape, sizes: Shape, extent: Pair) -> bool:
    if all(n > 0 for n, side in zip(sizes, dims[1:], strict=True) if side):
        return True
    message = f"a kernel of {text(extent)} is larger than bottom {layer.bottom()}, {text(dims[1:])}, with its pad"
    layer.wrong("kernel_size", message, "are the images too small, or does an earlier layer shrink them too much?")
    return False


# -- whole maps


class Concat(Settings, param="concat_param", bottoms=(1, MANY)):
    axis: int = 1

    @classmethod
    def read(cls, layer: Reading) -> Made | None:
        first = layer.first
        if (axis := layer.axis(first, older="concat_dim")) is None:
            return None
        at = axis - 1
        for i, dims in enumerate(layer.dims):
            if len(dims) != len(first) or not alike(dims[:at] + dims[axis:], first[:at] + first[axis:]):
                other = f"{layer.bottom()}, {text(first)}"
                message = f"bottom {layer.bottom(i)}, {text(dims)}, and {other}, differ outside axis {axis}"
                layer.fail(message, "all other axes must be equal")
                return None
        sizes = [dims[at] for dims in layer.dims]
        top = list(map(max, *layer.dims, first))
        top[at] = 0 if 0 in sizes else sum(sizes)
        return Made(cls(axis=axis), (tuple(top),))


class Slice(Settings, param="slice_param", tops=(1, MANY)):
    """Cuts an axis into `parts`. `points`: the end of each part but the last; (): parts of equal size, for images of any size."""

    axis: int
    parts: int
    points: tuple[int, ...] = ()

    @classmethod
    def read(cls, layer: Reading) -> Made | None:
        dims, tops = layer.first, layer.tops
        if (axis := layer.axis(dims, older="slice_dim")) is None:
            return None
        size = dims[axis - 1]
        points = tuple(int(n) for n in layer.view.numbers("slice_point"))
        if points and len(points) != tops - 1:
            layer.wrong("slice_point", f"{len(points)} `slice_point` for {tops} tops", "give one fewer than tops")
            return None
        if not points and size % tops:
            layer.wrong("axis", f"{tops} tops don't divide {size} evenly", "give `slice_point`")
            return None
        edges = [0, *(points or [size // tops * i for i in range(1, tops)]), size]
        sizes = [b - a for a, b in pairwise(edges)] if size else [0] * tops
        if size and min(sizes) < 1:
            layer.wrong("slice_point", f"the points don't ascend between 0 and {size}", "each is the end of a top")
            return None
        shapes = tuple((*dims[: axis - 1], n, *dims[axis:]) for n in sizes)
        return Made(cls(axis=axis, parts=tops, points=points), shapes)


class Split(Settings, tops=(1, MANY)):
    """Copies the bottom to every top."""


class Silence(Settings, bottoms=(1, MANY), tops=(0, 0)):
    """Takes its bottoms and has no top."""


class Eltwise(Settings, param="eltwise_param", bottoms=(2, MANY), in_place=True):
    """Combines its bottoms. `operation`: PROD, SUM or MAX. `coeff`: SUM's factor for each bottom."""

    operation: str = "SUM"
    coeff: tuple[float, ...] = ()

    @classmethod
    def read(cls, layer: Reading) -> Made | None:
        operation, coeff = layer.view.text("operation") or "", layer.view.numbers("coeff")
        if coeff and operation != "SUM":
            layer.wrong("coeff", f"`coeff` is for SUM, not for {operation}", "take it out")
        elif coeff and len(coeff) != len(layer.bottoms):
            layer.wrong("coeff", f"{len(coeff)} `coeff` for {len(layer.bottoms)} bottoms", "give one for each")
        for i, dims in enumerate(layer.dims):
            if not alike(dims, layer.first):
                message = f"bottom {layer.bottom(i)} is {text(dims)}, and {layer.bottom()} is {text(layer.first)}"
                layer.fail(message, "they must be equal")
                return None
        shape = next((dims for dims in layer.dims if 0 not in dims), layer.first)
        return Made(cls(operation=operation, coeff=tuple(layer.single("coeff", c) for c in coeff)), (shape,))


# Markers in a new shape: the axis of the images, the axis that takes the rest, an axis that can't exist.
IMAGE, INFER, BAD = -3, -1, -2


class Reshape(Settings, param="reshape_param"):
    """Replaces the axes from `axis` on, except the last `behind`, by `sizes`. 0 copies the bottom's axis, -1 takes the rest, for images of
    any size."""

    axis: int
    sizes: tuple[int, ...] = (-1,)
    behind: int = 0

    @classmethod
    def read(cls, layer: Reading) -> Made | None:
        """Compute the new shape with the images' axis, whose size is unknown and must not change."""
        view, dims = layer.view, layer.first
        wanted = tuple(int(n) for n in view.inside("shape").numbers("dim"))
        start, count = view.whole("axis") or 0, view.whole("num_axes")
        around, total = (IMAGE, *dims), prod(dims)
        rank = len(around)
        start = start + rank + 1 if start < 0 else start
        end = rank if count is None or count == -1 else start + count
        if not 0 <= start <= end <= rank:
            layer.wrong("axis", f"the axes of {text(dims)} are 1 to {len(dims)}", "leave `axis` and `num_axes` out")
            return None
        copied = [(around[i] if i < rank else BAD) if n == 0 else max(n, BAD) for i, n in enumerate(wanted, start)]
        new = [*around[:start], *copied, *around[end:]]
        bad, inferred, inner = BAD in new, new.count(INFER), new[1:]
        if new[:1] == [INFER] and total and prod(inner) == total:  # the rest is the images
            new[0], wanted = IMAGE, (0, *wanted[1:])
        others = prod(n for n in inner if n != INFER)
        if INFER in inner:
            inner[inner.index(INFER)] = total // others if others else 0
        now = prod(inner)
        if len(new) > MOST_AXES:
            message, hint = f"a shape of {len(new)} axes", f"Caffe's have at most {MOST_AXES}"
        elif bad or inferred > 1:
            message = "a `dim: 0` copies an axis that the bottom lacks" if bad else "more than one `dim: -1`"
            hint = "`dim: 0` copies, one `dim: -1` takes the rest"
        elif new[:1] != [IMAGE] or IMAGE in inner:
            message, hint = "the first axis counts the images and must not change", "begin with `dim: 0`"
        elif INFER in new and others and total % others:
            message = f"{total} values of {text(dims)} can't be put in `-1` x {others}"
            hint = f"the other `dim` must divide {total}"
        elif 0 not in (now, total) and now != total:
            message = f"{text(tuple(inner))} has {now} values, and bottom {layer.bottom()} has {total}"
            hint = "write `dim: -1` for one of them"
        else:
            return Made(cls(axis=start, sizes=wanted, behind=rank - end), (tuple(inner),))
        layer.wrong("shape", message, hint)
        return None


class Flatten(Reshape, param="flatten_param"):
    @classmethod
    def read(cls, layer: Reading) -> Made | None:
        dims = layer.first
        start, end = layer.axis(dims), layer.axis(dims, "end_axis")
        if start is None or end is None:
            return None
        if end < start:
            layer.wrong("end_axis", f"`end_axis` is before axis {start}", "-1: the last one")
            return None
        top = (*dims[: start - 1], prod(dims[start - 1 : end]), *dims[end:])
        return Made(Reshape(axis=start, behind=len(dims) - end), (top,))
