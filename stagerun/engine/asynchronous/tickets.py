"""Who trains which iteration, and whose push is applied next: bounded staleness, and the takeover of what a dead replica had. Pure.

A replica is known by its rank. It asks for iterations ahead, as its loader reads ahead, begins one when it pulls the weights for it,
and claims its turn before it pushes. The age of what it has begun is the number of pushes that may have been applied since its pull.

Ages stay at most `max_staleness`. Whoever has begun must find a turn in time, whatever the others do: so with the ages of those that have
not found it in falling order, the k-th (from 0) plus k is at most `max_staleness`, after every step. The oldest can then always push
next, as soon as the pushes under way are done: there is no deadlock.
"""

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Begin:
    """`iteration` is begun: that which was asked for, or one that a dead replica has left."""

    iteration: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Not now. `for_whom`: the replicas whose age forbids it; empty: something else has to happen first."""

    for_whom: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class End:
    """All iterations of the leg are done."""


@dataclass(frozen=True, slots=True)
class Granted:
    """The push may be applied; it is the `number`-th of the leg that was granted, from 0."""

    number: int


@dataclass(frozen=True, slots=True)
class Refused:
    """What was begun is too old by now, and the iteration was given away: begin another."""


@dataclass(slots=True)
class _Begun:
    iteration: int
    age: int
    granted: bool = False
    refused: bool = False


@dataclass(slots=True)
class Tickets:
    """Hands out the iterations of a stage, from `next` to `last`. The present leg ends before iteration `limit`."""

    next: int
    last: int
    max_staleness: int
    limit: int = 0
    claims: int = 0  # of the leg
    left: int = 0  # iterations of the leg that are not done
    _top: int = 0  # no iteration from here on was begun
    _asked: dict[int, deque[int]] = field(default_factory=dict)
    _begun: dict[int, _Begun] = field(default_factory=dict)
    _returned: list[int] = field(default_factory=list)  # a heap

    def leg(self, first: int, limit: int) -> None:
        """The leg of iterations `first` .. `limit` - 1 starts; nothing is begun."""
        assert not self._begun and not self.left
        self.limit, self.left, self._top, self.claims = limit, limit - first, first, 0

    def ask(self, replica: int) -> int | None:
        """The next iteration, for `replica`; None: there are no more."""
        if self.next >= self.last:
            return None
        self.next += 1
        self._asked.setdefault(replica, deque()).append(self.next - 1)
        return self.next - 1

    def cut(self) -> None:
        """Ends the leg as soon as can be: what was begun is finished, and what comes before it."""
        limit = min(self.limit, self._top)
        self.left -= self.limit - limit
        self.limit = limit

    def begin(self, replica: int) -> Begin | Wait | End:
        """What `replica` begins now: what others have left comes first."""
        if not self.holds(replica):  # it was refused, and had nothing to claim
            self._begun.pop(replica, None)
        source = self._source(replica)
        if source is None:
            others = tuple(r for r in self._ages(without=replica))
            return Wait(others) if self.left else End()
        age = sum(one.granted for one in self._begun.values())
        ages = self._ages(without=replica)
        if not self._fits([*ages.values(), age]):
            return Wait(tuple(ages))
        iteration = self._taken(source, replica)
        self._begun[replica] = _Begun(iteration, age)
        self._top = max(self._top, iteration + 1)
        return Begin(iteration)

    def own_from(self, replica: int) -> int:
        """What `replica` has asked for before this iteration and not begun was given to others."""
        return min(self._asked.get(replica, ()), default=self.next)

    def _source(self, replica: int) -> list[int] | int | None:
        """Where the next iteration of the leg comes from: what was left, or whose queue it is in; -1: nobody's. At the end of a leg one takes
        what another has asked for and not begun."""
        if self._returned and self._returned[0] < self.limit:
            return self._returned
        waiting = {r: asked for r, asked in self._asked.items() if asked and min(asked) < self.limit}
        if replica in waiting:
            return replica
        if self.next < self.limit:  # whoever reads ahead for this one has not come to ask
            return -1
        return max(waiting, key=lambda r: sum(i < self.limit for i in waiting[r]), default=None)

    def _taken(self, source: list[int] | int, replica: int) -> int:
        if isinstance(source, list):
            return heapq.heappop(source)
        if source < 0:
            self.next += 1
            return self.next - 1
        asked = self._asked[source]
        return asked.popleft() if source == replica else _last_before(asked, self.limit)

    def holds(self, replica: int) -> bool:
        """Whether what it has begun is still its own."""
        held = self._begun.get(replica)
        return held is not None and not held.refused

    def claim(self, replica: int) -> Granted | Wait | Refused:
        """Whether the push of `replica` is next."""
        held = self._begun[replica]
        if held.refused:
            del self._begun[replica]
            return Refused()
        older = {r: age + 1 for r, age in self._ages(without=replica).items()}
        if not self._fits(older.values()):
            return Wait(tuple(r for r, age in older.items() if age + self._before(older, r) > self.max_staleness))
        under_way = [one for one in self._begun.values() if one.granted]
        if any(one.age == self.max_staleness for one in under_way):
            return Wait()  # a push that was granted before may come to a server after this one
        for one in (*under_way, *(self._begun[r] for r in older)):
            one.age += 1
        held.granted = True
        self.claims += 1
        return Granted(self.claims - 1)

    def refuse(self, replica: int) -> None:
        """What `replica` has begun no longer holds the others up: it goes to one of them."""
        held = self._begun.get(replica)
        if held is not None and not held.granted and not held.refused:
            held.refused = True
            heapq.heappush(self._returned, held.iteration)

    def done(self, replica: int) -> bool:
        """Its push was applied by all servers, or its gradient is not finite and there is none. Whether the iteration counts: not where it
        was given away meanwhile."""
        held = self._begun.pop(replica)
        self.left -= not held.refused
        return not held.refused

    def lost(self, replica: int) -> None:
        """`replica` is dead. What it had goes to the others."""
        held = self._begun.pop(replica, None)
        if held is not None and not held.refused:
            heapq.heappush(self._returned, held.iteration)
        for iteration in self._asked.pop(replica, ()):
            heapq.heappush(self._returned, iteration)

    def _ages(self, without: int) -> dict[int, int]:
        return {r: b.age for r, b in self._begun.items() if r != without and not b.granted and not b.refused}

    def _fits(self, ages: Iterable[int]) -> bool:
        return all(age + k <= self.max_staleness for k, age in enumerate(sorted(ages, reverse=True)))

    def _before(self, ages: dict[int, int], replica: int) -> int:
        return sum((age, -r) > (ages[replica], -replica) for r, age in ages.items())


def _last_before(asked: deque[int], limit: int) -> int:
    """Takes out the last that is before `limit`: whoever reads them ahead comes to it last."""
    found = max(i for i in asked if i < limit)
    asked.remove(found)
    return found
