"""A server: its part of the weights, and what their updates remember. It updates at each push, in the order in which they come, or in that of
a record."""

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stagerun.base.knobs import Knobs
from stagerun.engine.asynchronous.record import Arrived
from stagerun.engine.asynchronous.shards import Shards, flat
from stagerun.engine.parameters import Parameter
from stagerun.engine.solvers import WeightUpdate, make_update


@dataclass(frozen=True, slots=True)
class Push:
    """`claim`: its number in the leg. `seen`: the version that was pulled. `gradient` [n]; `total`: BatchNorm's statistics, for server 0."""

    claim: int
    iteration: int
    seen: int
    gradient: Tensor
    total: Tensor | None = None


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
        self.number, self.shards, self._knobs, self._move = number, shards, knobs, move
        self.vector = shards.packed(number, [p.tensor for p in shards.parameters])
        self._gradient = torch.zeros_like(self.vector)
        self.update = self._make(update)
        self._changed = threading.Condition()
        self.order: list[int] = []
        self.staleness: list[int] = []
        self._error: BaseException | None = None
        self._waiting: dict[int, Push] = {}
        self._recorded = recorded is not None
        line, staleness, missed = (recorded.order, recorded.staleness, recorded.missed) if recorded else ((), (), ())
        self._line = line
        self._behind = dict(zip(line, staleness, strict=True))
        self._sees = {claim: at - self._behind[claim] for at, claim in enumerate(line)} | dict(missed)
        self._wanted = Counter(self._sees.values())
        self._kept: dict[int, Tensor] = {}

    def _make(self, whole: WeightUpdate) -> WeightUpdate | None:
        """None for a server without parts: few parameters, and many servers."""
        shards, number = self.shards, self.number
        lengths = shards.lengths(number)
        pieces = zip(shards.parts[number], self.vector.split(lengths), self._gradient.split(lengths), strict=True)
        own = []
        for part, piece, gradient in pieces:
            one = shards.parameters[part.index]
            tensor = nn.Parameter(piece, requires_grad=False)
            tensor.grad = gradient
            own.append(Parameter(one.name, tensor, one.lr_mult, one.decay_mult, one.adapt))
        if not own:
            return None
        update = make_update(own, whole.settings)
        for slot, kept in update.history.items():
            for part, mine in zip(shards.parts[number], own, strict=True):
                there = whole.history[slot][mine.name]
                kept[mine.name].copy_(there if slot == "t" else flat(there)[part.begin : part.end])
        return update

    @property
    def version(self) -> int:
        return len(self.order)

    def remembered(self) -> dict[str, Tensor]:
        """By slot the history of its parts, one after the other [n]; of slot `t` the counts, one per part."""
        if self.update is None:
            return {}
        return {
            slot: torch.cat([tensor.reshape(-1) for tensor in kept.values()])
            for slot, kept in self.update.history.items()
        }

    def pull(self, claim: int) -> tuple[int, Tensor]:
        """(version, the weights [n]). `claim`: its number in a record, which says what it sees; -1 without a record."""
        with self._changed:
            if claim not in self._sees:
                return self.version, self.vector.clone()
            version = self._sees[claim]
            self._changed.wait_for(lambda: self.version >= version or self._error is not None)
            if self._error is not None:
                raise self._error
            self._wanted[version] -= 1
            found = self.vector.clone() if version == self.version else self._kept[version]
            if not self._wanted[version]:
                self._kept.pop(version, None)
            return version, found

    def fail(self, error: BaseException) -> None:
        """Wake pulls that wait for a push that won't come; they raise `error`."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def arrived(self) -> Arrived:
        return Arrived(tuple(self.order), tuple(self.staleness))

    @torch.no_grad()
    def push(self, push: Push) -> int:
        """Apply it now, or with a record in its turn. Return how many updates its gradient has not seen."""
        with self._changed:
            if not self._recorded:
                self._apply(push)
                return self.staleness[-1]
            if push.claim not in self._behind:
                return 0  # recorded by a version that continued without a dead replica: this server never had its push
            self._waiting[push.claim] = push
            while self.version < len(self._line) and self._line[self.version] in self._waiting:
                if self._wanted[self.version]:
                    self._kept[self.version] = self.vector.clone()
                self._apply(self._waiting.pop(self._line[self.version]))
            self._changed.notify_all()
            return self._behind[push.claim]

    def _apply(self, push: Push) -> None:
        self._gradient.copy_(push.gradient)
        if self.update is not None:
            self.update.update(self._knobs(push.iteration))
        if push.total is not None:
            self._move(push.total)
        self.staleness.append(self.version - push.seen)
        self.order.append(push.claim)
