"""One function and one row of LAYERS for each type of layer: its settings, the shapes of its tops and its parameters.

A function gets the layer as written and its bottoms' shapes, and adds what is wrong to the problems. None: nothing is known of
its tops. The formulas for sizes are Caffe's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from stagerun.base import net
from stagerun.language.net.given import Dims, Given, Made, NewBlob, Size, filler, text, volume
from stagerun.language.net.upgrade import top_shapes
from stagerun.language.tree import Block
from stagerun.language.view import View

FILLERS = ("constant", "gaussian", "uniform", "xavier", "msra", "positive_unitball", "bilinear")
IMAGES = ("Data", "ImageData", "DummyData", "Input")
Make = Callable[[Given], Made | None]


@dataclass(frozen=True, slots=True)
class Row:
    """`bottoms`, `tops`: least and most of them. `in_place`: a top may be the bottom."""

    make: Make
    bottoms: tuple[int, int] = (1, 1)
    tops: tuple[int, int] = (1, 1)
    in_place: bool = False


MANY = 1_000


def images(given: Given) -> Made:
    """Of Input and DummyData the shapes are written; of the others `resolve` knows the images'."""
    found: list[Dims | None] = [None] * given.tops
    for i, dims in enumerate(top_shapes(given.block)[: given.tops]):
        found[i] = dims[1:] if len(dims) > 2 or (len(dims) == 2 and dims[1] != 1) else ()
    return Made(net.Images(), tuple(found))


# -- convolutions, pooling


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
            given.wrong(view, f"{short}_{given_sides[0]}", f"`{short}_h` and `{short}_w` are given together alone")
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


@dataclass(frozen=True, slots=True)
class Window:
    kernel: net.Pair
    stride: net.Pair
    pad: net.Pair
    dilation: net.Pair = (1, 1)

    @property
    def extent(self) -> net.Pair:
        """Of the kernel with its holes."""
        (h, w), (dh, dw) = self.kernel, self.dilation
        return dh * (h - 1) + 1, dw * (w - 1) + 1


def _window(given: Given, view: View) -> Window | None:
    kernel = _pair(given, view, "kernel_size", "kernel", None)
    stride, pad = _pair(given, view, "stride", "stride", 1), _pair(given, view, "pad", "pad", 0)
    holes = "dilation" in view.block.kind.fields_by_name
    dilation = _pair(given, view, "dilation", "dilation", 1) if holes else (1, 1)
    if kernel is None or stride is None or pad is None or dilation is None:
        return None
    for name, pair in (("kernel_size", kernel), ("stride", stride), ("dilation", dilation)):
        if 0 in pair:
            given.wrong(view, name, f"`{name}` must be at least 1")
            return None
    return Window(kernel, stride, pad, dilation)


def _fitting(given: Given, view: View, dims: Dims, sizes: tuple[Size, ...], extent: net.Pair) -> bool:
    if all(n is None or n > 0 for n in sizes):
        return True
    given.wrong(
        view,
        "kernel_size",
        f"a kernel of {text(extent)} is larger than bottom {given.bottoms[0]}, {text(dims[1:])}, with its pad",
    )
    return False


def convolution(given: Given) -> Made | None:
    return _convolution(given, transposed=False)


def deconvolution(given: Given) -> Made | None:
    return _convolution(given, transposed=True)


def _convolution(given: Given, transposed: bool) -> Made | None:
    view = given.inside("convolution_param")
    outputs, group, window = _outputs(given, view), view.whole("group") or 0, _window(given, view)
    dims = given.rank(3, "a convolution takes channels, height and width")
    if view.whole("axis") != 1:
        given.wrong(view, "axis", "`axis` other than 1: a convolution here is one over height and width")
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
    return Made(settings, ((outputs, *sizes),), _weights(given, view, (inputs, per_group, *window.kernel), outputs))


def _convolved(size: Size, side: int, window: Window, transposed: bool) -> Size:
    if size is None:
        return None
    stride, pad, extent = window.stride[side], window.pad[side], window.extent[side]
    return stride * (size - 1) + extent - 2 * pad if transposed else (size + 2 * pad - extent) // stride + 1


