"""Coded collectives between ranks that are threads: what is sent, and what becomes of a peer that sends damaged bytes."""

import copy
import gc
import itertools
import queue
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from stagerun.base.errors import PeerError
from stagerun.base.spans import Spans
from stagerun.comm import SoloComm, lossless
from stagerun.comm.coded_steps import ring_pieces
from stagerun.comm.group import Traffic
from stagerun.comm.lossless import coded
from stagerun.system.pulse import Pulse


class Wire:
    """A Comm of a rank that is a thread. `tamper` is given what goes to another rank, and answers with what comes there."""

    def __init__(self, rank: int, size: int, mail: dict) -> None:
        self.rank, self.size, self.mail = rank, size, mail
        self.pulse, self.spans = Pulse(), None
        self.numbers = itertools.count()  # of the collectives, as gloo's tags are
        self.tamper: Callable[[Tensor], Tensor] = lambda tensor: tensor
        self.traffic = Traffic()
        self.sent: list[int] = []  # bytes to other ranks, by copies of this too

    def twin(self):
        twin = copy.copy(self)
        twin.numbers = itertools.count(1 << 32)
        return twin

    def exchange(self, sent, sent_sizes, received, received_sizes):
        return self._swap(sent.split(list(sent_sizes)), received.split(list(received_sizes)))

    def complete(self, pieces):
        come = [p if rank != self.rank else p.clone() for rank, p in enumerate(pieces)]
        return self._swap([pieces[self.rank]] * self.size, come)

    def all_reduce(self, tensor, doing=""):
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        wait = self._swap([tensor] * self.size, parts)

        def add_up() -> None:
            wait()
            tensor.copy_(torch.stack(parts).sum(0))

        return add_up

    def barrier(self):
        self.all_reduce(torch.zeros(1))()

    def _swap(self, pieces, come):
        number = next(self.numbers)
        for rank, piece in enumerate(pieces):
            own = rank == self.rank
            self.sent += [] if own else [piece.nbytes]
            self._box(number, self.rank, rank).put(piece.clone() if own else self.tamper(piece.clone()))

        def wait() -> None:
            for rank, piece in enumerate(come):
                piece.copy_(self._box(number, rank, self.rank).get(timeout=20))

        return wait

    def _box(self, *key: int) -> queue.SimpleQueue:
        return self.mail.setdefault(key, queue.SimpleQueue())


def ranks(size: int, work: Callable[[Wire], object]) -> list:
    """What `work` gives on each rank, or the error that it raises."""
    answers: list = [None] * size
    mail: dict = {}

    def one(rank: int) -> None:
        try:
            answers[rank] = work(Wire(rank, size, mail))
        except Exception as error:
            answers[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return answers


def gradient(rank: int, n: int = 1 << 16) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(rank)) * 1e-3


@pytest.mark.parametrize("size", [2, 3, 5])
def test_sums_in_the_order_of_the_ring_with_many_under_way(size):
    def work(wire: Wire):
        comm = coded(wire)
        vectors = [gradient(wire.rank + 10 * i, n) for i, n in enumerate((1 << 16, 40_000, 1 << 17))]
        tail = torch.full((3,), float(wire.rank), dtype=torch.float64)
        waits = [comm.all_reduce(t) for t in (tail, *vectors)]
        for wait in waits:
            wait()
        comm.barrier()
        return vectors, tail

    answers = ranks(size, work)
    for i, n in enumerate((1 << 16, 40_000, 1 << 17)):
        parts = [gradient(rank + 10 * i, n).numpy() for rank in range(size)]
        expected, start = np.empty(n, np.float32), 0
        for owner, width in enumerate(ring_pieces(n, 4, size)):
            here = slice(start, start + width)
            total = parts[owner - 1][here].copy()
            for step in range(2, size + 1):
                total = parts[(owner - step) % size][here] + total
            expected[here], start = total, start + width
        for vectors, _ in answers:
            assert np.array_equal(vectors[i].numpy(), expected)
    assert all(tail.tolist() == [sum(range(size))] * 3 for _, tail in answers)


@pytest.mark.parametrize("bits, most", [(32, 0.87), (16, 0.46)])
def test_fewer_bytes_are_sent(bits, most):
    """With 16 bits, as bf16 leaves them, the sums that are handed out have more of them."""

    def work(wire: Wire):
        vector = gradient(wire.rank, 1 << 18)
        coded(wire).all_reduce(vector.bfloat16().float() if bits == 16 else vector)()
        return sum(wire.sent)

    dense = 2 * (4 - 1) / 4 * 4 * (1 << 18)
    assert all(sent < most * dense for sent in ranks(4, work))


