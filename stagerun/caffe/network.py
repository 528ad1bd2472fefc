"""A Caffe net as a torch module, and the computation of each layer: one function and one row of `FUNCTIONS` per layer, and the losses.

A function takes the layer's settings, its bottoms and its blobs, and returns its tops. Images are axis 0. Sources: BVLC/caffe,
src/caffe/layers. Where Caffe's gradient is wrong, because a later layer overwrote in place what it reads, this one is right.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from stagerun.base.errors import UsageError
from stagerun.base.weights import COUNTER
from stagerun.caffe import layers, map_layers
from stagerun.caffe.layers import LRN, BatchNorm, SoftmaxWithLoss
from stagerun.caffe.reading import Layer, Net, text
from stagerun.caffe.steps import IMAGES, Step, Steps, steps_of
from stagerun.models.layers import KeptStatistics, fill

Held = tuple[nn.Module, str]  # where a parameter is
# The calls of a pass, the number of the logits' map, and the number of each loss's map.
Planned = tuple[list[tuple[Callable, Step]], int, tuple[int, ...]]
_CROP = "cut images with `crop_size` in transform_param and test_transform_param to the size that the net is for"


class Blobs(nn.Module):
    """The parameters of a layer. `scales_norm`: whether it is the Scale after a BatchNorm."""

    scales_norm = False

    def _load_from_state_dict(self, *args: Any) -> None:
        """Do nothing: `Network` loads its layers."""


class Statistics(Blobs, KeptStatistics):
    """Statistics of a BatchNorm layer, and Intel's blobs if it has any. They begin at zero, as in Caffe. `moving_average_passes` 0:
    every device batch is a pass."""

    moving_average_passes = 0

    def __init__(self, features: int, fraction: float) -> None:
        super().__init__(features, momentum=None, affine=False)
        self.moving_average_fraction = fraction
        self.running_var.zero_()
        self.register_buffer("batch_mean", torch.zeros(features), persistent=False)
        self.register_buffer("batch_var", torch.zeros(features), persistent=False)

    def normalised(
        self, held: Sequence[Held], eps: float, by_global: bool, keep: bool, bottoms: Sequence[Tensor]
    ) -> Tensor:
        """Normalise by the running statistics if `by_global`, or if `freeze` has put a layer that trains into evaluation mode; else by the
        batch's statistics, and keep them if `keep`."""
        (x,), (weight, bias) = bottoms, (*_values(held), None, None)[:2]
        if by_global or (keep and not self.training):
            return F.batch_norm(x, self.running_mean, self.running_var, weight, bias, False, 0.0, eps)
        if x.numel() == x.shape[1]:  # one number per channel, which torch refuses: its variance is 0
            if keep:
                self.batch_mean.copy_(x.detach().flatten())
                self.batch_var.zero_()
            zero = (x - x).transpose(1, -1)
            zero = zero if weight is None else zero * weight
            return (zero if bias is None else zero + bias).transpose(1, -1)
        mean, variance = (self.batch_mean, self.batch_var) if keep else (None, None)
        return F.batch_norm(x, mean, variance, weight, bias, True, 1.0, eps)


def build(net: Net) -> "Network":
    """Return the network with freshly drawn weights, from torch's global random state, in float32 on the CPU."""
    return Network(net)


