"""Bytes of gradients at the socket: two workers in a network of their own, whose kernel counts them, against `Comm.traffic` and dense.

Run as a program inside that network, this file starts the workers and prints what was counted, as JSON.
"""

import json
import os
import socket
import stat
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from facade import Determinism, Method, World, make
from torch import nn

from stagerun.comm import TorchComm, gather_json, make_reducer
from stagerun.comm.compressed import CompressedReducer
from stagerun.comm.reduce import Reducer

CPU = torch.device("cpu")
METHODS = (Method.NONE, *(m for m in Method if m not in (Method.NONE, Method.AUTO)))
# What an iteration may send at most, as a share of dense.
MOST = {Method.TOP_K: 0.022, Method.TERNGRAD: 0.065, Method.QSGD: 0.26}
ITERATIONS = 3
HEADERS = 2_000  # bytes of an iteration and worker, beside 1 % of what is sent


def resnet9() -> list[tuple[int, ...]]:
    """The parameters of cifar10-fast's network, BatchNorm's among them: 6.57 million."""
    return _network((3, 64, 128, 128, 128, 256, 512, 512, 512), (512, 10))


def _network(channels: Sequence[int], last: tuple[int, int]) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for before, after in pairwise(channels):
        found += [(after, before, 3, 3), (after,), (after,)]
    return [*found, last[::-1]]


NETWORKS = {"ResNet-9": resnet9}


@dataclass(frozen=True)
class Counted:
    """Bytes of an iteration and worker: at the socket, by `Comm.traffic`, and of both what dense has."""

    network: str
    method: str
    socket: float
    traffic: float
    dense_socket: float
    dense_traffic: float

    @property
    def share(self) -> float:
        return self.socket / self.dense_socket


# -- in the network


def handed_over() -> int:
    """What this process's TCP connections have carried away so far, without what TCP sent twice: it does so on a busy machine."""
    return sum(_carried(int(name)) for name in os.listdir("/proc/self/fd"))


def _carried(descriptor: int) -> int:
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return 0
        with socket.socket(fileno=os.dup(descriptor)) as one:
            told = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    except OSError:  # a socket of another kind, or the descriptor that listed the folder
        return 0
    assert len(told) >= 216, "this Linux doesn't count the bytes of a connection"
    sent, again = struct.unpack_from("QQ", told, 200)  # tcpi_bytes_sent, tcpi_bytes_retrans
    return int(sent - again)


def reducer(method: Method, parameters: Mapping[str, nn.Parameter], comm: TorchComm) -> Reducer:
    if method is Method.NONE:
        return make_reducer(Determinism.FIXED, list(parameters.values()), comm, comm.size)
    operators = [make(method, p.shape) for p in parameters.values()]
    return CompressedReducer(parameters, operators, comm, [range(r, r + 1) for r in range(comm.size)], seed=1)


def iterate(reducer: Reducer, parameters: Mapping[str, nn.Parameter], comm: TorchComm, iter: int) -> None:
    """With gaussian gradients, whose scale is another in each layer."""
    draw = torch.Generator().manual_seed(100 * iter + comm.rank)
    gradients = [torch.randn(p.shape, generator=draw) * 10.0 ** -(1 + i % 4) for i, p in enumerate(parameters.values())]
    loss = sum((p * g).sum() for p, g in zip(parameters.values(), gradients, strict=True))
    assert isinstance(loss, torch.Tensor)
    reducer.begin(iter)
    reducer.add(loss, comm.rank, torch.ones(tail(parameters.values()), dtype=torch.float64), last=True)
    reducer.finish()
    reducer.accept()


def tail(parameters: Sequence[nn.Parameter]) -> int:
    """Mean and variance of each BatchNorm's channels, the loss and a flag: half of what has one dimension are weights of a BatchNorm."""
    return sum(p.numel() for p in parameters if p.dim() == 1) + 2


def worker(rank: int) -> list[tuple[str, str, int, int]]:
    """(network, method, bytes on the wire, bytes that both workers say that they have sent)."""
    torch.set_num_threads(1)
    comm = TorchComm(World(rank=rank, size=2, local_rank=rank, local_size=2), CPU)
    found = []
    for name, shapes in NETWORKS.items():
        for method in METHODS:
            parameters = {str(i): nn.Parameter(torch.zeros(shape)) for i, shape in enumerate(shapes())}
            chosen = reducer(method, parameters, comm)
            iterate(chosen, parameters, comm, 0)  # connections are made
            comm.barrier()
            wire, traffic = handed_over(), comm.traffic.sent
            comm.barrier()  # no one has begun before everyone has looked
            for i in range(ITERATIONS):
                iterate(chosen, parameters, comm, i)
            comm.barrier()  # what was sent has arrived
            mine = [handed_over() - wire, comm.traffic.sent - traffic]
            wire, sent = map(sum, zip(*gather_json(comm, mine), strict=True))
            found.append((name, method.value, wire, sent))
    comm.close()
    return found


def main() -> None:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29400")
    torch.set_num_threads(1)
    other = os.fork()
    mine = worker(1 if other == 0 else 0)
    if other == 0:
        os._exit(0)
    assert os.waitpid(other, 0)[1] == 0
    each = [(n, m, wire / 2 / ITERATIONS, sent / 2 / ITERATIONS) for n, m, wire, sent in mine]
    dense = {n: figures for n, m, *figures in each if m == Method.NONE.value}
    counted = [Counted(n, m, wire, sent, *dense[n]) for n, m, wire, sent in each]
    print(json.dumps([asdict(one) for one in counted]))


# -- what is asserted of it


@pytest.fixture(scope="module")
def counted() -> list[Counted]:
    if subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode:
        pytest.skip("no network namespace may be made here")
    root = Path(__file__).parents[2]
    done = subprocess.run(
        ["unshare", "-n", sys.executable, __file__],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(map(str, (root, root / "tests/help"))),
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = [Counted(**one) for one in json.loads(done.stdout)]
    return found


def test_what_is_counted_as_sent_is_what_crosses_the_socket(counted: list[Counted]) -> None:
    """Gloo adds a header to each message, which weighs where messages are short; a barrier is a message."""
    for one in counted:
        assert one.traffic <= one.socket <= 1.01 * one.traffic + HEADERS, one


CELLS = [pytest.param(network, method, id=f"{network}-{method.value}") for network in NETWORKS for method in MOST]


@pytest.mark.parametrize(("network", "method"), CELLS)
def test_a_method_sends_no_more_than_it_is_for(counted: list[Counted], network: str, method: Method) -> None:
    (one,) = (c for c in counted if (c.network, c.method) == (network, method.value))
    assert one.share <= MOST[method], one


if __name__ == "__main__":
    main()
