"""A server: its part of the weights, and what their updates remember. It updates at each push, in the order in which they come, or in that of
a record. And which server has which part."""

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from stagerun.base.knobs import Knobs
from stagerun.base.recipe import Solver
from stagerun.engine.asynchronous.record import Arrived
from stagerun.engine.parameters import Parameter
from stagerun.engine.solvers import WeightUpdate, make_update

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


def flat(tensor: Tensor) -> Tensor:
    """A dense tensor's elements as they lie in memory: a view [n]."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


class Shards:
    """The parameters of a network, cut up for the servers. One vector per server crosses the network."""

    def __init__(self, parameters: Sequence[Parameter], servers: int, solver: Solver) -> None:
        self.parameters = list(parameters)
        norms = solver.type in ("LARS", "LAMB") or solver.local_lr_auto  # of whole parameters
        self.parts = placement([p.tensor.numel() for p in parameters], servers, norms)
        self.lengths = [[part.end - part.begin for part in parts] for parts in self.parts]

    def packed(self, server: int, tensors: Sequence[Tensor]) -> Tensor:
        """[n]: the server's parts of `tensors`, which are one per parameter and lie in memory as it does."""
        pieces = [flat(tensors[part.index])[part.begin : part.end] for part in self.parts[server]]
        return torch.cat(pieces) if pieces else tensors[0].new_empty(0)

    def unpack(self, server: int, vector: Tensor, tensors: Sequence[Tensor]) -> None:
        """Puts the parts back where they are from."""
        for part, piece in zip(self.parts[server], vector.split(self.lengths[server]), strict=True):
            flat(tensors[part.index])[part.begin : part.end].copy_(piece)

    def gradients(self, found: Mapping[str, Tensor]) -> list[Tensor]:
        """By parameter, laid out as it is."""
        both = [(found[p.name], p.tensor) for p in self.parameters]
        return [g if g.stride() == p.stride() else torch.empty_like(p).copy_(g) for g, p in both]


class Server:
    """Serves one leg. Any thread may call it; `version` counts the updates.

    With a record, a push that comes before its turn is kept until then, and so is a version of the weights that a replica has yet to see:
    early replicas don't wait for late ones, so any number of replicas gets through the record. A pull waits for its version, which pushes of
    earlier claims make.
    """

    def __init__(
        self,
        number: int,
        shards: Shards,
        update: WeightUpdate,
        knobs: Callable[[int], Knobs],
        move: Callable[[Tensor], None],
        recorded: Arrived | None = None,
    ) -> None:
        """The leg begins with the weights and the history of `update`, which stay as they are. `move` updates BatchNorm's statistics."""
        self._knobs, self._move, self._recorded = knobs, move, recorded
        self.vector = shards.packed(number, [p.tensor for p in shards.parameters])
        self._gradient = torch.zeros_like(self.vector)
        self.update = self._make(shards, number, update)
        self._changed = threading.Condition()
        self.order: list[int] = []
        self.staleness: list[int] = []
        self._error: BaseException | None = None
        self._waiting: dict[int, tuple[int, Tensor, Tensor | None]] = {}
        self._sees = recorded.seen() if recorded is not None else {}
        self._wanted = Counter(self._sees.values())
        self._kept: dict[int, Tensor] = {}

    def _make(self, shards: Shards, number: int, whole: WeightUpdate) -> WeightUpdate | None:
        """None for a server without parts: few parameters, and many servers."""
        parts, lengths = shards.parts[number], shards.lengths[number]
        own = []
        for part, piece, gradient in zip(parts, self.vector.split(lengths), self._gradient.split(lengths), strict=True):
            one = shards.parameters[part.index]
            tensor = nn.Parameter(piece, requires_grad=False)
            tensor.grad = gradient
            own.append(Parameter(one.name, tensor, one.lr_mult, one.decay_mult, one.adapt))
        if not own:
            return None
        update = make_update(own, whole.settings)
        for slot, kept in update.history.items():
            for part, mine in zip(parts, own, strict=True):
                there = whole.history[slot][mine.name]
                kept[mine.name].copy_(there if slot == "t" else flat(there)[part.begin : part.end])
        return update

    @property
    def version(self) -> int:
        return len(self.order)

    def remembered(self) -> list[Tensor]:
        """By slot, but for the counts, the history of its parts, one after the other [n]."""
        history = self.update.history if self.update is not None else {}
        return [torch.cat([t.reshape(-1) for t in kept.values()]) for slot, kept in history.items() if slot != "t"]

    def pull(self, claim: int) -> tuple[int, Tensor]:
        """(version, the weights [n]). `claim`: its number in a record, which says what it sees; -1 without a record."""
        with self._changed:
            if claim not in self._sees:
                return self.version, self.vector.clone()
            version = self._sees[claim]
            self._changed.wait_for(lambda: self.version >= version or self._error is not None)
            if self._error is not None:
                raise self._error
            found = self.vector.clone() if version == self.version else self._kept[version]
            self._wanted[version] -= 1
            if not self._wanted[version]:
                self._kept.pop(version, None)
            return version, found

    def fail(self, error: BaseException) -> None:
        """Wake pulls that wait for a push that won't come; they raise `error`."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    @torch.no_grad()
    def push(self, claim: int, seen: int, iteration: int, gradient: Tensor, total: Tensor | None = None) -> int:
        """Apply it now, or with a record in its turn. Return how many updates its gradient has not seen. `claim`: its number in the leg; `seen`:
        the version that was pulled; `total`: BatchNorm's statistics, for server 0."""
        with self._changed:
            if self._recorded is None:
                self._apply(claim, seen, iteration, gradient, total)
                return self.staleness[-1]
            line = self._recorded.order
            self._waiting[claim] = iteration, gradient, total
            while self.version < len(line) and line[self.version] in self._waiting:
                if self._wanted[self.version]:
                    self._kept[self.version] = self.vector.clone()
                first = line[self.version]
                self._apply(first, self._sees[first], *self._waiting.pop(first))
            self._changed.notify_all()
            return self._recorded.staleness[line.index(claim)]

    def _apply(self, claim: int, seen: int, iteration: int, gradient: Tensor, total: Tensor | None) -> None:
        self._gradient.copy_(gradient)
        if self.update is not None:
            self.update.update(self._knobs(iteration))
        if total is not None:
            self._move(total)
        self.staleness.append(self.version - seen)
        self.order.append(claim)
