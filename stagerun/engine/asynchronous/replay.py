"""Server 0's other task where a record is replayed: the iterations in the order in which their pushes were claimed.

So what an iteration has to have seen was pushed before it begins, and one replica alone gets through.
"""

import threading
import time
from collections import deque
from collections.abc import Sequence

from stagerun.base.errors import PeerError, RanksDiffer
from stagerun.comm.group import AGAIN
from stagerun.engine.asynchronous.desk import Done, InOrder, LegEnd, Work
from stagerun.engine.asynchronous.record import Arrived, Leg


class Replay:
    """Hands out the claims of a leg in their order, to whoever comes."""

    def __init__(self, legs: Sequence[Leg], replicas: Sequence[int]) -> None:
        self._legs = {leg.first: leg for leg in legs}
        self._all = deque((leg.first, claim) for leg in legs for claim in self._applied(leg))
        self.present, self.gone = set(replicas), set[int]()
        self.news: deque[tuple[Done, float]] = deque()  # and when, by time.monotonic()
        self._changed = threading.Condition()
        self._asked: dict[int, deque[tuple[int, int]]] = {}
        self._claims: dict[int, int] = {}
        self._error: BaseException | None = None
        self._left, self._stopped = 0, False
        self._top = 0  # no claim of the leg from here on was begun
        self._ended: set[int] = set()
        self._meeting = 0  # threads that wait for the others at the end of a leg
        self._now: Leg | None = None
        self._told = InOrder()
        self.skips = self.skips_in_all = 0

    @staticmethod
    def _applied(leg: Leg) -> list[int]:
        """The claims that some server has had a push of."""
        return sorted({claim for server in leg.servers for claim in server.order})

    def start(self, first: int, limit: int, skips: int, skips_in_all: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._meeting)
            self._now = self._legs[first]
            assert limit == self._now.last
            self._left, self._ended, self._top = len(self._applied(self._now)), set(), 0
            self._told = InOrder(sorted(self._now.servers[0].order))  # what other claims were for was done once more
            self.skips, self.skips_in_all = skips, skips_in_all
            self._changed.notify_all()

    def ask(self, replica: int) -> int | None:
        with self._changed:
            if not self._all:
                return None
            first, claim = self._all.popleft()
            self._asked.setdefault(replica, deque()).append((first, claim))
            self._changed.notify_all()
            return self._legs[first].iterations[claim]

    def begin(self, replica: int, stop: bool) -> Work | LegEnd:
        with self._changed:
            self._stopped = self._stopped or stop
            self._changed.notify_all()
            leg = self._now
            assert leg is not None
            if self._error is not None:
                raise self._error
            claim = self._next(replica, leg)
            if claim is not None:
                self._claims[replica], self._top = claim, max(self._top, claim + 1)
                return Work(leg.iterations[claim], claim)
            return self._meet(replica, leg)

    def _meet(self, replica: int, leg: Leg) -> LegEnd:
        self._ended.add(replica)
        self._meeting += 1
        self._changed.notify_all()
        try:
            self._changed.wait_for(lambda: self._error is not None or self._ended >= self.present)
        finally:
            self._meeting -= 1
            self._changed.notify_all()
        if self._error is not None:
            raise self._error
        if self._left:
            return LegEnd(leg.first, (), True, "", self.skips, self.skips_in_all)
        return LegEnd(leg.last, (), self._stopped, "", leg.skips, leg.skips_in_all)

    def _next(self, replica: int, leg: Leg) -> int | None:
        """The claim that `replica` begins: what it has asked for, or, where its loader has not come to ask, what is next. After a stop those
        before one that was begun, since that one may have to see them."""
        mine = self._asked.get(replica)
        source = mine if mine and mine[0][0] == leg.first else self._all
        if not source or source[0][0] != leg.first or (self._stopped and source[0][1] >= self._top):
            return None
        return source.popleft()[1]

    def claim(self, replica: int, seen: Sequence[int], computed: Done) -> int:
        return self._claims[replica]

    def done(self, replica: int, done: Done) -> None:
        with self._changed:
            if done.wrong:
                self._error = RanksDiffer(
                    f"replay: {done.wrong} at iteration {done.iteration}, where the recorded run went on",
                    "test memory and processor of both machines",
                )
            self._left -= 1
            self.news += ((told, time.monotonic()) for told in self._told.over(self._claims[replica], done))
            self._changed.notify_all()

    def noted(self, first: int, end: LegEnd, arrived: Sequence[Arrived]) -> Leg:
        assert self._now is not None
        return self._now

    def fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def lost(self, replica: int) -> None:
        """What it had is not given to another: the same command goes on from the newest snapshot."""
        self.fail(PeerError(f"worker {replica} is gone, and a replay goes on with those that it started with", AGAIN))
