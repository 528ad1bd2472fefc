"""Layers with weights and without a window: linear ones, scales, normalisation."""

from stagerun.base import net
from stagerun.language.net.blobs import filler_of, outputs_of, weights_of
from stagerun.language.net.given import Dims, Given, Made, NewBlob, text, volume
from stagerun.language.tree import Block
from stagerun.language.view import View


def inner_product(given: Given) -> Made | None:
    view, dims = given.inside("inner_product_param"), given.first
    outputs, transpose = outputs_of(given, view), view.flag("transpose")
    axis = 1 if dims is None else given.axis(view, "axis", dims) if dims else 1
    if outputs is None or axis is None:
        return None
    inputs = None if dims is None else volume(dims[axis - 1 :])
    weight = (inputs, outputs) if transpose else (outputs, inputs)
    top = (outputs,) if dims is None else (*dims[: axis - 1], outputs)
    return Made(net.InnerProduct(axis=axis, transpose=transpose), (top,), weights_of(given, view, weight, outputs))


def scale(given: Given) -> Made | None:
    """The weight starts at 1. One of MKL-DNN's BatchNorm before it: `resolve` gives it that filler."""
    view = given.inside("scale_param")
    own = _own_blob(given, view)
    if own is None:
        return None
    axis, dims = own
    blobs = []
    if len(given.bottoms) == 1:
        blobs.append(NewBlob("weight", dims, filler_of(given, view, "filler", dims, 1.0)))
    if view.flag("bias_term"):
        if len(given.bottoms) == 2:
            given.wrong(
                view, "bias_term", "`bias_term` with two bottoms: the bias would be of the images", "take it out"
            )
        blobs.append(NewBlob("bias", dims, filler_of(given, view, "bias_filler", dims)))
    return Made(net.Scale(axis=axis), (given.first,), tuple(blobs))


def bias(given: Given) -> Made | None:
    view = given.inside("bias_param")
    own = _own_blob(given, view)
    if own is None:
        return None
    axis, dims = own
    blobs = (NewBlob("bias", dims, filler_of(given, view, "filler", dims)),) if len(given.bottoms) == 1 else ()
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
            message = f"bottom {given.bottom(1)}, {text(other)}, does not fit {given.bottom()}, {text(dims)}"
            given.wrong(view, "axis", message, hint)
            return None
        return 0, ()
    if dims is None:
        return 1, (None,)
    axis_, count = given.axis(view, "axis", dims), view.whole("num_axes")
    if axis_ is None or count is None:
        return None
    if count < -1 or axis_ - 1 + count > len(dims):
        message = f"`num_axes: {count}` from axis {axis_} on is more than {text(dims)} has"
        given.wrong(view, "num_axes", message, "-1: all from `axis` on")
        return None
    return axis_, dims[axis_ - 1 :] if count == -1 else dims[axis_ - 1 : axis_ - 1 + count]


def lrn(given: Given) -> Made | None:
    view = given.inside("lrn_param")
    size, within = view.whole("local_size") or 0, view.text("norm_region") == "WITHIN_CHANNEL"
    dims = given.rank(3, "LRN takes channels, height and width")
    if size % 2 == 0:
        given.wrong(view, "local_size", f"`local_size: {size}` is not odd", "the value itself stands in the middle")
    numbers = {name: given.number(view, name) for name in ("alpha", "beta", "k")}
    hint = "a power is taken of `k` and `alpha` times a mean of squares"
    given.require(view, "alpha", numbers["alpha"], numbers["alpha"] >= 0, "at least 0", hint)
    given.require(view, "k", numbers["k"], numbers["k"] > 0 or within, "above 0", hint)
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
        blobs = (NewBlob("weight", channels, filler_of(given, view, "filler", channels, 1.0)),)
        if view.flag("bias_term"):
            blobs += (NewBlob("bias", channels, filler_of(given, view, "bias_filler", channels)),)
    fraction, eps = given.number(view, "moving_average_fraction"), given.number(view, "eps")
    hint = "it is the share of the statistics so far"
    given.require(view, "moving_average_fraction", fraction, 0 <= fraction <= 1, "between 0 and 1", hint)
    given.require(view, "eps", eps, eps > 0, "above 0", "a variance may be 0, and is divided by")
    settings = net.BatchNorm(
        moving_average_fraction=fraction,
        eps=eps,
        use_global_stats=view.flag("use_global_stats") if view.has("use_global_stats") else None,
    )
    return Made(settings, (dims,), blobs)


def prelu(given: Given) -> Made:
    view, dims = given.inside("prelu_param"), given.first
    shared = view.flag("channel_shared")
    channels: Dims = () if shared else (None,) if dims is None else dims[:1]
    return Made(net.PReLU(), (dims,), (NewBlob("weight", channels, filler_of(given, view, "filler", channels, 0.25)),))
