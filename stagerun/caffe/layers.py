"""Layers without a window: images, parameters per channel, functions of each number, losses; and the labels that the losses ignore."""

from collections.abc import Sequence
from math import prod

from stagerun.base.wings import Ignored
from stagerun.caffe.reading import MANY, Blob, Layer, Made, Net, Pass, Reading, Settings, Shape, alike, map_shapes, text
from stagerun.language.tree import Block, View


class Images(Settings, types=("Data", "ImageData"), bottoms=(0, 0), tops=(1, 2)):
    """Reads images. Its tops are the images and, in training, the labels."""

    @classmethod
    def read(cls, layer: Reading) -> Made:
        """Return the shapes that Input and DummyData have; `resolve` fills in the images' shape of the others."""
        shapes: list[Shape | None] = [None] * layer.tops
        for i, dims in enumerate(map_shapes(layer.block)[: layer.tops]):
            if any(size < 1 for size in dims):
                span = layer.view.place("shape")
                layer.fail(f"a shape of {' x '.join(map(str, dims))}", "sizes are at least 1", span)
            else:
                shapes[i] = dims
        return Made(cls(), tuple(shapes))


class MadeUpImages(Images, types=("Input", "DummyData"), bottoms=(0, 0), tops=(1, MANY)):
    """Has shapes for its tops, but no contents."""


class InnerProduct(Settings, param="inner_product_param"):
    """Blobs: the weight, [outputs, inputs] or if `transpose` [inputs, outputs], and any bias. Flattens from `axis`
    on."""

    axis: int = 1
    transpose: bool = False

    @classmethod
    def read(cls, layer: Reading) -> Made | None:
        outputs, dims = layer.outputs(), layer.first
        if (axis := layer.axis(dims) if dims else 1) is None:
            return None
        inputs, settings = prod(dims[axis - 1 :]), cls.written(layer, axis=axis)
        weight = (inputs, outputs) if settings.transpose else (outputs, inputs)
        return Made(settings, ((*dims[: axis - 1], outputs),), layer.weights(weight, (outputs,)))

    def multiply_adds(self, layer: Layer, bottom: Shape) -> int:
        return prod(layer.blobs[0].shape) * prod(layer.shapes[0][: self.axis - 1])


class LRN(Settings, param="lrn_param"):
    """`within`: WITHIN_CHANNEL, over a square of `local_size`."""

    local_size: int = 5
    alpha: float = 1.0
    beta: float = 0.75
    k: float = 1.0
    within: bool = False

    @classmethod
    def read(cls, layer: Reading) -> Made:
        dims = layer.image("LRN takes channels, height and width")
        made = cls.written(layer, within=layer.view.text("norm_region") == "WITHIN_CHANNEL")
        if made.local_size % 2 == 0:
            message = f"`local_size: {made.local_size}` is not odd"
            layer.wrong("local_size", message, "the value itself is in the middle")
        hint = "a power is taken of `k` and `alpha` times a mean of squares"
        layer.require("alpha", made.alpha, made.alpha >= 0, "at least 0", hint)
        layer.require("k", made.k, made.k > 0 or made.within, "above 0", hint)
        return Made(made, (dims,))


class BatchNorm(Settings, param="batch_norm_param", in_place=True):
    """No blobs: the statistics are buffers, `running_mean`, `running_var`. Intel's merged layer has blobs `weight` and
    `bias`. `use_global_stats` None: only in testing."""

    moving_average_fraction: float = 0.999
    eps: float = 1e-5
    use_global_stats: bool | None = None

    @classmethod
    def read(cls, layer: Reading) -> Made:
        view, channels = layer.view, layer.first[:1]
        blobs = layer.weights(channels, channels, "filler", 1.0) if merged(layer.block) else ()
        by_global = view.flag("use_global_stats") if view.has("use_global_stats") else None
        made = cls.written(layer, use_global_stats=by_global)
        fraction, hint = made.moving_average_fraction, "it is the share of the statistics so far"
        layer.require("moving_average_fraction", fraction, 0 <= fraction <= 1, "between 0 and 1", hint)
        layer.require("eps", made.eps, made.eps > 0, "above 0", "a variance may be 0, and is divided by")
        return Made(made, (layer.first,), blobs)


