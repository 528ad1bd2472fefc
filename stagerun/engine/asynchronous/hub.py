"""Server 0's other task: it hands out iterations, says whose push is next, and writes down who came when.

`Hub` decides by who comes, with `Tickets`. `Replay` has the same face and goes by a record, as pushes were claimed: so what an iteration has
to have seen was pushed before it begins, and one replica alone gets through.
"""

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from stagerun.base.errors import PeerError, RanksDiffer
from stagerun.comm.group import AGAIN
from stagerun.engine.asynchronous.record import Arrived, Leg
from stagerun.engine.asynchronous.tickets import Begin, End, Granted, Refused, Tickets, Wait

T = TypeVar("T")

# A replica that keeps others waiting is waited for so many times as long as a push usually takes, and at least so many seconds.
PATIENCE, LEAST_PATIENCE_S = 4.0, 1.0
# One that stays away at the end of a leg is left behind after so many seconds: the others can't tell it from a dead one.
LEFT_BEHIND_S = 120.0


@dataclass(frozen=True, slots=True)
class Work:
    """An iteration to compute. `claim`: its number in a record, -1 without one. `own_from`: what the replica has asked for before this
    iteration is no longer its own, unless it is the one to compute."""

    iteration: int
    claim: int = -1
    own_from: int = 0


@dataclass(frozen=True, slots=True)
class LegEnd:
    """The leg is over after `iter` iterations. `gone`: the ranks that are no longer there. `stopped`: someone asked for it. `wrong`: what
    isn't finite, '' if training goes on."""

    iter: int
    gone: tuple[int, ...] = ()
    stopped: bool = False
    wrong: str = ""
    skips: int = 0
    skips_in_all: int = 0


@dataclass(frozen=True, slots=True)
class Done:
    """An iteration that counts. `wrong`: why it has no push; `lr`, `seconds` of the replica's computing, `staleness` at server 0."""

    iteration: int
    replica: int
    loss: float
    seconds: float
    staleness: int = 0
    wrong: str = ""


class Desk(Protocol):
    """What a replica asks for, here or over the network."""

    def ask(self, replica: int) -> int | None:
        """The next iteration that its loader is to read; None at the stage's end."""

    def begin(self, replica: int, stop: bool) -> Work | LegEnd:
        """Waits for what the replica is to do now. `stop`: it asks all to stop."""

    def claim(self, replica: int, seen: Sequence[int]) -> int:
        """Waits for its turn to push: the number of its claim, or -1: it came too late, and is to begin another. `seen`: the versions that it
        has pulled, by server."""

    def done(self, replica: int, done: Done) -> None:
        """All servers have its push; or it has none, since something isn't finite."""


