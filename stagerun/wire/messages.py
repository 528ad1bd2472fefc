"""What messages are made of: the operator of each parameter, by the rules of `compress_param`; and what they keep of the gradients."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from stagerun.base.events import CompressedItem
from stagerun.base.recipe import Compression, CompressionRule, Memory, Method, ParamKind, Scope
from stagerun.engine.parameters import first_that_fits, kind_of
from stagerun.engine.state import TrainState
from stagerun.wire.operators import BFloat16, Dense, Draw, Operator, pieces
from stagerun.wire.quantised import Qsgd, TernGrad
from stagerun.wire.sparse import PowerSgd, RandomK, Threshold, TopK, saves
from stagerun.wire.values import METHODS, SETTINGS, settings_of


def rule_of(name: str, kind: ParamKind, how: Compression) -> Compression:
    """How one parameter's gradient is compressed: by the first rule that fits, or as all are."""
    rule = first_that_fits(how.param, name, kind)
    if rule is None:
        return how
    return replace(how, **{field: getattr(rule, field) for field in ("method", "memory", *SETTINGS)})


def rules_of(state: TrainState, how: Compression) -> dict[str, Compression]:
    """That of each parameter that is trained, in model order; those that scope ENTIRE_MODEL leaves out come first."""
    model = state.model
    found = {p.name: rule_of(p.name, kind_of(model, p.name), how) for p in state.solver.parameters}
    if how.scope is Scope.ENTIRE_MODEL:
        return dict(sorted(found.items(), key=lambda pair: pair[1] == how))
    return found


# A class for each method, whose docstring is its formula; it is built with `residual` and the settings that it reads. What is known
# without torch is in `wire.values`.
BUILT: Mapping[Method, Callable[..., Operator]] = {
    Method.NONE: Dense,
    Method.TOP_K: TopK,
    Method.RANDOM_K: RandomK,
    Method.THRESHOLD: Threshold,
    Method.TERNGRAD: TernGrad,
    Method.QSGD: Qsgd,
    Method.POWER_SGD: PowerSgd,
    Method.BF16: BFloat16,
}


def operator(how: Compression | CompressionRule, shape: Sequence[int], senders: int = 1) -> Operator:
    """The operator of a tensor of that shape, for gradients that are divided by the number of senders already, as losses are: so is a
    threshold. KeyError for AUTO, which is no operator."""
    settings: dict[str, Any] = settings_of(how.method, how)
    residual = how.memory is Memory.RESIDUAL
    if how.method is Method.THRESHOLD:
        settings["threshold"] /= senders
    if how.method is Method.POWER_SGD:
        settings["shape"] = (shape[0], prod(shape[1:])) if shape else (1, 1)
        if not saves(settings["rank"], settings["shape"]):
            return Dense(residual)
    return BUILT[how.method](residual=residual, **settings)


def remembers(rule: Compression) -> bool:
    return rule.method is Method.POWER_SGD or (rule.memory is Memory.RESIDUAL and not METHODS[rule.method].exact)


@dataclass(frozen=True, slots=True)
class Item:
    """What one message is made of: a parameter, or all of them. `start` and `stop` cut it out of a vector."""

    name: str
    number: int  # the key of its random numbers
    operator: Operator
    start: int
    stop: int


class Kept:
    """What the messages of sender 0 keep of the gradients that they are made from, in every `every`-th iteration; 0: in none. It looks on: no
    bit depends on it. The reducer calls all but `take`."""

    def __init__(self, every: int = 0) -> None:
        self.every, self.due = every, False
        self._found: dict[int, CompressedItem] = {}  # by the number of the item

    def begin(self, iter: int) -> None:
        """`iter`: updates done in the stage."""
        self._found, self.due = {}, self.every > 0 and (iter + 1) % self.every == 0

    def sent(self, item: Item, c: Tensor, size: int, lacks: Tensor | None = None) -> None:
        """A message of the first round, of so many bytes. `lacks`: what it leaves out of `c`, where that is known already."""
        lost = None if lacks is None else _norm(lacks)
        self._found[item.number] = CompressedItem(
            name=item.name, norm=_norm(c), residual_norm=lost, kept=None, bytes=size
        )

    def encoded(self, item: Item, c: Tensor, message: Tensor, draw: Draw) -> None:
        """What it lacks is the residual after the last round (`left`); without one it is found by decoding the message by itself, which of a
        method with more rounds says nothing."""
        operator, out, alone = item.operator, None, c.clone()
        if not operator.residual and len(operator.sizes(c.numel(), c.element_size())) == 1:
            out = torch.zeros_like(c)
            steps = operator.steps([alone], [0], draw, out)
            next(steps)
            with suppress(StopIteration):
                steps.send([message])
        self.sent(item, c, message.numel(), None if out is None else c - out)

    def one_more(self, item: Item, message: Tensor) -> None:
        """The message of a later round."""
        before = self._found[item.number]
        self._found[item.number] = replace(before, bytes=before.bytes + message.numel())

    def left(self, item: Item, residual: Tensor) -> None:
        """After the last round, where there is a residual."""
        self._found[item.number] = replace(self._found[item.number], residual_norm=_norm(residual))

    def take(self) -> tuple[CompressedItem, ...]:
        """In model order; none where the iteration was not looked at, or a number overflowed."""
        found, self._found = self._found, {}
        items = tuple(_rounded(found[number]) for number in sorted(found, reverse=True))
        finite = all(math.isfinite(item.norm) and math.isfinite(item.residual_norm or 0.0) for item in items)
        return items if finite else ()


def _rounded(item: CompressedItem) -> CompressedItem:
    """With what it keeps, and six digits: a log has many of them."""
    norm, lost, kept = item.norm, item.residual_norm, None
    if lost is not None:
        kept = float(f"{1 - (lost / norm) ** 2:.6g}") if norm else 1.0
        lost = float(f"{lost:.6g}")
    return replace(item, norm=float(f"{norm:.6g}"), residual_norm=lost, kept=kept)


def _norm(vector: Tensor) -> float:
    parts = [torch.linalg.vector_norm(vector[p], dtype=torch.float64) for p in pieces(vector.numel(), vector.device)]
    return float(torch.linalg.vector_norm(torch.stack(parts)))
