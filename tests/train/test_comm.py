"""How logical workers are added up, without processes: the tree, the chunks, the order of sending."""

import hashlib

import numpy as np
import pytest
import torch
import torch.distributed as dist
from engine_help import SOLVER, Linear, Threads, dataset, updates
from facade import Determinism, PeerError, UsageError, peers
from torch import nn

from stagerun.comm import SoloComm, make_reducer, runs_of

# -- adding up


def gradients(k: int, shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
    """What logical worker k has, of sizes far apart, so that each order of adding has other bits; zeros of both signs among them."""
    rng = np.random.RandomState(k)
    made = [(rng.standard_normal(s) * 10.0 ** rng.randint(-6, 6)).astype(np.float32) for s in shapes]
    for array in made:
        array.reshape(-1)[0] = -0.0
    return [torch.from_numpy(array) for array in made]


SHAPES = [(3,), (5, 7), (4, 3, 3, 3), (1,), (130,), (2, 2)]
LONG = [*SHAPES, (1_300_000,), (7,), (3, 700_000), (5,)]  # gradients that leave in several pieces
UNREACHED = 3  # by any loss; number 1 by that of every second logical worker


def reached(i: int, k: int) -> bool:
    return i != UNREACHED and not (i == 1 and k % 2)


def tree_sum(low: int, high: int, shapes: list[tuple[int, ...]]) -> list[np.ndarray]:
    """By the rule in words, with numpy: what all logical workers of [low, high) add up to, and the tail. A node is cut at the largest power
    of two below its width."""
    if high - low == 1:
        own = [(g if reached(i, low) else 0 * g.abs()).numpy() for i, g in enumerate(gradients(low, shapes))]
        return [*own, np.random.RandomState(1000 + low).standard_normal(5)]
    cut = low + (1 << (high - low - 1).bit_length() - 1)
    left, right = tree_sum(low, cut, shapes), tree_sum(cut, high, shapes)
    return [a + b for a, b in zip(left, right, strict=True)]


def elastic_sum(total: int, shapes: list[tuple[int, ...]]):
    """On each rank: the digest of what the reducer gives, the second time, for what has been left of the first may not count."""

    def work(comm) -> str:
        parameters = [nn.Parameter(torch.zeros(s)) for s in shapes]
        parameters[2].data = parameters[2].data.contiguous(memory_format=torch.channels_last)
        runs = runs_of(total, comm.size)
        reducer = make_reducer(Determinism.ELASTIC, parameters, comm, total)
        for first in (500, 0):
            reducer.begin()
            for k in runs[comm.rank]:
                found = zip(parameters, gradients(first + k, shapes), strict=True)
                loss = sum((p * g).sum() for i, (p, g) in enumerate(found) if reached(i, k))
                tail = torch.from_numpy(np.random.RandomState(1000 + k).standard_normal(5))
                reducer.add(loss, k, tail, last=k == runs[comm.rank][-1])
            tail = reducer.finish()
        assert [p.grad.stride() for p in parameters] == [p.stride() for p in parameters]
        return digest([*(p.grad.contiguous().numpy() for p in parameters), tail.numpy()])

    return work


def digest(arrays: list[np.ndarray]) -> str:
    return hashlib.sha256(b"".join(a.tobytes() for a in arrays)).hexdigest()[:16]


@pytest.mark.parametrize(
    ("total", "shapes"),
    [*((total, SHAPES) for total in (1, 2, 5, 8, 13)), pytest.param(5, LONG, marks=pytest.mark.long)],
)
def test_elastic_bits_are_those_of_the_tree_whatever_the_workers_and_the_pieces(total, shapes):
    expected = digest(tree_sum(0, total, shapes))
    for workers in (1, 2, 3, 4, 8):
        if workers <= total:
            assert set(Threads(workers).run(elastic_sum(total, shapes))) == {expected}, workers


@pytest.mark.parametrize("logical_workers", [1, 3])
def test_a_gradient_of_minus_zero_is_summed_as_it_was_in_a_buffer_of_zeros(logical_workers):
    """The sign of a zero decides bits of what is resumed from snapshots that were written so."""
    parameter = nn.Parameter(torch.ones(4))
    reducer = make_reducer(Determinism.FIXED, [parameter], Recorder(), logical_workers)
    for _ in range(2):
        reducer.begin()
        for k in range(logical_workers):
            reducer.add((parameter * -0.0).sum(), k, torch.zeros(1, dtype=torch.float64), k == logical_workers - 1)
        reducer.finish()
        assert not parameter.grad.any() and not parameter.grad.signbit().any()


LONG_ONES = (600_003, 600_004, 600_005)


class Recorder:
    """A Comm of two ranks whose partner adds nothing; writes down how much is sent."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.sent: list[int] = []

    def all_reduce(self, tensor):
        self.sent.append(tensor.numel())
        return lambda: None


def test_the_order_of_sending_is_that_of_the_buffer_whatever_backward_does():
    """Branches whose backward runs in the order in which forward ran them, which may differ from rank to rank."""
    net, orders = nn.ModuleList(nn.Linear(2, n) for n in LONG_ONES), []  # each a piece of its own
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        comm = Recorder()
        reducer = make_reducer(Determinism.FIXED, list(net.parameters()), comm, 2)
        reducer.begin()
        loss = sum(net[i](torch.ones(1, 2)).sum() for i in order)
        reducer.add(loss, 0, torch.zeros(2, dtype=torch.float64), last=True)
        reducer.finish()
        orders.append(comm.sent)
    assert orders == [[2, *(3 * n for n in reversed(LONG_ONES))]] * 3


# -- what the errors of collectives are called

PAIR = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] "
GONE = [
    "Connection closed by peer",
    PAIR + "Read error [10.0.0.2]:4711: No route to host",
    PAIR + "Timed out waiting 1000ms for recv operation to complete",
    "Application timeout caused pair closure",
    "Operation timed out!",
    "Broken pipe",
    dist.DistBackendError("NCCL error: remote process exited or there was a network error"),
    dist.DistStoreError("wait failed"),
]
OWN = [
    torch.OutOfMemoryError("CUDA out of memory"),
    "CUDA error: an illegal memory access was encountered",
    dist.DistBackendError("NCCL error: unhandled cuda error. Last error: Cuda failure 2 'out of memory'"),
    "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory",
    PAIR.replace("pair", "device") + "socket: Too many open files",
    "Tensors must be contiguous",
    ValueError("no group"),
]


@pytest.mark.parametrize("found", GONE + OWN)
def test_a_peer_that_is_gone_and_an_error_of_this_worker_which_keeps_its_name(found):
    error = RuntimeError(found) if isinstance(found, str) else found
    with pytest.raises(Exception) as caught, peers("add gradients"):
        raise error
    if found in GONE:
        assert isinstance(caught.value, PeerError)
        assert "lost the other workers while trying to add gradients: " in caught.value.message
    else:
        assert caught.value is error


@pytest.mark.parametrize("found", [OWN[0], OWN[2]])
def test_memory_that_a_collective_lacks_is_told_as_memory(found):
    class Full(SoloComm):
        size = 2

        def all_reduce(self, *_: object) -> None:
            with peers("add gradients"):
                raise found

    with pytest.raises(UsageError, match="out of memory on the GPU with a device_batch_size of 2"):
        updates(Linear(), SOLVER, [dataset(8)], Full())
