"""A net of Caffe's as a module."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stagerun.base.errors import UsageError
from stagerun.base.weights import COUNTER
from stagerun.caffe.functions import FUNCTIONS, WrongSize
from stagerun.caffe.layers import BatchNorm
from stagerun.caffe.map_layers import Convolution
from stagerun.caffe.net import Layer, Net
from stagerun.caffe.steps import IMAGES, Step, Steps, steps_of
from stagerun.models.layers import KeptStatistics, fill

Held = tuple[nn.Module, str]  # where a parameter is
# The calls of a pass, and the numbers of the logits and of what each loss takes.
Planned = tuple[list[tuple[Callable, Step]], int, tuple[int, ...]]
_CROP = "cut images with `crop_size` in transform_param and test_transform_param to the size that the net is for"


class Blobs(nn.Module):
    """Holds the parameters of a layer. `scales_norm`: it is the Scale after a BatchNorm."""

    scales_norm = False

    def _load_from_state_dict(self, *args: Any) -> None:
        """`Network` loads its layers."""


class Statistics(Blobs, KeptStatistics):
    """Those of a BatchNorm layer, and Intel's blobs where it has any. They begin at zero, as Caffe's do. `moving_average_passes` 0: every
    device batch is a pass."""

    moving_average_passes = 0

    def __init__(self, features: int, fraction: float) -> None:
        super().__init__(features, momentum=None, affine=False)
        self.moving_average_fraction = fraction
        self.running_var.zero_()
        self.register_buffer("batch_mean", torch.zeros(features), persistent=False)
        self.register_buffer("batch_var", torch.zeros(features), persistent=False)

    def normalised(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, keep: bool | None
    ) -> Tensor:
        """By the running statistics where `keep` is None; else by those of the batch, which are kept if `keep`."""
        if keep is None:
            return F.batch_norm(x, self.running_mean, self.running_var, weight, bias, False, 0.0, eps)
        if x.numel() == x.shape[1]:  # one number per channel, which torch refuses: its variance is 0
            if keep:
                self.batch_mean.copy_(x.detach().flatten())
                self.batch_var.zero_()
            zero = (x - x).transpose(1, -1)
            zero = zero if weight is None else zero * weight
            return (zero if bias is None else zero + bias).transpose(1, -1)
        if keep:
            return F.batch_norm(x, self.batch_mean, self.batch_var, weight, bias, True, 1.0, eps)
        return F.batch_norm(x, None, None, weight, bias, True, 0.0, eps)


def build(net: Net) -> "Network":
    """Return the network with freshly drawn weights, from torch's global random state, in float32 on the CPU."""
    return Network(net)


class Network(nn.Module):
    """Images [N, C, H, W] -> logits [N, classes]. In training of a net with several losses a tuple: the logits, and then those of each
    loss in order, some of them twice.

    Parameters are called as the net's blobs, statistics as BatchNorm's in torch, in the layer's name. `frozen_by_network`: the names of
    parameters of layers that training doesn't have; those that no loss depends on decay, as in Caffe.

    Each layer is one module, called as it is: also by a name that `add_module` refuses, as `a.b` and `train`.
    """

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
        """From now on it answers in training with the logits alone, for a loss that isn't the net's, and computes no more than these need."""
        self._plan(alone=True)

    def use_module_names(self) -> None:
        """From now on layers are called so that torch's exporters can look them up."""
        good = {name for name in self._modules if name.isidentifier() and not hasattr(nn.Module(), name)}
        named = ((name if name in good else f"layer_with_another_name_{i}") for i, name in enumerate(self._modules))
        self._modules = dict(zip(named, self._modules.values(), strict=True))

    def first_weights(self) -> list[str] | None:
        """The weights of the convolutions that take the images; None where another layer does, or one in groups."""
        first = [step.layer for _, step in self._test[0] if IMAGES in step.takes]
        plain = all(isinstance(s := one.settings, Convolution) and s.group == 1 and not s.transposed for one in first)
        return [one.blobs[0].name for one in first] if plain else None

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
        object.__setattr__(self, name, value)  # no layer of this name is meant

    def get_submodule(self, target: str) -> nn.Module:
        found = self._modules.get(target)
        return super().get_submodule(target) if found is None else found

    def _load_from_state_dict(self, state: dict[str, Tensor], prefix: str, *args: Any) -> None:
        """For all layers at once: torch takes a `.` in their names for a step down."""
        missing, unexpected, errors = args[-3:]
        own = self.state_dict(prefix=prefix, keep_vars=True)
        with torch.no_grad():
            for key, tensor in own.items():
                if key not in state:
                    missing += [] if key.endswith(COUNTER) else [key]  # old files have none
                elif state[key].shape == tensor.shape:
                    tensor.copy_(state[key])
                else:
                    shapes = f"{list(state[key].shape)}, and in the network {list(tensor.shape)}"
                    errors.append(f"size mismatch for {key}: it is {shapes}")
        unexpected += [key for key in state if key not in own]

    # -- what a pass calls

    def _plan(self, alone: bool) -> None:
        planned = steps_of(self._net.train, training=True, alone=alone)
        self._train = self._ready(planned, testing=False)
        norms = [(one.layer.name, one.layer.settings) for one in planned.steps]
        moving = {name for name, s in norms if isinstance(s, BatchNorm) and not s.use_global_stats}
        named = self._modules.items()
        self._still = [m for name, m in named if isinstance(m, Statistics) and name not in moving]
        self.train(self.training)

    def _hold(self, layer: Layer) -> None:
        """Makes and fills what the layer holds, if another one hasn't before."""
        settings = layer.settings
        if isinstance(settings, BatchNorm) and not isinstance(self._modules.get(layer.name), Statistics):
            self._modules[layer.name] = Statistics(layer.shapes[0][0], settings.moving_average_fraction)
        for blob in layer.blobs:
            name, _, leaf = blob.name.rpartition(".")
            holder = self._modules.setdefault(name, Blobs())
            assert holder is not None
            if holder._parameters.get(leaf) is None:
                parameter = nn.Parameter(torch.empty(blob.shape))
                fill(parameter if blob.shape else parameter.view(1), blob.filler)  # fans are those of Caffe's shape
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
        return partial(_normalised, statistics, held, settings.eps, by_global, not testing)


def _values(held: Sequence[Held]) -> list[Tensor]:
    return [getattr(module, leaf) for module, leaf in held]


def _computed(function: Callable, layer: Layer, held: Sequence[Held], x: Sequence[Tensor]) -> Any:
    try:
        return function(layer.settings, *x, *_values(held))
    except WrongSize as error:
        raise UsageError(f"layer `{layer.name}` {error}", _CROP) from None


def _normalised(
    statistics: Statistics, held: Sequence[Held], eps: float, by_global: bool, keep: bool, x: Sequence[Tensor]
) -> Tensor:
    weight, bias = (*_values(held), None, None)[:2]
    # In training `freeze` has a layer use its running statistics: it is in evaluation mode then.
    own = None if by_global or (keep and not statistics.training) else keep
    return statistics.normalised(x[0], weight, bias, eps, own)
