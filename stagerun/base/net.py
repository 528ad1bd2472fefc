"""A net of Caffe's as values: what `language.net` reads from a prototxt and `models.net` builds.

Shapes are those of one image: (channels, height, width) or (outputs,), without Caffe's first axis. `axis` counts as Caffe does, with the
images as axis 0, and is not negative. Pairs are (height, width).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from stagerun.base import recipe

Shape = tuple[int, ...]
Pair = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Filler(recipe.Filler):
    """`type` may be `positive_unitball` or `bilinear`, too. `sparse`: how many weights of an output are not zero, on average (gaussian);
    -1: all."""

    sparse: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """A parameter. `name` is that in the network's state, `conv1.weight`; of a shared one that of the layer which has it first."""

    name: str
    shape: Shape
    filler: Filler
    lr_mult: float = 1.0
    decay_mult: float = 1.0


class Method(Enum):
    MAX = "MAX"
    AVE = "AVE"


class Operation(Enum):
    PROD = "PROD"
    SUM = "SUM"
    MAX = "MAX"


class Normalization(Enum):
    """Over what a loss is averaged."""

    FULL = "FULL"
    VALID = "VALID"
    BATCH_SIZE = "BATCH_SIZE"
    PRE_FIXED = "PRE_FIXED"
    NONE = "NONE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """A layer that reads images: Data, ImageData, DummyData or Input. Its tops are the images and, in training, the labels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolution:
    """Convolution, or Deconvolution where `transposed`. Blobs: the weight, and the bias where there is one."""

    kernel: Pair
    stride: Pair = (1, 1)
    pad: Pair = (0, 0)
    dilation: Pair = (1, 1)
    group: int = 1
    transposed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerProduct:
    """Blobs: the weight, [outputs, inputs] or with `transpose` [inputs, outputs], and the bias where there is one."""

    axis: int = 1
    transpose: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooling:
    """`kernel` is None for the whole map (`global_pooling`). `ceil`: Caffe's rule, FLOOR is BVLC's later `round_mode`."""

    method: Method
    kernel: Pair | None
    stride: Pair = (1, 1)
    pad: Pair = (0, 0)
    ceil: bool = True


