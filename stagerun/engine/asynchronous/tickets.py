"""Who trains which iteration, and whose push is applied next: bounded staleness, and the takeover of what a dead replica had. Pure.

A replica is known by its rank. It asks for iterations ahead, as its loader reads ahead, begins one when it pulls the weights for it,
and claims its turn before it pushes. The age of what it has begun is the number of pushes that may have been applied since its pull.

Ages stay at most `max_staleness`. Whoever has begun must find a turn in time, whatever the others do: so with the ages of those that have
not found it in falling order, the k-th (from 0) plus k is at most `max_staleness`, after every step. The oldest can then always push
next, as soon as the pushes under way are done: there is no deadlock.

A push that is granted and does not come is made void: no one waits for it any more. Servers other than server 0 may still apply it, until
they know a floor above its claim; so until then it counts in the age of whoever begins.
"""

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Begin:
    """`iteration` starts: the one that was asked for, or one that a dead replica has left."""

    iteration: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Not now. `for_whom`: the replicas whose age or push forbids it; empty: something else has to happen first."""

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
    refused: bool = False


@dataclass(slots=True)
class _Push:
    """`void`: server 0 has applied it, so that its iteration is done, and others may."""

    replica: int
    iteration: int
    age: int
    void: bool = False


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
    _pushes: dict[int, _Push] = field(
        default_factory=dict
    )  # by claim, in their order: granted, and not known to be over
    _returned: list[int] = field(default_factory=list)  # a heap

    def leg(self, first: int, limit: int) -> None:
        """The leg of iterations `first` .. `limit` - 1 starts; nothing is begun."""
        assert not self._begun and not self._pushes and not self.left
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
            return Wait((*self._ages(without=replica), *self._pushing())) if self.left else End()
        age = len(self._pushes)
        ages = self._ages(without=replica)
        if not self._fits([*ages.values(), age]):
            return Wait((*ages, *self._pushing()))
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
        under_way = [push for push in self._pushes.values() if not push.void]
        if oldest := tuple(push.replica for push in under_way if push.age == self.max_staleness):
            return Wait(oldest)  # a push that was granted before may come to a server after this one
        for push in under_way:
            push.age += 1
        for other in older:
            self._begun[other].age += 1
        del self._begun[replica]
        self._pushes[self.claims] = _Push(replica, held.iteration, held.age)
        self.claims += 1
        return Granted(self.claims - 1)

    @property
    def floor(self) -> int:
        """The lowest claim that is under way: those below it were applied, or are void. It never falls during a leg."""
        return next((claim for claim, push in self._pushes.items() if not push.void), self.claims)

    def refuse(self, replica: int) -> None:
        """What `replica` has begun no longer holds the others up: it goes to one of them."""
        held = self._begun.get(replica)
        if held is not None and not held.refused:
            held.refused = True
            heapq.heappush(self._returned, held.iteration)

    def done(self, replica: int) -> bool:
        """Its push was applied by all servers, or its gradient is not finite and there is none. Whether the iteration counts now: not where
        it was given away meanwhile, or its push was made void."""
        claim = self._claim_of(replica)
        if claim is not None:
            del self._pushes[claim]
            self._forget()
            counts = True
        else:
            held = self._begun.pop(replica, None)
            counts = held is not None and not held.refused
        self.left -= counts
        return counts

    def void(self, replica: int, applied: bool) -> None:
        """No one waits any more for the push of `replica`, which is under way. `applied`: by server 0, so that the iteration is done; else no
        server will apply it, and the iteration goes to another."""
        claim = self._claim_of(replica)
        assert claim is not None
        if applied:
            self._pushes[claim].void = True
            self.left -= 1
        else:
            heapq.heappush(self._returned, self._pushes.pop(claim).iteration)
        self._forget()

    def lost(self, replica: int) -> None:
        """`replica` is dead; its push, if there was one, was made void. What it had goes to the others."""
        assert self._claim_of(replica) is None
        held = self._begun.pop(replica, None)
        if held is not None and not held.refused:
            heapq.heappush(self._returned, held.iteration)
        for iteration in self._asked.pop(replica, ()):
            heapq.heappush(self._returned, iteration)

    def _ages(self, without: int) -> dict[int, int]:
        return {r: b.age for r, b in self._begun.items() if r != without and not b.refused}

    def _pushing(self) -> list[int]:
        return [push.replica for push in self._pushes.values() if not push.void]

    def _claim_of(self, replica: int) -> int | None:
        """That of its push under way."""
        return next((c for c, push in self._pushes.items() if push.replica == replica and not push.void), None)

    def _forget(self) -> None:
        """No server applies any more what is below the floor."""
        floor = self.floor
        self._pushes = {claim: push for claim, push in self._pushes.items() if claim >= floor}

    def _fits(self, ages: Iterable[int]) -> bool:
        return all(age + k <= self.max_staleness for k, age in enumerate(sorted(ages, reverse=True)))

    def _before(self, ages: dict[int, int], replica: int) -> int:
        return sum((age, -r) > (ages[replica], -replica) for r, age in ages.items())


def _last_before(asked: deque[int], limit: int) -> int:
    """Takes out the last that is before `limit`: whoever reads them ahead comes to it last."""
    found = max(i for i in asked if i < limit)
    asked.remove(found)
    return found
