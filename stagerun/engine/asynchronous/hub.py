"""Server 0's other task: it hands out iterations, says whose push is next, and writes down who came when.

It decides by who comes, with `Tickets`; and by the clock who is late: then another replica computes the iteration.
"""

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from itertools import count
from typing import TypeVar

from stagerun.engine.asynchronous.desk import Done, InOrder, LegEnd, Work
from stagerun.engine.asynchronous.record import Arrived, Leg
from stagerun.engine.asynchronous.tickets import Begin, End, Granted, Refused, Tickets, Wait

T = TypeVar("T")

# A replica that keeps others waiting is waited for so many times as long as what it does usually takes, and at least so many seconds.
PATIENCE, LEAST_PATIENCE_S = 4.0, 1.0
# One that stays away at the end of a leg is left behind after so many seconds: the others can't tell it from a dead one.
LEFT_BEHIND_S = 120.0


class _Doing:
    """Who computes, or pushes, since when; and how long one that others wait for is waited for, by what it took of late."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._recent: deque[float] = deque(maxlen=16)
        self.since: dict[int, float] = {}

    def starts(self, replica: int) -> None:
        self.since[replica] = self._clock()

    def ends(self, replica: int) -> None:
        """That counts where it is too late, too: what all take longer for than they did is soon the usual."""
        if (since := self.since.pop(replica, None)) is not None:
            self._recent.append(self._clock() - since)

    @property
    def patience(self) -> float:
        if not self._recent:
            return LEFT_BEHIND_S
        return max(LEAST_PATIENCE_S, PATIENCE * statistics.median(self._recent))


class Hub:
    """Any thread may call it. `news`: what was done, for the one who reports it."""

    def __init__(
        self,
        tickets: Tickets,
        replicas: Sequence[int],
        void: Callable[[int], int],
        most_skips: int = 0,
        explained: Callable[[Done, int], str] = lambda done, number: done.wrong,
        clock: Callable[[], float] = time.monotonic,
        needed: Collection[int] = (0,),
    ) -> None:
        """`void`: `Server.void` of server 0, which has the last word on each push. `most_skips`: iterations one after the other that may have no
        push; one more, the `number`-th, ends the leg, and is `explained`. `needed`: who serves; its pushes, and its coming to the end of a leg,
        are waited for whatever it takes."""
        self._tickets, self._clock, self._most, self._explained = tickets, clock, most_skips, explained
        self._void_at_server_0 = void
        self.present, self.gone = set(replicas), set[int]()
        self.news: deque[tuple[Done, float]] = deque()  # and when, by time.monotonic()
        self.skips = self.skips_in_all = 0
        self._told = InOrder()
        self._needed = frozenset(needed)
        self._changed = threading.Condition()
        self._computing, self._pushing = _Doing(clock), _Doing(clock)
        self._pushes: dict[int, tuple[int, Done]] = {}  # under way, by replica: the claim, and what was computed
        self._meeting = 0  # threads that are in `_meet`
        self._error: BaseException | None = None
        self._end: LegEnd | None = None
        self._ended: set[int] = set()  # who knows that the leg is over
        self._stopped, self._wrong = False, ""
        self._iterations: list[int] = []  # by claim
        self._replicas: list[int] = []
        self._seen: list[Sequence[int]] = []

    def start(self, first: int, limit: int, skips: int, skips_in_all: int) -> None:
        """The leg of iterations `first` .. `limit` - 1."""
        with self._changed:
            self._changed.wait_for(lambda: not self._meeting)  # all have heard how the leg before ended
            self._tickets.leg(first, limit)
            self._iterations, self._replicas, self._seen, self._ended, self._end = [], [], [], set(), None
            self.skips, self.skips_in_all = skips, skips_in_all
            self._told = InOrder(count())
            self._changed.notify_all()

    def ask(self, replica: int) -> int | None:
        with self._changed:
            found = self._tickets.ask(replica)
            self._changed.notify_all()
            return found

    def begin(self, replica: int, stop: bool) -> Work | LegEnd:
        with self._changed:
            self._pushing.ends(replica)  # it was void
            if stop:
                self._cut()
            answer = self._until(replica, lambda: self._tickets.begin(replica))
            if answer is None:
                return LegEnd(self._tickets.limit, tuple(sorted(self.gone)))
            if isinstance(answer, End):
                return self._meet(replica)
            assert isinstance(answer, Begin)
            self._computing.starts(replica)
            return Work(answer.iteration, own_from=self._tickets.own_from(replica), floor=self._tickets.floor)

    def claim(self, replica: int, seen: Sequence[int], computed: Done) -> int:
        with self._changed:
            self._computing.ends(replica)
            answer = self._until(replica, lambda: self._tickets.claim(replica))
            if answer is None or isinstance(answer, Refused):
                return -1
            assert isinstance(answer, Granted)
            self._pushing.starts(replica)
            self._pushes[replica] = answer.number, computed
            self._iterations.append(computed.iteration)
            self._replicas.append(replica)
            self._seen.append(seen)
            self._changed.notify_all()
            return answer.number

    def done(self, replica: int, done: Done) -> None:
        with self._changed:
            if replica in self.gone:
                return
            self._computing.ends(replica)
            self._pushing.ends(replica)
            claim, _ = self._pushes.pop(replica, (-1, done))
            if self._tickets.done(replica):  # else it was given to another, who will see for itself, or counts already
                self._count([done] if done.wrong else self._told.over(claim, done))

    def lost(self, replica: int) -> None:
        """It is dead, or as good as dead."""
        with self._changed:
            self._give_up(replica)

    def fail(self, error: BaseException) -> None:
        """A thread that answers replicas met what it should not have: whoever waits next raises it."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def noted(self, first: int, end: LegEnd, arrived: Sequence[Arrived]) -> Leg:
        """The leg from iteration `first` to its `end`, of which each server has applied what `arrived` says."""
        applied = {claim for one in arrived for claim in one.order}
        servers = []
        for s, one in enumerate(arrived):
            missed = tuple((claim, self._seen[claim][s]) for claim in sorted(applied.difference(one.order)))
            servers.append(replace(one, missed=missed))
        claims = tuple(self._iterations), tuple(self._replicas)
        return Leg(first, end.iter, *claims, tuple(servers), end.skips, end.skips_in_all)

    def _count(self, over: Iterable[Done]) -> None:
        for done in over:
            self.news.append((done, self._clock()))
            if done.wrong:
                self.skips, self.skips_in_all = self.skips + 1, self.skips_in_all + 1
                if self.skips > self._most and not self._wrong:
                    self._wrong = self._explained(done, self.skips)
                    self._cut()
            else:
                self.skips = 0
        self._changed.notify_all()

    def _void(self, replica: int) -> None:
        """No one waits for its push any more. Server 0 says whether it has it; what it has not it rejects from now on."""
        claim, computed = self._pushes.pop(replica)
        staleness = self._void_at_server_0(claim)
        self._tickets.void(replica, applied=staleness >= 0)
        self._count(self._told.over(claim, replace(computed, staleness=staleness) if staleness >= 0 else None))

    def _cut(self) -> None:
        self._stopped = self._stopped or not self._wrong
        self._tickets.cut()
        self._changed.notify_all()

    def _give_up(self, replica: int) -> None:
        if replica not in self.gone:
            self.gone.add(replica)
            self.present.discard(replica)
            self._computing.since.pop(replica, None)
            self._pushing.since.pop(replica, None)
            if replica in self._pushes:
                self._void(replica)
            self._tickets.lost(replica)
            self._changed.notify_all()

    def _until(self, replica: int, ask: Callable[[], T | Wait]) -> T | None:
        """What `ask` answers when it is no longer Wait; None where `replica` is gone, or was left behind. Who computes or pushes for too long
        meanwhile, and holds this one up, is passed over."""
        since = self._clock()
        while True:
            if self._error is not None:
                raise self._error
            if replica in self.gone:
                return None
            answer = ask()
            if not isinstance(answer, Wait):
                return answer
            now = self._clock()
            ends = {other: end for other in answer.for_whom if (end := self._waited_for(other, since)) is not None}
            late = [other for other, end in ends.items() if end <= now]
            for other in late:
                if other in self._pushes:
                    self._void(other)
                else:
                    self._tickets.refuse(other)
            if late:
                since = now
                self._changed.notify_all()
            else:
                self._changed.wait(min(ends.values()) - now if ends else None)

    def _waited_for(self, other: int, since: float) -> float | None:
        """Until when one waits for it that has waited since then; None: it waits itself, or no one can go on without it."""
        if other in self._pushes:
            doing = self._pushing if other not in self._needed else None
        else:
            doing = self._computing if other in self._computing.since else None
        return max(since, doing.since[other]) + doing.patience if doing is not None else None

    def _meet(self, replica: int) -> LegEnd:
        """When all that are present know that the leg is over, the same for all of them. Who stays away is left behind, unless it serves."""

        def over() -> bool:
            return self._error is not None or self._end is not None or self.present <= self._ended

        self._ended.add(replica)
        self._meeting += 1
        self._changed.notify_all()
        try:
            if not self._changed.wait_for(over, max(LEFT_BEHIND_S, self._computing.patience)):
                for other in self.present - self._ended - self._needed:
                    self._give_up(other)
                self._changed.wait_for(over)
        finally:
            self._meeting -= 1
            self._changed.notify_all()
        if self._error is not None:
            raise self._error
        if self._end is None:
            gone, iter = tuple(sorted(self.gone)), self._tickets.limit
            self._end = LegEnd(iter, gone, self._stopped, self._wrong, self.skips, self.skips_in_all)
        return self._end
