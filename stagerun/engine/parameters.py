"""Multipliers of each parameter of a model: `Solver.param` applied to names and kinds."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeVar

from torch import nn

# torch has no public name for what all BatchNorm layers derive from, a user's and SyncBatchNorm too. Without it nothing imports.
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

from stagerun.base import weights
from stagerun.base.errors import UsageError, nearest
from stagerun.base.recipe import CompressionRule, ParamKind, ParamRule


@dataclass(frozen=True, slots=True, eq=False)
class Parameter:
    """A trained parameter with its multipliers. `adapt`: whether layer-wise rates apply to it."""

    name: str
    tensor: nn.Parameter
    lr_mult: float
    decay_mult: float
    adapt: bool = True


def kind_of(model: nn.Module, name: str) -> ParamKind:
    """Return NORM, BIAS or WEIGHT of a parameter by its full name.

    WEIGHT is anything else: embeddings, class tokens, tables of positions and scales of layers are
    learnt maps like weights, and differ from network to network; a rule that means them names them."""
    owner, _, last = name.rpartition(".")
    module = model.get_submodule(owner)
    if isinstance(module, BatchNorm | nn.GroupNorm | nn.LayerNorm):
        return ParamKind.NORM
    if getattr(module, "scales_norm", False):  # the Scale after a BatchNorm in a net of Caffe's
        return ParamKind.NORM
    return ParamKind.BIAS if last == "bias" or last.endswith("_bias") else ParamKind.WEIGHT


Rule = TypeVar("Rule", ParamRule, CompressionRule)


def fits(rule: ParamRule | CompressionRule, name: str, kind: ParamKind) -> bool:
    """Return whether a rule applies to the parameter of that name and kind."""
    alike = rule.kind in (ParamKind.ANY, kind)
    if rule.kind is ParamKind.BIAS_AND_NORM:
        alike = kind in (ParamKind.BIAS, ParamKind.NORM)
    return alike and fnmatchcase(name, rule.name)


def first_that_fits(rules: Sequence[Rule], name: str, kind: ParamKind) -> Rule | None:
    return next((rule for rule in rules if fits(rule, name, kind)), None)


def trained_parameters(model: nn.Module, rules: Sequence[ParamRule], freeze: Sequence[str]) -> list[Parameter]:
    """Return the parameters to train, in model order; UsageError if all are frozen. A parameter is frozen, and left out by autograd, if its
    lr_mult is 0, `freeze` names it, or the network itself freezes it."""
    trained: list[Parameter] = []
    frozen = frozen_parameters(model, rules, freeze)
    for name, tensor in model.named_parameters():
        tensor.requires_grad_(name not in frozen)
        if name not in frozen:
            rule = first_that_fits(rules, name, kind_of(model, name)) or ParamRule()
            trained.append(Parameter(name, tensor, rule.lr_mult, rule.decay_mult, rule.adapt))
    if trained:
        return trained
    message = "the network has no parameter left: there is nothing to train"
    raise UsageError(message, "`freeze`, `lr_mult: 0` of a `param`, or `requires_grad` False in the network freeze all")


def frozen_parameters(model: nn.Module, rules: Sequence[ParamRule], freeze: Sequence[str]) -> frozenset[str]:
    """Return the names of the frozen parameters. Doesn't read `requires_grad`, which `trained_parameters` sets."""
    frozen: set[str] = set(getattr(model, "frozen_by_network", ()))
    for name, _ in model.named_parameters():
        rule = first_that_fits(rules, name, kind_of(model, name))
        if weights.fits(name, freeze) or (rule is not None and rule.lr_mult == 0):
            frozen.add(name)
    return frozenset(frozen)


def frozen_norms(model: nn.Module, freeze: Sequence[str]) -> list[nn.Module]:
    """Return the BatchNorm layers whose statistics `freeze` names."""
    norms = ((n, m) for n, m in model.named_modules() if isinstance(m, BatchNorm))
    return [norm for name, norm in norms if weights.fits(f"{name}.running_mean", freeze)]


def still_in(model: nn.Module, rules: Sequence[ParamRule], freeze: Sequence[str]) -> frozenset[str]:
    """Return the names of constant tensors: frozen parameters, and all buffers of BatchNorm layers that `freeze` names."""
    norms = set(map(id, frozen_norms(model, freeze)))
    held = [f"{name}.{one}" for name, m in model.named_modules() if id(m) in norms for one, _ in m.named_buffers()]
    return frozen_parameters(model, rules, freeze).union(held)


def idle_patterns(model: nn.Module, freeze: Sequence[str]) -> list[tuple[str, str]]:
    """Return the patterns that fit neither a parameter nor the statistics of a BatchNorm layer, each with a hint."""
    names = [name for name, _ in model.named_parameters()]
    tensors = [*names, *(name for name in model.state_dict() if name.endswith("running_mean"))]
    idle = [one for one in freeze if not any(weights.fits(name, (one,)) for name in tensors)]
    return [(one, nearest(one, names) or _named_like(names)) for one in idle]


def idle_rules(
    model: nn.Module, rules: Sequence[ParamRule | CompressionRule]
) -> list[tuple[ParamRule | CompressionRule, str]]:
    """Return the rules that fit no parameter, each with a hint."""
    kinds = {name: kind_of(model, name) for name, _ in model.named_parameters()}
    idle = [rule for rule in rules if not any(fits(rule, name, kind) for name, kind in kinds.items())]
    return [(rule, nearest(rule.name, kinds) or _named_like(kinds)) for rule in idle]


def _named_like(names: Iterable[str]) -> str:
    return f"the model's parameters are named like `{next(iter(names), '')}`"
