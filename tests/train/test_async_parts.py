"""The parts of `sync_param { method: ASYNC }`: the record as bytes; and turns: whatever order replicas come in, no push is staler than the
bound, replicas never deadlock, and each iteration is done once; and by a record pushes come in its order."""

from random import Random

import pytest
import torch
from facade import decode, encode
from hypothesis import given, settings
from hypothesis import strategies as st

from stagerun.wire.replay import Record, Turns, record_of

# -- the record


def a_record(seed: int, legs: int = 4) -> Record:
    rnd, found = Random(seed), Record()
    for _ in range(legs):
        first, last = found.last, found.last + rnd.randint(1, 9)
        found.ends.append(last)
        found.iterations += rnd.sample(range(first, last), last - first)
        found.replicas += [rnd.randrange(9) for _ in range(first, last)]
        found.staleness += [rnd.randint(0, at - first) for at in range(first, last)]
    return found


@pytest.mark.long
@given(seed=st.integers(0, 1 << 32), legs=st.integers(0, 5))
def test_a_record_is_what_it_was(seed, legs):
    record = a_record(seed, legs)
    assert record_of(record.encoded()) == record


def test_claims_that_were_applied_in_another_order():
    """As older versions may have written them."""
    tensors = decode(Record([3], [0, 1, 2], [0, 1, 2], [0, 1, 1]).encoded())
    tensors["0/order"] = torch.tensor([1, 0, 2], dtype=torch.int32)
    assert record_of(encode(tensors)) == Record([3], [1, 0, 2], [1, 0, 2], [0, 1, 1])


@pytest.mark.long
@settings(max_examples=300)
@given(data=st.data(), seed=st.integers(0, 9))
def test_bytes_that_no_run_wrote_are_an_error_and_nothing_else(data, seed):
    """Wherever a byte is another; and tensors of any type, shape and size in the place of one."""
    whole = a_record(seed, 3).encoded()
    if data.draw(st.booleans()):
        damaged = bytearray(whole)
        for _ in range(data.draw(st.integers(1, 3))):
            damaged[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
        found = bytes(damaged[: data.draw(st.integers(0, len(whole)))]) if data.draw(st.booleans()) else bytes(damaged)
    else:
        tensors = decode(whole)
        name = data.draw(st.sampled_from(sorted(tensors)))
        dtypes = [torch.int64, torch.int32, torch.int16, torch.float32, torch.bfloat16, torch.bool, torch.uint8]
        shape = data.draw(st.lists(st.integers(0, 5), max_size=3))
        number = data.draw(st.sampled_from([0, 1, -1, 1 << 14, -(1 << 62), (1 << 63) - 1]))
        dtype = data.draw(st.sampled_from(dtypes))
        tensors[name] = torch.full(shape, number, dtype=torch.int64).to(dtype)
        if data.draw(st.booleans()):
            del tensors[name]
        found = encode(tensors)
    try:
        record = record_of(found)
    except ValueError:
        return
    assert sorted(record.iterations) == list(range(record.last))  # what training does with it
    assert len(record.replicas) == record.last and all(0 <= n <= at for at, n in enumerate(record.staleness))


@pytest.mark.parametrize(
    "name, there, why",
    [
        ("0/order", [0], "its leg at iteration 0 is impossible"),  # by one that went on without dead workers
        ("1/order", [0, 1], "it is of several servers"),
    ],
)
def test_records_of_what_was_retired_are_refused(name, there, why):
    tensors = decode(Record([2], [0, 1], [0, 1], [0, 0]).encoded())
    tensors[name] = torch.tensor(there, dtype=torch.int32)
    with pytest.raises(ValueError, match=why):
        record_of(encode(tensors))


# -- turns


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
