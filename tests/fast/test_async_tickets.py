"""Tickets of `sync_param { method: ASYNC }`: whatever replicas do and whoever dies, no push is staler than the bound, no one waits for
ever, and each iteration is done once."""

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagerun.engine.asynchronous.tickets import Begin, End, Granted, Refused, Tickets, Wait


class Job:
    """Replicas whose steps are chosen by `pick`, which says a number below the one it is given. A push takes two steps: it is granted, and
    then applied; those that are granted may be applied in any order, as on servers that are not all equally fast."""

    def __init__(self, tickets: Tickets, replicas: int, pick: Callable[[int], int]) -> None:
        self.tickets, self.pick = tickets, pick
        self.alive = set(range(replicas))
        self.doing: dict[int, str] = dict.fromkeys(self.alive, "nothing")
        self.iteration: dict[int, int] = {}
        self.seen: dict[int, int] = {}
        self.version = 0
        self.done: list[int] = []
        self.staleness: list[int] = []
        self.numbers: list[int] = []
        self.ended: set[int] = set()
        self.refused = 0
        self.odds = 1

    def leg(self, first: int, limit: int, odds: int = 40) -> None:
        """`odds`: one step of so many is a death, a refusal or a stop, and one gradient of so many is not finite."""
        self.odds = odds
        self.tickets.leg(first, limit)
        self.ended, self.version, self.numbers, idle = set(), 0, [], 0
        while self.ended < self.alive:
            moved = self.happens() if self.pick(odds) == 0 else self.step(self.one(self.alive - self.ended))
            idle = 0 if moved else idle + 1
            assert idle < 100 or self.someone_can(), "deadlock"
        assert all(doing == "nothing" for doing in self.doing.values())
        assert self.numbers == list(range(len(self.numbers)))

    def one(self, of: set[int]) -> int:
        return sorted(of)[self.pick(len(of))]

    def step(self, replica: int) -> bool:
        """Whether anything has changed."""
        if self.pick(3) == 0:
            self.tickets.ask(replica)
        match self.doing[replica]:
            case "nothing":
                return self.begins(replica)
            case "computes":
                return self.claims(replica)
        self.staleness.append(self.version - self.seen[replica])
        self.version += 1
        self.tickets.done(replica)
        self.done.append(self.iteration[replica])
        self.doing[replica] = "nothing"
        return True

    def begins(self, replica: int) -> bool:
        answer = self.tickets.begin(replica)
        if isinstance(answer, Begin):
            self.doing[replica], self.iteration[replica] = "computes", answer.iteration
            self.seen[replica] = self.version
        elif isinstance(answer, End):
            self.ended.add(replica)
        else:
            self.tickets.ask(replica)
        return not isinstance(answer, Wait)

    def claims(self, replica: int) -> bool:
        if self.pick(self.odds) == 0:
            return self.has_no_push(replica)
        answer = self.tickets.claim(replica)
        if isinstance(answer, Granted):
            self.doing[replica] = "pushes"
            self.numbers.append(answer.number)
        elif isinstance(answer, Refused):
            self.doing[replica] = "nothing"
            self.refused += 1
        return not isinstance(answer, Wait)

    def has_no_push(self, replica: int) -> bool:
        """Its gradient is not finite."""
        if self.tickets.holds(replica):
            self.tickets.done(replica)
            self.done.append(self.iteration[replica])
        self.doing[replica] = "nothing"
        return True

    def someone_can(self) -> bool:
        return any(self.step(replica) for replica in sorted(self.alive - self.ended))

    def happens(self) -> bool:
        match self.pick(3):
            case 0 if len(self.alive) > 1:
                self.dies(self.one(self.alive))
            case 1:
                self.tickets.refuse(self.one(self.alive))
            case _:
                self.tickets.cut()
        return True

    def dies(self, replica: int) -> None:
        self.tickets.lost(replica)
        self.alive.discard(replica)
        self.ended.discard(replica)
        del self.doing[replica]


@settings(max_examples=200)
@given(
    seed=st.integers(0, 1 << 32), replicas=st.integers(1, 6), max_staleness=st.integers(1, 7), last=st.integers(1, 40)
)
def test_whatever_happens(seed: int, replicas: int, max_staleness: int, last: int) -> None:
    pick = Random(seed).randrange
    tickets = Tickets(next=0, last=last, max_staleness=max_staleness)
    job, first = Job(tickets, replicas, pick), 0
    while first < last:
        job.leg(first, min(last, first + 1 + pick(10)))
        first = tickets.limit
        assert sorted(job.done) == list(range(first))
    assert max(job.staleness, default=0) <= max_staleness


def walk(seed: int, replicas: int, max_staleness: int, odds: int = 1 << 30, legs: int = 4) -> Job:
    job = Job(Tickets(next=0, last=60 * legs, max_staleness=max_staleness), replicas, Random(seed).randrange)
    first = 0
    while first < 60 * legs:
        job.leg(first, min(60 * legs, first + 60), odds)
        first = job.tickets.limit
    assert sorted(job.done) == list(range(60 * legs))
    return job


@pytest.mark.parametrize("max_staleness", [1, 2, 3, 5])
def test_the_bound_is_met_and_not_passed_where_there_are_replicas_enough(max_staleness: int) -> None:
    found = [walk(seed, 6, max_staleness).staleness for seed in range(4)]
    assert {max(one) for one in found} == {max_staleness}


