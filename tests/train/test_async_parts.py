"""The parts of `sync_param { method: ASYNC }`: the record as bytes, and who waits for a turn."""

import random
import threading
from unittest import mock

import pytest
import torch
from async_help import Stage
from engine_help import CPU, ConvNet, peer_error
from facade import PeerError, decode, encode, make_state
from hypothesis import given, settings
from hypothesis import strategies as st

from stagerun.wire.asynchronous import Server
from stagerun.wire.replay import Record, Turns, record_of

pytestmark = pytest.mark.long

# -- the record


def a_record(seed: int, legs: int = 4) -> Record:
    rnd, found = random.Random(seed), Record()
    for _ in range(legs):
        first, last = found.last, found.last + rnd.randint(1, 9)
        found.ends.append(last)
        found.iterations += rnd.sample(range(first, last), last - first)
        found.replicas += [rnd.randrange(9) for _ in range(first, last)]
        found.staleness += [rnd.randint(0, at - first) for at in range(first, last)]
    return found


@given(seed=st.integers(0, 1 << 32), legs=st.integers(0, 5))
def test_a_record_is_what_it_was(seed, legs):
    record = a_record(seed, legs)
    assert record_of(record.encoded()) == record


def test_claims_that_were_applied_in_another_order():
    """As older versions may have written them."""
    tensors = decode(Record([3], [0, 1, 2], [0, 1, 2], [0, 1, 1]).encoded())
    tensors["0/order"] = torch.tensor([1, 0, 2], dtype=torch.int32)
    assert record_of(encode(tensors)) == Record([3], [1, 0, 2], [1, 0, 2], [0, 1, 1])


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
        (
            "0/order",
            [0],
            "its leg at iteration 0 is impossible",
        ),  # by one that went on without dead workers
        ("1/order", [0, 1], "it is of several servers"),
    ],
)
def test_records_of_what_was_retired_are_refused(name, there, why):
    tensors = decode(Record([2], [0, 1], [0, 1], [0, 0]).encoded())
    tensors[name] = torch.tensor(there, dtype=torch.int32)
    with pytest.raises(ValueError, match=why):
        record_of(encode(tensors))


# -- who waits for a turn


@pytest.mark.parametrize("recorded", [None, Record([6], [*range(6)], [0] * 6, [0] * 6)])
def test_who_waits_for_a_push_that_will_not_come_hears_of_it(recorded):
    stage = Stage()
    state = make_state(ConvNet(), stage.solver, CPU)
    server = Server(state, stage.stage_loop(), Turns(2, 0, 6, 1, recorded), Record(), recorded)
    server.start(6)
    (end, iteration, *_), (weights,) = server.turn(0, [False], [])
    assert end is None and iteration == 0 and len(weights) == sum(p.tensor.numel() for p in state.solver.parameters)
    gone = mock.Mock(receive=mock.Mock(side_effect=PeerError("it does not answer")))
    waits = threading.Timer(0.05, server.serve, (2, gone))
    waits.start()
    words: list[object] = [False]
    if recorded is None:
        server.turn(1, words, [])
        push = torch.zeros_like(weights), torch.zeros(state.statistics.n)
        words = [False, 3, 0.5, ""]
        server.turn(1, words, push)  # replica 0 is 1 behind now, and another push would make it 2
    assert peer_error(lambda: server.turn(1, words, push if recorded is None else [])) == "worker 2 is gone"
    waits.join()