def test_noise_takes_no_more_than_some_bytes():
    def work(wire: Wire):
        bits = np.random.default_rng(wire.rank).integers(0, 2**32, 1 << 16, dtype=np.uint32)
        sent, received = torch.from_numpy(bits.view(np.float32)), torch.empty(1 << 16)
        coded(wire).exchange(sent, [1 << 15] * 2, received, [1 << 15] * 2)()
        return sum(wire.sent)

    assert all(sent <= 4 * (1 << 15) + 1 + 16 for sent in ranks(2, work))


def test_what_is_small_or_of_another_type_goes_as_it_is():
    def work(wire: Wire):
        comm = coded(wire)
        comm.all_reduce(torch.ones(lossless.LEAST_BYTES // 4 - 1))()
        comm.all_reduce(torch.ones(1 << 16, dtype=torch.float64))()
        comm.complete([torch.ones(8)] * 2)()
        return wire.sent

    assert ranks(2, work) == [[lossless.LEAST_BYTES - 4, 8 << 16, 32]] * 2


def test_one_worker_sends_nothing():
    solo = SoloComm()
    assert coded(solo) is solo


def flipped(tensor: Tensor) -> Tensor:
    """The byte in the middle of the first plane, where there are coded bytes."""
    if tensor.dtype == torch.uint8:
        tensor[1000] ^= 16
    return tensor


def longer(tensor: Tensor) -> Tensor:
    return tensor * 1000 if tensor.dtype == torch.int64 else tensor


def negative(tensor: Tensor) -> Tensor:
    return -tensor if tensor.dtype == torch.int64 else tensor


CALLS = {
    "all_reduce": lambda comm: comm.all_reduce(gradient(comm.rank)),
    "exchange": lambda comm: comm.exchange(gradient(comm.rank), [1 << 15] * 2, torch.empty(1 << 16), [1 << 15] * 2),
    "complete": lambda comm: comm.complete([gradient(comm.rank), gradient(comm.rank)]),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("tamper, message", [(flipped, "damaged"), (longer, "announces"), (negative, "announces")])
def test_what_a_peer_damages_is_a_peer_error(call, tamper, message):
    def work(wire: Wire):
        if wire.rank == 1:
            wire.tamper = tamper
        comm = coded(wire)
        wait = CALLS[call](comm)
        if wire.rank == 1:
            return None  # it may well wait for ever
        with pytest.raises(PeerError, match=f"worker 1 .*{message}"):
            wait()
        with pytest.raises(PeerError, match=message):  # nor does anything that is begun afterwards seem to go well
            comm.all_reduce(gradient(0))()
        return "said"

    assert ranks(2, work)[0] == "said"


def test_an_error_of_the_network_is_raised_where_it_is_waited_for():
    def work(wire: Wire):
        def gone(*_):
            raise PeerError("lost the other workers", "again")

        wire.exchange = gone
        comm = coded(wire)
        waits = [comm.all_reduce(gradient(0)), comm.all_reduce(gradient(1))]
        for wait in waits:
            with pytest.raises(PeerError, match="lost the other workers"):
                wait()
        return "said"

    assert ranks(2, work) == ["said"] * 2


def test_a_profile_shows_each_sum_once_and_only_the_waiting_thread_beats():
    def work(wire: Wire):
        wire.pulse = copy.copy(wire.pulse)
        comm = coded(wire)
        comm.spans = spans = Spans()
        writers = set()
        wire.pulse._write = lambda: writers.add(threading.get_ident())
        waits = [comm.all_reduce(gradient(0)), comm.all_reduce(torch.ones(2, dtype=torch.float64))]
        for wait in waits:
            wait()
        assert writers == {threading.get_ident()}
        return sorted(span.bytes for span in spans.found)

    assert ranks(2, work) == [[16, 4 << 16]] * 2


def test_the_thread_ends_with_the_reducer_that_it_served():
    def alive() -> int:
        return sum(thread.name == lossless.THREAD for thread in threading.enumerate())

    gc.collect()
    before = alive()
    ranks(2, lambda wire: coded(wire).all_reduce(gradient(0))())
    gc.collect()
    deadline = time.monotonic() + 60
    while alive() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert alive() <= before
