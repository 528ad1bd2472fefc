"""What the solver types share: groups of parameters with the same multipliers, what is remembered, weight decay."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor

from stagerun.engine.parameters import Parameter
from stagerun.knobs import Knobs
from stagerun.recipe import Solver
from stagerun.schedule import slots_of

Tensors = list[Tensor]


class Group:
    """Parameters that are moved together. `w` and the lists in `history` are in the order of `members`, as is all that is
    computed for them; `places` are the members' places in the order of `WeightUpdate.parameters`."""

    def __init__(self, members: Sequence[tuple[int, Parameter]], history: Mapping[str, Mapping[str, Tensor]]) -> None:
        self.places = [place for place, _ in members]
        self.members = [p for _, p in members]
        first = self.members[0]
        self.lr_mult, self.decay_mult, self.adapt = first.lr_mult, first.decay_mult, first.adapt
        self.w: Tensors = [p.tensor for p in self.members]
        self.history = {slot: [kept[p.name] for p in self.members] for slot, kept in history.items()}

    def gradients(self) -> Tensors:
        found = [p.tensor.grad for p in self.members]
        assert all(g is not None for g in found)
        return found  # type: ignore[return-value]


class WeightUpdate(ABC):
    """`history`: slot -> parameter name -> what is remembered of it, zero at first. The slots are those of
    `schedule.slots_of`. `t`, where there is one, is int64 []: the updates that the parameter's averages have seen. The others
    have the parameter's shape, dtype and layout."""

    def __init__(self, parameters: Sequence[Parameter], solver: Solver) -> None:
        self.parameters = list(parameters)
        self.settings = solver
        self.history: dict[str, dict[str, Tensor]] = {}
        # One vector, so that counting is one operation on a GPU, too.
        self.t = torch.zeros(len(self.parameters), dtype=torch.int64, device=self.parameters[0].tensor.device)
        for slot in slots_of(solver.type, solver.momentum_form):
            if slot == "t":
                self.history[slot] = {p.name: self.t[place] for place, p in enumerate(self.parameters)}
            else:
                self.history[slot] = {p.name: torch.zeros_like(p.tensor) for p in self.parameters}

        def multipliers(member: tuple[int, Parameter]) -> tuple[float, float, bool]:
            return member[1].lr_mult, member[1].decay_mult, member[1].adapt

        ordered = sorted(enumerate(self.parameters), key=multipliers)
        self._groups = [Group(list(members), self.history) for _, members in groupby(ordered, key=multipliers)]

    @torch.no_grad()
    def update(self, knobs: Knobs) -> None:
        """One weight update from the parameters' `.grad`, which may be changed by it."""
        for group in self._groups:
            rate, decay = knobs.lr * group.lr_mult, knobs.weight_decay * group.decay_mult
            self._move(group, group.gradients(), rate, decay, knobs)

    @abstractmethod
    def _move(self, group: Group, g: Tensors, rate: float, decay: float, knobs: Knobs) -> None:
        """One group's share of it. `rate` and `decay` are r and d of the formulas."""

    def _regularise(self, group: Group, g: Tensors, decay: float) -> None:
        """g becomes h: the term of weight decay is added to it."""
        if decay:
            term = group.w if self.settings.regularization_type == "L2" else torch._foreach_sign(group.w)
            torch._foreach_add_(g, term, alpha=decay)


def lengths(tensors: Tensors) -> Tensor:
    """[n]: the L2 norm of each, in their dtype."""
    return torch.stack(torch._foreach_norm(tensors))


def where_both(a: Tensor, b: Tensor, ratio: Tensor) -> Tensors:
    """n scalars: `ratio` [n] where `a` [n] and `b` [n] are above zero, and 1 elsewhere."""
    return list(torch.where((a > 0) & (b > 0), ratio, torch.ones_like(ratio)).unbind())
