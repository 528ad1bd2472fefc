"""What server 0's process does beside serving: it hands out iterations and says whose push is next. `Hub` records the order, `Replay` follows a
record."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from stagerun.engine.asynchronous.record import Arrived, Leg
from stagerun.engine.asynchronous.tickets import END, Tickets

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Work:
    """An iteration to compute. `claim`: its number in a record, -1 without a record."""

    iteration: int
    claim: int = -1


@dataclass(frozen=True, slots=True)
class LegEnd:
    """The leg ended after `iter` iterations. `stopped`: a replica asked for a stop. `wrong`: why training can't continue, or ''."""

    iter: int
    stopped: bool = False
    wrong: str = ""
    skips: int = 0
    skips_in_all: int = 0


@dataclass(frozen=True, slots=True)
class Done:
    """An iteration that counts. `wrong`: why it has no push; `seconds` of the replica's computing, `staleness` at server 0."""

    iteration: int
    replica: int
    loss: float
    seconds: float
    staleness: int = 0
    wrong: str = ""


@dataclass(slots=True)
class _Meeting:
    """Replicas that have come to the end of a leg; `end` once all have."""

    ranks: set[int] = field(default_factory=set)
    end: LegEnd | None = None


class Hub:
    """Hands out iterations as replicas come. Any thread may call it."""

    def __init__(
        self,
        replicas: int,
        tickets: Tickets,
        most_skips: int = 0,
        explained: Callable[[Done, int], str] = lambda done, number: done.wrong,
    ) -> None:
        """`most_skips`: consecutive iterations that may have no push; one more, the `number`-th, ends the leg and is `explained`."""
        self.replicas, self.tickets, self._most, self._explained = replicas, tickets, most_skips, explained
        self.news: deque[tuple[Done, float]] = deque()  # and when, by time.monotonic()
        self.skips = self.skips_in_all = 0
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._meeting = _Meeting()
        self._stopped, self._wrong = False, ""
        self._claims: dict[int, int] = {}  # of the pushes under way, by replica
        self._order: deque[int] = deque()  # claims whose loss is still to be reported
        self._early: dict[int, Done] = {}
        self._iterations: list[int] = []  # by claim
        self._replicas: list[int] = []

    def start(self, first: int, limit: int, skips: int, skips_in_all: int) -> None:
        """Start the leg of iterations `first` .. `limit` - 1."""
        with self._changed:
            self.skips, self.skips_in_all = skips, skips_in_all
            self._meeting, self._iterations, self._replicas = _Meeting(), [], []
            self._order.clear()
            self._start(first, limit)

    def _start(self, first: int, limit: int) -> None:
        self.tickets.leg(first, limit)

    def ask(self, replica: int) -> int | None:
        """Reserve the next iteration for the loader of `replica`; None at the end of the stage."""
        with self._changed:
            return self.tickets.ask(replica)

    def begin(self, replica: int, stop: bool) -> Work | LegEnd:
        """Wait for the next iteration of `replica`, or for the end of the leg. `stop`: the replica asks all to stop."""
        with self._changed:
            if stop:
                self._stopped = True
                self.tickets.cut()
            iteration = self._until(lambda: self.tickets.begin(replica))
            return Work(iteration) if iteration != END else self._meet(replica)

    def claim(self, replica: int, iteration: int) -> int:
        """Wait for the turn of `replica` to push; return the number of its claim."""
        with self._changed:
            number = self._until(lambda: self.tickets.claim(replica))
            self._claims[replica] = number
            self._order.append(number)
            self._iterations.append(iteration)
            self._replicas.append(replica)
            return number

    def done(self, replica: int, done: Done) -> None:
        """All servers have the push; or there is none, since something isn't finite."""
        with self._changed:
            self.tickets.done(replica)
            if not done.wrong:
                if self._report(self._claims.pop(replica), done):
                    self.skips = 0
            else:
                self.news.append((done, time.monotonic()))
                self.skips, self.skips_in_all = self.skips + 1, self.skips_in_all + 1
                if self.skips > self._most and not self._wrong:
                    self._wrong = self._explained(done, self.skips)
                    self.tickets.cut()
            self._changed.notify_all()

    def noted(self, first: int, end: LegEnd, arrived: Sequence[Arrived]) -> Leg:
        """The leg from iteration `first` to its `end`; `arrived`: what each server has applied."""
        claims = tuple(self._iterations), tuple(self._replicas)
        return Leg(first, end.iter, *claims, tuple(arrived), end.skips, end.skips_in_all)

    def fail(self, error: BaseException) -> None:
        """End all: every caller raises the first error from now on."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _report(self, claim: int, done: Done) -> bool:
        """Report losses in the order of claims, so that a run and its replay report them alike. Whether any was reported."""
        self._early[claim], before = done, len(self._order)
        while self._order and self._order[0] in self._early:
            self.news.append((self._early.pop(self._order.popleft()), time.monotonic()))
        return len(self._order) < before

    def _until(self, ask: Callable[[], T | None]) -> T:
        """Poll `ask` after each change until it answers."""
        while True:
            if self._error is not None:
                raise self._error
            if (answer := ask()) is not None:
                self._changed.notify_all()
                return answer
            self._changed.wait()

    def _meet(self, replica: int) -> LegEnd:
        """Wait until all replicas have come; all get the same answer."""
        meeting = self._meeting
        meeting.ranks.add(replica)
        if len(meeting.ranks) == self.replicas:
            meeting.end = self._end()
        return self._until(lambda: meeting.end)

    def _end(self) -> LegEnd:
        return LegEnd(self.tickets.limit, self._stopped, self._wrong, self.skips, self.skips_in_all)


class Replay(Hub):
    """Hands out the claims of a record in their order to whichever replica comes.

    So an iteration begins after the pushes that it has to see, and one replica alone gets through."""

    def __init__(self, replicas: int, legs: Sequence[Leg]) -> None:
        super().__init__(replicas, Tickets(0, 0, 1))
        self._legs = {leg.first: leg for leg in legs}
        self._all = deque((leg.first, claim) for leg in legs for claim in _applied(leg))
        self._asked: dict[int, deque[tuple[int, int]]] = {}
        self._left = self._top = 0  # claims of the leg that are not done, and the first that has not begun

    def _start(self, first: int, limit: int) -> None:
        self._now = self._legs[first]
        self._left, self._top = len(_applied(self._now)), 0
        self._order.extend(sorted(self._now.servers[0].order))

    def ask(self, replica: int) -> int | None:
        with self._changed:
            if not self._all:
                return None
            first, claim = self._all.popleft()
            self._asked.setdefault(replica, deque()).append((first, claim))
            return self._legs[first].iterations[claim]

    def begin(self, replica: int, stop: bool) -> Work | LegEnd:
        with self._changed:
            self._stopped = self._stopped or stop
            if self._error is not None:
                raise self._error
            claim = self._next(replica)
            if claim is None:
                return self._meet(replica)
            self._claims[replica], self._top = claim, max(self._top, claim + 1)
            return Work(self._now.iterations[claim], claim)

    def _next(self, replica: int) -> int | None:
        """The claim that `replica` begins: one that its loader asked for, or else the next. After a stop only claims before one that has begun,
        which may have to see them."""
        asked, first = self._asked.get(replica), self._now.first
        source = asked if asked and asked[0][0] == first else self._all
        if not source or source[0][0] != first or (self._stopped and source[0][1] >= self._top):
            return None
        return source.popleft()[1]

    def claim(self, replica: int, iteration: int) -> int:
        return self._claims[replica]

    def done(self, replica: int, done: Done) -> None:
        with self._changed:
            self._left -= 1
            self._report(self._claims[replica], done)

    def noted(self, first: int, end: LegEnd, arrived: Sequence[Arrived]) -> Leg:
        return self._now

    def _end(self) -> LegEnd:
        leg = self._now
        if self._left:
            return LegEnd(leg.first, True, "", self.skips, self.skips_in_all)
        return LegEnd(leg.last, self._stopped, "", leg.skips, leg.skips_in_all)


def _applied(leg: Leg) -> list[int]:
    """Claims that some server has applied."""
    return sorted({claim for server in leg.servers for claim in server.order})
