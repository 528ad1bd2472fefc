"""Turns of `sync_param { method: ASYNC }`: whatever order replicas come in, no push is staler than the bound, replicas never deadlock, and each
iteration is done once; and by a record pushes come in its order."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagerun.wire.replay import Record, Turns


class Job:
    """Replicas whose steps `pick` chooses."""

    def __init__(self, turns: Turns, seed: int) -> None:
        self.turns, self.pick = turns, Random(seed).randrange
        self.iterations: list[int] = []
        self.staleness: list[int] = []

    def leg(self, limit: int, odds: int = 1 << 30) -> None:
        """`odds`: a stop is one step of so many."""
        turns, ended, idle = self.turns, set[int](), 0
        doing: dict[int, int] = {}  # iterations, by replica
        turns.limit = limit
        while len(ended) < turns.replicas:
            assert idle < 1000, "deadlock"
            idle += 1
            if self.pick(odds) == 0:
                turns.cut()
            replica = self.pick(turns.replicas)
            if replica in ended:
                continue
            if replica in doing:
                if (staleness := turns.push(replica)) is not None:
                    self.iterations.append(doing.pop(replica))
                    self.staleness.append(staleness)
                    idle = 0
            elif (found := turns.begin(replica)) is not None:
                if found:
                    doing[replica] = found[0]
                else:
                    ended.add(replica)
                idle = 0


def walk(seed: int, replicas: int, max_staleness: int, last: int, leg: int, odds: int = 1 << 30) -> Record:
    job, record, first = Job(Turns(replicas, 0, last, max_staleness, None), seed), Record(), 0
    while first < last:
        job.leg(min(last, first + leg), odds)
        if job.turns.limit > first:
            record.ends.append(job.turns.limit)
        first = job.turns.limit
        assert sorted(job.iterations) == list(range(first))
    assert max(job.staleness) <= max_staleness
    record.iterations, record.staleness = job.iterations, job.staleness
    return record


@settings(max_examples=200)
@given(seed=st.integers(0, 1 << 32))
def test_whatever_happens(seed):
    pick = Random(seed).randrange
    record = walk(seed, 1 + pick(6), 1 + pick(7), 1 + pick(40), 1 + pick(10), odds=8 + pick(40))
    again = Job(Turns(1 + pick(6), 0, record.last, 1, record), seed + 1)
    for end in record.ends:
        again.leg(end)
    assert (again.iterations, again.staleness) == (record.iterations, record.staleness)


@pytest.mark.parametrize("max_staleness", [1, 2, 3, 5])
def test_the_bound_is_met_where_there_are_replicas_enough(max_staleness):
    assert {max(walk(seed, 6, max_staleness, 240, 60).staleness) for seed in range(4)} == {max_staleness}