def _outputs(given: Given, view: View) -> int | None:
    count = view.whole("num_output")
    if not count:
        given.wrong(view, "num_output", "`num_output` must be at least 1", "say how many outputs the layer has")
        return None
    return count


def _grouped(given: Given, view: View, dims: Dims | None, outputs: int, group: int) -> bool:
    if group < 1:
        given.wrong(view, "group", "`group` must be at least 1")
        return False
    fine = True
    if dims is not None and dims[0] is not None and dims[0] % group:
        given.wrong(
            view, "group", f"bottom {given.bottoms[0]} has {dims[0]} channels, group {group} does not divide it"
        )
        fine = False
    if outputs % group:
        given.wrong(view, "group", f"`num_output: {outputs}`, and group {group} does not divide it")
        fine = False
    return fine


def _weights(given: Given, view: View, weight: Dims, outputs: int, bias: bool | None = None) -> tuple[NewBlob, ...]:
    """The weight, and the bias where the layer has one."""
    found = [NewBlob("weight", weight, _filler(given, view, "weight_filler"))]
    if view.flag("bias_term") if bias is None else bias:
        found.append(NewBlob("bias", (outputs,), _filler(given, view, "bias_filler")))
    return tuple(found)


def _filler(given: Given, view: View, field: str, value: float = 0.0) -> net.Filler:
    """`value`: that of a filler that is not written."""
    written = view.inside(field)
    found = filler(written, "constant", value)
    if found.type not in FILLERS:
        given.wrong(written, "type", f"there is no filler `{found.type}`", f"known: {', '.join(FILLERS)}")
    return found


def pooling(given: Given) -> Made | None:
    view, dims = given.inside("pooling_param"), given.rank(3, "a pooling takes channels, height and width")
    whole, method = view.flag("global_pooling"), view.text("pool") or ""
    if method == "STOCHASTIC":
        given.wrong(view, "pool", "`STOCHASTIC` is not built", "MAX and AVE are")
        return None
    settings = {"method": net.Method(method), "ceil": view.text("round_mode") == "CEIL"}
    if whole:
        if any(view.has(name) for name in ("kernel_size", "kernel_h", "kernel_w")):
            given.wrong(
                view,
                "global_pooling",
                "`global_pooling` takes the whole map, and a kernel is given",
                "take one of them out",
            )
            return None
        channels = dims[0] if dims is not None else None
        return Made(net.Pooling(kernel=None, **settings), ((channels, 1, 1),))  # type: ignore[arg-type]
    window = _window(given, view)
    if window is None:
        return None
    if any(p >= k for p, k in zip(window.pad, window.kernel, strict=True)):
        given.wrong(view, "pad", f"a pad of {text(window.pad)} is not smaller than the kernel, {text(window.kernel)}")
        return None
    channels, *sides = dims if dims is not None else (None, None, None)
    sizes = tuple(_pooled(n, i, window, bool(settings["ceil"])) for i, n in enumerate(sides))
    if dims is not None and not _fitting(given, view, dims, sizes, window.kernel):
        return None
    made = net.Pooling(kernel=window.kernel, stride=window.stride, pad=window.pad, **settings)  # type: ignore[arg-type]
    return Made(made, ((channels, *sizes),))


