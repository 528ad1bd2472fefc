"""What compressed gradients, or changes of replicas, have left out so far, and its way into a snapshot and back."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from stagerun.comm.group import Comm
from stagerun.comm.reduce import views_of

Parts = Mapping[str, Tensor]


class Residual:
    """What each sender of this rank has not sent yet: one vector per sender, with the last registered parameter first. `bases`: what
    operators remember that is the same on all ranks, by parameter, zeros before the first update that is compressed.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        runs: Sequence[range],
        rank: int,
        bases: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        """`parameters` are those that are trained, in model order; `runs[r]` the senders of rank r, contiguous; `bases` the shapes."""
        self.runs, self.own = runs, runs[rank]
        self.parameters = dict(reversed(list(parameters.items())))
        first = next(iter(parameters.values()))
        self.empty = torch.empty(sum(p.numel() for p in parameters.values()), dtype=first.dtype, device=first.device)
        self.vectors = [torch.zeros_like(self.empty) for _ in self.own]
        self.bases = {name: self.empty.new_zeros(shape) for name, shape in (bases or {}).items()}
        self.shared_from = 0  # so many senders' residuals were shared out evenly over these; 0: each has its own

    @property
    def senders(self) -> int:
        """How many there are on all ranks."""
        return self.runs[-1].stop

    def like(self) -> dict[str, Tensor]:
        """Tensors as those of the snapshot's file are: NAME [senders, ...] for each parameter, and BASIS/NAME."""
        one = self.by_name(self.empty)
        found = {name: part.expand(self.senders, *part.shape) for name, part in one.items()}
        return found | {f"{BASIS}{name}": basis for name, basis in self.bases.items()}

    def by_name(self, vector: Tensor) -> dict[str, Tensor]:
        """The parts of a sender's vector by parameter."""
        return dict(zip(self.parameters, views_of(vector, list(self.parameters.values())), strict=True))

    def gather(self, comm: Comm, take: Callable[[int, Parts], None] | None) -> None:
        """Has rank 0's `take` see each sender's residual, by parameter, in their order. Collective."""
        for rank, run in enumerate(self.runs):
            for sender in run:
                vector = self._room(sender)
                comm.broadcast(vector, rank)
                if take is not None:
                    take(sender, self.by_name(vector))

    def hand_out(self, comm: Comm, fill: Callable[[int, Parts], None] | None) -> None:
        """Gives each sender what rank 0's `fill` puts into its residual, and every rank the bases of rank 0. Collective."""
        for sender in range(self.senders):
            vector = self._room(sender)
            if fill is not None:
                fill(sender, self.by_name(vector.zero_()))
            comm.broadcast(vector, 0)
        for basis in self.bases.values():
            comm.broadcast(basis, 0)

    def _room(self, sender: int) -> Tensor:
        return self.vectors[sender - self.own.start] if sender in self.own else self.empty


BASIS = "basis/"