class Network(nn.Module):
    """Images [N, C, H, W] -> logits [N, classes]. Training a net with several losses returns a tuple: the logits, then
    each loss's logits in order, some of them twice. Parameters are named after the net's blobs, statistics as in
    torch's BatchNorm with the layer's name. `frozen_by_network`: names of the parameters of layers that only testing
    has; parameters that no loss depends on decay, as in Caffe. Each layer is one module with the layer's name, even a
    name that `add_module` refuses, such as `a.b` and `train`."""

    _train: Planned

    def __init__(self, net: Net) -> None:
        super().__init__()
        self._net = net
        for layer in net.layers:
            self._hold(layer)
        learnt = {blob.name for layer in net.train.layers for blob in layer.blobs}
        self.frozen_by_network = frozenset(name for name, _ in self.named_parameters() if name not in learnt)
        self._test = self._ready(steps_of(net.test, training=False), testing=True)
        self._plan(alone=False)

    def train_alone(self) -> None:
        """Return only the logits in training from now on, for a loss that isn't the net's, and compute only what they need."""
        self._plan(alone=True)

    def use_module_names(self) -> None:
        """Rename layers so that torch's exporters can look them up."""
        good = {name for name in self._modules if name.isidentifier() and not hasattr(nn.Module(), name)}
        named = ((name if name in good else f"layer_with_another_name_{i}") for i, name in enumerate(self._modules))
        self._modules = dict(zip(named, self._modules.values(), strict=True))

    def train(self, mode: bool = True) -> "Network":
        super().train(mode)
        for statistics in self._still:
            statistics.training = False
        return self

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, ...]:
        calls, logits, losses = self._train if self.training else self._test
        maps = {IMAGES: images}
        for call, step in calls:
            x = [maps[number] for number in step.takes]
            for number in step.ends:
                del maps[number]
            made = call(x)
            maps.update(zip(step.makes, (made,) if isinstance(made, Tensor) else made, strict=True))
        if all(number == logits for number in losses):
            return maps[logits].flatten(1)
        return tuple(maps[number].flatten(1) for number in (logits, *losses))

    # -- layers by any name

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # never a layer of this name

    def get_submodule(self, target: str) -> nn.Module:
        module = self._modules.get(target)
        return super().get_submodule(target) if module is None else module

    def _load_from_state_dict(self, state: dict[str, Tensor], prefix: str, *args: Any) -> None:
        """Load all layers at once: torch would split their names at a `.`."""
        missing, unexpected, errors = args[-3:]
        tensors = self.state_dict(prefix=prefix, keep_vars=True)
        with torch.no_grad():
            for key, tensor in tensors.items():
                if key not in state:
                    missing += [] if key.endswith(COUNTER) else [key]  # old files have none
                elif state[key].shape == tensor.shape:
                    tensor.copy_(state[key])
                else:
                    shapes = f"{list(state[key].shape)}, and in the network {list(tensor.shape)}"
                    errors.append(f"size mismatch for {key}: it is {shapes}")
        unexpected += [key for key in state if key not in tensors]

    # -- the calls of a pass

    def _plan(self, alone: bool) -> None:
        planned = steps_of(self._net.train, training=True, alone=alone)
        self._train = self._ready(planned, testing=False)
        layers = [(step.layer.name, step.layer.settings) for step in planned.steps]
        moving = {name for name, s in layers if isinstance(s, BatchNorm) and not s.use_global_stats}
        named = self._modules.items()
        self._still = [m for name, m in named if isinstance(m, Statistics) and name not in moving]
        self.train(self.training)

    def _hold(self, layer: Layer) -> None:
        """Make and fill the layer's parameters and statistics unless an earlier layer shares them."""
        settings = layer.settings
        if isinstance(settings, BatchNorm) and not isinstance(self._modules.get(layer.name), Statistics):
            self._modules[layer.name] = Statistics(layer.shapes[0][0], settings.moving_average_fraction)
        for blob in layer.blobs:
            name, _, leaf = blob.name.rpartition(".")
            holder = self._modules.setdefault(name, Blobs())
            assert holder is not None
            if holder._parameters.get(leaf) is None:
                parameter = nn.Parameter(torch.empty(blob.shape))
                fill(parameter if blob.shape else parameter.view(1), blob.filler)  # fans by Caffe's shape
                holder.register_parameter(leaf, parameter)

    def _ready(self, planned: Steps, testing: bool) -> Planned:
        return [(self._call(step, testing), step) for step in planned.steps], planned.logits, planned.losses

    def _call(self, step: Step, testing: bool) -> Callable[[Sequence[Tensor]], Tensor | Sequence[Tensor]]:
        names = (blob.name.rpartition(".") for blob in (step.scale or step.layer).blobs)
        held = [(self.get_submodule(name), leaf) for name, _, leaf in names]
        settings = step.layer.settings
        if not isinstance(settings, BatchNorm):
            function = (lambda _, x: F.relu_(x)) if step.over else FUNCTIONS[type(settings)]
            return partial(_computed, function, step.layer, held)
        if step.scale is not None and held:
            held[0][0].scales_norm = True  # type: ignore[assignment]
        by_global = testing if settings.use_global_stats is None else settings.use_global_stats
        statistics = self.get_submodule(step.layer.name)
        assert isinstance(statistics, Statistics)
        return partial(statistics.normalised, held, settings.eps, by_global, not testing)


