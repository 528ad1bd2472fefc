"""Reducers, collectives and replicas between real processes over gloo: bits, bytes (also at the socket), process lives, and what is seen of
a peer that is gone.

Run as a program, this file starts the workers: it imports torch once and forks them, a fresh set for each life.
"""

import json
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import forked
import pytest
import torch
from compressing import how
from engine_help import CPU, SOLVER, ConvNet, Linear, assert_same, dataset, started, tensors, updates
from facade import (
    Determinism,
    Knobs,
    Method,
    Model,
    PeerError,
    Precision,
    Sync,
    SyncMethod,
    TrainState,
    World,
    decode,
    encode,
    make_state,
    momentum,
    open_lines,
    restore,
    weights,
)

import stagerun.comm.group
from stagerun.comm import Comm, SoloComm, TorchComm, dense_bytes, elastic, gather_json, make_reducer, reduce, runs_of
from stagerun.models import build
from stagerun.schedule import make_knobs

FIXED, ELASTIC = Determinism.FIXED, Determinism.ELASTIC
ITERATIONS, HALF, LOGICAL = 10, 5, 12
UNEVEN = (5, 7, 12)
SIZES = (2, 3, 4)
AT_ONCE_S = 60  # on a busy machine, where gloo would wait for half an hour
SIDE, WARM_UP, PERIOD, MEETINGS = 100, 4, 8, 3
REPLICATED = replace(
    SOLVER,
    precision=Precision.FP32,
    warmup_iter=WARM_UP,
    max_iter=WARM_UP + PERIOD * MEETINGS,
    sync=Sync(method=SyncMethod.LOCAL, replicas=2, period=PERIOD),
)
# What an iteration may send at most, as a share of dense.
MOST = {"TOP_K": 0.022, "TERNGRAD": 0.065, "QSGD": 0.26}
HEADERS = 2_000  # bytes of an iteration and worker, beside 1 % of what is sent
CHUNKS = reduce.CHUNK_BYTES, elastic.CHUNK_BYTES, elastic.SLICE_BYTES


def train(
    comm: Comm,
    determinism: Determinism = FIXED,
    precision: Precision = Precision.FP32,
    logical: int = LOGICAL,
    iterations: range = range(ITERATIONS),
    start: Path | None = None,
    after: Callable[[int, TrainState], None] = lambda i, state: None,
) -> dict[str, torch.Tensor]:
    """Iterations of a small net with BatchNorm, dropout and an unused parameter; `start`: a file of `save`. `after` so many iterations."""
    solver = replace(SOLVER, batch_size=3 * logical, device_batch_size=3, precision=precision)
    state = make_state(ConvNet(dropout=0.2), solver, CPU)
    if start is not None:
        saved, state.iter = decode(start.read_bytes()), iterations.start
        restore(weights(state), {k: v for k, v in saved.items() if not k.startswith("V ")})
        restore(momentum(state), {k[2:]: v for k, v in saved.items() if k.startswith("V ")})
    batches = [dataset(solver.batch_size, seed=i) for i in iterations]
    for i, batch in zip(iterations, batches, strict=True):
        batch.positions += i * solver.batch_size

    def knobs(i: int) -> Knobs:
        after(i, state)
        return Knobs(0.05 + 0.01 * i, 0.9, 0.01)

    return tensors(updates(state.model, solver, batches, comm, determinism, knobs, state)[0])


# -- what the workers do: each a life of its own


def save(path: Path, found: dict[str, torch.Tensor]) -> None:
    path.write_bytes(encode({k: v.contiguous() for k, v in found.items()}))


def trained(comm: Comm, out: Path, name: str = "-alone") -> None:
    save(out / f"fp64{name}", train(comm, precision=Precision.FP64))
    for logical in UNEVEN:
        save(out / f"elastic-{logical}{name}", train(comm, ELASTIC, logical=logical, iterations=range(3)))


def straight(comm: Comm, out: Path) -> None:
    stagerun.comm.group.MOST_BROADCASTS = 1  # this life goes as a job of many workers
    name = f"{comm.size}-{comm.rank}"

    def at_half(i: int, state: TrainState) -> None:
        if i == HALF and comm.rank == 0:
            save(out / f"half-{comm.size}", tensors(state))

    save(out / f"straight-{name}", train(comm, after=at_half))
    trained(comm, out, f"-{name}")


def sent(comm: Comm, out: Path) -> None:
    """What rank 0 sends in an iteration, as it counts it, and as the formula has it."""
    reduce.CHUNK_BYTES, elastic.CHUNK_BYTES, elastic.SLICE_BYTES = CHUNKS
    tail, found = 1000, {}
    for determinism in (FIXED, ELASTIC):
        for logical in (comm.size, *UNEVEN):
            parameters = [torch.nn.Parameter(torch.ones(n)) for n in (300_001, 1_200_000, 77)]
            reducer, before = make_reducer(determinism, parameters, comm, logical), comm.traffic.sent
            run = runs_of(logical, comm.size)[comm.rank]
            reducer.begin()
            for k in run:
                loss = torch.stack([p.sum() for p in parameters]).sum()
                reducer.add(loss, k, torch.ones(tail, dtype=torch.float64), k == run[-1])
            reducer.finish()
            expected = dense_bytes(determinism, sum(p.numel() for p in parameters), 4, comm.size, logical, tail)
            found[f"{determinism.name} {logical}"] = [comm.traffic.sent - before, expected]
    if comm.rank == 0:
        (out / f"sent-{comm.size}").write_text(json.dumps(found))