def test_without_deaths_and_refusals_each_iteration_is_granted_once() -> None:
    job = walk(1, 4, 3)
    assert job.refused == 0 and len(job.done) == len(set(job.done)) == 240


def test_one_replica_alone_takes_iterations_in_order_and_is_never_stale() -> None:
    job = walk(2, 1, 1)
    assert job.done == list(range(240)) and set(job.staleness) == {0}


def begun(tickets: Tickets, replica: int) -> int:
    answer = tickets.begin(replica)
    assert isinstance(answer, Begin), answer
    return answer.iteration


def stage(replicas: int, max_staleness: int, last: int = 10, ahead: int = 2) -> Tickets:
    """Each replica has asked for `ahead` iterations in turn, and begun the first."""
    tickets = Tickets(next=0, last=last, max_staleness=max_staleness)
    tickets.leg(0, last)
    for _ in range(ahead):
        for replica in range(replicas):
            tickets.ask(replica)
    for replica in range(replicas):
        assert begun(tickets, replica) == replica
    return tickets


def push(tickets: Tickets, replica: int) -> None:
    answer = tickets.claim(replica)
    assert isinstance(answer, Granted), answer
    tickets.done(replica)


def test_who_would_make_another_too_old_waits_and_is_told_for_whom() -> None:
    tickets = stage(replicas=3, max_staleness=2)
    push(tickets, 0)
    assert begun(tickets, 0) == 3
    push(tickets, 1)
    # Now 2 has not seen two: the next push would be the third.
    assert tickets.claim(0) == Wait((2,))
    push(tickets, 2)
    push(tickets, 0)


def test_what_is_refused_goes_to_another_and_the_late_one_begins_anew() -> None:
    tickets = stage(replicas=3, max_staleness=2)
    for replica in (0, 1):
        push(tickets, replica)
    tickets.refuse(2)
    assert not tickets.holds(2)
    assert begun(tickets, 0) == 2, "what was given away comes first"
    push(tickets, 0)
    assert tickets.claim(2) == Refused()
    assert begun(tickets, 2) == 5


def test_what_is_granted_is_not_refused() -> None:
    tickets = stage(replicas=2, max_staleness=1)
    assert tickets.claim(0) == Granted(0)
    tickets.refuse(0)
    assert tickets.holds(0)
    tickets.done(0)
    push(tickets, 1)


def test_what_a_dead_replica_had_begun_or_asked_for_comes_first() -> None:
    tickets = stage(replicas=3, max_staleness=4)
    tickets.lost(2)
    push(tickets, 0)
    push(tickets, 1)
    assert [begun(tickets, 1), begun(tickets, 0)] == [2, 5]
    push(tickets, 0)
    assert begun(tickets, 0) == 3


def test_at_the_end_of_a_leg_one_takes_what_another_would_come_to_last() -> None:
    tickets = Tickets(next=0, last=8, max_staleness=4)
    tickets.leg(0, 8)
    for replica in (0, 0, 0, 1, 1, 1, 1, 1):
        tickets.ask(replica)
    done = []
    for _ in range(4):
        done.append(begun(tickets, 0))
        push(tickets, 0)
    assert done == [0, 1, 2, 7]
    assert begun(tickets, 1) == 3


def test_a_stop_ends_the_leg_behind_what_was_begun_and_nothing_is_left_out() -> None:
    tickets = stage(replicas=3, max_staleness=4, last=100, ahead=4)
    tickets.lost(1)
    push(tickets, 2)
    tickets.cut()
    assert tickets.limit == 3
    assert isinstance(tickets.begin(2), Begin), "the iteration that the dead one had"
    push(tickets, 2)
    push(tickets, 0)
    assert tickets.begin(0) == tickets.begin(2) == End()
    assert tickets.left == 0


def test_who_was_refused_and_finds_the_leg_over_keeps_no_one_from_the_next() -> None:
    """Its gradient was not finite: it makes no claim, and so does not hear of it."""
    tickets = stage(replicas=2, max_staleness=1, last=4)
    push(tickets, 0)
    tickets.refuse(1)
    tickets.cut()
    assert begun(tickets, 0) == 1
    push(tickets, 0)
    assert tickets.begin(1) == tickets.begin(0) == End()
    tickets.leg(2, 4)
    assert begun(tickets, 1) == 3


def test_whose_loader_has_not_come_to_ask_takes_the_next_and_waits_for_no_one() -> None:
    tickets = Tickets(next=0, last=10, max_staleness=4)
    tickets.leg(0, 6)
    tickets.ask(0)
    assert [begun(tickets, 1), begun(tickets, 0), begun(tickets, 2)] == [1, 0, 2]
    assert tickets.ask(0) == 3


def test_a_replica_hears_what_of_its_own_was_given_away() -> None:
    """It is not to hold it for ever: its loader then asks for nothing more, and where that is so of all, they wait for each other."""
    tickets = Tickets(next=0, last=20, max_staleness=4)
    tickets.leg(0, 4)
    for replica in (0, 0, 1, 1, 1):
        tickets.ask(replica)
    for replica in (0, 0):
        begun(tickets, replica)
        push(tickets, replica)
    assert tickets.own_from(1) == 2
    assert begun(tickets, 0) == 3, "the last before the end of the leg"
    assert begun(tickets, 1) == 2 and tickets.own_from(1) == 4
    tickets.lost(1)
    assert tickets.own_from(1) == tickets.next == 5
