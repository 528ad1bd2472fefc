"""LAYERS: a row for each type of layer, with the function that reads it.

A function gets the layer as written and its bottoms' shapes, and adds what is wrong to the problems. It gives the settings, the shapes of
the tops and the parameters; None: nothing is known of its tops. The formulas for sizes are Caffe's.
"""

from collections.abc import Callable
from dataclasses import dataclass

from stagerun.base import net
from stagerun.language.net import maps, weighted, windows
from stagerun.language.net.given import MOST_AXES, Dims, Given, Made, text, volume
from stagerun.language.net.upgrade import map_shapes, written_sizes
from stagerun.language.view import View

IMAGES = ("Data", "ImageData", "DummyData", "Input")
MANY = 1_000  # bottoms or tops
Make = Callable[[Given], Made | None]


@dataclass(frozen=True, slots=True)
class Row:
    """`bottoms`, `tops`: least and most of them. `in_place`: a top may be the bottom."""

    make: Make
    bottoms: tuple[int, int] = (1, 1)
    tops: tuple[int, int] = (1, 1)
    in_place: bool = False


def images(given: Given) -> Made:
    """Input and DummyData say their shapes; `resolve` knows the images' of the others."""
    found: list[Dims | None] = [None] * given.tops
    for value in written_sizes(given.block):
        if isinstance(value.value, int) and value.value < 1:
            given.fail(f"a size of {value.text}", "sizes are at least 1", value.span)
    for i, dims in enumerate(map_shapes(given.block)[: given.tops]):
        if len(dims) >= MOST_AXES:
            given.fail(f"a shape of {len(dims) + 1} axes", f"Caffe's have at most {MOST_AXES}")
            continue
        found[i] = tuple(n if n > 0 else None for n in dims)
    return Made(net.Images(), tuple(found))


def relu(given: Given) -> Made:
    return Made(net.ReLU(negative_slope=given.number(given.inside("relu_param"), "negative_slope")), (given.first,))


def elu(given: Given) -> Made:
    return Made(net.ELU(alpha=given.number(given.inside("elu_param"), "alpha")), (given.first,))


def sigmoid(given: Given) -> Made:
    return Made(net.Sigmoid(), (given.first,))


def tanh(given: Given) -> Made:
    return Made(net.TanH(), (given.first,))


def power(given: Given) -> Made:
    view = given.inside("power_param")
    numbers = {name: given.number(view, name) for name in ("power", "scale", "shift")}
    return Made(net.Power(**numbers), (given.first,))


def dropout(given: Given) -> Made:
    view = given.inside("dropout_param")
    ratio = given.number(view, "dropout_ratio")
    hint = "it is the share that is set to 0"
    phases = {View(rule).text("phase") for rule in given.block.blocks("include")}
    unread = phases == {"TEST"} and 0 <= ratio <= 1  # nothing is dropped there
    given.require(view, "dropout_ratio", ratio, 0 < ratio < 1 or unread, "between 0 and 1", hint)
    return Made(net.Dropout(ratio=ratio), (given.first,))


def softmax(given: Given) -> Made | None:
    view, dims = given.inside("softmax_param"), given.first
    axis = 1 if dims is None else given.axis(view, "axis", dims)
    return None if axis is None else Made(net.Softmax(axis=axis), (dims,))


def softmax_with_loss(given: Given) -> Made | None:
    loss = given.inside("loss_param")
    if given.inside("softmax_param").whole("axis") != 1:
        given.wrong(given.inside("softmax_param"), "axis", "the classes are along axis 1", "take it out")
    _labels(given)
    weights = View(given.block).numbers("loss_weight")
    if weights and len(weights) != max(1, given.tops):
        given.wrong(
            View(given.block), "loss_weight", f"{len(weights)} `loss_weight` for {given.tops} tops", "give one for each"
        )
    if len(weights) > 1 and weights[1]:
        given.wrong(View(given.block), "loss_weight", "the second top is no loss", "write `loss_weight: 0`")
    if loss.has("normalization") or not loss.has("normalize"):
        normalization = net.Normalization(loss.text("normalization"))
    else:
        normalization = net.Normalization.VALID if loss.flag("normalize") else net.Normalization.BATCH_SIZE
    smoothing = given.number(loss, "label_smoothing")
    hint = "it is the share that all classes have alike"
    given.require(loss, "label_smoothing", smoothing, 0 <= smoothing < 1, "at least 0 and below 1", hint)
    settings = net.SoftmaxWithLoss(
        loss_weight=given.single(View(given.block), "loss_weight", weights[0]) if weights else 1.0,
        ignore_label=loss.whole("ignore_label"),
        normalization=normalization,
        pre_fixed_normalizer=given.number(loss, "pre_fixed_normalizer"),
        label_smoothing=smoothing,
    )
    return Made(settings, ((), given.first)[: given.tops])


def accuracy(given: Given) -> Made | None:
    view = given.inside("accuracy_param")
    top_k, dims = view.whole("top_k") or 0, given.first
    _labels(given)
    if view.whole("axis") != 1:
        given.wrong(view, "axis", "the classes are along axis 1", "take it out")
    if not top_k or (dims and dims[0] is not None and top_k > dims[0]):
        given.wrong(
            view, "top_k", f"`top_k: {top_k}` of {dims[0] if dims else 0} classes", "at least 1, at most all of them"
        )
    return Made(net.Accuracy(top_k=top_k, ignore_label=view.whole("ignore_label")), ((), None)[: given.tops])


def _labels(given: Given) -> None:
    labels = given.dims[1]
    if labels and (volume(labels) or 1) != 1:
        given.fail(f"bottom {given.bottom(1)}, {text(labels)}, is no label", "the labels are the second bottom")


LAYERS: dict[str, Row] = {
    **{name: Row(images, (0, 0), (1, 2 if name in ("Data", "ImageData") else MANY)) for name in IMAGES},
    "Convolution": Row(windows.convolution),
    "Deconvolution": Row(windows.deconvolution),
    "Pooling": Row(windows.pooling),
    "InnerProduct": Row(weighted.inner_product),
    "LRN": Row(weighted.lrn),
    "BatchNorm": Row(weighted.batch_norm, in_place=True),
    "Scale": Row(weighted.scale, (1, 2), in_place=True),
    "Bias": Row(weighted.bias, (1, 2), in_place=True),
    "ReLU": Row(relu, in_place=True),
    "PReLU": Row(weighted.prelu, in_place=True),
    "ELU": Row(elu, in_place=True),
    "Sigmoid": Row(sigmoid, in_place=True),
    "TanH": Row(tanh, in_place=True),
    "Power": Row(power, in_place=True),
    "Dropout": Row(dropout, in_place=True),
    "Concat": Row(maps.concat, (1, MANY)),
    "Slice": Row(maps.slice_, tops=(1, MANY)),
    "Split": Row(maps.split, tops=(1, MANY)),
    "Eltwise": Row(maps.eltwise, (2, MANY), in_place=True),
    "Flatten": Row(maps.flatten),
    "Reshape": Row(maps.reshape),
    "Silence": Row(maps.silence, (1, MANY), (0, 0)),
    "Softmax": Row(softmax, in_place=True),
    "SoftmaxWithLoss": Row(softmax_with_loss, (2, 2), (0, 2)),
    "Accuracy": Row(accuracy, (2, 2), (1, 2)),
}
