"""What rank 0 does beside serving: it hands out iterations, says whose push is next, and collects what is told of them."""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from stagerun.engine.asynchronous.tickets import Recorded, Tickets, Work

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LegEnd:
    """The leg ended after `iter` iterations. `stopped`: a replica asked for a stop. `wrong`: where training can't continue, what is wrong,
    and at which iteration."""

    iter: int
    stopped: bool = False
    wrong: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True)
class Done:
    """An iteration that counts. `wrong`: why it has no push, and no `claim`; `seconds` of the replica's computing, `staleness` at server 0."""

    iteration: int
    replica: int
    loss: float
    seconds: float
    claim: int = -1
    staleness: int = 0
    wrong: str = ""


class Hub:
    """Any thread may call it."""

    def __init__(self, replicas: int, order: Tickets | Recorded) -> None:
        self.replicas, self.order = replicas, order
        self.news: deque[tuple[Done, float]] = deque()  # and when, by time.monotonic()
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._stopped = False
        self._wrong: tuple[str, int] | None = None

    def start(self, first: int, limit: int) -> None:
        """Start the leg of iterations `first` .. `limit` - 1."""
        with self._changed:
            self.claims: list[tuple[int, int]] = []  # (iteration, replica)
            self._early: dict[int, Done] = {}  # by claim, until the earlier ones are done
            self._reported = 0
            self._met: set[int] = set()  # replicas that have come to the end of the leg
            self._end: LegEnd | None = None
            self.order.leg(first, limit)

    def begin(self, replica: int, stop: bool, done: Done | None = None) -> Work | LegEnd:
        """Wait for the next iteration of `replica`, or for the end of the leg. `stop`: the replica asks all to stop. `done`: what it did before:
        all servers have the push; or there is none, since something isn't finite."""
        with self._changed:
            if done is not None:
                self._count(replica, done)
            if stop:
                self._stopped = True
                self.order.cut()
            work = self._until(lambda: self.order.begin(replica))
            if isinstance(work, Work):
                return work
            self._met.add(replica)
            if len(self._met) == self.replicas:
                self._end = LegEnd(self.order.end(), self._stopped, self._wrong)
            return self._until(lambda: self._end)

    def claim(self, replica: int, iteration: int) -> int:
        """Wait for the turn of `replica` to push; return the number of its claim."""
        with self._changed:
            turn = self._until(lambda: (number,) if (number := self.order.claim(replica)) is not None else None)
            self.claims.append((iteration, replica))
            return turn[0]

    def fail(self, error: BaseException) -> None:
        """End all: every caller raises the first error from now on."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _count(self, replica: int, done: Done) -> None:
        """Report losses in the order of claims, so that a run and its replay report them alike."""
        self.order.done(replica)
        self._changed.notify_all()
        if not done.wrong:
            self._early[done.claim] = done
            while self._reported in self._early:
                self.news.append((self._early.pop(self._reported), time.monotonic()))
                self._reported += 1
        elif self._wrong is None:
            self.news.append((done, time.monotonic()))
            self._wrong = done.wrong, done.iteration
            self.order.cut()

    def _until(self, ask: Callable[[], T | None]) -> T:
        """Poll `ask` after each change until it answers."""
        while True:
            if self._error is not None:
                raise self._error
            if answer := ask():
                self._changed.notify_all()
                return answer
            self._changed.wait()