def _pooled(size: Size, side: int, window: Window, ceil: bool) -> Size:
    """Caffe's rule: the last window may reach beyond the map, and with a pad it has to start within map and pad before it."""
    if size is None:
        return None
    kernel, stride, pad = window.kernel[side], window.stride[side], window.pad[side]
    room = size + 2 * pad - kernel
    out = (-(-room // stride) if ceil else room // stride) + 1
    return out - 1 if pad and (out - 1) * stride >= size + pad else out


# -- linear layers


def inner_product(given: Given) -> Made | None:
    view, dims = given.inside("inner_product_param"), given.first
    outputs, transpose = _outputs(given, view), view.flag("transpose")
    axis = 1 if dims is None else given.axis(view, "axis", dims) if dims else 1
    if outputs is None or axis is None:
        return None
    inputs = None if dims is None else volume(dims[axis - 1 :])
    weight = (inputs, outputs) if transpose else (outputs, inputs)
    top = (outputs,) if dims is None else (*dims[: axis - 1], outputs)
    return Made(net.InnerProduct(axis=axis, transpose=transpose), (top,), _weights(given, view, weight, outputs))


def scale(given: Given) -> Made | None:
    """The weight starts at 1. One of MKL-DNN's BatchNorm before it: `resolve` gives it that filler."""
    view = given.inside("scale_param")
    own = _own_blob(given, view)
    if own is None:
        return None
    axis, dims = own
    blobs = []
    if len(given.bottoms) == 1:
        blobs.append(NewBlob("weight", dims, _filler(given, view, "filler", 1.0)))
    if view.flag("bias_term"):
        if len(given.bottoms) == 2:
            given.wrong(
                view, "bias_term", "`bias_term` with two bottoms: the bias would be of the images", "take it out"
            )
        blobs.append(NewBlob("bias", dims, _filler(given, view, "bias_filler")))
    return Made(net.Scale(axis=axis), (given.first,), tuple(blobs))


def bias(given: Given) -> Made | None:
    view = given.inside("bias_param")
    own = _own_blob(given, view)
    if own is None:
        return None
    axis, dims = own
    blobs = (NewBlob("bias", dims, _filler(given, view, "filler")),) if len(given.bottoms) == 1 else ()
    return Made(net.Bias(axis=axis), (given.first,), blobs)


def _own_blob(given: Given, view: View) -> tuple[int, Dims] | None:
    """The axis and the shape of what a Scale or Bias multiplies with or adds."""
    dims = given.first
    if len(given.bottoms) == 2:
        other, axis = given.dims[1], view.whole("axis") or 0
        if dims is None or other is None:
            return axis, ()
        if axis not in (0, -1 - len(dims)) or any(
            a is not None and b is not None and a != b for a, b in zip(dims, other, strict=False)
        ):
            hint = "" if axis == 0 else "write `axis: 0`: the second bottom is of the same images"
            given.wrong(
                view,
                "axis",
                f"bottom {given.bottoms[1]}, {text(other)}, does not fit {given.bottoms[0]}, {text(dims)}",
                hint,
            )
            return None
        return 0, ()
    if dims is None:
        return 1, (None,)
    axis_, count = given.axis(view, "axis", dims), view.whole("num_axes")
    if axis_ is None or count is None:
        return None
    if count < -1 or axis_ - 1 + count > len(dims):
        given.wrong(view, "num_axes", f"`num_axes: {count}` from axis {axis_} on is more than {text(dims)} has")
        return None
    return axis_, dims[axis_ - 1 :] if count == -1 else dims[axis_ - 1 : axis_ - 1 + count]


# -- normalisation


def lrn(given: Given) -> Made | None:
    view = given.inside("lrn_param")
    size, within = view.whole("local_size") or 0, view.text("norm_region") == "WITHIN_CHANNEL"
    dims = given.rank(3, "LRN takes channels, height and width")
    if size % 2 == 0:
        given.wrong(view, "local_size", f"`local_size: {size}` is not odd")
    numbers = {name: view.number(name) or 0.0 for name in ("alpha", "beta", "k")}
    return Made(net.LRN(local_size=size, within=within, **numbers), (dims,))


def merged(norm: Block) -> bool:
    """Whether a BatchNorm is Intel's with scale and shift: `use_weight_bias` is written, or more `param` than the three statistics'."""
    view = View(norm).inside("batch_norm_param")
    return len(list(norm.blocks("param"))) > 3 or (view.has("use_weight_bias") and view.flag("use_weight_bias"))


def batch_norm(given: Given) -> Made | None:
    view, dims = given.inside("batch_norm_param"), given.first
    channels: Dims = (None,) if dims is None else dims[:1]
    blobs: tuple[NewBlob, ...] = ()
    if merged(given.block):
        blobs = (NewBlob("weight", channels, _filler(given, view, "filler", 1.0)),)
        if view.flag("bias_term"):
            blobs += (NewBlob("bias", channels, _filler(given, view, "bias_filler")),)
    settings = net.BatchNorm(
        moving_average_fraction=view.number("moving_average_fraction") or 0.0,
        eps=view.number("eps") or 0.0,
        use_global_stats=view.flag("use_global_stats") if view.has("use_global_stats") else None,
    )
    return Made(settings, (dims,), blobs)


# -- functions of one value


def relu(given: Given) -> Made:
    return Made(net.ReLU(negative_slope=given.inside("relu_param").number("negative_slope") or 0.0), (given.first,))


def prelu(given: Given) -> Made:
    view, dims = given.inside("prelu_param"), given.first
    shared = view.flag("channel_shared")
    channels: Dims = () if shared else (None,) if dims is None else dims[:1]
    return Made(net.PReLU(), (dims,), (NewBlob("weight", channels, _filler(given, view, "filler", 0.25)),))


def elu(given: Given) -> Made:
    alpha = given.inside("elu_param").number("alpha")
    return Made(net.ELU(alpha=1.0 if alpha is None else alpha), (given.first,))


def sigmoid(given: Given) -> Made:
    return Made(net.Sigmoid(), (given.first,))


def tanh(given: Given) -> Made:
    return Made(net.TanH(), (given.first,))


def power(given: Given) -> Made:
    view = given.inside("power_param")
    numbers = {name: view.number(name) or 0.0 for name in ("power", "scale", "shift")}
    return Made(net.Power(**numbers), (given.first,))


def dropout(given: Given) -> Made:
    view = given.inside("dropout_param")
    ratio = view.number("dropout_ratio") or 0.0
    if not 0 < ratio < 1:
        given.wrong(view, "dropout_ratio", f"`dropout_ratio: {ratio:g}` is not between 0 and 1")
    return Made(net.Dropout(ratio=ratio), (given.first,))


# -- maps put together and taken apart


def concat(given: Given) -> Made | None:
    view = given.inside("concat_param")
    known = [(name, dims) for name, dims in zip(given.bottoms, given.dims, strict=True) if dims is not None]
    if len(known) < len(given.dims):
        return None
    first_name, first = known[0]
    axis = given.axis(view, "axis", first, "concat_dim")
    if axis is None:
        return None
    at = axis - 1
    for name, dims in known[1:]:
        if len(dims) != len(first) or not _alike(dims[:at] + dims[at + 1 :], first[:at] + first[at + 1 :]):
            given.fail(f"bottom {name}, {text(dims)}, and {first_name}, {text(first)}, differ beside axis {axis}")
            return None
    sizes = [dims[at] for _, dims in known]
    total = sum(n for n in sizes if n is not None) if None not in sizes else None
    others = [next((d[i] for _, d in known if d[i] is not None), None) for i in range(len(first))]
    return Made(net.Concat(axis=axis), ((*others[:at], total, *others[at + 1 :]),))


def _alike(one: Dims, other: Dims) -> bool:
    return len(one) == len(other) and all(a is None or b is None or a == b for a, b in zip(one, other, strict=True))


def slice_(given: Given) -> Made | None:
    view, dims = given.inside("slice_param"), given.first
    if dims is None:
        return None
    axis = given.axis(view, "axis", dims, "slice_dim")
    size = dims[axis - 1] if axis is not None else None
    if axis is None or size is None:
        return None
    points = [int(n) for n in view.numbers("slice_point")]
    if points and len(points) != given.tops - 1:
        given.wrong(
            view, "slice_point", f"{len(points)} `slice_point` for {given.tops} tops", "give one fewer than tops"
        )
        return None
    if not points and size % given.tops:
        given.wrong(view, "axis", f"{given.tops} tops don't divide {size} evenly", "give `slice_point`")
        return None
    edges = [0, *(points or [size // given.tops * i for i in range(1, given.tops)]), size]
    sizes = tuple(b - a for a, b in pairwise(edges))
    if min(sizes) < 1:
        given.wrong(view, "slice_point", f"the points don't ascend between 0 and {size}")
        return None
    return Made(net.Slice(axis=axis, sizes=sizes), tuple((*dims[: axis - 1], n, *dims[axis:]) for n in sizes))


def split(given: Given) -> Made:
    return Made(net.Split(), (given.first,) * given.tops)


def eltwise(given: Given) -> Made | None:
    view = given.inside("eltwise_param")
    operation, coeff = net.Operation(view.text("operation")), view.numbers("coeff")
    if coeff and operation is not net.Operation.SUM:
        given.wrong(view, "coeff", f"`coeff` is for SUM, not for {operation.value}", "take it out")
    elif coeff and len(coeff) != len(given.bottoms):
        given.wrong(view, "coeff", f"{len(coeff)} `coeff` for {len(given.bottoms)} bottoms", "give one for each")
    for name, dims in zip(given.bottoms[1:], given.dims[1:], strict=True):
        if dims is not None and given.first is not None and not _alike(dims, given.first):
            given.fail(f"bottom {name} is {text(dims)}, and {given.bottoms[0]} is {text(given.first)}")
            return None
    known = next((dims for dims in given.dims if dims is not None and None not in dims), given.first)
    return Made(net.Eltwise(operation=operation, coeff=tuple(float(c) for c in coeff)), (known,))


def flatten(given: Given) -> Made | None:
    view, dims = given.inside("flatten_param"), given.first
    if dims is None:
        return None
    start, end = given.axis(view, "axis", dims), given.axis(view, "end_axis", dims)
    if start is None or end is None:
        return None
    if end < start:
        given.wrong(view, "end_axis", f"`end_axis` is before axis {start}")
        return None
    return Made(net.Reshape(), ((*dims[: start - 1], volume(dims[start - 1 : end]), *dims[end:]),))


def reshape(given: Given) -> Made | None:
    """With the images' axis, of which nothing is known but that it stays: `?` stands for it."""
    view, dims = given.inside("reshape_param"), given.first
    if dims is None:
        return None
    wanted = [int(n) for n in view.inside("shape").numbers("dim")]
    start, count = view.whole("axis") or 0, view.whole("num_axes")
    rank = len(dims) + 1
    start = start + rank + 1 if start < 0 else start
    end = rank if count is None or count == -1 else start + count
    if not 0 <= start <= end <= rank:
        given.wrong(view, "axis", f"the axes of {text(dims)} are 1 to {len(dims)}")
        return None
    around: tuple[Size, ...] = (IMAGE, *dims)
    new = [*around[:start], *(_copied(n, around, start + i) for i, n in enumerate(wanted)), *around[end:]]
    if new.count(INFER) > 1 or BAD in new:
        message = "more than one `dim: -1`" if BAD not in new else "a `dim: 0` copies an axis that the bottom has not"
        given.wrong(view, "shape", message)
        return None
    return _reshaped(given, view, dims, new)


IMAGE, INFER, BAD = -3, -1, -2


def _copied(size: int, around: tuple[Size, ...], at: int) -> Size:
    if size == 0:
        return around[at] if at < len(around) else BAD
    return size if size >= -1 else BAD


def _reshaped(given: Given, view: View, dims: Dims, new: list[Size]) -> Made | None:
    """The top, where the images' axis stays the first."""
    total = volume(dims)
    inner = new[1:]
    if new and new[0] == INFER and total is not None and volume(tuple(inner)) == total:
        new[0] = IMAGE
    if not new or new[0] != IMAGE or IMAGE in inner:
        given.wrong(view, "shape", "the first axis is that of the images, and has to stay", "begin with `dim: 0`")
        return None
    if INFER in inner:
        at = inner.index(INFER)
        rest = volume(tuple(inner[:at] + inner[at + 1 :]))
        if total is None or rest is None:
            inner[at] = None
        elif rest == 0 or total % rest:
            given.wrong(view, "shape", f"{total} values of {text(dims)} can't be put in `-1` x {rest}")
            return None
        else:
            inner[at] = total // rest
    now = volume(tuple(inner))
    if now is not None and total is not None and now != total:
        given.wrong(view, "shape", f"{text(tuple(inner))} has {now} values, and bottom {given.bottoms[0]} has {total}")
        return None
    return Made(net.Reshape(), (tuple(inner),))


def silence(given: Given) -> Made:
    return Made(net.Silence(), ())


# -- outputs


def softmax(given: Given) -> Made | None:
    view, dims = given.inside("softmax_param"), given.first
    axis = 1 if dims is None else given.axis(view, "axis", dims)
    return None if axis is None else Made(net.Softmax(axis=axis), (dims,))


def softmax_with_loss(given: Given) -> Made | None:
    loss = given.inside("loss_param")
    if given.inside("softmax_param").whole("axis") != 1:
        given.wrong(given.inside("softmax_param"), "axis", "the classes are along axis 1")
    _labels(given)
    weights = View(given.block).numbers("loss_weight")
    if weights and len(weights) != max(1, given.tops):
        given.wrong(View(given.block), "loss_weight", f"{len(weights)} `loss_weight` for {given.tops} tops")
    if len(weights) > 1 and weights[1]:
        given.wrong(View(given.block), "loss_weight", "the second top is no loss", "write `loss_weight: 0`")
    if loss.has("normalization") or not loss.has("normalize"):
        normalization = net.Normalization(loss.text("normalization"))
    else:
        normalization = net.Normalization.VALID if loss.flag("normalize") else net.Normalization.BATCH_SIZE
    settings = net.SoftmaxWithLoss(
        loss_weight=float(weights[0]) if weights else 1.0,
        ignore_label=loss.whole("ignore_label"),
        normalization=normalization,
        pre_fixed_normalizer=loss.number("pre_fixed_normalizer") or 1.0,
        label_smoothing=loss.number("label_smoothing") or 0.0,
    )
    return Made(settings, ((), given.first)[: given.tops])


def accuracy(given: Given) -> Made | None:
    view = given.inside("accuracy_param")
    top_k, dims = view.whole("top_k") or 0, given.first
    _labels(given)
    if view.whole("axis") != 1:
        given.wrong(view, "axis", "the classes are along axis 1")
    if not top_k or (dims and dims[0] is not None and top_k > dims[0]):
        given.wrong(view, "top_k", f"`top_k: {top_k}` of {dims[0] if dims else 0} classes")
    return Made(net.Accuracy(top_k=top_k, ignore_label=view.whole("ignore_label")), ((), None)[: given.tops])


def _labels(given: Given) -> None:
    labels = given.dims[1]
    if labels and (volume(labels) or 1) != 1:
        given.fail(f"bottom {given.bottoms[1]}, {text(labels)}, is no label", "the labels are the second bottom")


LAYERS: dict[str, Row] = {
    **{name: Row(images, (0, 0), (1, 2 if name in ("Data", "ImageData") else MANY)) for name in IMAGES},
    "Convolution": Row(convolution),
    "Deconvolution": Row(deconvolution),
    "Pooling": Row(pooling),
    "InnerProduct": Row(inner_product),
    "LRN": Row(lrn),
    "BatchNorm": Row(batch_norm, in_place=True),
    "Scale": Row(scale, (1, 2), in_place=True),
    "Bias": Row(bias, (1, 2), in_place=True),
    "ReLU": Row(relu, in_place=True),
    "PReLU": Row(prelu, in_place=True),
    "ELU": Row(elu, in_place=True),
    "Sigmoid": Row(sigmoid, in_place=True),
    "TanH": Row(tanh, in_place=True),
    "Power": Row(power, in_place=True),
    "Dropout": Row(dropout, in_place=True),
    "Concat": Row(concat, (1, MANY)),
    "Slice": Row(slice_, tops=(1, MANY)),
    "Split": Row(split, tops=(1, MANY)),
    "Eltwise": Row(eltwise, (2, MANY), in_place=True),
    "Flatten": Row(flatten),
    "Reshape": Row(reshape),
    "Silence": Row(silence, (1, MANY), (0, 0)),
    "Softmax": Row(softmax),
    "SoftmaxWithLoss": Row(softmax_with_loss, (2, 2), (0, 2)),
    "Accuracy": Row(accuracy, (2, 2), (1, 2)),
}
