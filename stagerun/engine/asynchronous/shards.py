"""Which server has which part of the parameters, and the parts as vectors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from stagerun.base.recipe import Solver
from stagerun.engine.parameters import Parameter

# MXNet's BIGARRAY_BOUND: elements from which on an array is split, and what spreads the others.
SPLIT_FROM, _SPREAD = 1_000_000, 9973


@dataclass(frozen=True, slots=True)
class Part:
    """Elements `begin` .. `end` - 1 of a parameter, counted as they lie in memory. `index`: its place among those that are trained."""

    index: int
    begin: int
    end: int


def placement(sizes: Sequence[int], servers: int, whole: bool = False) -> list[list[Part]]:
    """The parts of each server, of parameters with so many elements: a small one on server (index * 9973) mod `servers`, a large one
    split evenly over all, as MXNet's KVStore has it. `whole`: none is split.

    >>> [[(p.index, p.begin, p.end) for p in parts] for parts in placement([10, 1_000_001], 2)]
    [[(0, 0, 10), (1, 0, 500000)], [(1, 500000, 1000001)]]
    """
    found: list[list[Part]] = [[] for _ in range(servers)]
    for index, size in enumerate(sizes):
        if size < SPLIT_FROM or whole or servers == 1:
            found[index * _SPREAD % servers].append(Part(index, 0, size))
            continue
        cuts = [size * s // servers for s in range(servers + 1)]
        for s, (begin, end) in enumerate(pairwise(cuts)):
            found[s].append(Part(index, begin, end))
    return found


def needs_whole(solver: Solver) -> bool:
    """Whether updates take the norm of a whole parameter."""
    return solver.type in ("LARS", "LAMB") or solver.local_lr_auto


def flat(tensor: Tensor) -> Tensor:
    """A dense tensor's elements as they lie in memory: a view [n]."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


class Shards:
    """The parameters of a network, cut up for the servers. One vector per server crosses the network."""

    def __init__(self, parameters: Sequence[Parameter], servers: int, whole: bool) -> None:
        self.parameters = list(parameters)
        self.parts = placement([p.tensor.numel() for p in parameters], servers, whole)
        self.sizes = [sum(part.end - part.begin for part in parts) for parts in self.parts]

    def packed(self, server: int, tensors: Sequence[Tensor]) -> Tensor:
        """[n]: the server's parts of `tensors`, which are one per parameter and lie in memory as it does."""
        pieces = [flat(tensors[part.index])[part.begin : part.end] for part in self.parts[server]]
        return torch.cat(pieces) if pieces else tensors[0].new_empty(0)

    def unpack(self, server: int, vector: Tensor, tensors: Sequence[Tensor]) -> None:
        """Puts the parts back where they are from."""
        for part, piece in zip(self.parts[server], vector.split(self.lengths(server)), strict=True):
            flat(tensors[part.index])[part.begin : part.end].copy_(piece)

    def lengths(self, server: int) -> list[int]:
        return [part.end - part.begin for part in self.parts[server]]

    def gradients(self, found: Mapping[str, Tensor]) -> list[Tensor]:
        """By parameter, laid out as it is."""
        return [_as(found[p.name], p.tensor) for p in self.parameters]


def _as(tensor: Tensor, like: Tensor) -> Tensor:
    return tensor if tensor.stride() == like.stride() else torch.empty_like(like).copy_(tensor)
