"""Who trains which iteration, and whose push is applied next: bounded staleness. Pure.

A replica is known by its rank. Its loader asks for iterations ahead; the replica begins one when it pulls the weights for it, and claims a turn
before it pushes. The age of what a replica has begun is the number of pushes that may have been applied since its pull.

Ages stay at most `max_staleness`. Every replica that has begun must find a turn in time, whatever the others do: sort the ages of the replicas
without a turn in falling order, then the k-th (from 0) plus k is at most `max_staleness`, after every step. The oldest can always push next, as
soon as the pushes under way are done: there is no deadlock.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

END = -1


@dataclass(slots=True)
class Tickets:
    """Hands out the iterations of a stage, from `next` to `last`. The present leg ends before iteration `limit`."""

    next: int
    last: int
    max_staleness: int
    limit: int = 0
    claims: int = 0  # of the leg
    _top: int = 0  # iterations from here on have not begun
    _asked: dict[int, deque[int]] = field(default_factory=dict)
    _begun: dict[int, int] = field(default_factory=dict)  # ages by replica
    _pushes: dict[int, int] = field(default_factory=dict)  # ages of the pushes under way, by replica

    def leg(self, first: int, limit: int) -> None:
        """Start the leg of iterations `first` .. `limit` - 1."""
        assert not self._begun and not self._pushes
        self.limit, self._top, self.claims = limit, first, 0

    def ask(self, replica: int) -> int | None:
        """Reserve the next iteration for `replica`; None at the end of the stage."""
        if self.next >= self.last:
            return None
        self.next += 1
        self._asked.setdefault(replica, deque()).append(self.next - 1)
        return self.next - 1

    def cut(self) -> None:
        """End the leg as soon as possible: replicas finish what has begun, and all iterations before it."""
        self.limit = min(self.limit, self._top)

    def begin(self, replica: int) -> int | None:
        """The iteration that `replica` begins now; END: the leg has none left for it; None: it must wait.

        A replica whose loader has not asked in time takes the next iteration."""
        asked = self._asked.setdefault(replica, deque())
        reserved = bool(asked) and asked[0] < self.limit
        if not reserved and self.next >= self.limit:
            return END
        age = len(self._pushes)
        if not self._fits([*self._begun.values(), age]):
            return None
        iteration = asked.popleft() if reserved else self.next
        self.next = max(self.next, iteration + 1)
        self._top = max(self._top, iteration + 1)
        self._begun[replica] = age
        return iteration

    def claim(self, replica: int) -> int | None:
        """The number of the push in its leg, from 0; None: `replica` must wait for its turn."""
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

    def _fits(self, ages: Iterable[int]) -> bool:
        return all(age + k <= self.max_staleness for k, age in enumerate(sorted(ages, reverse=True)))