def windows(pooling: Pooling, side: int, size: int) -> int:
    """How many there are along the height (side 0) or the width (1) of a map of that size. With a pad on either side the last begins in the
    map, or in the pad before it.

    >>> windows(Pooling(method=Method.MAX, kernel=(1, 1), stride=(2, 2)), 0, 4)
    3
    >>> windows(Pooling(method=Method.MAX, kernel=(2, 2), stride=(2, 2), pad=(0, 1)), 0, 5)
    3
    """
    assert pooling.kernel is not None
    kernel, stride, pad = pooling.kernel[side], pooling.stride[side], pooling.pad[side]
    room = size + 2 * pad - kernel
    count = (-(-room // stride) if pooling.ceil else room // stride) + 1
    return count - (any(pooling.pad) and (count - 1) * stride >= size + pad)


@dataclass(frozen=True, slots=True, kw_only=True)
class LRN:
    """`within`: WITHIN_CHANNEL, over a square of `local_size`."""

    local_size: int = 5
    alpha: float = 1.0
    beta: float = 0.75
    k: float = 1.0
    within: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchNorm:
    """No blobs: the statistics are buffers, `running_mean`, `running_var`. Intel's merged layer has blobs `weight` and `bias`.

    `use_global_stats` None: in testing alone.
    """

    moving_average_fraction: float = 0.999
    eps: float = 1e-5
    use_global_stats: bool | None = None


def statistics_factor(fraction: float, passes: int) -> float:
    """What Caffe's third blob of a BatchNorm is after so many passes: c = fraction * c + 1, from 0 on.

    >>> statistics_factor(0.5, 3), statistics_factor(1.0, 3)
    (1.75, 3.0)
    """
    return float(passes) if fraction == 1 else (1 - fraction**passes) / (1 - fraction)


def statistics_passes(fraction: float, factor: float) -> int:
    """The reverse, rounded; where the factor doesn't grow any more, the passes after which it hasn't.

    >>> statistics_passes(0.5, 1.75), statistics_passes(0.5, 2.0), statistics_passes(0.0, 1.0)
    (3, 53, 1)
    """
    if fraction in (0, 1):
        return round(factor)
    return round(math.log(max(1 - factor * (1 - fraction), 2.0**-53)) / math.log(fraction))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Blobs: the weight unless a second bottom is it, and the bias where there is one. It multiplies `axis` and those after it, as many as
    the weight has dimensions."""

    axis: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Bias:
    """Blob: the bias, unless a second bottom is it."""

    axis: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ReLU:
    negative_slope: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PReLU:
    """Blob: the slope of each channel, or one for all (`channel_shared`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ELU:
    alpha: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sigmoid:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class TanH:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    """(shift + scale * x) ** power."""

    power: float = 1.0
    scale: float = 1.0
    shift: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropout:
    ratio: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Concat:
    axis: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """`points`: where each top but the last ends along the axis; none: all tops have the same size. So it fits images of any size."""

    axis: int
    points: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Every top is the bottom."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Eltwise:
    """`coeff`: one for each bottom, of SUM."""

    operation: Operation = Operation.SUM
    coeff: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reshape:
    """Flatten and Reshape: `sizes` in place of the axes from `axis` on, but for the last `behind`. 0 copies the bottom's at its place, -1
    is what remains; so it fits images of any size. The default flattens an image."""

    axis: int = 1
    sizes: tuple[int, ...] = (-1,)
    behind: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """Takes its bottoms, and has no top."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Softmax:
    axis: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftmaxWithLoss:
    """Bottoms: logits and labels. `label_smoothing` is Intel's."""

    loss_weight: float = 1.0
    ignore_label: int | None = None
    normalization: Normalization = Normalization.VALID
    pre_fixed_normalizer: float = 1.0
    label_smoothing: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    top_k: int = 1
    ignore_label: int | None = None


Settings = (
    Images | Convolution | InnerProduct | Pooling | LRN | BatchNorm | Scale | Bias | ReLU | PReLU | ELU | Sigmoid | TanH
    | Power | Dropout | Concat | Slice | Split | Eltwise | Reshape | Silence | Softmax | SoftmaxWithLoss | Accuracy
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """`bottoms` and `tops` are names of maps. A top that is also a bottom is computed in place. `shapes`: of the tops, as far as they are
    maps of images; a loss has (), labels have ()."""

    name: str
    type: str  # Caffe's word
    settings: Settings
    bottoms: tuple[str, ...] = ()
    tops: tuple[str, ...] = ()
    shapes: tuple[Shape, ...] = ()
    blobs: tuple[Blob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """The layers of one phase in their order. `images` and `labels`: the maps that go in ('' where no labels do).
    `logits`: what comes out, [classes] for each image: the first bottom of the last SoftmaxWithLoss, else of an Accuracy or a Softmax,
    else the last top that nothing takes."""

    layers: tuple[Layer, ...]
    images: str
    labels: str
    logits: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Net:
    """Both phases; layers of the same name have the same blobs. `shape` is that of an image. `text`: the canonical form of the prototxt."""

    name: str
    shape: Shape
    num_classes: int
    train: Pass
    test: Pass
    text: str = ""


def trained_losses(one: Pass) -> tuple[SoftmaxWithLoss, ...]:
    """Those that count, in order."""
    losses = (layer.settings for layer in one.layers if isinstance(layer.settings, SoftmaxWithLoss))
    return tuple(loss for loss in losses if loss.loss_weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ignored:
    """The label whose images count for nothing, which may be no class: in training, in the loss of an evaluation, in its top-1 and top-5. None:
    all count. `of_all`: the loss of an evaluation is divided by the number of all images."""

    train: int | None = None
    loss: int | None = None
    accuracy: int | None = None
    of_all: bool = False

    @property
    def test(self) -> int | None:
        """That of images which count for nothing in a whole evaluation."""
        return self.loss if self.loss == self.accuracy else None


ALL_COUNT = Ignored()


def ignored(net: Net, own_loss: bool = False) -> Ignored:
    """What the layers of a net ignore together. `own_loss`: the stage has a loss in place of theirs. Training ignores a label if every loss
    does. An evaluation without a loss, or without an Accuracy, ignores what the other one does."""
    accuracies, losses = _judging(net.test, Accuracy), _judging(net.test, SoftmaxWithLoss)
    label = _label(accuracies or losses)
    if own_loss:
        return Ignored(accuracy=_label(accuracies))
    by_batch = (Normalization.FULL, Normalization.BATCH_SIZE)
    return Ignored(
        train=_label(trained_losses(net.train)),
        loss=_label(losses) if losses else label,
        accuracy=label,
        of_all=any(loss.normalization in by_batch for loss in losses),  # type: ignore[union-attr]
    )


def ignored_by_some(net: Net) -> frozenset[int]:
    """Labels that a loss or an Accuracy of a net ignores."""
    layers = (layer.settings for one in (net.train, net.test) for layer in one.layers)
    judging = (one for one in layers if isinstance(one, SoftmaxWithLoss | Accuracy))
    return frozenset(one.ignore_label for one in judging if one.ignore_label is not None)


def _judging(one: Pass, kind: type[Accuracy] | type[SoftmaxWithLoss]) -> list[Accuracy | SoftmaxWithLoss]:
    """The layers of a kind that take the logits; all, if none does."""
    layers = [layer for layer in one.layers if isinstance(layer.settings, kind)]
    own = [layer for layer in layers if layer.bottoms[0] == one.logits]
    return [layer.settings for layer in own or layers]  # type: ignore[misc]


def _label(layers: Sequence[Accuracy | SoftmaxWithLoss]) -> int | None:
    found = {layer.ignore_label for layer in layers}
    return found.pop() if len(found) == 1 else None
