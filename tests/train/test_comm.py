"""How logical workers are dealt out and added up, without processes: the tree, the runs, the chunks, the order of sending."""

import hashlib

import numpy as np
import pytest
import torch
from engine_help import SOLVER, ConvNet, Threads, assert_same, dataset, tensors, updates
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from stagerun.comm import SoloComm, elastic, reduce, runs_of
from stagerun.comm.elastic import TreeReducer
from stagerun.comm.reduce import FlatReducer

WORK = st.integers(1, 200).flatmap(lambda total: st.tuples(st.just(total), st.integers(1, total)))


# -- dealing out


@given(WORK)
def test_runs_are_contiguous_complete_and_even(work):
    total, workers = work
    runs = runs_of(total, workers)
    assert len(runs) == workers
    assert [k for run in runs for k in run] == list(range(total))
    lengths = [len(run) for run in runs]
    assert max(lengths) - min(lengths) <= 1 and lengths == sorted(lengths, reverse=True)


def nodes(low: int, high: int) -> dict[tuple[int, int], int]:
    """Every node of the tree that is no leaf -> where it is cut; by the rule in words: the largest power of two below its width."""
    if high - low == 1:
        return {}
    power = 1
    while power * 2 < high - low:
        power *= 2
    return {(low, high): low + power, **nodes(low, low + power), **nodes(low + power, high)}


# -- adding up


def gradients(k: int, shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
    """What logical worker k has, of sizes far apart, so that each order of adding has other bits; zeros of both signs among them."""
    rng = np.random.RandomState(k)
    made = [(rng.standard_normal(s) * 10.0 ** rng.randint(-6, 6)).astype(np.float32) for s in shapes]
    for array in made:
        array.reshape(-1)[0] = -0.0
    return [torch.from_numpy(array) for array in made]


SHAPES = [(3,), (5, 7), (4, 3, 3, 3), (1,), (130,), (2, 2)]
UNREACHED = 3  # by any loss; number 1 by that of every second logical worker


def reached(i: int, k: int) -> bool:
    return i != UNREACHED and not (i == 1 and k % 2)


def tree_sum(low: int, high: int) -> tuple[list[np.ndarray], np.ndarray]:
    """By the rule in words, with numpy: what all logical workers of [low, high) add up to; and the tail."""
    if high - low == 1:
        own = [
            g.numpy() if reached(i, low) else np.zeros(s, np.float32)
            for i, (g, s) in enumerate(zip(gradients(low, SHAPES), SHAPES, strict=True))
        ]
        return own, np.random.RandomState(1000 + low).standard_normal(5)
    cut = nodes(low, high)[low, high]
    left, right = tree_sum(low, cut), tree_sum(cut, high)
    return [a + b for a, b in zip(left[0], right[0], strict=True)], left[1] + right[1]


def elastic_sum(total: int):
    """On each rank: the digest of what the reducer gives, the second time, for what has been left of the first may not count."""

    def work(comm) -> str:
        parameters = [nn.Parameter(torch.zeros(s)) for s in SHAPES]
        parameters[2].data = parameters[2].data.contiguous(memory_format=torch.channels_last)
        runs = runs_of(total, comm.size)
        reducer = TreeReducer(parameters, comm, runs)
        for first in (500, 0):
            reducer.begin()
            for k in runs[comm.rank]:
                found = zip(parameters, gradients(first + k, SHAPES), strict=True)
                loss = sum((p * g).sum() for i, (p, g) in enumerate(found) if reached(i, k))
                tail = torch.from_numpy(np.random.RandomState(1000 + k).standard_normal(5))
                reducer.add(loss, k, tail, last=k == runs[comm.rank][-1])
            tail = reducer.finish()
        assert [p.grad.stride() for p in parameters] == [p.stride() for p in parameters]
        return digest([p.grad.contiguous().numpy() for p in parameters], tail.numpy())

    return work


def digest(arrays: list[np.ndarray], tail: np.ndarray) -> str:
    return hashlib.sha256(b"".join(a.tobytes() for a in [*arrays, tail])).hexdigest()[:16]


# As the first form of this reducer gave them, which sent every node of every rank to all: snapshots of then go on with the same bits.
STORED = {
    1: "b6b531c90a1c5762",
    2: "4057699958c12f0c",
    5: "8c6a237bad9b9395",
    8: "053a7b58176e0a90",
    13: "4eaa495c6bd9c381",
}


@pytest.mark.parametrize("total", sorted(STORED))
@pytest.mark.parametrize("chunk_bytes", [1, 300, 4 << 20])
def test_elastic_bits_are_those_of_the_tree_whatever_the_workers_and_chunks(monkeypatch, total, chunk_bytes):
    monkeypatch.setattr(elastic, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(elastic, "SLICE_BYTES", min(chunk_bytes, 1 << 20))
    assert digest(*tree_sum(0, total)) == STORED[total]
    for workers in (1, 2, 3, 4, 8):
        if workers <= total:
            assert set(Threads(workers).run(elastic_sum(total))) == {STORED[total]}, workers


@pytest.mark.parametrize("logical_workers", [1, 3])
def test_a_gradient_of_minus_zero_is_summed_as_it_was_in_a_buffer_of_zeros(logical_workers):
    """The sign of a zero decides bits of what is resumed from snapshots that were written so."""
    parameter = nn.Parameter(torch.ones(4))
    reducer = FlatReducer([parameter], Recorder())
    for _ in range(2):
        reducer.begin()
        for k in range(logical_workers):
            reducer.add((parameter * -0.0).sum(), k, torch.zeros(1, dtype=torch.float64), k == logical_workers - 1)
        reducer.finish()
        assert not parameter.grad.any() and not parameter.grad.signbit().any()


@pytest.mark.parametrize("chunk_bytes", [1, 100, 10**9])
def test_chunks_change_neither_the_sum_nor_who_has_it(monkeypatch, chunk_bytes):
    monkeypatch.setattr(reduce, "CHUNK_BYTES", chunk_bytes)
    batches = [dataset(8, seed=i) for i in range(3)]
    one = tensors(updates(ConvNet(), SOLVER, batches, SoloComm())[0])
    for workers in (2, 4):
        for state in Threads(workers).run(lambda comm: updates(ConvNet(), SOLVER, batches, comm)[0]):
            assert_same(one, tensors(state), 1e-11)


class Recorder:
    """A Comm of two ranks whose partner adds nothing; writes down what is sent when."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.log: list[object] = []

    def all_reduce(self, tensor):
        number = len(self.log)
        self.log.append(("send", tensor.numel(), tensor.clone()))
        return lambda: self.log.append(f"wait {number}")


def test_the_order_of_sending_is_that_of_the_buffer_whatever_backward_does(monkeypatch):
    """Two branches whose backward runs in the order in which forward ran them, which may differ from rank to rank."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(2, 3), nn.Linear(2, 4), nn.Linear(2, 5)

        def forward(self, x, order):
            return sum(getattr(self, name)(x).sum() for name in order)

    monkeypatch.setattr(reduce, "CHUNK_BYTES", 1)
    torch.manual_seed(0)
    net, orders = Branches(), []
    for order in ("abc", "cba", "bca"):
        comm = Recorder()
        reducer = FlatReducer(list(net.parameters()), comm)
        reducer.begin()
        reducer.add(net(torch.ones(1, 2), order), 0, torch.zeros(2, dtype=torch.float64), last=True)
        reducer.finish()
        orders.append([e[1] for e in comm.log if isinstance(e, tuple)])
    assert orders == [[2, 5, 10, 4, 8, 3, 6]] * 3
