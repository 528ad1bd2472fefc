"""Tickets of `sync_param { method: ASYNC }`: whatever order replicas come in, no push is staler than the bound at any server, replicas never
deadlock, and each iteration is done once."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagerun.engine.asynchronous.tickets import Tickets, Work


class Job:
    """Replicas whose steps `pick` chooses. Each pull from one of two servers is a step, and so is each push: they come there in any order."""

    def __init__(self, tickets: Tickets, replicas: int, seed: int) -> None:
        self.tickets, self.replicas, self.pick = tickets, replicas, Random(seed).randrange
        self.done: list[int] = []
        self.staleness: list[int] = []

    def leg(self, first: int, limit: int, odds: int) -> None:
        """`odds`: a stop is one step of so many, and a gradient of so many is not finite."""
        tickets, pick = self.tickets, self.pick
        tickets.leg(first, limit)
        versions, ended, idle = [0, 0], set[int](), 0
        doing: dict[
            int, tuple[int, list[int], list[int]]
        ] = {}  # iteration, versions that were pulled, staleness of pushes
        granted: set[int] = set()
        while len(ended) < self.replicas:
            assert idle < 1000, "deadlock"
            idle += 1
            if pick(odds) == 0:
                tickets.cut()
            replica = pick(self.replicas)
            if replica in ended:
                continue
            if replica not in doing:
                work = tickets.begin(replica)
                if isinstance(work, Work):
                    doing[replica] = work.iteration, [], []
                    idle = 0
                elif work:
                    ended.add(replica)
                continue
            iteration, pulled, pushed = doing[replica]
            if len(pulled) < 2:
                pulled.append(versions[len(pulled)])
            elif replica not in granted:
                finite = pick(odds) > 0
                if finite and tickets.claim(replica) is None:
                    continue
                granted.add(replica)
                if not finite:
                    pushed.extend([0, 0])
            elif len(pushed) < 2:
                s = len(pushed)
                pushed.append(versions[s] - pulled[s])
                versions[s] += 1
            else:
                tickets.done(replica)
                self.done.append(iteration)
                self.staleness += pushed
                granted.discard(replica)
                del doing[replica]
            idle = 0


def walk(seed: int, replicas: int, max_staleness: int, last: int, leg: int, odds: int = 1 << 30) -> Job:
    job, first = Job(Tickets(next=0, last=last, max_staleness=max_staleness), replicas, seed), 0
    while first < last:
        job.leg(first, min(last, first + leg), odds)
        first = job.tickets.limit
        assert sorted(job.done) == list(range(first))
    assert max(job.staleness, default=0) <= max_staleness
    return job


@settings(max_examples=200)
@given(seed=st.integers(0, 1 << 32))
def test_whatever_happens(seed: int) -> None:
    pick = Random(seed).randrange
    walk(seed, 1 + pick(6), 1 + pick(7), 1 + pick(40), 1 + pick(10), odds=8 + pick(40))


@pytest.mark.parametrize("max_staleness", [1, 2, 3, 5])
def test_the_bound_is_met_where_there_are_replicas_enough(max_staleness: int) -> None:
    found = [walk(seed, 6, max_staleness, 240, 60).staleness for seed in range(4)]
    assert {max(one) for one in found} == {max_staleness}


def test_one_replica_alone_takes_iterations_in_order_and_is_never_stale() -> None:
    job = walk(2, 1, 1, 240, 60)
    assert job.done == list(range(240)) and set(job.staleness) == {0}
