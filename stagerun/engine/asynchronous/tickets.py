"""Who trains which iteration, and whose push is applied next. Pure.

A replica is known by its rank. It has some iterations reserved, whose images it reads ahead; it begins the first of them when it pulls the
weights for it, and claims a turn before it pushes. The age of what a replica has begun is the number of pushes that may have been applied
since its pull.

Ages stay at most `max_staleness`. Every replica that has begun must find a turn in time, whatever the others do: sort the ages of the replicas
without a turn in falling order, then the k-th (from 0) plus k is at most `max_staleness`, after every step. The oldest can always push next, as
soon as the pushes under way are done: there is no deadlock.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stagerun.engine.asynchronous.record import Leg

AHEAD = 2  # iterations that a replica has reserved beside the one that it begins


@dataclass(frozen=True, slots=True)
class Work:
    """An iteration to compute. `claim`: its number in a record, -1 without a record; `reserved`: what this replica begins after it."""

    iteration: int
    claim: int = -1
    reserved: Sequence[int] = ()


@dataclass(slots=True)
class Tickets:
    """Hands out the iterations of a stage, from `next` to `last`. The present leg ends before iteration `limit`."""

    next: int
    last: int
    max_staleness: int
    limit: int = 0
    claims: int = 0  # of the leg
    _top: int = 0  # iterations from here on have not begun
    _reserved: dict[int, deque[int]] = field(default_factory=dict)
    _begun: dict[int, int] = field(default_factory=dict)  # ages by replica
    _pushes: dict[int, int] = field(default_factory=dict)  # ages of the pushes under way, by replica

    def leg(self, first: int, limit: int) -> None:
        """Start the leg of iterations `first` .. `limit` - 1."""
        assert not self._begun and not self._pushes
        self.limit, self._top, self.claims = limit, first, 0

    def cut(self) -> None:
        """End the leg as soon as possible: replicas finish what has begun, and all iterations before it."""
        self.limit = min(self.limit, self._top)

    def begin(self, replica: int) -> Work | bool:
        """Return what `replica` begins now; False: it must wait; True: the leg has nothing left for it."""
        reserved = self._reserved.setdefault(replica, deque())
        while len(reserved) <= AHEAD and self.next < self.last:
            reserved.append(self.next)
            self.next += 1
        if not reserved or reserved[0] >= self.limit:
            return True
        age = len(self._pushes)
        if not self._fits([*self._begun.values(), age]):
            return False
        iteration = reserved.popleft()
        self._top = max(self._top, iteration + 1)
        self._begun[replica] = age
        return Work(iteration, reserved=list(reserved))

    def claim(self, replica: int) -> int | None:
        """Return the number of the push in its leg, from 0; None: `replica` must wait for its turn."""
        older = {r: age + 1 for r, age in self._begun.items() if r != replica}
        # A push that was granted before may reach a server after this one.
        if not self._fits(older.values()) or self.max_staleness in self._pushes.values():
            return None
        self._pushes = {r: age + 1 for r, age in self._pushes.items()} | {replica: self._begun[replica]}
        self._begun = older
        self.claims += 1
        return self.claims - 1

    def done(self, replica: int) -> None:
        """All servers have applied the push of `replica`; or its gradient is not finite and there is no push."""
        if self._pushes.pop(replica, None) is None:
            del self._begun[replica]

    def end(self) -> int:
        """Return the iteration at which the leg has ended."""
        return self.limit

    def _fits(self, ages: Iterable[int]) -> bool:
        return all(age + k <= self.max_staleness for k, age in enumerate(sorted(ages, reverse=True)))


class Recorded:
    """Hands out the claims of a record in their order to whichever replica comes, in the place of Tickets.

    So an iteration begins after the pushes that it has to see, and one replica alone gets through."""

    def __init__(self, legs: "Sequence[Leg]") -> None:
        self._legs = {leg.first: leg for leg in legs}
        self._all = deque((leg.first, claim) for leg in legs for claim in range(len(leg.iterations)))
        self._reserved: dict[int, deque[tuple[int, int]]] = {}

    def leg(self, first: int, limit: int) -> None:
        self._now = self._legs[first]
        self._left = self._limit = len(self._now.iterations)
        self._top = 0

    def cut(self) -> None:
        """Claims before one that has begun are still done: it may have to see them."""
        self._limit = min(self._limit, self._top)

    def begin(self, replica: int) -> Work | bool:
        reserved = self._reserved.setdefault(replica, deque())
        while len(reserved) <= AHEAD and self._all:
            reserved.append(self._all.popleft())
        if not reserved or reserved[0][0] != self._now.first or reserved[0][1] >= self._limit:
            return True
        _, claim = reserved.popleft()
        self._top = max(self._top, claim + 1)
        return Work(self._now.iterations[claim], claim, [self._legs[first].iterations[n] for first, n in reserved])

    def claim(self, replica: int) -> int | None:
        raise NotImplementedError  # `begin` has said it

    def done(self, replica: int) -> None:
        self._left -= 1

    def end(self) -> int:
        """A leg that a stop has cut is begun anew by the next process."""
        return self._now.first if self._left else self._now.last