def merged(norm: Block) -> bool:
    """Return whether a BatchNorm is Intel's with scale and shift: it has `use_weight_bias`, or more `param` than the three statistics'."""
    view = View(norm).inside("batch_norm_param")
    return len(list(norm.blocks("param"))) > 3 or (view.has("use_weight_bias") and view.flag("use_weight_bias"))


class Bias(Settings, param="bias_param", bottoms=(1, 2), in_place=True):
    """Blob: the bias, unless a second bottom is the bias. It spans `axis` and as many following axes as it has."""

    axis: int = 1

    @classmethod
    def read(cls, layer: Reading) -> Made | None:
        dims, view = layer.first, layer.view
        if len(layer.bottoms) == 2:
            other, axis = layer.dims[1], view.whole("axis") or 0
            if axis in (0, -1 - len(dims)) and alike(dims[: len(other)], other):
                return Made(cls(axis=0), (dims,))
            hint = "" if axis == 0 else "write `axis: 0`: the second bottom is of the same images"
            message = f"bottom {layer.bottom(1)}, {text(other)}, does not fit {layer.bottom()}, {text(dims)}"
            layer.wrong("axis", message, hint)
            return None
        start, count = layer.axis(dims), view.whole("num_axes")
        if start is None or count is None:
            return None
        if count < -1 or start - 1 + count > len(dims):
            message = f"`num_axes: {count}` from axis {start} on is more than {text(dims)} has"
            layer.wrong("num_axes", message, "-1: all from `axis` on")
            return None
        end = len(dims) if count == -1 else start - 1 + count
        return Made(cls(axis=start), (dims,), cls.blobs(layer, dims[start - 1 : end]))

    @staticmethod
    def blobs(layer: Reading, shape: Shape) -> tuple[Blob, ...]:
        return (layer.blob("bias", shape, "filler"),)


class Scale(Bias, param="scale_param", bottoms=(1, 2), in_place=True):
    """Blobs: the weight unless a second bottom is the weight, and optionally the bias. The weight starts at 1, or by the filler of an
    MKL-DNN BatchNorm before it (`resolve`)."""

    @classmethod
    def read(cls, layer: Reading) -> Made | None:
        if layer.view.flag("bias_term") and len(layer.bottoms) == 2:
            layer.wrong("bias_term", "`bias_term` with two bottoms: the bias would be per image", "take it out")
        return super().read(layer)

    @staticmethod
    def blobs(layer: Reading, shape: Shape) -> tuple[Blob, ...]:
        return layer.weights(shape, shape, "filler", 1.0)


class ReLU(Settings, param="relu_param", in_place=True):
    negative_slope: float = 0.0


class PReLU(Settings, param="prelu_param", in_place=True):
    """Blob: the slope of each channel, or one for all (`channel_shared`)."""

    @classmethod
    def read(cls, layer: Reading) -> Made:
        channels = () if layer.view.flag("channel_shared") else layer.first[:1]
        return Made(cls(), (layer.first,), (layer.blob("weight", channels, "filler", 0.25),))


class ELU(Settings, param="elu_param", in_place=True):
    alpha: float = 1.0


class Sigmoid(Settings, in_place=True):
    pass


class TanH(Settings, in_place=True):
    pass


class Power(Settings, param="power_param", in_place=True):
    """(shift + scale * x) ** power."""

    power: float = 1.0
    scale: float = 1.0
    shift: float = 0.0


class Dropout(Settings, param="dropout_param", in_place=True):
    ratio: float = 0.5

    @classmethod
    def read(cls, layer: Reading) -> Made:
        ratio = layer.number("dropout_ratio")
        layer.require("dropout_ratio", ratio, 0 < ratio < 1, "between 0 and 1", "it is the share that is set to 0")
        return Made(cls(ratio=ratio), (layer.first,))


class Softmax(Settings, param="softmax_param", in_place=True):
    axis: int = 1

    @classmethod
    def read(cls, layer: Reading) -> Made | None:
        axis = layer.axis(layer.first)
        return None if axis is None else Made(cls(axis=axis), (layer.first,))