def _values(held: Sequence[Held]) -> list[Tensor]:
    return [getattr(module, leaf) for module, leaf in held]


def _computed(function: Callable, layer: Layer, held: Sequence[Held], x: Sequence[Tensor]) -> Any:
    try:
        return function(layer.settings, *x, *_values(held))
    except WrongSize as error:
        raise UsageError(f"layer `{layer.name}` {error}", _CROP) from None


# -- layers


class WrongSize(Exception):
    """The layer doesn't fit images of this size; the message ends a sentence that begins with the layer."""


def _convolution(s: map_layers.Convolution, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if s.transposed:
        return F.conv_transpose2d(x, weight, bias, s.stride, s.pad, groups=s.group, dilation=s.dilation)
    return F.conv2d(x, weight, bias, s.stride, s.pad, s.dilation, s.group)


def _inner_product(s: layers.InnerProduct, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    weight = weight.t() if s.transpose else weight
    flat = x.flatten(s.axis)
    if flat.shape[-1] != weight.shape[1]:
        raise WrongSize(f"takes {weight.shape[1]} numbers per image, and gets {text(tuple(x.shape[1:]))}")
    return F.linear(flat, weight, bias)


def _pooling(s: map_layers.Pooling, x: Tensor) -> Tensor:
    """Pool; among equal numbers the first is the largest. A mean counts the window's padding, but nothing beyond the padding."""
    largest = s.method == "MAX"
    if s.kernel is None:
        return F.max_pool2d(x, (x.shape[2], x.shape[3])) if largest else x.mean((2, 3), keepdim=True)
    pool = F.max_pool2d if largest else F.avg_pool2d
    return pool(x, s.kernel, s.stride, s.pad, ceil_mode=s.ceil)


def _lrn(s: LRN, x: Tensor) -> Tensor:
    """Return x * d ** -beta, with d = k + alpha / n * the sum of squares over n neighbouring channels; bfloat16 is computed in float32.
    Within a channel, d = 1 + alpha * the mean of the squares in a square of the map."""
    if s.within:
        squares = F.avg_pool2d(x * x, s.local_size, 1, s.local_size // 2)
        return x * (1 + s.alpha * squares) ** -s.beta
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    y: Tensor = _AcrossChannels.apply(wide, s)
    return y.to(x.dtype)


class _AcrossChannels(torch.autograd.Function):
    """LRN with a hand-written backward pass: autograd's needs three times the memory, and torch's local_response_norm pools in 3-D."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, s: LRN) -> Tensor:
        d = _window_sum(x * x, s.local_size).mul_(s.alpha / s.local_size).add_(s.k)
        if s.beta == 0.75:  # as in most nets; roots take a fifth of the time
            root = d.rsqrt()
            factor = root.sqrt().mul_(root)
        else:
            factor = d**-s.beta
        ctx.save_for_backward(x, d, factor)
        ctx.settings = s
        return x * factor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (x, d, factor), s = ctx.saved_tensors, ctx.settings
        direct = g * factor
        around = _window_sum((direct * x).div_(d), s.local_size)
        return torch.addcmul(direct, x, around, value=-(2 * s.alpha * s.beta / s.local_size)), None


def _window_sum(x: Tensor, size: int) -> Tensor:
    """Return the sum over `size` neighbouring channels, fewer at the edges."""
    total = x.clone()
    for distance in range(1, min(size // 2, x.shape[1] - 1) + 1):
        total[:, distance:] += x[:, :-distance]
        total[:, :-distance] += x[:, distance:]
    return total


def _scale(s: layers.Scale, x: Tensor, factor: Tensor, bias: Tensor | None = None) -> Tensor:
    factor = _along(factor, x, s.axis)
    return x * factor if bias is None else torch.addcmul(_along(bias, x, s.axis), x, factor)


def _along(values: Tensor, maps: Tensor, axis: int) -> Tensor:
    """Reshape `values` to broadcast over `maps` from `axis` on."""
    return values.reshape(*values.shape, *[1] * (maps.ndim - axis - values.ndim))


def _power(s: layers.Power, x: Tensor) -> Tensor:
    if s.power * s.scale == 0:  # a constant, without a gradient
        return x * 0 + (s.shift**s.power if s.power else 1.0)
    scaled = x if (s.scale, s.shift) == (1, 0) else s.scale * x + s.shift
    return scaled if s.power == 1 else scaled**s.power


def _slice(s: map_layers.Slice, x: Tensor) -> tuple[Tensor, ...]:
    size = x.shape[s.axis]
    if (s.points and s.points[-1] >= size) or (not s.points and size % s.parts):
        where = f"at {', '.join(map(str, s.points))}" if s.points else f"into {s.parts} of the same size"
        raise WrongSize(f"cuts axis {s.axis} {where}, and its bottom has size {size} on that axis")
    return x.tensor_split(s.points, s.axis) if s.points else x.split(size // s.parts, s.axis)


def _eltwise(s: map_layers.Eltwise, *x: Tensor) -> Tensor:
    """Combine the bottoms. In MAX, the gradient goes to the second of two equal bottoms; later bottoms must be larger."""
    if s.operation == "PROD":
        return reduce(torch.mul, x)
    if s.operation == "MAX":
        first = torch.where(x[0] > x[1], x[0], x[1])
        return reduce(lambda most, other: torch.where(other > most, other, most), x[2:], first)
    coeff = s.coeff or (1.0,) * len(x)
    total = x[0] if coeff[0] == 1 else coeff[0] * x[0]
    for other, factor in zip(x[1:], coeff[1:], strict=True):
        total = torch.add(total, other, alpha=factor)
    return total


def _reshape(s: map_layers.Reshape, x: Tensor) -> Tensor:
    sizes = (size or x.shape[i] for i, size in enumerate(s.sizes, s.axis))
    return x.reshape(*x.shape[: s.axis], *sizes, *x.shape[x.ndim - s.behind :])


# By settings. BatchNorm, which has a state, is above; layers that compute nothing are in `steps`. Dropout in training divides the kept
# values by their share, with torch's random numbers, which the engine seeds for each device batch.
FUNCTIONS: Mapping[type, Callable[..., Tensor | tuple[Tensor, ...]]] = {
    map_layers.Convolution: _convolution,
    map_layers.Pooling: _pooling,
    map_layers.Concat: lambda s, *x: torch.cat(x, s.axis),
    map_layers.Slice: _slice,
    map_layers.Eltwise: _eltwise,
    map_layers.Reshape: _reshape,
    layers.InnerProduct: _inner_product,
    layers.LRN: _lrn,
    layers.Scale: _scale,
    layers.Bias: lambda s, x, values: x + _along(values, x, s.axis),
    layers.ReLU: lambda s, x: F.leaky_relu(x, s.negative_slope) if s.negative_slope else F.relu(x),
    layers.PReLU: lambda s, x, slope: F.prelu(x, slope.reshape(-1)),
    layers.ELU: lambda s, x: F.elu(x, s.alpha),
    layers.Sigmoid: lambda s, x: x.sigmoid(),
    layers.TanH: lambda s, x: x.tanh(),
    layers.Power: _power,
    layers.Dropout: lambda s, x: F.dropout(x, s.ratio),
    layers.Softmax: lambda s, x: x.softmax(s.axis),
    # A loss's second top, for layers that take it; the loss itself is not a map.
    layers.SoftmaxWithLoss: lambda s, x: (x.new_zeros(()), x.softmax(1)),
}


# -- losses


def loss_of(
    s: SoftmaxWithLoss, logits: Tensor, labels: Tensor, smoothing: float, class_weight: Tensor | None = None
) -> Tensor:
    """Return SoftmaxWithLoss, normalised as in Caffe, without its `loss_weight`. `smoothing` is the stage's, and overrides the layer's.
    Images with `ignore_label` don't count. The divisor of the sum is at least 1."""
    ignored = -100 if s.ignore_label is None else s.ignore_label  # torch's default, which is not a class
    smoothed = smoothing or s.label_smoothing
    each = F.cross_entropy(logits, labels, reduction="none", ignore_index=ignored, label_smoothing=smoothed)
    if class_weight is not None:
        each = each * class_weight.index_select(0, labels.clamp(0, logits.shape[1] - 1))
    if s.normalization == "VALID" and s.ignore_label is not None:
        return each.sum() / (labels != s.ignore_label).sum().clamp(min=1)
    fixed = {"NONE": 1.0, "PRE_FIXED": max(1.0, s.pre_fixed_normalizer)}
    return each.sum() / fixed.get(s.normalization, float(len(labels)))