class Hub:
    """Any thread may call it. `news`: what was done, for the one who reports it."""

    def __init__(
        self,
        tickets: Tickets,
        replicas: Sequence[int],
        most_skips: int = 0,
        explained: Callable[[Done, int], str] = lambda done, number: done.wrong,
        clock: Callable[[], float] = time.monotonic,
        needed: Collection[int] = (0,),
    ) -> None:
        """`most_skips`: iterations one after the other that may have no push; one more, the `number`-th, ends the leg, and is `explained`.
        `needed`: who serves, and is waited for whatever it takes."""
        self._tickets, self._clock, self._most, self._explained = tickets, clock, most_skips, explained
        self.present, self.gone = set(replicas), set[int]()
        self.news: deque[tuple[Done, float]] = deque()  # and when, by time.monotonic()
        self.skips = self.skips_in_all = 0
        self._needed = frozenset(needed)
        self._changed = threading.Condition()
        self._recent: deque[float] = deque(maxlen=16)
        self._began: dict[int, float] = {}  # since when those that have not come to push work
        self._meeting = 0  # threads that are in `_meet`
        self._error: BaseException | None = None
        self._end: LegEnd | None = None
        self._ended: set[int] = set()  # who knows that the leg is over
        self._stopped, self._wrong = False, ""
        self._iterations: list[int] = []  # by claim
        self._replicas: list[int] = []
        self._seen: list[Sequence[int]] = []
        self._working: dict[int, int] = {}

    def start(self, first: int, limit: int, skips: int, skips_in_all: int) -> None:
        """The leg of iterations `first` .. `limit` - 1."""
        with self._changed:
            self._changed.wait_for(lambda: not self._meeting)  # all have heard how the leg before ended
            self._tickets.leg(first, limit)
            self._iterations, self._replicas, self._seen, self._ended, self._end = [], [], [], set(), None
            self.skips, self.skips_in_all = skips, skips_in_all
            self._changed.notify_all()

    def ask(self, replica: int) -> int | None:
        with self._changed:
            found = self._tickets.ask(replica)
            self._changed.notify_all()
            return found

    def begin(self, replica: int, stop: bool) -> Work | LegEnd:
        with self._changed:
            if stop:
                self._cut()
            answer = self._until(replica, lambda: self._tickets.begin(replica))
            if answer is None:
                return LegEnd(self._tickets.limit, tuple(sorted(self.gone)))
            if isinstance(answer, End):
                return self._meet(replica)
            assert isinstance(answer, Begin)
            self._working[replica], self._began[replica] = answer.iteration, self._clock()
            return Work(answer.iteration, own_from=self._tickets.own_from(replica))

    def claim(self, replica: int, seen: Sequence[int]) -> int:
        with self._changed:
            self._came(replica)
            answer = self._until(replica, lambda: self._tickets.claim(replica))
            if answer is None or isinstance(answer, Refused):
                return -1
            assert isinstance(answer, Granted)
            self._iterations.append(self._working[replica])
            self._replicas.append(replica)
            self._seen.append(seen)
            self._changed.notify_all()
            return answer.number

    def done(self, replica: int, done: Done) -> None:
        with self._changed:
            if replica in self.gone:
                return
            self._came(replica)
            if not self._tickets.done(replica):
                return  # it was given to another, who will see for itself
            self.news.append((done, self._clock()))
            if done.wrong:
                self.skips, self.skips_in_all = self.skips + 1, self.skips_in_all + 1
                if self.skips > self._most and not self._wrong:
                    self._wrong = self._explained(done, self.skips)
                    self._cut()
            else:
                self.skips = 0
            self._changed.notify_all()

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

    def _cut(self) -> None:
        self._stopped = self._stopped or not self._wrong
        self._tickets.cut()
        self._changed.notify_all()

    def _came(self, replica: int) -> None:
        """It has computed. That counts where it is too late, too: what all take longer for than they did is soon the usual."""
        if (began := self._began.pop(replica, None)) is not None:
            self._recent.append(self._clock() - began)

    def _give_up(self, replica: int) -> None:
        if replica not in self.gone:
            self.gone.add(replica)
            self.present.discard(replica)
            self._began.pop(replica, None)
            self._tickets.lost(replica)
            self._changed.notify_all()

    def _patience(self) -> float:
        if not self._recent:
            return LEFT_BEHIND_S
        return max(LEAST_PATIENCE_S, PATIENCE * statistics.median(self._recent))

    def _until(self, replica: int, ask: Callable[[], T | Wait]) -> T | None:
        """What `ask` answers when it is no longer Wait; None where `replica` is gone, or was left behind. Who works for too long
        meanwhile, and holds this one up, is refused."""
        since = self._clock()
        while True:
            if self._error is not None:
                raise self._error
            if replica in self.gone:
                return None
            answer = ask()
            if not isinstance(answer, Wait):
                return answer
            now, patience = self._clock(), self._patience()
            working = [other for other in answer.for_whom if other in self._began]
            ends = {other: max(since, self._began[other]) + patience for other in working}
            late = [other for other, end in ends.items() if end <= now]
            for other in late:
                self._tickets.refuse(other)
            if late:
                since = now
                self._changed.notify_all()
            else:
                self._changed.wait(min(ends.values()) - now if ends else None)

    def _meet(self, replica: int) -> LegEnd:
        """When all that are present know that the leg is over, the same for all of them. Who stays away is left behind, unless it serves."""

        def over() -> bool:
            return self._error is not None or self._end is not None or self.present <= self._ended

        self._ended.add(replica)
        self._meeting += 1
        self._changed.notify_all()
        try:
            if not self._changed.wait_for(over, max(LEFT_BEHIND_S, self._patience())):
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

    def claim(self, replica: int, seen: Sequence[int]) -> int:
        return self._claims[replica]

    def done(self, replica: int, done: Done) -> None:
        with self._changed:
            if done.wrong:
                self._error = RanksDiffer(
                    f"replay: {done.wrong} at iteration {done.iteration}, where the recorded run went on",
                    "test memory and processor of both machines",
                )
            self._left -= 1
            self.news.append((done, time.monotonic()))
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
