"""Bytes of gradients at the socket: two workers in a network of their own, whose loopback counts them, against `Comm.traffic` and dense.

Run as a program inside that network, this file starts the workers and prints what was counted, as JSON.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from stagerun.base.recipe import Determinism, Method
from stagerun.base.text import columns, size
from stagerun.comm import TorchComm, dense_bytes, gather_json, make_reducer
from stagerun.comm.compressed import CompressedReducer
from stagerun.comm.compression import make
from stagerun.comm.reduce import Reducer
from stagerun.system.world import World

CPU = torch.device("cpu")
METHODS = (Method.NONE, *(m for m in Method if m not in (Method.NONE, Method.LOSSLESS, Method.AUTO)))
# What an iteration may send at most, as a share of dense.
MOST = {Method.TOP_K: 0.022, Method.TERNGRAD: 0.065, Method.TWO_BIT: 0.065, Method.QSGD: 0.26}
ITERATIONS, TRIES = 3, 3  # a measurement counts in which TCP sent nothing twice
HEADERS = 2_000  # bytes of an iteration and worker, beside 3 % of what is sent


def resnet9() -> list[tuple[int, ...]]:
    """The parameters of cifar10-fast's network, BatchNorm's among them: 6.57 million."""
    return _network((3, 64, 128, 128, 128, 256, 512, 512, 512), (512, 10))


def alexnet_bn() -> list[tuple[int, ...]]:
    """2.26 million."""
    return _network((3, 64, 192, 384, 256, 256), (256, 10))


def _network(channels: Sequence[int], last: tuple[int, int]) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for before, after in pairwise(channels):
        found += [(after, before, 3, 3), (after,), (after,)]
    return [*found, last[::-1]]


NETWORKS = {"ResNet-9": resnet9, "AlexNet-BN": alexnet_bn}


@dataclass(frozen=True)
class Counted:
    """Bytes of an iteration and worker: at the socket with all that TCP and IP add, by `Comm.traffic`, and of both what dense has."""

    network: str
    method: str
    socket: float
    traffic: float
    dense_socket: float
    dense_traffic: float

    @property
    def share(self) -> float:
        return self.socket / self.dense_socket


def table(found: Sequence[Counted]) -> list[str]:
    """As the manual has it."""
    rows = [["network", "method", "sent per iteration", "at the socket", "of dense"]]
    rows += [[c.network, c.method, size(c.traffic), size(c.socket), f"{100 * c.share:.2f} %"] for c in found]
    return columns(rows)


# -- in the network


def on_the_wire() -> int:
    """What all sockets have handed to loopback so far, headers and acknowledgements too: each byte once."""
    # Not /sys/class/net, which shows the network that /sys was mounted in.
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    (counters,) = (line.partition(":")[2].split() for line in lines if line.strip().startswith("lo:"))
    return int(counters[8])


def sent_again() -> int:
    """Packets that TCP has sent twice, 64 kB each: it does so on a busy machine, where an answer comes late."""
    names, values = (
        line.split() for line in Path("/proc/self/net/snmp").read_text().splitlines() if line.startswith("Tcp:")
    )
    return int(values[names.index("RetransSegs")])


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
            for _ in range(TRIES):
                comm.barrier()
                wire, again, traffic = on_the_wire(), sent_again(), comm.traffic.sent
                comm.barrier()  # no one has begun before everyone has looked
                for i in range(ITERATIONS):
                    iterate(chosen, parameters, comm, i)
                comm.barrier()
                wire, again = on_the_wire() - wire, sent_again() - again
                sent, repeats = map(sum, zip(*gather_json(comm, [comm.traffic.sent - traffic, again]), strict=True))
                if not repeats:
                    break
            assert not repeats, "TCP sent packets twice, whatever was tried"
            found.append((name, method.value, wire, sent))
    comm.close()
    return found


def main() -> None:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    # Nothing is lost here, and a busy machine may answer late: TCP is to wait before it sends 64 kB again.
    route = [
        "local",
        "127.0.0.1",
        "dev",
        "lo",
        "table",
        "local",
        "proto",
        "kernel",
        "scope",
        "host",
        "src",
        "127.0.0.1",
    ]
    subprocess.run(["ip", "route", "replace", *route, "rto_min", "20s"], check=True)
    with suppress(OSError):  # a container may not let us; then there are more tries
        for setting in ("tcp_early_retrans", "tcp_recovery"):
            Path("/proc/sys/net/ipv4", setting).write_text("0")
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
    done = subprocess.run(
        ["unshare", "-n", sys.executable, __file__],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = [Counted(**one) for one in json.loads(done.stdout)]
    print("", *table(found), sep="\n")
    return found


def test_what_is_counted_as_sent_is_what_crosses_the_socket(counted: list[Counted]) -> None:
    """TCP and IP add a header to each packet and acknowledge it, which weighs where messages are short."""
    for one in counted:
        assert one.traffic <= one.socket <= 1.03 * one.traffic + HEADERS, one


CELLS = [pytest.param(network, method, id=f"{network}-{method.value}") for network in NETWORKS for method in MOST]


@pytest.mark.parametrize(("network", "method"), CELLS)
def test_a_method_sends_no_more_than_it_is_for(counted: list[Counted], network: str, method: Method) -> None:
    (one,) = (c for c in counted if (c.network, c.method) == (network, method.value))
    assert one.share <= MOST[method], one


def test_dense_is_what_the_formula_says(counted: list[Counted]) -> None:
    for one in counted:
        parameters = [nn.Parameter(torch.zeros(shape)) for shape in NETWORKS[one.network]()]
        elements = sum(p.numel() for p in parameters)
        assert one.dense_traffic == dense_bytes(Determinism.FIXED, elements, 4, 2, 2, tail(parameters))


if __name__ == "__main__":
    main()