class SoftmaxWithLoss(Settings, param="loss_param", bottoms=(2, 2), tops=(0, 2)):
    """Bottoms: logits and labels. `normalization`: Caffe's word for the divisor. `label_smoothing` is Intel's."""

    loss_weight: float = 1.0
    ignore_label: int | None = None
    normalization: str = "VALID"
    pre_fixed_normalizer: float = 1.0
    label_smoothing: float = 0.0

    @classmethod
    def read(cls, layer: Reading) -> Made:
        loss, whole = layer.view, layer.of(View(layer.block))
        _require_judgeable(layer.of(whole.view.inside("softmax_param")))
        weights = whole.view.numbers("loss_weight")
        if (weights and len(weights) != max(1, layer.tops)) or any(weights[1:]):
            message = f"{len(weights)} `loss_weight` for {layer.tops} tops, whose first is the loss"
            whole.wrong("loss_weight", message, "give one for each, 0 for the second")
        normalization = loss.text("normalization")
        if loss.has("normalize") and not loss.has("normalization"):
            normalization = "VALID" if loss.flag("normalize") else "BATCH_SIZE"
        weight = whole.single("loss_weight", weights[0]) if weights else 1.0
        made = cls.written(layer, normalization=normalization, loss_weight=weight)
        smoothing, hint = made.label_smoothing, "it is the share that is spread over all classes"
        layer.require("label_smoothing", smoothing, 0 <= smoothing < 1, "at least 0 and below 1", hint)
        return Made(made, ((), layer.first)[: layer.tops])


class Accuracy(Settings, param="accuracy_param", bottoms=(2, 2), tops=(1, 2)):
    top_k: int = 1
    ignore_label: int | None = None

    @classmethod
    def read(cls, layer: Reading) -> Made:
        made, dims = cls.written(layer), layer.first
        _require_judgeable(layer)
        if not made.top_k or (dims and 0 < dims[0] < made.top_k):
            message = f"`top_k: {made.top_k}` of {dims[0] if dims else 0} classes"
            layer.wrong("top_k", message, "at least 1, at most all of them")
        return Made(made, ((),) * layer.tops)


def _require_judgeable(layer: Reading) -> None:
    """Add a mistake unless the classes are along axis 1, and the second bottom is labels. `layer`: read in the message with `axis`."""
    labels = layer.dims[1]
    if labels and prod(labels) > 1:
        layer.fail(f"bottom {layer.bottom(1)}, {text(labels)}, is not labels", "the labels are the second bottom")
    if layer.view.whole("axis") != 1:
        layer.wrong("axis", "the classes are along axis 1", "take it out")


# -- the losses of a net together


def trained_losses(one: Pass) -> tuple[SoftmaxWithLoss, ...]:
    """Return the losses with a weight, in order."""
    losses = (layer.settings for layer in one.layers if isinstance(layer.settings, SoftmaxWithLoss))
    return tuple(loss for loss in losses if loss.loss_weight)


def ignored(net: Net, own_loss: bool) -> Ignored:
    """Return the labels that the layers of a net ignore. `own_loss`: the stage's loss replaces the net's. Training ignores a label if every
    loss does. An evaluation with only a loss, or only an Accuracy, ignores that layer's label for both."""
    accuracies, losses = _of_logits(net.test, Accuracy), _of_logits(net.test, SoftmaxWithLoss)
    if own_loss:
        return Ignored(accuracy=_label(accuracies))
    return Ignored(
        train=_label(trained_losses(net.train)),
        loss=_label(losses or accuracies),
        accuracy=_label(accuracies or losses),
        of_all=any(loss.normalization in ("FULL", "BATCH_SIZE") for loss in losses),  # type: ignore[union-attr]
    )


def _of_logits(one: Pass, kind: type[Accuracy | SoftmaxWithLoss]) -> list[Accuracy | SoftmaxWithLoss]:
    """Return the layers of a kind that take the logits; all layers of the kind if none does."""
    layers = [layer for layer in one.layers if isinstance(layer.settings, kind)]
    judging = [layer for layer in layers if layer.bottoms[0] == one.logits]
    return [layer.settings for layer in judging or layers]  # type: ignore[misc]


def _label(layers: Sequence[Accuracy | SoftmaxWithLoss]) -> int | None:
    labels = {layer.ignore_label for layer in layers}
    return labels.pop() if len(labels) == 1 else None
