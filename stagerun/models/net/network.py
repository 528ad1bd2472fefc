"""A net of Caffe's as a module."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from stagerun.base.net import BatchNorm, Blob, Convolution, Layer, Net, Shape
from stagerun.models.net.held import Blobs, Statistics, fill
from stagerun.models.net.layers import LAYERS, relu_in_place
from stagerun.models.net.steps import IMAGES, Step, Steps, steps_of

# Where a parameter is, and the shape that it has in a layer which shares it (`share_mode: PERMISSIVE`), where that is another.
Held = tuple[nn.Module, str, Shape | None]


# The calls of a pass, and the numbers of the logits and of what each loss takes.
Planned = tuple[list[tuple[Callable, Step]], int, tuple[int, ...]]


class Network(nn.Module):
    """Images [N, C, H, W] -> logits [N, classes]. In training of a net with several losses a tuple: the logits, and then those of each
    loss in order, some of them twice.

    Parameters are called as the net's blobs, statistics as BatchNorm's in torch, in the layer's name. `frozen_by_network`: the names of
    parameters of layers that training doesn't have; those that no loss depends on decay, as in Caffe.

    A layer whose name torch's modules can't have (`train`, `a.`) is a module of another name, which what asks for modules, tensors and the
    state never sees.
    """

    frozen_by_network: frozenset[str]
    _net: Net
    _paths: dict[str, str]
    _train: Planned
    _test: Planned
    _still: list[Statistics]
    _errors: list[str]  # what torch says of the state that is being loaded

    def __init__(self, net: Net) -> None:
        super().__init__()
        self._net, self._paths = net, _paths(net)
        self.register_state_dict_post_hook(_with_own_names)
        self.register_load_state_dict_post_hook(_say_own_names)
        for one in (net.train, net.test):
            for layer in one.layers:
                self._hold(layer)
        learnt = {blob.name for layer in net.train.layers for blob in layer.blobs}
        self.frozen_by_network = frozenset(name for name, _ in self.named_parameters() if name not in learnt)
        self._test = self._ready(steps_of(net.test, training=False), testing=True)
        self._plan(alone=False)

    def train_alone(self) -> None:
        """From now on it answers in training with the logits alone, for a loss that isn't the net's, and computes no more than these need."""
        self._plan(alone=True)

    def use_module_names(self) -> None:
        """From now on layers and tensors are called as their modules, by which torch's exporters look them up."""
        self._paths = {}

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
            if isinstance(made, Tensor):
                maps[step.makes[0]] = made
            else:
                maps.update(zip(step.makes, made, strict=True))
        if all(number == logits for number in losses):
            return maps[logits].flatten(1)
        return tuple(maps[number].flatten(1) for number in (logits, *losses))

    def get_submodule(self, target: str) -> nn.Module:
        return super().get_submodule(self._paths.get(target, target))

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        names = {path: name for name, path in _prefixed(self._paths, f"{prefix}." if prefix else "").items()}
        for path, module in super().named_modules(*args, **kwargs):
            yield names.get(path, path), module

    def _named_members(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        for name, member in super()._named_members(*args, **kwargs):
            yield name if "." in name else f".{name}", member  # of a layer without a name

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self._errors = args[-1]
        _rename(state_dict, _prefixed(self._paths, prefix))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _plan(self, alone: bool) -> None:
        planned = steps_of(self._net.train, training=True, alone=alone)
        self._train = self._ready(planned, testing=False)
        moving = {step.layer.name for step in planned.steps if _moves(step.layer)}
        named = ((name, m) for name, m in self.named_modules() if isinstance(m, Statistics))
        self._still = [m for name, m in named if name not in moving]
        self.train(self.training)

    def _hold(self, layer: Layer) -> None:
        """Makes and fills what the layer holds, if another one hasn't before."""
        settings = layer.settings
        if isinstance(settings, BatchNorm) and not isinstance(_at(self, layer.name), Statistics):
            channels = layer.shapes[0][0]
            _place(
                self, self._paths.get(layer.name, layer.name), Statistics(channels, settings.moving_average_fraction)
            )
        for blob in layer.blobs:
            path, _, leaf = blob.name.rpartition(".")
            holder = _at(self, path)
            if holder is None:
                holder = _place(self, self._paths.get(path, path), Blobs())
            if holder._parameters.get(leaf) is None:
                parameter = nn.Parameter(torch.empty(blob.shape))
                fill(parameter, blob.filler)
                holder.register_parameter(leaf, parameter)

    def _held(self, blob: Blob) -> Held:
        path, _, leaf = blob.name.rpartition(".")
        module = self.get_submodule(path)
        alike = getattr(module, leaf).shape == blob.shape
        return module, leaf, None if alike else blob.shape

    def _ready(self, planned: Steps, testing: bool) -> Planned:
        calls = [(self._call(step, testing), step) for step in planned.steps]
        return calls, planned.logits, planned.losses

    def _call(self, step: Step, testing: bool) -> Callable[[Sequence[Tensor]], Tensor | Sequence[Tensor]]:
        held = [self._held(blob) for blob in _blobs(step)]
        settings = step.layer.settings
        if not isinstance(settings, BatchNorm):
            function = relu_in_place if step.over else LAYERS[type(settings)]
            return partial(_computed, function, step.layer, held)
        if step.scale is not None and held:
            held[0][0].scales_norm = True  # type: ignore[assignment]
        statistics = self.get_submodule(step.layer.name)
        assert isinstance(statistics, Statistics)
        by_global = testing if settings.use_global_stats is None else settings.use_global_stats
        return partial(_normalised, statistics, held, settings.eps, by_global, not testing)


def _values(held: Sequence[Held]) -> list[Tensor]:
    found = ((getattr(module, leaf), shape) for module, leaf, shape in held)
    return [tensor if shape is None else tensor.view(shape) for tensor, shape in found]


def _blobs(step: Step) -> Iterable[Blob]:
    return step.layer.blobs if step.scale is None else step.scale.blobs


def _moves(layer: Layer) -> bool:
    return isinstance(layer.settings, BatchNorm) and not layer.settings.use_global_stats


def _computed(function: Callable, layer: Layer, held: Sequence[Held], x: Sequence[Tensor]) -> Tensor:
    return function(layer.settings, layer, x, _values(held))


def _normalised(
    statistics: Statistics, held: Sequence[Held], eps: float, by_global: bool, keep: bool, x: Sequence[Tensor]
) -> Tensor:
    weight, bias = (*_values(held), None, None)[:2]
    # In training `freeze` has a layer use its running statistics: it is in evaluation mode then.
    if by_global or (keep and not statistics.training):
        return statistics.normalised_globally(x[0], weight, bias, eps)
    return statistics.normalised(x[0], weight, bias, eps, keep)


def _at(root: nn.Module, path: str) -> nn.Module | None:
    try:
        return root.get_submodule(path)
    except AttributeError:
        return None


def _place(root: nn.Module, path: str, module: nn.Module) -> nn.Module:
    """Registers a module by a name that may have dots in it, which torch takes for steps down. What was at its place goes on in it."""
    owner, _, last = path.rpartition(".")
    at = root if not owner else _at(root, owner) or _place(root, owner, Blobs())
    before = at._modules.pop(last, None)
    if before is not None:
        module._modules.update(before._modules)
        module._parameters.update(before._parameters)
    at.add_module(last, module)
    return module


_ESCAPED = "layer_with_another_name_"


def _paths(net: Net) -> dict[str, str]:
    """The names of the modules for layers whose own can't be that of a module: those with an empty part, with a part that torch's modules or
    ours have a use for, or below another layer's tensor."""
    layers = [layer for one in (net.train, net.test) for layer in one.layers]
    tensors = {blob.name for layer in layers for blob in layer.blobs}
    names = dict.fromkeys(one.name for one in layers if one.blobs or isinstance(one.settings, BatchNorm))
    return {name: f"{_ESCAPED}{n}" for n, name in enumerate(names) if not _fits(name, tensors)}


def _fits(name: str, tensors: set[str]) -> bool:
    first, *others = parts = name.split(".")
    above = {".".join(parts[: n + 1]) for n in range(len(parts))}
    used, used_below = _used()
    free = first not in used and not any(part.startswith(_ESCAPED) for part in parts)
    return all(parts) and free and not used_below.intersection(others) and not above & tensors


@cache
def _used() -> tuple[frozenset[str], frozenset[str]]:
    """What names mean in the network, and in a layer."""
    network = {*dir(Network), *dir(nn.Module()), *Network.__annotations__}
    return frozenset(network), frozenset((*dir(Blobs()), *dir(Statistics(1, 0.0))))


def _with_own_names(network: Network, state: dict[str, Any], prefix: str, metadata: Mapping[str, Any]) -> None:
    _rename(state, {path: name for name, path in _prefixed(network._paths, prefix).items()})


def _say_own_names(network: Network, found: Any) -> None:
    """In what torch says of tensors that don't fit. It tells no prefix here, but such a name is that of no other module of the network."""
    names = {path: name for name, path in network._paths.items()}
    for keys in (found.missing_keys, found.unexpected_keys):
        keys[:] = [_own_name(key, names) for key in keys]
    own = re.compile(rf"\b{_ESCAPED}\d+(?=\.)")
    network._errors[:] = [own.sub(lambda found: names.get(found[0], found[0]), text) for text in network._errors]


def _own_name(key: str, names: Mapping[str, str]) -> str:
    path, dot, leaf = key.rpartition(".")
    above, below, last = path.rpartition(".")
    return above + below + names.get(last, last) + dot + leaf


def _prefixed(paths: Mapping[str, str], prefix: str) -> dict[str, str]:
    return {prefix + name: prefix + path for name, path in paths.items()}


def _rename(state: MutableMapping[str, Any], names: Mapping[str, str]) -> None:
    """Gives the tensors of modules other names, in the same order."""
    if names:
        items = [(key.rpartition("."), value) for key, value in state.items()]
        state.clear()
        state.update({names.get(path, path) + dot + leaf: value for (path, dot, leaf), value in items})
