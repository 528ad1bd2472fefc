"""Which multipliers each parameter of a model has: `Solver.param` applied to names and kinds."""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeVar

from torch import nn

from stagerun.base import weights
from stagerun.base.errors import UsageError, nearest
from stagerun.base.recipe import CompressionRule, ParamKind, ParamRule
from stagerun.models.net import Blobs


@dataclass(frozen=True, slots=True, eq=False)
class Parameter:
    """One parameter that is trained, with its multipliers. `adapt`: whether layer-wise rates are for it."""

    name: str
    tensor: nn.Parameter
    lr_mult: float
    decay_mult: float
    adapt: bool = True


def kind_of(model: nn.Module, name: str) -> ParamKind:
    """NORM, BIAS or WEIGHT of a parameter by its full name.

    WEIGHT is all that is neither of the others: embeddings, class tokens, tables of positions and scales of layers are
    learnt maps like weights, and differ from network to network; a rule that means them names them.
    """
    owner, _, last = name.rpartition(".")
    module = model.get_submodule(owner)
    if isinstance(module, nn.modules.batchnorm._BatchNorm | nn.GroupNorm | nn.LayerNorm):
        return ParamKind.NORM
    if isinstance(module, Blobs) and module.scales_norm:
        return ParamKind.NORM
    return ParamKind.BIAS if last == "bias" or last.endswith("_bias") else ParamKind.WEIGHT


Rule = TypeVar("Rule", ParamRule, CompressionRule)


def fits(rule: ParamRule | CompressionRule, name: str, kind: ParamKind) -> bool:
    """Whether a rule is for the parameter of that name and kind."""
    return fnmatchcase(name, rule.name) and rule.kind in (ParamKind.ANY, kind)


def first_that_fits(rules: Sequence[Rule], name: str, kind: ParamKind) -> Rule | None:
    return next((rule for rule in rules if fits(rule, name, kind)), None)


def multipliers(name: str, kind: ParamKind, rules: Sequence[ParamRule]) -> ParamRule:
    """The first rule that fits, or the rule that changes nothing."""
    return first_that_fits(rules, name, kind) or ParamRule()


def trained_parameters(model: nn.Module, rules: Sequence[ParamRule], freeze: Sequence[str] = ()) -> list[Parameter]:
    """The parameters that move, in model order. Those with lr_mult 0, those that `freeze` names, and those that a network from
    outside keeps as they are, are frozen: autograd leaves them out.

    UsageError if that leaves none.
    """
    trained: list[Parameter] = []
    frozen = frozen_parameters(model, rules, freeze)
    for name, tensor in model.named_parameters():
        rule = multipliers(name, kind_of(model, name), rules)
        tensor.requires_grad_(name not in frozen)
        if name not in frozen:
            trained.append(Parameter(name, tensor, rule.lr_mult, rule.decay_mult, rule.adapt))
    if not trained and freeze:
        alone = all(weights.fits(name, freeze) for name, _ in model.named_parameters())
        message = "`freeze` fits every parameter of the model: there is nothing to train"
        if not alone:
            message = "`freeze`, `lr_mult: 0` and what the network itself freezes leave nothing to train"
        raise UsageError(message, "name only what is to stay as it is")
    if not trained and not any(rule.lr_mult == 0 for rule in rules):
        raise UsageError(
            "the network has no parameter to train", "parameters with `requires_grad` False stay as they are"
        )
    if not trained:
        raise UsageError(
            "`param` gives every parameter of the model lr_mult 0: there is nothing to train",
            "give the rule a name or a kind, so that it fits only what is to be frozen",
        )
    return trained


def frozen_parameters(model: nn.Module, rules: Sequence[ParamRule], freeze: Sequence[str]) -> frozenset[str]:
    """Their names. Says nothing of `requires_grad`, which a trained model has as `trained_parameters` sets it."""
    kept: frozenset[str] = getattr(model, "frozen_by_network", frozenset())
    return frozenset(
        name
        for name, _ in model.named_parameters()
        if name in kept or weights.fits(name, freeze) or multipliers(name, kind_of(model, name), rules).lr_mult == 0
    )


def frozen_norms(model: nn.Module, freeze: Sequence[str]) -> list[nn.Module]:
    """The BatchNorm layers whose statistics `freeze` names."""
    norms = ((n, m) for n, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm))
    return [norm for name, norm in norms if weights.fits(f"{name}.running_mean", freeze)]


def still_in(model: nn.Module, rules: Sequence[ParamRule], freeze: Sequence[str]) -> frozenset[str]:
    """The names of the tensors that stay as they are: frozen parameters, and all buffers of BatchNorm layers that `freeze` names."""
    norms = set(map(id, frozen_norms(model, freeze)))
    held = [f"{name}.{one}" for name, m in model.named_modules() if id(m) in norms for one, _ in m.named_buffers()]
    return frozen_parameters(model, rules, freeze).union(held)


def idle_patterns(model: nn.Module, freeze: Sequence[str]) -> list[tuple[str, str]]:
    """Those that fit neither a parameter nor the statistics of a BatchNorm layer, each with a hint."""
    names = [name for name, _ in model.named_parameters()]
    known = [*names, *(name for name in model.state_dict() if name.endswith("running_mean"))]
    like = f"the model's parameters are named like `{next(iter(names), '')}`"
    return [(one, nearest(one, names) or like) for one in freeze if not any(weights.fits(n, (one,)) for n in known)]


def idle_rules(
    model: nn.Module, rules: Sequence[ParamRule | CompressionRule]
) -> list[tuple[ParamRule | CompressionRule, str]]:
    """The rules that fit no parameter at all, each with a hint: a pattern that was meant to do something."""
    names = {name: kind_of(model, name) for name, _ in model.named_parameters()}
    idle = []
    for rule in rules:
        if not any(fits(rule, n, k) for n, k in names.items()):
            hint = nearest(rule.name, names) or f"the model's parameters are named like `{next(iter(names), '')}`"
            idle.append((rule, hint))
    return idle
