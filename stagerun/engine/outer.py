"""The outer update of `sync_param { method: DILOCO }`: Douillard et al., DiLoCo (arXiv:2311.08105), algorithm 1."""

from collections.abc import Mapping

import torch
from torch import Tensor

from stagerun.base.recipe import Outer


class OuterUpdate:
    """d = a - (mean of the replicas)    V = m*V + d    a -= r*(d + m*V) (Nesterov), a -= r*V (SGD)

    with a the weights that all replicas went on from, r `base_lr` and m `momentum` of `outer`. V is zero at first. That is torch's form
    of Nesterov's momentum, which the paper uses. Only what is trained has d; statistics of BatchNorm are the mean.
    """

    def __init__(self, trained: Mapping[str, Tensor], how: Outer) -> None:
        self.how = how
        self.common = {name: t.detach().clone() for name, t in trained.items()}
        self.velocity = {name: torch.zeros_like(t) for name, t in self.common.items()}

    @torch.no_grad()
    def update(self, trained: Mapping[str, Tensor]) -> None:
        """`trained`: the mean of the replicas, which becomes what they go on from."""
        a, v = list(self.common.values()), list(self.velocity.values())
        live = [trained[name] for name in self.common]
        d = torch._foreach_sub(a, live)
        torch._foreach_mul_(v, self.how.momentum)
        torch._foreach_add_(v, d)
        if self.how.type == "Nesterov":
            torch._foreach_add_(d, v, alpha=self.how.momentum)
        step = d if self.how.type == "Nesterov" else v
        torch._foreach_add_(a, step, alpha=-self.how.base_lr)
        torch._foreach_copy_(live, a)

    def remembered(self) -> dict[str, Tensor]:
        """What a snapshot holds of it, by name: the live tensors."""
        return remembered(self.common, self.velocity)


def remembered(common: Mapping[str, Tensor], velocity: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Both by the names that they have in a snapshot."""
    return {f"common/{n}": t for n, t in common.items()} | {f"velocity/{n}": t for n, t in velocity.items()}