def handed_over() -> int:
    """What this process's TCP connections have carried away so far, without what TCP sent twice: it does so on a busy machine."""
    total = 0
    links = [(int(name), f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    for number in [n for n, link in links if os.path.islink(link) and os.readlink(link).startswith("socket:")]:
        with suppress(OSError), socket.socket(fileno=os.dup(number)) as one:  # or it is not one of TCP
            told = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            assert len(told) >= 216, "this Linux doesn't count the bytes of a connection"
            carried, again = struct.unpack_from("QQ", told, 200)  # tcpi_bytes_sent, tcpi_bytes_retrans
            total += carried - again
    return total


def compressed(comm: Comm, out: Path) -> None:
    """Bytes of an iteration of ResNet-9, of 6.57 million numbers, by method: at the socket, and as all workers say that they have sent."""
    reduce.CHUNK_BYTES, elastic.CHUNK_BYTES, elastic.SLICE_BYTES = CHUNKS
    found = {}
    for method in (m for m in Method if m is not Method.AUTO):
        # The numbers that the manual's table is for.
        numbers = {"TOP_K": {"ratio": 0.01}, "RANDOM_K": {"ratio": 0.01}, "POWER_SGD": {"rank": 4}}
        compress = how(method, **numbers.get(method.name, {}))
        solver = replace(SOLVER, batch_size=4, precision=Precision.FP32, compress=compress)
        state = started(build(Model(name="resnet9", num_classes=10)), solver, comm)
        reducer = state.exchange.make_reducer()
        parameters = [p.tensor for p in state.solver.parameters]
        for iter in range(2):  # connections are made in the first
            comm.barrier()
            wire, traffic = handed_over(), comm.traffic.sent
            comm.barrier()  # no one has begun before everyone has looked
            # Gaussian gradients, whose scale is another in each layer.
            draw = torch.Generator().manual_seed(100 * iter + comm.rank)
            given = [torch.randn(p.shape, generator=draw) * 10.0 ** -(1 + i % 4) for i, p in enumerate(parameters)]
            reducer.begin(iter)
            loss = torch.stack([(p * g).sum() for p, g in zip(parameters, given, strict=True)]).sum()
            # Mean and variance of each BatchNorm's channels, the loss and a flag.
            channels = sum(p.numel() for p in parameters if p.dim() == 1)
            reducer.add(loss, comm.rank, torch.ones(channels + 2, dtype=torch.float64), last=True)
            reducer.finish()
            reducer.accept()
            comm.barrier()  # what was sent has arrived
        told = gather_json(comm, [handed_over() - wire, comm.traffic.sent - traffic])
        found[method.name] = [sum(of) / comm.size for of in zip(*told, strict=True)]
    if comm.rank == 0:
        (out / "compressed").write_text(json.dumps(found))


def replicated(comm: Comm, out: Path) -> None:
    """With the bytes that this worker has sent before each iteration."""
    reduce.CHUNK_BYTES, elastic.CHUNK_BYTES, elastic.SLICE_BYTES = CHUNKS
    known, sent = make_knobs(REPLICATED), []

    def knobs(i: int) -> Knobs:
        sent.append(comm.traffic.sent)
        return known(i)

    batches = [dataset(8, size=SIDE, seed=i) for i in range(REPLICATED.max_iter)]
    state = started(Linear(SIDE * SIDE), REPLICATED, comm, ELASTIC)
    updates(state.model, REPLICATED, batches, comm, ELASTIC, knobs, state)
    save(out / f"replicated-{comm.size}-{comm.rank}", tensors(state))
    (out / f"bytes-{comm.size}-{comm.rank}").write_text(json.dumps(sent))


def resumed(comm: Comm, out: Path) -> None:
    found = train(comm, iterations=range(HALF, ITERATIONS), start=out / f"half-{comm.size}")
    save(out / f"resumed-{comm.size}-{comm.rank}", found)


def peer_killed(where: str) -> Callable[[Comm, Path], None]:
    """The last rank kills itself; the others write down what they see, and when."""

    def life(comm: Comm, out: Path) -> None:
        begun, lines = 0.0, open_lines(comm)

        def die(i: int = 2, state: TrainState | None = None) -> None:
            nonlocal begun
            if i == 2:
                comm.barrier()
                begun = time.monotonic()
                if comm.rank == comm.size - 1:
                    os.kill(os.getpid(), signal.SIGKILL)

        try:
            if where in Determinism.__members__:
                train(comm, Determinism[where], after=die)
            die()
            lines[comm.size - 1].receive(CPU) if comm.rank == 0 else comm.barrier()
        except PeerError as error:
            seen = {"message": error.message, "hint": error.hint, "seconds": time.monotonic() - begun}
            (out / f"killed-{where}-{comm.rank}").write_text(json.dumps(seen))

    return life


KILLED = ("FIXED", "ELASTIC", "a line")


@dataclass(frozen=True)
class Life:
    """One set of `size` processes, each calling `work`; in some the last process `dies`."""

    size: int
    work: Callable[[Comm, Path], None]
    dies: bool = False


LIVES = [
    Life(1, trained),
    Life(1, replicated),
    *(Life(size, work) for work in (straight, resumed, sent, replicated) for size in SIZES),
    Life(2, compressed),
    *(Life(3, peer_killed(where), dies=True) for where in KILLED),
]


def worker(rank: int, life: Life, out: Path) -> None:
    torch.set_num_threads(1)
    reduce.CHUNK_BYTES = elastic.CHUNK_BYTES = elastic.SLICE_BYTES = 256
    if life.size == 1:
        return life.work(SoloComm(), out)
    comm = TorchComm(World(rank=rank, size=life.size, local_rank=rank, local_size=life.size), CPU)
    life.work(comm, out)
    if not life.dies:
        comm.barrier()  # rank 0 holds the meeting point
        comm.close()


def main(out: Path) -> int:
    failed = 0
    for life in LIVES:
        forked.meet()
        codes = forked.together(life.size, partial(worker, life=life, out=out))
        if codes != [0] * (life.size - 1) + [-signal.SIGKILL if life.dies else 0]:
            print(f"{life}: exit codes {codes}", file=sys.stderr)
            failed += 1
    return failed


# -- what is asserted of it


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gloo")
    forked.run_program(__file__, folder, timeout=1200)
    return folder


def read(path: Path) -> dict[str, torch.Tensor]:
    return decode(path.read_bytes())


@pytest.mark.parametrize("size", SIZES)
def test_all_ranks_have_the_bits_of_the_first_and_new_processes_too(out, size):
    """What DistributedDataParallel breaks from three ranks on."""
    for rank in range(size):
        assert_same(read(out / f"straight-{size}-0"), read(out / f"straight-{size}-{rank}"))
        assert_same(read(out / f"straight-{size}-0"), read(out / f"resumed-{size}-{rank}"))


@pytest.mark.parametrize("size", SIZES)
def test_the_sum_is_that_of_one_worker_to_rounding_and_with_elastic_to_the_bit(out, size):
    for rank in range(size):
        assert_same(read(out / "fp64-alone"), read(out / f"fp64-{size}-{rank}"), 1e-10)
        for logical in UNEVEN:
            assert_same(read(out / f"elastic-{logical}-alone"), read(out / f"elastic-{logical}-{size}-{rank}"))


@pytest.mark.parametrize("where", KILLED)
def test_a_killed_peer_is_told_to_the_others_at_once(out, where):
    for rank in (0, 1):
        seen = json.loads((out / f"killed-{where}-{rank}").read_text())
        who = "worker 2" if where == "a line" and rank == 0 else "the other workers"
        assert f"lost {who}" in seen["message"] and "\n" not in seen["message"]
        assert "same command" in seen["hint"]
        assert seen["seconds"] < AT_ONCE_S


@pytest.mark.parametrize("size", SIZES)
def test_replicas_have_the_bits_of_one_worker_and_send_little_once_they_have_parted(out, size):
    for rank in range(size):
        assert_same(read(out / "replicated-1-0"), read(out / f"replicated-{size}-{rank}"))
        sent = json.loads((out / f"bytes-{size}-{rank}").read_text())
        each = [after - before for before, after in pairwise(sent)]
        assert sum(each[:WARM_UP]) == WARM_UP * each[0]
        if size == 2:  # each has a replica of its own
            meeting = [each[WARM_UP + PERIOD * n - 1] for n in range(1, MEETINGS)]
            quiet = [b for i, b in enumerate(each) if i >= WARM_UP and (i - WARM_UP + 1) % PERIOD]
            assert max(quiet) < 1000 and max(meeting) <= each[0]
            assert sum(each[WARM_UP:]) <= 1.01 * len(meeting) * each[0]


@pytest.mark.parametrize("size", SIZES)
def test_dense_bytes_are_what_a_worker_counts(out, size):
    found = json.loads((out / f"sent-{size}").read_text())
    assert len({expected for _, expected in found.values()}) > 1 or size == 2, "uneven runs send more"
    for counted, expected in found.values():
        assert counted == pytest.approx(expected, rel=2e-4), found  # which has no alignment in it


@pytest.mark.parametrize("method", [m.name for m in Method if m is not Method.AUTO])
def test_what_is_counted_as_sent_crosses_the_socket_and_a_method_sends_no_more_than_it_is_for(out, method):
    """Gloo adds a header to each message, which weighs where messages are short; a barrier is a message."""
    found = json.loads((out / "compressed").read_text())
    wire, traffic = found[method]
    print(f"\n{method}: {wire / found['NONE'][0]:.1%} of the bytes of plain gradients")
    assert traffic <= wire <= 1.01 * traffic + HEADERS
    assert wire <= MOST.get(method, 2) * found["NONE"][0]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
